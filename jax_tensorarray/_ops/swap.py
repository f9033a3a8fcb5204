"""`ta_swap`: exchange rows of a buffer for others. It is its own transpose."""

from typing import Any, Unpack

import jax
from jax.interpreters import ad

from jax_tensorarray._ops import addressing, reference
from jax_tensorarray._ops.primitive import (
    Params,
    batch_rows,
    check_operands,
    is_zero,
    like_buffer,
    make_primitive,
    row_kernel,
    rows_of,
)
from jax_tensorarray._types import Array, Lowering, Mode, Numbers


def ta_swap(
    buffer: Numbers,
    index: Numbers,
    value: Numbers,
    *,
    axis: int = 0,
    length: int | None = None,
    where: Numbers | None = None,
    mode: Mode | None = None,
    lowering: Lowering = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Exchange rows of a buffer for others: `buffer[index], old = value, buffer[index]`.

    XLA sees one operation on one buffer, so it needs no copy to keep the read before the write.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype, or random keys (`jax.random.key`).
        index: integer or integer array of shape `I`, or a tuple of these, which addresses elements like
            NumPy's `buffer[i, j]`. Duplicates are exchanged in order: a later one takes out the row of an earlier one.
        value: broadcast to `[*I, *elem]`, and converted to the dtype of `buffer` if that loses nothing.
        axis: the axis of the rows, or the first axis that a tuple addresses: 1 for `buffer[:, index]`.
        length: None, or the number of consecutive rows that each index stands for. They become an axis after `I`.
        where: bool, broadcast to `I`. If it is False for a row, the row is not touched and the old row is zeros.
        mode: the treatment of an index outside `[0, T)`, negative ones included: "error" raises an error, "drop" skips
            the row and gives zeros as the old one. None means "error". Under `jax.vmap` every example that runs is
            checked.
        lowering: "auto" uses XLA's slices if they are in place too, mostly in loops, and otherwise a kernel. "xla" uses
            slices outside of loops as well, "ffi" always a kernel. JAX_TENSORARRAY_LOWERING overrides "auto".

    Returns:
        The updated buffer, and the old rows of shape `[*I, *elem]`. Differentiable in `buffer` and `value`.

    Raises:
        IndexError: a Python or NumPy index is out of range (while tracing).
        jax.errors.JaxRuntimeError, ValueError: a traced index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: `index` is not of an integer dtype, `where` is not bool, or `value` would lose precision.
        ValueError: shapes do not fit, or the buffer has no such `axis` or fewer than `length` rows.

    >>> import jax.numpy as jnp
    >>> buffer, old = ta_swap(jnp.array([1.0, 2.0, 3.0]), 1, 9.0)
    >>> buffer, old
    (Array([1., 9., 3.], dtype=float32), Array(2., dtype=float32))
    """
    rows = addressing.rows(
        "ta_swap", buffer, index, axis=axis, length=length, where=where, mode=mode, lowering=lowering
    )
    new, old = ta_swap_p.bind(*rows.with_value(value), **rows.params)
    return new, old


def _abstract_eval(buffer: Any, index: Any, *rest: Any, **params: Unpack[Params]) -> Any:
    check_operands(buffer, index, rest, True, **params)
    return like_buffer(buffer), rows_of(buffer, index, **params)


def _transpose(cts: Any, buffer: Any, index: Array, value: Any, *where: Array, **params: Unpack[Params]) -> Any:
    nothing = [None] * len(where)
    needs_buffer, needs_value = ad.is_undefined_primal(buffer), ad.is_undefined_primal(value)
    dtype = next(ct.dtype for ct in cts if not is_zero(ct))  # a rule of a `custom_vjp` may return another dtype
    ct_buffer, ct_old = (ad.Zero(ct.aval.update(dtype=dtype)) if is_zero(ct) else ct for ct in cts)
    ct_buffer, ct_old = map(ad.instantiate_zeros, (ct_buffer, ct_old))
    # Exchanges in the opposite order.
    ct_buffer, ct_value = ta_swap_p.bind(
        ct_buffer, index, ct_old, *where, **params | {"reverse": not params["reverse"]}
    )
    return [ct_buffer if needs_buffer else None, None, ct_value if needs_value else None, *nothing]


ta_swap_p = make_primitive(
    "ta_swap",
    multiple_results=True,
    abstract_eval=_abstract_eval,
    linear_in=(0, 2),
    transpose=_transpose,
    batch=batch_rows,
    reference=reference.swap,
    kernel=row_kernel("swap", ("buffer", "index", "value", "where"), ("buffer", "value")),
)
