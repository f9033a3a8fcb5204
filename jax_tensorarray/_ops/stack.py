"""`ta_stack`: the dense array of a buffer, with zeros past its live rows. Linear, and its own transpose."""

from typing import Any

import jax
from jax.typing import ArrayLike

from jax_tensorarray._ops import arguments, reference
from jax_tensorarray._ops.primitive import batch_operands, like_buffer, make_primitive, simple_kernel
from jax_tensorarray._types import Array, Numbers


def ta_stack(buffer: Numbers, size: ArrayLike | None = None) -> jax.Array:
    """Return the rows of a buffer as one dense array, with zeros in the rows at or past `size`.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype.
        size: number of rows to keep, an integer scalar that may be traced. None or a size of T or more keeps all rows,
            and a negative size none.

    Returns:
        Array of the shape and dtype of `buffer`. Differentiable in `buffer`.

    Raises:
        TypeError: `size` is not of an integer dtype.
        ValueError: `size` is not a scalar.

    >>> import jax.numpy as jnp
    >>> ta_stack(jnp.array([1.0, 2.0, 3.0]), 2)
    Array([1., 2., 0.], dtype=float32)

    TensorFlow: `tf.TensorArray.stack`.
    """
    buffer = arguments.as_buffer("ta_stack", buffer)
    if size is None:
        return buffer
    return ta_stack_p.bind(buffer, arguments.as_size("ta_stack", size), batch_dims=0)


def _abstract_eval(buffer: Any, size: Any, *, batch_dims: int) -> Any:
    if buffer.ndim <= batch_dims or size.shape != buffer.shape[:batch_dims]:
        raise ValueError(f"ta_stack: buffer {buffer.shape} and size {size.shape} do not share {batch_dims} batch axes")
    return like_buffer(buffer)


def _transpose(ct: Any, buffer: Any, size: Array, **params: Any) -> Any:
    return [ta_stack_p.bind(ct, size, **params), None]


ta_stack_p = make_primitive(
    "ta_stack",
    abstract_eval=_abstract_eval,
    linear_in=(0,),
    transpose=_transpose,
    batch=batch_operands,
    reference=reference.mask,
    kernel=simple_kernel("mask", ("buffer", "bound"), ("buffer",)),
)
