"""`ta_read`: rows of a buffer. Its transpose adds to the cotangent that the buffer already has."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jax_tensorarray import _compat
from jax_tensorarray._ops import addressing, reference
from jax_tensorarray._ops.primitive import (
    Params,
    batch_rows,
    batched_params,
    check_operands,
    make_primitive,
    nonzero_transpose,
    row_kernel,
    rows_of,
    to_front,
)
from jax_tensorarray._types import Array, Lowering, Mode, Numbers


def ta_read(
    buffer: Numbers,
    index: Numbers,
    *,
    axis: int = 0,
    length: int | None = None,
    where: Numbers | None = None,
    mode: Mode | None = None,
    lowering: Lowering = "auto",
) -> jax.Array:
    """Read rows of a buffer: `buffer[index]`.

    The gradient adds the cotangents of the rows to the cotangent that `buffer` already has, and makes no dense array
    of zeros. The gradient of a loop of T reads therefore takes O(T) time.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype, or random keys (`jax.random.key`).
        index: integer or integer array of shape `I`, or a tuple of these, which addresses elements like
            NumPy's `buffer[i, j]`.
        axis: the axis of the rows, or the first axis that a tuple addresses: 1 for `buffer[:, index]`.
        length: None, or the number of consecutive rows that each index stands for. They become an axis after `I`.
        where: bool, broadcast to `I`. If it is False for a row, the row is zeros and its index is ignored.
        mode: the treatment of an index outside `[0, T)`, negative ones included. "error" raises an error, "drop"
            gives zeros. None means "error". Under `jax.vmap` every example that runs is checked.
        lowering: "auto" uses XLA's slices if they are in place too, mostly in loops, and otherwise a kernel. "xla" uses
            slices outside of loops as well, "ffi" always a kernel. JAX_TENSORARRAY_LOWERING overrides "auto".

    Returns:
        Array of shape `[*I, *elem]` and the dtype of `buffer`, after the axes before `axis`. Differentiable in
        `buffer`, in every mode and order.

    Raises:
        IndexError: a Python or NumPy index is out of range (while tracing).
        jax.errors.JaxRuntimeError, ValueError: a traced index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: `index` is not of an integer dtype, or `where` not bool.
        ValueError: shapes do not fit, or the buffer has no such `axis` or fewer than `length` rows.

    >>> import jax, jax.numpy as jnp
    >>> buffer = jnp.arange(6.0).reshape(3, 2)
    >>> ta_read(buffer, 1)
    Array([2., 3.], dtype=float32)
    >>> ta_read(buffer, (2, 0)), ta_read(buffer, 1, axis=1)
    (Array(4., dtype=float32), Array([1., 3., 5.], dtype=float32))
    >>> ta_read(buffer, 1, length=2)
    Array([[2., 3.],
           [4., 5.]], dtype=float32)
    >>> jax.grad(lambda b: ta_read(b, jnp.array([1, 1])).sum())(buffer)
    Array([[0., 0.],
           [2., 2.],
           [0., 0.]], dtype=float32)

    TensorFlow: `tf.TensorArray.read` and `gather`.
    """
    rows = addressing.rows(
        "ta_read", buffer, index, axis=axis, length=length, where=where, mode=mode, lowering=lowering
    )
    return ta_read_p.bind(*rows.operands, **rows.params)


def _abstract_eval(buffer: Any, index: Any, *where: Any, **params: Unpack[Params]) -> Any:
    check_operands(buffer, index, where, False, **params)
    return rows_of(buffer, index, **params)


def _accumulate(running: Array, ct: Array, index: Array, *where: Array, **params: Unpack[Params]) -> Array:
    from jax_tensorarray._ops.add import ta_add_p  # each is the other's transpose

    return ta_add_p.bind(running, index, ct, *where, **params)


def _transpose(ct: Any, buffer: Any, index: Array, *where: Array, **params: Unpack[Params]) -> Any:
    zeros = jnp.zeros(buffer.aval.shape, ct.dtype)
    return [_accumulate(zeros, ct, index, *where, **params), *[None] * (1 + len(where))]


def _batch(primitive: Any, args: Any, dims: Any, **params: Unpack[Params]) -> Any:
    if dims[0] is not None:
        return batch_rows(primitive, args, dims, **params)
    # All examples share the buffer: their indices are more positions of one read, after the batch axes.
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    at = params["batch_dims"]
    rest = [jnp.moveaxis(to_front(x, d, size), 0, at) for x, d in zip(args[1:], dims[1:], strict=True)]
    return primitive.bind(args[0], *rest, **batched_params(params, dims[1], new_axes=0)), at


ta_read_p = make_primitive(
    "ta_read",
    abstract_eval=_abstract_eval,
    linear_in=(0,),
    batch=_batch,
    reference=reference.read,
    kernel=row_kernel("read", ("buffer", "index", "where"), ("value",)),
)
_compat.register_accumulating_transpose(ta_read_p, _accumulate, nonzero_transpose(_transpose))
_compat.asks_policies(ta_read_p)
