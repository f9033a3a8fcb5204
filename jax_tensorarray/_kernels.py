"""Load the compiled kernels, check that they fit the running jaxlib, register them with XLA, and raise their errors."""

import contextlib
import importlib
import importlib.util
import warnings
from types import ModuleType

import jax
import jaxlib.version

from jax_tensorarray import __version__, _compat

PLATFORM_OF = {"_cpu": "cpu", "_cuda": "CUDA", "_rocm": "ROCM"}

#: The package that `cuda13/` builds: the CUDA kernels, for a wheel of this package without them. We find it by its
#: name, because a search for entry points takes 3 ms in every process.
PLUGIN = "jax_tensorarray_cuda13"

#: The modules with registered kernels, by the platform's name in lowering rules.
modules: dict[str, ModuleType] = {}

#: The errors of modules that could not be loaded. The main job reports them once.
missing: dict[str, str] = {}


def is_of_plugin(module: str) -> bool:
    """Return whether a module, by its full name, belongs to the plugin."""
    return module.startswith(f"{PLUGIN}.")


def check_plugin(version: str) -> None:
    """Raise ImportError if the plugin has another version than this package: there is no ABI between releases."""
    if version != __version__:
        raise ImportError(
            f"jax-tensorarray-cuda13 {version} is installed beside jax-tensorarray {__version__}, and these two must "
            f"be of one version. Run `pip install jax-tensorarray-cuda13=={__version__}`."
        )


def check_abi(built: tuple[int, int], running: tuple[int, int] | None, module: str) -> None:
    """Raise ImportError if kernels built for one FFI version cannot run under another.

    XLA's FFI is backward compatible only. A handler that it refuses breaks every later JAX call of the process.
    """
    if running is None or (running[0] == built[0] and running[1] >= built[1]):
        return
    package = f"jax-tensorarray-cuda13=={__version__}" if is_of_plugin(module) else "jax-tensorarray"
    raise ImportError(
        f"{module} was built for XLA FFI {built[0]}.{built[1]}, but the installed jaxlib "
        f"{jaxlib.version.__version__} has {running[0]}.{running[1]}. It needs jaxlib 0.10.2 or newer, and kernels "
        "built with jaxlib 0.10.2. Run `pip install --upgrade jax jaxlib`, or rebuild with "
        f"`pip install --force-reinstall --no-deps --no-cache-dir {package}`."
    )


def check_driver(built: int, driver: int, module: str) -> None:
    """Raise ImportError if kernels built with one CUDA cannot run on another's driver.

    13020 is CUDA 13.2, and 0 no driver. Within a major version older drivers run newer kernels.
    """
    if driver == 0 or driver // 1000 >= built // 1000:
        return
    built_text, driver_text = (f"{v // 1000}.{v % 1000 // 10}" for v in (built, driver))
    raise ImportError(
        f"{module} was built with CUDA {built_text}, but the driver of this machine runs CUDA {driver_text} at most. "
        f"Update the driver, build jax-tensorarray from source with a CUDA {driver_text} compiler on PATH, or leave "
        "the kernels out: "
        + (
            "`pip uninstall jax-tensorarray-cuda13`."
            if is_of_plugin(module)
            else "`JAX_TENSORARRAY_CUDA=OFF pip install --force-reinstall --no-deps --no-cache-dir jax-tensorarray`."
        )
    )


def _import_plugin(name: str) -> ModuleType:
    """Import a module of the plugin.

    ModuleNotFoundError means that the plugin is not installed, any other ImportError that it does not work.
    """
    try:
        version: str = importlib.import_module(PLUGIN).__version__
    except (ModuleNotFoundError, AttributeError):  # AttributeError: an uninstall left an empty folder
        raise ModuleNotFoundError("not built, and jax-tensorarray-cuda13 is not installed") from None
    check_plugin(version)
    try:
        return importlib.import_module(f"{PLUGIN}.{name}")
    except ImportError as error:
        raise ImportError(
            f"jax-tensorarray-cuda13 {version} is installed and cannot be imported ({error}). Run "
            f"`pip install --force-reinstall --no-deps --no-cache-dir jax-tensorarray-cuda13=={version}`."
        ) from error


def _import(name: str) -> ModuleType:
    """Import the module of this package, or else of the plugin."""
    try:
        return importlib.import_module(f"jax_tensorarray.{name}")
    except ModuleNotFoundError:
        if name != "_cuda":
            raise
    return _import_plugin(name)


def _load(name: str) -> None:
    """Register the kernels of a module. A GPU module may be missing. One that does not fit only gives a warning."""
    try:
        module = _import(name)
        check_abi(module.ffi_api_version, _compat.ffi_api_version(), module.__name__)
        if hasattr(module, "driver_version"):
            check_driver(module.cuda_version, module.driver_version(), module.__name__)
    except ImportError as error:
        if name == "_cpu":
            raise
        missing[name] = str(error)
        if not isinstance(error, ModuleNotFoundError):
            warnings.warn(
                f"{error} Until then the ops run on a GPU as plain JAX, which is slower and silently drops "
                "indices out of range.",
                RuntimeWarning,
                stacklevel=5,
            )
        return
    platform = PLATFORM_OF[name]
    for target, stages in module.registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform=platform)
    modules[platform.lower()] = module


def load() -> None:
    """Register the kernels of every installed module. The CPU module is required."""
    try:
        importlib.import_module("jax_tensorarray._cpu")
    except ImportError as error:
        raise ImportError(
            f"jax_tensorarray's compiled module cannot be imported ({error}). Install the package; in a source "
            "checkout, run `pip install .`."
        ) from error
    _load("_cpu")
    _load("_cuda")
    if importlib.util.find_spec("jax_tensorarray._rocm"):
        _load("_rocm")


load()


def check_errors() -> None:
    """Wait for the GPUs, and raise the first index error that they have recorded since the last one was raised.

    On a GPU an op drops an index that is out of range, like with `mode="drop"`, and records it. The next op of this
    library that runs there raises the error, or this function does. Call the function at the points at which a program
    must know of all errors: at its end, or once per epoch.

    On other platforms the function waits for nothing. A CPU raises an error at the op that causes it. A TPU drops an
    index that is out of range and records nothing, so a `RuntimeWarning` says that errors go unnoticed.

    Raises:
        jax.errors.JaxRuntimeError: an op got an index that is out of range. The text is the same as on a CPU.

    >>> check_errors()
    """
    if jax.default_backend() == "tpu":
        warnings.warn(
            "check_errors: a TPU drops indices that are out of range and does not record them, so errors go unnoticed. "
            "Run the program on a CPU to find out.",
            RuntimeWarning,
            stacklevel=2,
        )
    for platform, module in modules.items():
        if not hasattr(module, "has_run") or not module.has_run():
            continue
        # JAX may not have started the work of the GPU. Errors of other results have been raised, or will be.
        for array in jax.live_arrays(platform):
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
                array.block_until_ready()
        text = module.wait_for_error()
        if text is not None:
            raise jax.errors.JaxRuntimeError(f"OUT_OF_RANGE: {text}")
