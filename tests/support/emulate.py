"""A GPU that is this process: the handlers of `csrc/cuda.cc` and the threads of `csrc/gpu_kernels.h`, run by the CPU.

    TENSORARRAY_EMULATED_GPU=1 python -m pytest tests/ops/test_index_errors.py

runs tests on it, as `.ci/run` does with a few. Everything is as on a GPU but for the hardware: positions are sorted
before the call, every thread of a launch does its part, and errors are recorded, to be raised by the next op or by
`check_errors`.
"""

import ctypes
import importlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import jax

SOURCES = Path(__file__).parents[1] / "gpu" / "emulated_gpu"
CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

#: More positions than this are sorted here, so that small tests take both ways.
SCANNED = 3


def build(folder: Path) -> Path:
    """The compiled library."""
    jaxlib = importlib.util.find_spec("jaxlib")
    assert jaxlib is not None and jaxlib.origin is not None
    headers = Path(jaxlib.origin).parent / "include"
    library = folder / "emulated_gpu.so"
    command = [COMPILER, "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", f"-I{SOURCES}", f"-I{CSRC}"]
    command += ["-isystem", str(headers), str(SOURCES / "module.cc"), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def module(library: Path) -> ModuleType:
    """What `_cuda` would be, with the handlers in `library`."""
    functions = ctypes.CDLL(str(library))
    functions.emulated_handler.restype = ctypes.c_void_p
    functions.emulated_name.restype = ctypes.c_char_p
    functions.emulated_has_run.restype = ctypes.c_bool
    functions.emulated_wait_for_error.restype = ctypes.c_char_p

    def handler(name):
        return jax.ffi.pycapsule(ctypes.c_void_p(functions.emulated_handler(name)))

    def wait_for_error():
        text = functions.emulated_wait_for_error()
        return None if text is None else text.decode()

    made = ModuleType("jax_tensorarray._cpu")
    names = list(iter(map(functions.emulated_name, itertools.count()).__next__, None))
    made.registrations = lambda: {f"jax_tensorarray_{name.decode()}": {"execute": handler(name)} for name in names}
    made.ffi_api_version = (0, 3)
    made.has_run = functions.emulated_has_run
    made.wait_for_error = wait_for_error
    return made


def install(library: Path | None = None) -> None:
    """Give `jax_tensorarray`, which must not have been imported yet, this GPU's kernels instead of the CPU's."""
    assert "jax_tensorarray" not in sys.modules
    sys.modules["jax_tensorarray._cpu"] = module(library or build(Path(tempfile.mkdtemp())))
    from jax_tensorarray._ops import sorting

    os.environ["JAX_TENSORARRAY_LOWERING"] = "ffi"  # it is the kernels that are tested
    sorting.PLATFORMS.add("cpu")
    sorting.SCANNED = SCANNED
