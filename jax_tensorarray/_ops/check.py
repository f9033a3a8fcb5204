"""`ta_check`: check that an index is in the range of the live rows, and return it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_tensorarray._ops import arguments, reference
from jax_tensorarray._ops.calls import PREFIX, declare, op_attribute
from jax_tensorarray._ops.primitive import all_to_front, batched_mode, make_primitive, type_like, zero_tangent
from jax_tensorarray._types import Array


def ta_check(index: Any, size: Any, *, where: Any = None, mode: str | None = None, op: str = "ta_check") -> jax.Array:
    """Return the index where it is in `[0, size)`, for a traced size.

    Internal: `TensorArray` reads rows with the returned index, so it never reads a row past the live ones.

    Args:
        index: integer or integer array of shape `I`.
        size: number of live rows, an int32 scalar that may be traced.
        where: bool, broadcast to `I`. Where it is False, the index is ignored and the result is -1.
        mode: what an index outside `[0, size)` does, negative ones included: "error" raises, "drop" returns -1.
            None is "error", under `jax.vmap` too, for each example that runs.
        op: the function that the user called, for messages. After `TEXT` it is a whole message.

    Returns:
        int32 array of shape `I`. There is nothing to differentiate.

    Raises:
        jax.errors.JaxRuntimeError, ValueError: an index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: `index` is not of an integer dtype, `size` not int32, or `where` not bool.
        ValueError: `size` is not a scalar, `where` does not fit, or `mode` is not one of the above.

    >>> import jax.numpy as jnp
    >>> ta_check(jnp.array([0, 2]), 3)
    Array([0, 2], dtype=int32)
    >>> ta_check(jnp.array([0, 3, -1]), 3, mode="drop")
    Array([ 0, -1, -1], dtype=int32)
    """
    size, mode = arguments.as_size(op, size), arguments.as_mode(op, mode)
    # The size is traced. Every Python index is out of range for 0 rows, so the check happens at run time.
    index, mode = arguments.as_index(op, index, 0, mode, masked=True)
    return ta_check_p.bind(index, size, *arguments.as_where(op, where, index.shape), batch_dims=0, mode=mode, op=op)


def _abstract_eval(index: Any, size: Any, *where: Any, batch_dims: int, op: str, **_: Any) -> Any:
    if size.ndim != batch_dims or index.shape[:batch_dims] != size.shape:
        raise ValueError(f"{op}: index {index.shape} and size {size.shape} do not share {batch_dims} batch axes")
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{op}: index must have an integer dtype, got {index.dtype}")
    if size.dtype != jnp.int32:
        raise TypeError(f"{op}: size must be int32, got {size.dtype}")
    for w in where:
        if w.shape != index.shape or w.dtype != jnp.bool_:
            raise TypeError(f"{op}: where {w.str_short()} must be bool{index.shape}")
    return type_like(index, index.shape, range(index.ndim), jnp.dtype(jnp.int32))


def _jvp(primals: Any, _: Any, **params: Any) -> Any:
    out = ta_check_p.bind(*primals, **params)
    return out, zero_tangent(out)


def _batch(primitive: Any, args: Any, dims: Any, *, batch_dims: int, mode: str | None, op: str) -> Any:
    mode = batched_mode(mode, is_batched=any(d is not None for d in dims[:2]))
    return primitive.bind(*all_to_front(args, dims), batch_dims=batch_dims + 1, mode=mode, op=op), 0


def _in_plain_jax(index: Array, size: Array, *where: Array, batch_dims: int, **_: Any) -> Array:
    checked = reference.check(index, size, batch_dims=batch_dims)
    return jnp.where(where[0], checked, -1) if where else checked


declare("check", ("index", "bound"), ("index",))


def without_mask(index: Array, size: Array, where: Array, *, batch_dims: int, **params: Any) -> Array:
    """Check masked indices without a mask: each index gets a size of its own, and a masked one becomes row 0 of 1."""
    sizes = jnp.broadcast_to(size.reshape(size.shape + (1,) * (index.ndim - batch_dims)), index.shape)
    operands = jnp.where(where, index, 0), jnp.where(where, sizes, 1)
    return jnp.where(where, ta_check_p.bind(*operands, batch_dims=index.ndim, **params), -1)


def _kernel(
    ctx: Any,
    *operands: Any,
    batch_dims: int,
    mode: str | None,
    op: str,
    checked: str = "",
    effect: bool = False,
    **named: Any,
) -> Any:
    if len(operands) == 3:
        masked = functools.partial(without_mask, batch_dims=batch_dims, mode=mode, op=op, **named)
        return mlir.lower_fun(masked, multiple_results=False)(ctx, *operands)
    strict = mode != "drop" and checked != "recorded"
    rule = jax.ffi.ffi_lowering(PREFIX + "check", has_side_effect=effect)
    return rule(ctx, *operands, op=op_attribute({"op": op, **named}), strict=strict)


ta_check_p = make_primitive(
    "ta_check",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    batch=_batch,
    reference=_in_plain_jax,
    kernel=_kernel,
)
