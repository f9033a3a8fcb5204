"""`ta_read_part` and `ta_write_part`: read and write only the first parts of a row.

Internal. A row of the tape of a loop may be the tape of an inner loop, with a part for each of its `max_steps`. We move
only the parts of the steps that the inner loop has taken. Nobody reads the others, so their contents are not specified.
"""

from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad

from jax_tensorarray._ops.primitive import (
    batch_operands,
    is_zero,
    like_buffer,
    make_primitive,
    row_of,
    row_params,
    simple_kernel,
    zero_tangent,
)
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array


def ta_read_part(buffer: Array, index: Array, parts: Array) -> Array:
    """Return the row at `index` of a buffer `[T, M, *elem]`, as an array `[M, *elem]`: only `[:parts]` is specified.

    >>> import jax.numpy as jnp
    >>> ta_read_part(jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.int32(1), jnp.int32(2))[:2]
    Array([4, 5], dtype=int32)
    """
    return ta_read_part_p.bind(buffer, index, parts, batch_dims=0)


def ta_write_part(buffer: Array, index: Array, value: Array, parts: Array) -> Array:
    """Write `value[:parts]` to the first parts of the row at `index` of a buffer `[T, M, *elem]`, in place.

    The other parts of the row are not specified.

    >>> import jax.numpy as jnp
    >>> ta_write_part(jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.int32(1), jnp.array([7, 8, 9]), jnp.int32(2))[1, :2]
    Array([7, 8], dtype=int32)
    """
    return ta_write_part_p.bind(buffer, index, value, parts, batch_dims=0)


def _check(op: str, buffer: Any, index: Any, parts: Any, batch_dims: int) -> None:
    if buffer.ndim < batch_dims + 2 or not index.shape == parts.shape == buffer.shape[:batch_dims]:
        raise ValueError(
            f"{op}: buffer {buffer.shape}, index {index.shape} and parts {parts.shape} do not share {batch_dims} batch "
            "axes"
        )


def _read_abstract_eval(buffer: Any, index: Any, parts: Any, *, batch_dims: int) -> Any:
    _check("ta_read_part", buffer, index, parts, batch_dims)
    return row_of(buffer, batch_dims)


def _write_abstract_eval(buffer: Any, index: Any, value: Any, parts: Any, *, batch_dims: int) -> Any:
    _check("ta_write_part", buffer, index, parts, batch_dims)
    row = row_of(buffer, batch_dims).shape
    if value.shape != row or value.dtype != buffer.dtype:
        raise TypeError(f"ta_write_part: value {value.str_short()} is not a row {row} of {buffer.dtype}")
    return like_buffer(buffer)


# Derivatives use whole rows: nobody reads the other parts. Ops on whole rows have transposes, which second derivatives
# in reverse mode need. Without kernels we also move whole rows.


def _read_jvp(primals: Any, tangents: Any, *, batch_dims: int) -> Any:
    out = ta_read_part_p.bind(*primals, batch_dims=batch_dims)
    if is_zero(tangents[0]):
        return out, zero_tangent(out)
    return out, ta_read_p.bind(tangents[0], primals[1], **row_params("ta_read_part", "drop", batch_dims=batch_dims))


def _write_jvp(primals: Any, tangents: Any, *, batch_dims: int) -> Any:
    out = ta_write_part_p.bind(*primals, batch_dims=batch_dims)
    if is_zero(tangents[0]) and is_zero(tangents[2]):
        return out, zero_tangent(out)
    buffer, value = (ad.instantiate_zeros(tangents[k]) for k in (0, 2))
    return out, ta_write_p.bind(buffer, primals[1], value, **row_params("ta_write_part", "drop", batch_dims=batch_dims))


def _no_parts(active: Array, *operands: Array) -> list[Array]:
    return [*operands[:-1], jnp.where(active, operands[-1], 0)]


def _read_in_plain_jax(buffer: Array, index: Array, parts: Array, *, batch_dims: int) -> Array:
    return ta_read_p.bind(buffer, index, **row_params("ta_read_part", "drop", batch_dims=batch_dims))


def _write_in_plain_jax(buffer: Array, index: Array, value: Array, parts: Array, *, batch_dims: int) -> Array:
    return ta_write_p.bind(buffer, index, value, **row_params("ta_write_part", "drop", batch_dims=batch_dims))


ta_read_part_p = make_primitive(
    "ta_read_part",
    abstract_eval=_read_abstract_eval,
    jvp=_read_jvp,
    batch=batch_operands,
    noop_operands=_no_parts,
    reference=_read_in_plain_jax,
    kernel=simple_kernel("read_part", ("buffer", "bound", "parts"), ("parts of a row",)),
)

ta_write_part_p = make_primitive(
    "ta_write_part",
    abstract_eval=_write_abstract_eval,
    jvp=_write_jvp,
    batch=batch_operands,
    noop_operands=_no_parts,
    reference=_write_in_plain_jax,
    kernel=simple_kernel("write_part", ("buffer", "bound", "parts of a row", "parts"), ("buffer",)),
)
