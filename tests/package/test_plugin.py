"""The CUDA kernels as a package of their own: found, of another version, broken, or not there."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jax_tensorarray
from jax_tensorarray import __version__, _kernels
from jax_tensorarray.doctor import _header as main_job

#: What a plugin's `_cuda` has, with the handlers of the CPU instead of those for a GPU.
FAKE = """
from jax_tensorarray import _cpu

ffi_api_version = (0, 3)
cuda_version = 13000


def driver_version():
    return {driver}


def registrations():
    return {{name + "{suffix}": stages for name, stages in _cpu.registrations().items()}}
"""


def install(folder: Path, version: str, module: str | None) -> None:
    """A plugin in `folder`: a package that has a version, and a module unless that is None."""
    package = folder / _kernels.PLUGIN
    package.mkdir()
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    if module is not None:
        (package / "_cuda.py").write_text(module)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Loads `_cuda` where this package has none, as at the first import."""
    for name in list(sys.modules):
        if name == _kernels.PLUGIN or _kernels.is_of_plugin(name):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax_tensorarray._cuda", None)
    monkeypatch.setattr(_kernels, "modules", {"cpu": _kernels.modules["cpu"]})
    monkeypatch.setattr(_kernels, "missing", {})
    monkeypatch.syspath_prepend(tmp_path)

    def load(version: str = __version__, module: str | None = FAKE.format(driver=13000, suffix="_of_a_plugin")):
        install(tmp_path, version, module)
        _kernels._load("_cuda")

    yield load
    for name in (_kernels.PLUGIN, f"{_kernels.PLUGIN}._cuda"):
        sys.modules.pop(name, None)


def header() -> str:
    return " ".join("\n".join(main_job.header()).split())


def test_it_is_found_where_this_package_has_no_kernels_of_its_own(plugin):
    plugin()
    assert _kernels.modules["cuda"].__name__ == "jax_tensorarray_cuda13._cuda"
    assert not _kernels.missing
    assert "cuda (of jax-tensorarray-cuda13, no such device here)" in header()


def test_kernels_that_were_built_with_this_package_come_first(plugin, monkeypatch):
    built_in = ModuleType("jax_tensorarray._cuda")
    built_in.ffi_api_version, built_in.registrations = (0, 3), dict
    monkeypatch.setitem(sys.modules, "jax_tensorarray._cuda", built_in)
    plugin()
    assert _kernels.modules["cuda"] is built_in
    assert "cuda (no such device here)" in header()


@pytest.mark.parametrize("version", ["0.0.1", f"{__version__}.post1", "99.0.0"])
def test_one_of_another_version_is_left_out_and_said_to_be_so(plugin, version):
    with pytest.warns(RuntimeWarning, match="of one version.* as plain JAX") as warned:
        plugin(version)
    (message,) = (str(w.message) for w in warned)
    assert f"jax-tensorarray-cuda13 {version} is installed beside jax-tensorarray {__version__}" in message
    assert f"pip install jax-tensorarray-cuda13=={__version__}" in message
    assert set(_kernels.modules) == {"cpu"}
    assert f"not cuda (jax-tensorarray-cuda13 {version} is installed beside" in header()


@pytest.mark.parametrize(
    ("module", "why", "what_to_do"),
    [
        (
            "raise ImportError('libfoo.so.1: cannot open shared object file')",
            "cannot be imported .*libfoo.so.1",
            "--force-reinstall",
        ),
        # A wheel of another Python, unpacked by hand.
        (None, "cannot be imported .*No module named 'jax_tensorarray_cuda13._cuda'", "--force-reinstall"),
        (
            FAKE.format(driver=12080, suffix=""),
            r"jax_tensorarray_cuda13\._cuda was built with CUDA 13\.0",
            "pip uninstall jax-tensorarray-cuda13",
        ),
        (
            FAKE.format(driver=13000, suffix="").replace("(0, 3)", "(0, 99)"),
            r"built for XLA FFI 0\.99",
            "--no-cache-dir jax-tensorarray-cuda13==",
        ),
    ],
    ids=["broken", "of another Python", "too new for the driver", "for a newer jaxlib"],
)
def test_one_that_cannot_be_used_is_left_out_and_said_to_be_so(plugin, module, why, what_to_do):
    with pytest.warns(RuntimeWarning, match=f"{why}.*{what_to_do}"):
        plugin(module=module)
    assert set(_kernels.modules) == {"cpu"}
    assert "not cuda (" in header()
    assert module is not None or "No module named 'jax_tensorarray_cuda13._cuda'" in header()


def test_without_one_only_the_main_job_says_what_to_install(plugin, monkeypatch):
    monkeypatch.setitem(sys.modules, _kernels.PLUGIN, None)
    _kernels._load("_cuda")
    assert set(_kernels.modules) == {"cpu"}
    assert "not cuda (not built, and jax-tensorarray-cuda13 is not installed)" in header()


def test_a_folder_that_an_uninstall_has_left_is_no_plugin(plugin, tmp_path, monkeypatch):
    (tmp_path / _kernels.PLUGIN / "__pycache__").mkdir(parents=True)
    without = [folder for folder in sys.path if not (Path(folder) / _kernels.PLUGIN / "__init__.py").exists()]
    monkeypatch.setattr(sys, "path", without)
    _kernels._load("_cuda")
    assert "is not installed" in _kernels.missing["_cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["fake", "compiled"])
def test_importing_this_package_lowers_to_the_calls_of_the_plugin(tmp_path, kernels):
    if kernels == "fake":
        install(tmp_path, __version__, FAKE.format(driver=0, suffix=""))
    else:
        spec = importlib.util.find_spec("jax_tensorarray._cuda")
        if spec is None:
            pytest.skip("the CUDA kernels were not built")
        install(tmp_path, __version__, None)
        shutil.copy(spec.origin, tmp_path / _kernels.PLUGIN)
    program = """
import sys
sys.modules["jax_tensorarray._cuda"] = None
import jax, jax.numpy as jnp
import jax_tensorarray
from jax_tensorarray import _kernels
write = jax.jit(lambda b, i: jax_tensorarray.ta_write(b, i, 1.0))
text = write.trace(jnp.zeros(3), 1).lower(lowering_platforms=("cuda",)).as_text()
print(_kernels.modules["cuda"].__name__, "jax_tensorarray_write" in text, write(jnp.zeros(3), 1))
"""
    places = [str(tmp_path), *(str(Path(place).parent) for place in jax_tensorarray.__path__)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(places)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "jax_tensorarray_cuda13._cuda True [0. 1. 0.]\n", done.stderr
