"""`ta_clear`: zeros in a range of rows, in place. Linear, and its own transpose."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray._ops import arguments, reference
from jax_tensorarray._ops.primitive import batch_operands, like_buffer, make_primitive, simple_kernel
from jax_tensorarray._types import Array


def ta_clear(buffer: Any, start: Any, stop: Any) -> jax.Array:
    """Return a buffer with zeros in the rows `[start, stop)`, in place, in time proportional to their number.

    Internal: `TensorArray` clears the gap between its live rows and a row that is written past them.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype.
        start: first row to clear, an integer scalar that may be traced. Any integer is allowed: a negative one
            counts as 0.
        stop: the row past the last one, likewise; one larger than T counts as T. If it is not larger than `start`,
            no row is cleared.

    Returns:
        Array of the shape and dtype of `buffer`. Differentiable in `buffer`.

    Raises:
        TypeError: `start` or `stop` is not of an integer dtype.
        ValueError: `start` or `stop` is not a scalar.

    >>> import jax.numpy as jnp
    >>> ta_clear(jnp.array([1.0, 2.0, 3.0, 4.0]), 1, 3)
    Array([1., 0., 0., 4.], dtype=float32)
    """
    buffer = arguments.as_buffer("ta_clear", buffer)
    start, stop = (arguments.as_size("ta_clear", at, name) for at, name in ((start, "start"), (stop, "stop")))
    return ta_clear_p.bind(buffer, start, stop, batch_dims=0)


def _abstract_eval(buffer: Any, start: Any, stop: Any, *, batch_dims: int) -> Any:
    if buffer.ndim <= batch_dims or not start.shape == stop.shape == buffer.shape[:batch_dims]:
        raise ValueError(
            f"ta_clear: buffer {buffer.shape}, start {start.shape} and stop {stop.shape} do not share {batch_dims} "
            "batch axes"
        )
    return like_buffer(buffer)


def _transpose(ct: Any, buffer: Any, start: Array, stop: Array, **params: Any) -> Any:
    return [ta_clear_p.bind(ct, start, stop, **params), None, None]


ta_clear_p = make_primitive(
    "ta_clear",
    abstract_eval=_abstract_eval,
    linear_in=(0,),
    transpose=_transpose,
    batch=batch_operands,
    noop_operands=lambda active, buffer, start, stop: (buffer, start, jnp.where(active, stop, start)),
    reference=reference.clear,
    kernel=simple_kernel("clear", ("buffer", "bound", "bound"), ("buffer",)),
)
