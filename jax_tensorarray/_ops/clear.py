"""`ta_clear`: zeros in a range of rows, in place. Linear, and its own transpose."""

from typing import Any

import jax
import numpy as np
from jax.interpreters import ad

from jax_tensorarray._lowering.mlir import PREFIX, declare
from jax_tensorarray._ops import arguments, reference
from jax_tensorarray._ops.primitive import Array, is_zero, like_buffer, make_primitive, to_front, zero_tangent


def ta_clear(buffer: Any, start: Any, stop: Any) -> jax.Array:
    """Return a buffer with zeros in the rows `[start, stop)`, in place, in time proportional to their number.

    Internal: `TensorArray` clears the gap between its live rows and a row that is written past them.

    Args:
        buffer: array of shape `[T, *elem]`, any dtype.
        start: first row to clear, an integer scalar that may be traced. Any integer is allowed: a negative one
            counts as 0.
        stop: the row past the last one, likewise; one larger than T counts as T. No row is cleared where it is not
            larger than `start`.

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


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = ta_clear_p.bind(*primals, **params)
    if is_zero(tangents[0]):
        return out, zero_tangent(out)
    return out, ta_clear_p.bind(tangents[0], *primals[1:], **params)


def _transpose(ct: Any, buffer: Any, start: Array, stop: Array, **params: Any) -> Any:
    return [ad.Zero(buffer.aval) if is_zero(ct) else ta_clear_p.bind(ct, start, stop, **params), None, None]


def _batch(primitive: Any, args: Any, dims: Any, *, batch_dims: int) -> Any:
    n = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [to_front(x, d, n) for x, d in zip(args, dims, strict=True)]
    return primitive.bind(*args, batch_dims=batch_dims + 1), 0


declare("clear", ("buffer", "bound", "bound"), ("buffer",))


def _kernel(ctx: Any, *operands: Any, batch_dims: int, **_: Any) -> Any:
    rule = jax.ffi.ffi_lowering(PREFIX + "clear", operand_output_aliases={0: 0})
    return rule(ctx, *operands, batch_dims=np.int64(batch_dims))


ta_clear_p = make_primitive(
    "ta_clear",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    reference=reference.clear,
    kernel=_kernel,
)
