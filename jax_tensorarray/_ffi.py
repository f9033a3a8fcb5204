"""Load the compiled kernels, check that they fit the running jaxlib, and register them with XLA."""

import importlib
import importlib.util
import warnings
from types import ModuleType

import jax
import jaxlib.version

from jax_tensorarray import _compat

PLATFORM_OF = {"_cpu": "cpu", "_cuda": "CUDA", "_rocm": "ROCM"}

#: The modules whose kernels are registered, by platform, as lowering rules name it.
modules: dict[str, ModuleType] = {}

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


def check_driver(built: int, driver: int, module: str) -> str | None:
    """Why kernels built with one CUDA cannot run on another's driver, if so; 13020 is CUDA 13.2, and 0 no driver.

    Within a major version older drivers run newer kernels.
    """
    if driver == 0 or driver // 1000 >= built // 1000:
        return None
    built_text, driver_text = (f"{v // 1000}.{v % 1000 // 10}" for v in (built, driver))
    return (
        f"jax_tensorarray.{module} was built with CUDA {built_text}, but the driver of this machine runs CUDA "
        f"{driver_text} at most: on its GPU the ops run as plain JAX, which is slower and drops indices out of range "
        f"in silence. Update the driver, rebuild with a CUDA {driver_text} compiler on PATH, or leave the kernels out: "
        "`JAX_TENSORARRAY_CUDA=OFF pip install --force-reinstall --no-deps --no-cache-dir jax-tensorarray`."
    )


def _load(name: str) -> None:
    try:
        module: ModuleType = importlib.import_module(f"jax_tensorarray.{name}")
    except ImportError as error:
        missing[name] = str(error)
        return
    check_abi(module.ffi_api_version, _compat.ffi_api_version(), name)
    if hasattr(module, "driver_version"):
        reason = check_driver(module.cuda_version, module.driver_version(), name)
        if reason is not None:
            missing[name] = reason
            warnings.warn(reason, RuntimeWarning, stacklevel=4)
            return
    platform = PLATFORM_OF[name]
    for target, stages in module.registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform=platform)
    modules[platform.lower()] = module


def load() -> None:
    """Register the kernels of every module that was built. The CPU module is required."""
    _load("_cpu")
    if "_cpu" in missing:
        raise ImportError(
            f"jax_tensorarray's compiled module cannot be imported ({missing['_cpu']}). Install the package; in a "
            "source checkout, run `pip install .`."
        )
    _load("_cuda")
    if importlib.util.find_spec("jax_tensorarray._rocm"):
        _load("_rocm")
