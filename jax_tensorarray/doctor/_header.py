"""The first lines of a report: versions, devices and kernels."""

import platform
from collections.abc import Iterator

import jax
import jaxlib.version

from jax_tensorarray import __version__, _kernels
from jax_tensorarray.doctor._text import wrapped


def versions() -> dict[str, str]:
    """Return the versions that run here."""
    return {
        "jax_tensorarray": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "Python": platform.python_version(),
    }


def header() -> Iterator[str]:
    """Yield lines with versions, devices and kernels."""
    yield ", ".join(f"{name} {version}" for name, version in versions().items())
    yield "devices   " + ", ".join(f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices())
    present = {"cpu"} | {"cuda" if d.platform == "gpu" else d.platform for d in jax.devices()}
    loaded = []
    for name, module in sorted(_kernels.modules.items()):
        notes = ["of jax-tensorarray-cuda13"] if _kernels.is_of_plugin(getattr(module, "__name__", "")) else []
        notes += [] if name in present else ["no such device here"]
        loaded.append(f"{name} ({', '.join(notes)})" if notes else name)
    yield "kernels   " + ", ".join(loaded)
    for module_name, why in _kernels.missing.items():
        text = f"not {_kernels.PLATFORM_OF[module_name].lower()} ({why.rstrip('.')}): the ops run as plain JAX there"
        yield from wrapped(text, " " * 10)
