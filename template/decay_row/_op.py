"""`decay_row`: decay a row of a buffer, add to it, and take out what it was. It is its own transpose."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from decay_row._primitive import bind, register, spec_of

# --- public function -------------------------------------------------------------------------------------------


def decay_row(buffer: Any, index: Any, value: Any, scale: Any, *, where: Any = True) -> tuple[jax.Array, jax.Array]:
    """Decay a row and add to it: `buffer[index], old = scale * buffer[index] + value, buffer[index]`.

    In a loop that carries the buffer, the buffer is updated in place, and so is its cotangent under `jax.grad`.

    Args:
        buffer: array of shape `[T, *row]`, of a floating or complex dtype.
        index: an integer. Outside of `[0, T)`, negative ones included, nothing is updated and `old` is zero.
        value: broadcast to `row`.
        scale: a scalar.
        where: a boolean. If it is False, nothing is updated and `old` is zero.

    Returns:
        The updated buffer, and the row that was there. Differentiable in `buffer`, `value` and `scale`.

    Raises:
        IndexError: a Python integer is out of range.
        TypeError: a dtype does not fit: no value is converted if that loses precision.
        ValueError: shapes do not fit, or the rows are divided among the devices of a mesh with explicit axes.
    """
    buffer, index = jnp.asarray(buffer), _as_index(index, jnp.shape(buffer))
    if not jnp.issubdtype(buffer.dtype, jnp.inexact):
        raise TypeError(f"decay_row: buffer must have a floating or complex dtype, got {buffer.dtype}")
    if jnp.ndim(scale):
        raise ValueError(f"decay_row: scale must be a scalar, got shape {jnp.shape(scale)}")
    if jnp.ndim(where) or not jnp.issubdtype(jnp.result_type(where), jnp.bool):
        raise TypeError(f"decay_row: where must be one boolean, got {jnp.result_type(where)}{list(jnp.shape(where))}")
    for name, x in [("value", value), ("scale", scale)]:
        if jnp.result_type(buffer, x) != buffer.dtype:
            raise TypeError(f"decay_row: {name} of dtype {jnp.result_type(x)} does not fit a buffer of {buffer.dtype}")
    if where is not True:
        index = jnp.where(where, index, -1)  # the index rule is a mask, too
    value = jnp.broadcast_to(jnp.asarray(value, buffer.dtype), buffer.shape[1:])
    out, old = _bind(buffer, index, value, jnp.asarray(scale, buffer.dtype), batch_dims=0)
    return out, old


def _as_index(index: Any, shape: tuple[Any, ...]) -> Any:
    """Return the index as a scalar of dtype int32, the only one that the kernels know."""
    if not shape:
        raise ValueError("decay_row: buffer must have shape [T, *row], got a scalar")
    if isinstance(index, int | np.integer) and not isinstance(index, bool):
        size = shape[0] if isinstance(shape[0], int) else _MOST  # jax.export may leave the number of rows open
        if not 0 <= index < size:
            raise IndexError(f"decay_row: index {operator.index(index)} is out of range for {shape[0]} rows")
        return jnp.int32(index)
    if jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"decay_row: index must be one integer, got {jnp.result_type(index)}{list(jnp.shape(index))}")
    if index.dtype.itemsize < 4 or index.dtype == jnp.int32:
        return jnp.asarray(index, jnp.int32)
    # A number of a wider dtype beyond int32 must stay out of range.
    return jnp.where((index >= 0) & (index < _MOST), index, -1).astype(jnp.int32)


#: More rows than this no index of dtype int32 can address.
_MOST = 2**31 - 1


def _bind(*operands: Any, batch_dims: int) -> Any:
    return bind(decay_row_p, _division, *operands, batch_dims=batch_dims)


# --- types -----------------------------------------------------------------------------------------------------


def _abstract_eval(buffer: Any, index: Any, value: Any, scale: Any, *, batch_dims: int) -> tuple[Any, Any]:
    """Return the types of the results.

    Both are the type of the buffer with some parts replaced, so that all other parts of it are kept.
    """
    batch, row = buffer.shape[:batch_dims], buffer.shape[batch_dims + 1 :]
    shapes = index.shape == scale.shape == batch and value.shape == (*batch, *row)
    if not shapes or index.dtype != jnp.int32 or not buffer.dtype == value.dtype == scale.dtype:
        types = ", ".join(x.str_short() for x in (buffer, index, value, scale))
        raise TypeError(f"decay_row: operands {types} with {batch_dims} batch axes")
    _, (_, row_spec) = _division(spec_of(buffer), batch_dims)
    sharding = buffer.sharding.update(spec=row_spec)
    return buffer.update(weak_type=False), buffer.update(shape=value.shape, sharding=sharding, weak_type=False)


def _division(spec: Sequence[Any], batch_dims: int) -> Any:
    """Return how operands and results are divided among devices, given how the buffer is: by batch and within rows."""
    batch, row = spec[:batch_dims], spec[batch_dims + 1 :]
    # `old` is one row, so it has an entry fewer. Two rows have an axis there, which no device divides: None.
    buffers, rows, scalars = (PartitionSpec(*x) for x in ((*batch, None, *row), (*batch, *row), batch))
    return (buffers, scalars, rows, scalars), (buffers, rows)


# --- forward mode ----------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, batch_dims: int) -> Any:
    """Differentiate: the op is linear in `buffer` and `value`, and its derivative by `scale` is its second result."""
    buffer, index, value, scale = primals
    buffer_dot, _, value_dot, scale_dot = tangents
    out, old = _bind(buffer, index, value, scale, batch_dims=batch_dims)
    if type(scale_dot) is not ad.Zero:
        rows = scale_dot.reshape(*scale_dot.shape, *[1] * (old.ndim - batch_dims)) * old
        value_dot = ad.add_tangents(value_dot, rows)
    buffer_dot, value_dot = ad.instantiate_zeros(buffer_dot), ad.instantiate_zeros(value_dot)
    return (out, old), _bind(buffer_dot, index, value_dot, scale, batch_dims=batch_dims)


# --- reverse mode ----------------------------------------------------------------------------------------------


def _transpose(cts: Any, buffer: Any, index: Any, value: Any, scale: Any, *, batch_dims: int) -> Any:
    """Transpose: the op multiplies a row and a value by `[[scale, 1], [1, 0]]`, which is a symmetric matrix."""
    is_linear = [ad.is_undefined_primal(x) for x in (buffer, value)]
    if all(type(ct) is ad.Zero for ct in cts):
        grads = [ad.Zero(x.aval) if linear else None for x, linear in zip((buffer, value), is_linear, strict=True)]
    else:
        ct_buffer, ct_old = map(ad.instantiate_zeros, cts)
        results = _bind(ct_buffer, index, ct_old, scale, batch_dims=batch_dims)
        grads = [ct if linear else None for ct, linear in zip(results, is_linear, strict=True)]
    return [grads[0], None, grads[1], None]


# --- plain JAX -------------------------------------------------------------------------------------------------


def _in_plain_jax(buffer: Any, index: Any, value: Any, scale: Any, *, batch_dims: int) -> tuple[Any, Any]:
    """Compute the op in plain JAX, its lowering where there is no kernel."""

    def one(buffer: Any, index: Any, value: Any, scale: Any) -> tuple[Any, Any]:
        index = jnp.where(index < 0, buffer.shape[0], index)  # out of range, and not counted from the end
        old = buffer.at[index].get(mode="fill", fill_value=0)
        return buffer.at[index].set(scale * old + value, mode="drop"), old

    return functools.reduce(lambda f, _: jax.vmap(f), range(batch_dims), one)(buffer, index, value, scale)


# --- registration ----------------------------------------------------------------------------------------------

decay_row_p = register(
    "decay_row",
    target="decay_row_update",
    bind=_bind,
    division=_division,
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    transpose=_transpose,
    plain_jax=_in_plain_jax,
    aliases={0: 0},
)
