"""`ta_check`: the index, once it is known to be one of the live rows."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray import _arguments, _reference
from jax_tensorarray._lowering.mlir import PREFIX, declare
from jax_tensorarray._register import Array, make_primitive, to_front, type_like, zero_tangent


def ta_check(index: Any, size: Any, *, mode: str | None = None, op: str = "ta_check") -> jax.Array:
    """The index where it is in `[0, size)`, for a size that only the running program knows.

    Internal: `TensorArray` reads rows with the index that this gives, so that no row past the live ones is read.

    Args:
        index: integer or integer array of shape `I`.
        size: number of live rows, an int32 scalar that may be traced.
        mode: what an index outside `[0, size)` does, negative ones included: "error" raises, "drop" gives -1. None
            is "error", but "drop" for an index or a size that `jax.vmap` batches.
        op: what the user called, for messages.

    Returns:
        int32 array of shape `I`. There is nothing to differentiate.

    Raises:
        jax.errors.JaxRuntimeError, ValueError: an index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: `index` is not of an integer dtype, or `size` not int32.
        ValueError: `size` is not a scalar, or `mode` none of the above.

    >>> import jax.numpy as jnp
    >>> ta_check(jnp.array([0, 2]), 3)
    Array([0, 2], dtype=int32)
    >>> ta_check(jnp.array([0, 3, -1]), 3, mode="drop")
    Array([ 0, -1, -1], dtype=int32)
    """
    size, mode = _arguments.as_size(op, size), _arguments.as_mode(op, mode)
    # Nobody knows the size while tracing: every index of Python is out of a range of none, and left to check.
    index, mode = _arguments.as_index(op, index, 0, mode, masked=True)
    return ta_check_p.bind(index, size, batch_dims=0, mode=mode, op=op)


def _abstract_eval(index: Any, size: Any, *, batch_dims: int, op: str, **_: Any) -> Any:
    if size.ndim != batch_dims or index.shape[:batch_dims] != size.shape:
        raise ValueError(f"{op}: index {index.shape} and size {size.shape} do not share {batch_dims} batch axes")
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{op}: index must have an integer dtype, got {index.dtype}")
    if size.dtype != jnp.int32:
        raise TypeError(f"{op}: size must be int32, got {size.dtype}")
    return type_like(index, index.shape, range(index.ndim), jnp.dtype(jnp.int32))


def _jvp(primals: Any, _: Any, **params: Any) -> Any:
    out = ta_check_p.bind(*primals, **params)
    return out, zero_tangent(out)


def _batch(primitive: Any, args: Any, dims: Any, *, batch_dims: int, mode: str | None, op: str) -> Any:
    index_dim, size_dim = dims
    n = args[0].shape[index_dim] if size_dim is None else args[1].shape[size_dim]
    args = [to_front(x, d, n) for x, d in zip(args, dims, strict=True)]
    # Either of them, batched, belongs to examples that may not be running.
    return primitive.bind(*args, batch_dims=batch_dims + 1, mode=mode or "drop", op=op), 0


def _in_plain_jax(index: Array, size: Array, *, batch_dims: int, **_: Any) -> Array:
    return _reference.check(index, size, batch_dims=batch_dims)


declare("check", ("index", "bound"), ("index",))


def _kernel(ctx: Any, *operands: Any, batch_dims: int, mode: str | None, op: str, **_: Any) -> Any:
    return jax.ffi.ffi_lowering(PREFIX + "check")(ctx, *operands, op=op, strict=mode != "drop")


ta_check_p = make_primitive(
    "ta_check",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    transpose=None,
    batch=_batch,
    reference=_in_plain_jax,
    kernel=_kernel,
)
