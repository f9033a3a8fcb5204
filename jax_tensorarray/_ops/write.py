"""`ta_write`: put rows into a buffer. Its transpose takes the rows out of the cotangent, in one swap with zeros."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_tensorarray._ops import addressing, reference
from jax_tensorarray._ops.primitive import Params, batch_rows, check_operands, like_buffer, make_primitive, row_kernel
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._types import Array, Lowering, Mode, Numbers


def ta_write(
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
    """Write rows into a buffer: `buffer[index] = value`. Return the updated buffer.

    In a loop that carries the buffer, XLA updates it in place. The gradient takes the rows out of the cotangent of the
    buffer, in place as well. The gradient of T writes therefore takes O(T) time.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype, or random keys (`jax.random.key`).
        index: integer or integer array of shape `I`, or a tuple of these, which addresses elements like
            NumPy's `buffer[i, j]`. Duplicates are written in order: the last one stays.
        value: broadcast to `[*I, *elem]`, and converted to the dtype of `buffer` if that loses nothing.
        axis: the axis of the rows, or the first axis that a tuple addresses: 1 for `buffer[:, index]`.
        length: None, or the number of consecutive rows that each index stands for. They become an axis after `I`.
        where: bool, broadcast to `I`. If it is False for a row, the row is not written.
        mode: the treatment of an index outside `[0, T)`, negative ones included. "error" raises an error, "drop"
            skips the row. None means "error". Under `jax.vmap` every example that runs is checked.
        lowering: "auto" uses XLA's slices if they are in place too, mostly in loops, and otherwise a kernel. "xla" uses
            slices outside of loops as well, "ffi" always a kernel. JAX_TENSORARRAY_LOWERING overrides "auto".

    Returns:
        The updated buffer. Differentiable in `buffer` and `value`. The last of duplicates gets all of the gradient.

    Raises:
        IndexError: a Python or NumPy index is out of range (while tracing).
        jax.errors.JaxRuntimeError, ValueError: a traced index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: `index` is not of an integer dtype, `where` is not bool, or `value` would lose precision.
        ValueError: shapes do not fit, or the buffer has no such `axis` or fewer than `length` rows.

    >>> import jax, jax.numpy as jnp
    >>> ta_write(jnp.zeros((3, 2)), 1, jnp.array([5.0, 6.0]))
    Array([[0., 0.],
           [5., 6.],
           [0., 0.]], dtype=float32)
    >>> ta_write(jnp.zeros((3, 2)), (1, 0), 7.0)
    Array([[0., 0.],
           [7., 0.],
           [0., 0.]], dtype=float32)
    >>> jax.grad(lambda v: ta_write(jnp.zeros(3), jnp.array([1, 1]), v).sum())(jnp.array([7.0, 8.0]))
    Array([0., 1.], dtype=float32)

    TensorFlow: `tf.TensorArray.write` and `scatter`.
    """
    rows = addressing.rows(
        "ta_write", buffer, index, axis=axis, length=length, where=where, mode=mode, lowering=lowering
    )
    return ta_write_p.bind(*rows.with_value(value), **rows.params)


def _abstract_eval(buffer: Any, index: Any, *rest: Any, **params: Unpack[Params]) -> Any:
    check_operands(buffer, index, rest, True, **params)
    return like_buffer(buffer)


def _transpose(ct: Any, buffer: Any, index: Array, value: Any, *where: Array, **params: Unpack[Params]) -> Any:
    nothing = [None] * len(where)
    needs_buffer, needs_value = ad.is_undefined_primal(buffer), ad.is_undefined_primal(value)
    shape = value.aval.shape if needs_value else value.shape
    zeros = jnp.zeros(shape, ct.dtype)
    if not needs_value:
        return [ta_write_p.bind(ct, index, zeros, *where, **params), None, None, *nothing]
    # Last to first: for duplicates, the last write takes the cotangent and leaves zeros to the earlier ones.
    ct, value_ct = ta_swap_p.bind(ct, index, zeros, *where, **params | {"reverse": not params["reverse"]})
    return [ct if needs_buffer else None, None, value_ct, *nothing]


ta_write_p = make_primitive(
    "ta_write",
    abstract_eval=_abstract_eval,
    linear_in=(0, 2),
    transpose=_transpose,
    batch=batch_rows,
    reference=reference.write,
    kernel=row_kernel("write", ("buffer", "index", "value", "where"), ("buffer",)),
)
