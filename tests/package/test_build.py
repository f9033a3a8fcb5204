"""What a build compiles and with which CUDA compiler, and which drivers its kernels run on."""

import os
import subprocess
import sys
from pathlib import Path

import cpp
import pytest

from jax_tensorarray import _kernels

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cmake" / "cuda_of_python.py"
COMPILE_ONCE = ROOT / "cmake" / "compile_once.py"
COMPLETE = ["bin/nvcc", "include/crt/host_config.h", "nvvm/bin/cicc", "lib/libcudart_static.a"]


def found(place: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(place)}
    run = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def install(place: Path, version: str, files: list[str]) -> Path:
    root = place / "nvidia" / version
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs the sources of the build, which an installed package has not")
def test_a_compiler_from_pypi_is_found_if_it_is_complete(tmp_path):
    root = install(tmp_path, "cu13", COMPLETE)
    assert found(tmp_path) == str(root)
    newer = install(tmp_path, "cu14", COMPLETE)
    assert found(tmp_path) == str(newer)
    for file in COMPLETE:
        (newer / file).unlink()
        assert found(tmp_path) != str(newer)
        (newer / file).touch()


@pytest.mark.skipif(cpp.COMPILER is None or not COMPILE_ONCE.exists(), reason="needs a C++ compiler and the sources")
def test_a_file_is_compiled_again_if_anything_that_it_is_made_of_is_another(tmp_path):
    compiler, compiled, objects = tmp_path / "c++", tmp_path / "compiled", tmp_path / "objects"
    compiler.write_text(f'#!/bin/sh\n[ "$1" != -c ] || echo once >> {compiled}\nexec {cpp.COMPILER} "$@"\n')
    compiler.chmod(0o755)

    def times(environment, *, options=(), header="const int x = 1;", source='#include "x y.h"\nint f() { return x; }'):
        """How often the compiler compiles, with headers in the folder of an environment. The object is always made."""
        compiled.write_text("")
        folder = tmp_path / environment
        folder.mkdir(exist_ok=True)
        (folder / "x y.h").write_text(header)
        (folder / "f.cc").write_text(source)
        places = [
            "-isystem",
            folder,
            "-MD",
            "-MT",
            "f.o",
            "-MF",
            folder / "f.o.d",
            "-o",
            folder / "f.o",
            folder / "f.cc",
        ]
        command = [sys.executable, COMPILE_ONCE, objects, compiler, "-c", *options, *places]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        made = (folder / "f.o").exists() and (folder / "f.o").stat().st_size > 0
        assert made == (not done.returncode), done.stderr
        (folder / "f.o").unlink(missing_ok=True)
        return len(compiled.read_text().split()), done

    assert times("a")[0] == 1
    assert times("b")[0] == 0  # another environment
    assert "x\\ y.h" in (tmp_path / "b" / "f.o.d").read_text()  # which the build system reads
    assert times("b", header="const int x = 2;")[0] == 1
    assert times("b", options=["-DNDEBUG"])[0] == 1
    assert times("b", options=["-DNDEBUG"])[0] == 0
    number, failed = times("b", source="int f() { return y; }")
    assert (number, failed.returncode) == (1, 1)
    assert "y" in failed.stderr and "Traceback" not in failed.stderr

    objects = tmp_path / "a" / "f.cc"  # no folder, and nothing can be kept in it
    number, done = times("b")
    assert (number, done.returncode) == (1, 0)
    assert "cannot keep the object file" in done.stderr


@pytest.mark.parametrize(
    ("built", "driver"), [(13000, 13000), (13000, 13010), (13020, 13000), (12090, 13000), (13000, 0)]
)
def test_kernels_run_on_drivers_of_their_major_version_and_newer_ones(built, driver):
    _kernels.check_driver(built, driver, "jax_tensorarray._cuda")


def test_kernels_too_new_for_the_driver_are_named_and_left_out(monkeypatch):
    class TooNew:
        ffi_api_version = (0, 3)
        cuda_version = 13020

        @staticmethod
        def driver_version():
            return 12080

        @staticmethod
        def registrations():
            raise AssertionError("these kernels must not be registered")

    monkeypatch.setattr(_kernels.importlib, "import_module", lambda name: TooNew)
    monkeypatch.setattr(_kernels, "missing", {})
    monkeypatch.setattr(_kernels, "modules", {})
    with pytest.warns(RuntimeWarning, match=r"built with CUDA 13\.2, but the driver .* runs CUDA 12\.8 at most"):
        _kernels._load("_cuda")
    assert not _kernels.modules
    assert "Update the driver" in _kernels.missing["_cuda"]
    assert "JAX_TENSORARRAY_CUDA=OFF pip install" in _kernels.missing["_cuda"]
