"""Run every test in 64 bits, on the CPU and a GPU, and on this copy of the package."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, Mesh

import decay_row
from decay_row import _ffi
from helpers import devices_of

HERE, IMPORTED = Path(__file__).parents[1] / "decay_row", Path(decay_row.__file__).parent
if not IMPORTED.samefile(HERE) and "DECAY_ROW_INSTALLED" not in os.environ:
    pytest.exit(f"these are tests of {HERE}, but {IMPORTED} is imported: pip install -e .", returncode=4)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)


def _has_gpu():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


HAS_GPU = _has_gpu()


@pytest.fixture(
    autouse=True,
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU"))],
)
def platform(request):
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


@pytest.fixture
def kernel(platform):
    if platform not in _ffi.platforms:
        pytest.skip(f"no kernel was built for {platform}")


@pytest.fixture
def mesh(platform):
    mesh = Mesh(devices_of(platform), "d", axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="session")
def threads(tmp_path_factory):
    """The threads that a GPU would run, as a library for the CPU."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, library = Path(__file__).with_name("threads.cc"), tmp_path_factory.mktemp("threads") / "threads.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
