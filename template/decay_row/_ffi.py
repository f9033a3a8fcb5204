"""Load the compiled kernels, check that they fit the running jaxlib, and register them with XLA."""

import importlib
import re
from pathlib import Path

import jax
import jaxlib.version
from jax import export

#: The names of the kernels in a lowered program. They are global in the process, so they begin with the package's name.
targets: list[str] = []

#: The platforms that have a kernel, as lowering rules name them.
platforms: list[str] = []


def ffi_api_version(include: str) -> tuple[int, ...]:
    """Return (major, minor) of XLA's FFI, as the headers in that folder say."""
    header = (Path(include) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    return tuple(int(n) for n in re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header))


def check_abi(built: tuple[int, ...], running: tuple[int, ...]) -> None:
    """Raise ImportError if kernels cannot run: a handler that XLA refuses breaks all later calls of the process."""
    if built[0] == running[0] and built[1] <= running[1]:
        return
    raise ImportError(
        f"decay_row was built for XLA FFI {built[0]}.{built[1]}, but jaxlib {jaxlib.version.__version__} has "
        f"{running[0]}.{running[1]}. Upgrade jax and jaxlib, or build it again with an older jaxlib."
    )


def load() -> None:
    """Register the kernels of the modules that were built. The module for the CPU is required."""
    for name, platform in [("_cpu", "cpu"), ("_cuda", "CUDA")]:
        try:
            module = importlib.import_module(f"decay_row.{name}")
        except ImportError as error:
            if name == "_cpu":
                raise ImportError(f"decay_row is not built ({error}): run `pip install .` in its folder.") from error
            continue
        check_abi(module.ffi_api_version, ffi_api_version(jax.ffi.include_dir()))
        for target, handler in module.registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
            if target not in targets:
                targets.append(target)
        platforms.append(platform.lower())


def disabled_checks() -> list[export.DisabledSafetyCheck]:
    """Return the checks that `jax.export.export` has to skip: it knows no kernels but those of JAX."""
    return [export.DisabledSafetyCheck.custom_call(target) for target in targets]
