"""`ta_max`: the maximum of rows of a buffer and others. The elements that attain the maximum share the derivative."""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jax_tensorarray._ops import addressing, reference
from jax_tensorarray._ops.add import ta_add_p
from jax_tensorarray._ops.arguments import check_numbers
from jax_tensorarray._ops.primitive import (
    Params,
    batch_rows,
    check_operands,
    is_zero,
    like_buffer,
    make_primitive,
    row_kernel,
    row_params,
    zero_tangent,
)
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import counting, numbers_of_rows, positions_of
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Lowering, Mode, Numbers


def ta_max(
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
    """Put the larger element into rows of a buffer: `buffer[index] = maximum(buffer[index], value)`.

    The derivative belongs to the elements that attain the maximum, in the old row and at all positions that address
    it. Several elements share it equally. The gradient works row by row, so that of a loop of T steps takes O(T) time.

    Args:
        buffer: array of shape `[T, *elem]`, of any dtype but a complex one. Bools are or-ed. NaN stays, like in
            `jax.numpy.maximum`, and 0 is larger than -0.
        index: integer or integer array of shape `I`, or a tuple of these, which addresses elements like
            NumPy's `buffer[i, j]`. The largest of duplicates stays.
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
        TypeError: `buffer` is complex, `index` is not of an integer dtype, `where` is not bool, or `value`
            would lose precision.
        ValueError: shapes do not fit, or the buffer has no such `axis` or fewer than `length` rows.

    >>> import jax, jax.numpy as jnp
    >>> ta_max(jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 0, 2]), jnp.array([5.0, 4.0, 1.0]))
    Array([5., 2., 3.], dtype=float32)
    >>> jax.grad(lambda v: ta_max(jnp.zeros(2), jnp.array([1, 1, 1]), v).sum())(jnp.array([7.0, 5.0, 7.0]))
    Array([0.5, 0. , 0.5], dtype=float32)

    NumPy: `numpy.maximum.at`.
    """
    rows = addressing.rows("ta_max", buffer, index, axis=axis, length=length, where=where, mode=mode, lowering=lowering)
    return ta_max_p.bind(*rows.with_value(value), **rows.params)


def _abstract_eval(buffer: Any, index: Any, *rest: Any, **params: Unpack[Params]) -> Any:
    if jnp.issubdtype(buffer.dtype, jnp.complexfloating):
        raise TypeError(f"{params['op']}: complex numbers have no order, so there is no maximum of {buffer.dtype}")
    check_numbers(params["op"], buffer)
    check_operands(buffer, index, rest, True, **params)
    return like_buffer(buffer)


def _jvp(primals: Any, tangents: Any, **params: Unpack[Params]) -> Any:
    buffer, index, value, *where = primals
    buffer_dot, _, value_dot, *_ = tangents
    out = ta_max_p.bind(*primals, **params)
    if is_zero(buffer_dot) and is_zero(value_dot):
        return out, zero_tangent(out)
    old = ta_read_p.bind(buffer, index, *where, **params)
    # NaN compares as false, so it has no derivative, as in jnp.maximum.
    if math.prod(positions_of(index, params["index_dims"])[params["batch_dims"] :]) <= 1:
        # If XLA computes a value again and rounds it differently, it does not equal the maximum.
        keeps, wins = old >= value, value >= old
    else:
        new = ta_read_p.bind(out, index, *where, **params)
        keeps, wins = old == new, value == new
    ties = jnp.maximum(keeps.astype(jnp.int32) + _count(wins, buffer, index, *where, **params), 1)

    def share(attains: Array, dot: Array) -> Array:
        return jnp.where(attains, dot, jnp.zeros((), dot.dtype)) / ties.astype(dot.dtype)

    # JAX transposes these linear ops, each in place. All positions of one row write the same share of the old row. The
    # shares of the values add up.
    out_dot = ad.instantiate_zeros(buffer_dot)
    if not is_zero(buffer_dot):
        old_share = share(keeps, ta_read_p.bind(out_dot, index, *where, **params))
        out_dot = ta_write_p.bind(out_dot, index, old_share, *where, **params)
    if not is_zero(value_dot):
        out_dot = ta_add_p.bind(out_dot, index, share(wins, value_dot), *where, **params)
    return out, out_dot


def _count(wins: Array, buffer: Array, index: Array, *where: Array, **params: Unpack[Params]) -> Array:
    """Return for each position how many values attain the maximum of its row."""
    batch_dims = params["batch_dims"]
    ones = wins.astype(jnp.int32)
    if math.prod(positions_of(index, params["index_dims"])[batch_dims:]) <= 1:
        return ones
    # A small buffer has the count of a row at the rank of the row in the sorted index.
    first = _first_rank
    for _ in range(batch_dims):
        first = jax.vmap(first)
    with counting(buffer, params):
        numbers = numbers_of_rows(buffer, index, *where, **params)
        positions = numbers[0].shape
        flat = (*positions[:batch_dims], math.prod(positions[batch_dims:]))
        rows, *masks = (x.reshape(flat) for x in numbers)
        rows = first(rows).astype(jnp.int32)
    ones = ones.reshape(*flat, *wins.shape[len(positions) :])
    params = row_params("ta_max", "drop", batch_dims=batch_dims)
    counted = ta_add_p.bind(jnp.zeros_like(ones), rows, ones, *masks, **params)
    return ta_read_p.bind(counted, rows, **params).reshape(wins.shape)


def _first_rank(index: Array) -> Array:
    return jnp.searchsorted(jnp.sort(index), index)


ta_max_p = make_primitive(
    "ta_max",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    batch=batch_rows,
    reference=reference.updating(jnp.maximum),
    kernel=row_kernel("max", ("buffer", "index", "value", "where"), ("buffer",), lax.max),
)
