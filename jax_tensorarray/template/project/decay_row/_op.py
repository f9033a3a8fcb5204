"""`decay_row`: decay a row of a buffer, add to it, and take out what it was. It is its own transpose."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from decay_row import _ffi
from decay_row._compat import varying_alike

# --- public function -------------------------------------------------------------------------------------------


def decay_row(buffer: Any, index: Any, value: Any, scale: Any) -> tuple[jax.Array, jax.Array]:
    """Decay a row and add to it: `buffer[index], old = scale * buffer[index] + value, buffer[index]`.

    In a loop that carries the buffer, the buffer is updated in place, and so is its cotangent under `jax.grad`.

    Args:
        buffer: array of shape `[T, *row]`, of a floating or complex dtype.
        index: an integer. Outside of `[0, T)`, negative ones included, nothing is updated and `old` is zero.
        value: broadcast to `row`.
        scale: a scalar.

    Returns:
        The updated buffer, and the row that was there. Differentiable in `buffer`, `value` and `scale`.

    Raises:
        IndexError: a Python integer is out of range.
        TypeError: a dtype does not fit: no value is converted if that loses precision.
        ValueError: shapes do not fit.
    """
    buffer, index = jnp.asarray(buffer), _as_index(index, jnp.shape(buffer))
    if not jnp.issubdtype(buffer.dtype, jnp.inexact):
        raise TypeError(f"decay_row: buffer must have a floating or complex dtype, got {buffer.dtype}")
    if jnp.ndim(scale):
        raise ValueError(f"decay_row: scale must be a scalar, got shape {jnp.shape(scale)}")
    for name, x in [("value", value), ("scale", scale)]:
        if jnp.result_type(buffer, x) != buffer.dtype:
            raise TypeError(f"decay_row: {name} of dtype {jnp.result_type(x)} does not fit a buffer of {buffer.dtype}")
    value = jnp.broadcast_to(jnp.asarray(value, buffer.dtype), buffer.shape[1:])
    out, old = _bind(buffer, index, value, jnp.asarray(scale, buffer.dtype), batch_dims=0)
    return out, old


def _as_index(index: Any, shape: tuple[int, ...]) -> Any:
    """Return the index as a scalar of dtype int32, the only one that the kernels know."""
    if not shape:
        raise ValueError("decay_row: buffer must have shape [T, *row], got a scalar")
    if isinstance(index, int | np.integer) and not isinstance(index, bool):
        if not 0 <= index < shape[0]:
            raise IndexError(f"decay_row: index {operator.index(index)} is out of range for {shape[0]} rows")
        return jnp.int32(index)
    if jnp.ndim(index) or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        raise TypeError(f"decay_row: index must be one integer, got {jnp.result_type(index)}{list(jnp.shape(index))}")
    if index.dtype.itemsize < 4 or index.dtype == jnp.int32:
        return jnp.asarray(index, jnp.int32)
    # A number of a wider dtype beyond int32 must stay out of range.
    return jnp.where((index >= 0) & (index < shape[0]), index, shape[0]).astype(jnp.int32)


def _bind(*operands: Any, batch_dims: int) -> tuple[Any, Any]:
    out, old = decay_row_p.bind(*varying_alike(*operands), batch_dims=batch_dims)
    return out, old


# --- abstract eval ---------------------------------------------------------------------------------------------


def _abstract_eval(buffer: Any, index: Any, value: Any, scale: Any, *, batch_dims: int) -> tuple[Any, Any]:
    """Return the types of the results.

    Both are the type of the buffer with some parts replaced, so that all other parts of it are kept.
    """
    batch, row = buffer.shape[:batch_dims], buffer.shape[batch_dims + 1 :]
    shapes = index.shape == scale.shape == batch and value.shape == (*batch, *row)
    if not shapes or index.dtype != jnp.int32 or not buffer.dtype == value.dtype == scale.dtype:
        types = ", ".join(x.str_short() for x in (buffer, index, value, scale))
        raise TypeError(f"decay_row: operands {types} with {batch_dims} batch axes")
    spec = [*buffer.sharding.spec, *[None] * buffer.ndim][: buffer.ndim]
    del spec[batch_dims]  # `old` is one row. Of two rows: spec[batch_dims] = None, an axis that no device divides
    sharding = buffer.sharding.update(spec=PartitionSpec(*spec))
    return buffer.update(weak_type=False), buffer.update(shape=value.shape, sharding=sharding, weak_type=False)


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


# --- batching --------------------------------------------------------------------------------------------------


def _batch(operands: Any, dims: Any, *, batch_dims: int) -> Any:
    """Add a batch axis in front of all operands, which the kernels take as it is: no loop, and still one call."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    return _bind(*operands, batch_dims=batch_dims + 1), (0, 0)


# --- plain JAX -------------------------------------------------------------------------------------------------


def _in_plain_jax(buffer: Any, index: Any, value: Any, scale: Any, *, batch_dims: int) -> tuple[Any, Any]:
    """Compute the op in plain JAX, its lowering where there is no kernel."""

    def one(buffer: Any, index: Any, value: Any, scale: Any) -> tuple[Any, Any]:
        index = jnp.where(index < 0, buffer.shape[0], index)  # out of range, and not counted from the end
        old = buffer.at[index].get(mode="fill", fill_value=0)
        return buffer.at[index].set(scale * old + value, mode="drop"), old

    return functools.reduce(lambda f, _: jax.vmap(f), range(batch_dims), one)(buffer, index, value, scale)


# --- lowering --------------------------------------------------------------------------------------------------


def _lower(ctx: Any, *operands: Any, batch_dims: int) -> Any:
    """Lower to a call of the kernel, whose first result uses the memory of the first operand."""
    if ctx.avals_in[0].dtype not in (jnp.float32, jnp.float64):
        return _fallback(ctx, *operands, batch_dims=batch_dims)
    call = jax.ffi.ffi_lowering(_ffi.TARGET, operand_output_aliases={0: 0})
    return call(ctx, *operands, batch_dims=np.int64(batch_dims))


# --- registration ----------------------------------------------------------------------------------------------

decay_row_p = Primitive("decay_row")
decay_row_p.multiple_results = True
decay_row_p.def_impl(functools.partial(xla.apply_primitive, decay_row_p))
decay_row_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[decay_row_p] = _jvp
ad.primitive_transposes[decay_row_p] = _transpose
batching.primitive_batchers[decay_row_p] = _batch
_fallback = mlir.lower_fun(_in_plain_jax, multiple_results=True)
mlir.register_lowering(decay_row_p, _fallback)
for _platform in _ffi.platforms:
    mlir.register_lowering(decay_row_p, _lower, platform=_platform)
