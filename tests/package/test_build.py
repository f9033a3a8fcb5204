"""Which CUDA compiler a build finds, and which drivers its kernels run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_tensorarray import _kernels

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cmake" / "cuda_of_python.py"
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
