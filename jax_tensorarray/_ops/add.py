"""`ta_add`: add to rows of a buffer. Its transpose reads rows of the cotangent and does not change it."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jax_tensorarray._ops import addressing, reference
from jax_tensorarray._ops.arguments import check_numbers
from jax_tensorarray._ops.primitive import (
    Params,
    batch_rows,
    check_operands,
    is_zero,
    like_buffer,
    make_primitive,
    once_checked,
    row_kernel,
    zero_tangent,
)
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._types import Array, Lowering, Mode, Numbers


def ta_add(
    buffer: Numbers,
    index: Numbers,
    value: Numbers,
    *,
    axis: int = 0,
    length: int | None = None,
    where: Numbers | None = None,
    mode: Mode | None = None,
    lowering: Lowering = "auto",
) -> jax.Array:
    """Add to rows of a buffer: `buffer[index] += value`. Return the updated buffer.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype. Integers wrap, bools are or-ed, and the 8- and 16-bit floats
            are rounded after each addition.
        index: integer or integer array of shape `I`, or a tuple of these, which addresses elements like
            NumPy's `buffer[i, j]`. Duplicates are added in order.
        value: broadcast to `[*I, *elem]`, and converted to the dtype of `buffer` if that loses nothing.
        axis: the axis of the rows, or the first axis that a tuple addresses: 1 for `buffer[:, index]`.
        length: None, or the number of consecutive rows that each index stands for. They become an axis after `I`.
        where: bool, broadcast to `I`. If it is False for a row, the row is not touched.
        mode: the treatment of an index outside `[0, T)`, negative ones included. "error" raises an error, "drop"
            skips the row. None means "error". Under `jax.vmap` every example that runs is checked.
        lowering: "auto" uses XLA's slices if they are in place too, mostly in loops, and otherwise a kernel. "xla" uses
            slices outside of loops as well, "ffi" always a kernel. JAX_TENSORARRAY_LOWERING overrides "auto".

    Returns:
        The updated buffer. Differentiable in `buffer` and `value`.

    Raises:
        IndexError: a Python or NumPy index is out of range (while tracing).
        jax.errors.JaxRuntimeError, ValueError: a traced index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: `index` is not of an integer dtype, `where` is not bool, or `value` would lose precision.
        ValueError: shapes do not fit, or the buffer has no such `axis` or fewer than `length` rows.

    >>> import jax.numpy as jnp
    >>> ta_add(jnp.zeros(3), jnp.array([1, 1, 2]), jnp.array([1.0, 2.0, 4.0]))
    Array([0., 3., 4.], dtype=float32)

    NumPy: `numpy.add.at`.
    """
    rows = addressing.rows("ta_add", buffer, index, axis=axis, length=length, where=where, mode=mode, lowering=lowering)
    return ta_add_p.bind(*rows.with_value(value), **rows.params)


def _abstract_eval(buffer: Any, index: Any, *rest: Any, **params: Unpack[Params]) -> Any:
    check_numbers(params["op"], buffer)
    check_operands(buffer, index, rest, True, **params)
    return like_buffer(buffer)


def _jvp(primals: Any, tangents: Any, **params: Unpack[Params]) -> Any:
    _, index, _, *where = primals
    buffer_dot, _, value_dot, *_ = tangents
    out = ta_add_p.bind(*primals, **params)
    if is_zero(value_dot):
        return out, zero_tangent(out) if is_zero(buffer_dot) else buffer_dot
    return out, ta_add_p.bind(ad.instantiate_zeros(buffer_dot), index, value_dot, *where, **params)


def _transpose(ct: Any, buffer: Any, index: Array, value: Any, *where: Array, **params: Unpack[Params]) -> Any:
    nothing = [None] * len(where)
    needs_buffer, needs_value = ad.is_undefined_primal(buffer), ad.is_undefined_primal(value)
    rows = ta_read_p.bind(ct, index, *where, **params) if needs_value else None
    return [ct if needs_buffer else None, None, rows, *nothing]


def _checks(buffer: Array, index: Array, value: Array, *where: Array, **params: Unpack[Params]) -> None:
    """Add by JAX's own operation, in which `checkify` finds a NaN."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        rows = ta_read_p.bind(buffer, index, *where, **once_checked(params))
        masks = [lax.broadcast_in_dim(w, value.shape, range(w.ndim)) for w in where]
        lax.add(rows, *[jnp.where(mask, value, 0) for mask in masks] or [value])


ta_add_p = make_primitive(
    "ta_add",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    transpose=_transpose,
    batch=batch_rows,
    reference=reference.add,
    checks=_checks,
    kernel=row_kernel("add", ("buffer", "index", "value", "where"), ("buffer",), reference.added),
)
