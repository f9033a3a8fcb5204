"""Load the compiled kernels, check that they fit the running jaxlib, and register them with XLA."""

import importlib
from types import ModuleType

import jax
import jaxlib.version

from jax_tensorarray import _compat

PLATFORM_OF = {"_cpu": "cpu", "_cuda": "CUDA"}

#: Platforms whose kernels are registered, as lowering rules name them.
loaded: set[str] = set()

#: Why a module could not be loaded, for the main job to say once.
missing: dict[str, str] = {}


def check_abi(built: tuple[int, int], running: tuple[int, int] | None, module: str) -> None:
    """Raise ImportError if kernels built for one FFI version cannot run under another.

    XLA's FFI is backward compatible only, and a handler it refuses poisons every later JAX call of the process.
    """
    if running is None or (running[0] == built[0] and running[1] >= built[1]):
        return
    raise ImportError(
        f"jax_tensorarray.{module} was built for XLA FFI {built[0]}.{built[1]}, but the installed jaxlib "
        f"{jaxlib.version.__version__} has {running[0]}.{running[1]}. It needs jaxlib 0.10.2 or newer, and kernels "
        "built with jaxlib 0.10.2. Run `pip install --upgrade jax jaxlib`, or rebuild with "
        "`pip install --force-reinstall --no-deps --no-cache-dir jax-tensorarray`."
    )


def _load(name: str) -> None:
    try:
        module: ModuleType = importlib.import_module(f"jax_tensorarray.{name}")
    except ImportError as error:
        missing[name] = str(error)
        return
    check_abi(module.ffi_api_version, _compat.ffi_api_version(), name)
    platform = PLATFORM_OF[name]
    for target, handler in module.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    loaded.add(platform.lower())


def load() -> None:
    """Register the kernels of every module that was built. The CPU module is required."""
    _load("_cpu")
    if "_cpu" in missing:
        raise ImportError(
            f"jax_tensorarray's compiled module cannot be imported ({missing['_cpu']}). Install the package; in a "
            "source checkout, run `pip install .`."
        )
    _load("_cuda")
