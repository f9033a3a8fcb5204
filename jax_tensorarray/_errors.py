"""Errors that a GPU has recorded: a kernel cannot raise, so somebody has to ask."""

import contextlib
import warnings

import jax

from jax_tensorarray import _ffi


def check_errors() -> None:
    """Wait for the GPUs, and raise the first index error that they have recorded since the last one was raised.

    On a GPU an op drops an index that is out of range, as with `mode="drop"`, and records it. The next op of this
    library that runs there raises the error, as soon as it is known, or this function does. Call it where a program
    is to be told of errors for certain: at the end, or once an epoch.

    On other platforms it waits for nothing. A CPU raises errors where they occur. A TPU drops an index that is out of
    range and records nothing, so errors go unnoticed; a `RuntimeWarning` says so.

    Raises:
        jax.errors.JaxRuntimeError: an op got an index that is out of range. The text is the same as on a CPU.

    >>> check_errors()
    """
    if jax.default_backend() == "tpu":
        warnings.warn(
            "check_errors: a TPU drops indices that are out of range and records none, so there may have been some. "
            "Run the program on a CPU to find out.",
            RuntimeWarning,
            stacklevel=2,
        )
    for platform, module in _ffi.modules.items():
        if not hasattr(module, "has_run") or not module.has_run():
            continue
        # JAX may not have given the GPU its work yet. A result that is an error has been raised, or will be.
        for array in jax.live_arrays(platform):
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
                array.block_until_ready()
        text = module.wait_for_error()
        if text is not None:
            raise jax.errors.JaxRuntimeError(f"OUT_OF_RANGE: {text}")
