"""Facts about the installed jaxlib and its compiler."""

import importlib.util
import os
import re
from pathlib import Path

import jaxlib.version


def ffi_api_version() -> tuple[int, int] | None:
    """Return (major, minor) of XLA's FFI in the installed jaxlib, from its header."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    header = Path(spec.origin).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    matches = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if matches[0] is None or matches[1] is None:
        return None
    return int(matches[0].group(1)), int(matches[1].group(1))


def barriers_hold(platform: str) -> bool:
    """Return whether XLA keeps optimization barriers until it has assigned memory. Then they order reads and writes.

    Before jaxlib 0.12 the CPU compiler drops them first. The compilers for GPUs and TPUs keep them, at least since
    0.10.2.
    """
    return platform in ("cuda", "rocm", "tpu") or (platform == "cpu" and jaxlib.version.__version_info__ >= (0, 12))


def branches_are_steps() -> bool:
    """Return whether XLA's copy insertion treats the branches of a conditional as steps that run one after the other.

    Only before jaxlib 0.12, on all platforms.
    """
    return jaxlib.version.__version_info__ < (0, 12)


def small_loops_are_quadratic() -> bool:
    """Return whether XLA for CPUs copies a whole buffer in every step of a small loop (jax#40101)."""
    is_avoided = "xla_cpu_small_while_loop_byte_threshold=" in os.environ.get("XLA_FLAGS", "")
    return jaxlib.version.__version__ == "0.11.1" and not is_avoided
