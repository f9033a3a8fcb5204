"""Reference semantics: every op in plain JAX. Without a kernel, an op is lowered to this.

All operands have the same `batch_dims` leading axes. A program on a platform without kernels cannot raise, so an index
out of range is dropped here in every mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tensorarray._types import Array


def _batched(f: Callable[..., Any], batch_dims: int) -> Callable[..., Any]:
    for _ in range(batch_dims):
        f = jax.vmap(f)
    return f


def clamped_row(index: Array, where: Array, size: int) -> tuple[Array, Array]:
    """Return the index, 0 if it is masked or out of range, and whether it is neither."""
    last = min(size - 1, jnp.iinfo(index.dtype).max)  # at most the largest number of the dtype of the index
    is_inside = where & (index >= 0) & (index <= last)
    return jnp.where(is_inside, index, 0).astype(jnp.int64 if jax.config.jax_enable_x64 else jnp.int32), is_inside


def mask_like(index: Array, where: Sequence[Array]) -> Array:
    """Return the mask, or one that is true everywhere."""
    return where[0] if where else jnp.ones(index.shape, bool)


def _walk(step: Callable[..., Any], buffer: Array, index: Array, where: Array, value: Array, reverse: bool) -> Any:
    """Run `for k: buffer, out[k] = step(buffer, index[k], where[k], value[k])` over all positions of `index`."""
    elem = buffer.shape[1:]
    flat = (index.reshape(-1), where.reshape(-1), value.reshape(index.size, *elem))
    buffer, outs = lax.scan(lambda b, x: step(b, *x), buffer, flat, reverse=reverse)
    return buffer, jax.tree.map(lambda out: out.reshape(*index.shape, *elem), outs)


def read(buffer: Array, index: Array, *where: Array, batch_dims: int, reverse: bool = False) -> Array:
    """Return `value[k] = buffer[index[k]]`, with zeros where `k` is masked or out of range. The order is irrelevant."""

    def one(buffer: Array, index: Array, where: Array) -> Array:
        elem = buffer.shape[1:]
        if buffer.shape[0] == 0:
            return jnp.zeros(index.shape + elem, buffer.dtype)
        at, is_inside = clamped_row(index, where, buffer.shape[0])
        is_inside = is_inside.reshape(is_inside.shape + (1,) * len(elem))
        return jnp.where(is_inside, buffer[at], jnp.zeros((), buffer.dtype))

    return _batched(one, batch_dims)(buffer, index, mask_like(index, where))


def _update(row: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, Array]]:
    """Return a step of `_walk` that replaces the old row by `row(old, value)` and returns the old one."""

    def step(buffer: Array, index: Array, where: Array, value: Array) -> tuple[Array, Array]:
        if buffer.shape[0] == 0:
            return buffer, jnp.zeros_like(value)
        at, is_inside = clamped_row(index, where, buffer.shape[0])
        old = lax.dynamic_index_in_dim(buffer, at, 0, keepdims=False)
        new = jnp.where(is_inside, row(old, value), old)
        return lax.dynamic_update_index_in_dim(buffer, new, at, 0), jnp.where(is_inside, old, jnp.zeros_like(old))

    return step


def updating(row: Callable[[Array, Array], Array], *, takes: bool = False) -> Callable[..., Any]:
    """Return the op `for k: old[k], buffer[index[k]] = buffer[index[k]], row(buffer[index[k]], value[k])`.

    It returns the buffer, and `old` if it `takes` the old rows.
    """

    def op(buffer: Array, index: Array, value: Array, *where: Array, batch_dims: int, reverse: bool) -> Any:
        def one(buffer: Array, index: Array, value: Array, where: Array) -> Any:
            after, old = _walk(_update(row), buffer, index, where, value, reverse)
            return (after, old) if takes else after

        return _batched(one, batch_dims)(buffer, index, value, mask_like(index, where))

    return op


def added(a: Array, b: Array) -> Array:
    """Return the sum of numbers, or the disjunction of bools."""
    return lax.bitwise_or(a, b) if a.dtype == jnp.bool_ else lax.add(a, b)


write = updating(lambda old, value: value)
swap = updating(lambda old, value: value, takes=True)
add = updating(added)


def _bound(at: Array, size: int) -> Array:
    """Return `at` clamped to [0, size], in a dtype that holds it."""
    row = jnp.clip(at, 0, min(size, jnp.iinfo(at.dtype).max))
    return row.astype(jnp.int64 if jax.config.jax_enable_x64 else jnp.int32)


def mask(buffer: Array, size: Array, *, batch_dims: int) -> Array:
    """Return the buffer with zeros in the rows at or past `size`."""

    def one(buffer: Array, size: Array) -> Array:
        keep = jnp.arange(buffer.shape[0]) < _bound(size, buffer.shape[0])
        return jnp.where(keep.reshape((-1,) + (1,) * (buffer.ndim - 1)), buffer, jnp.zeros((), buffer.dtype))

    return _batched(one, batch_dims)(buffer, size)


def clear(buffer: Array, start: Array, stop: Array, *, batch_dims: int) -> Array:
    """Set the rows [start, stop) to zeros, one row at a time. An empty range costs nothing."""
    if buffer.size == 0:
        return buffer
    size, elem = buffer.shape[batch_dims], buffer.shape[batch_dims + 1 :]
    zeros = jnp.zeros((1, 1, *elem), buffer.dtype)
    first, last = (_bound(at, size).reshape(-1) for at in (start, stop))

    # A loop over the batch, because `jax.vmap` would select between whole buffers in every step.
    def one(batch: Array, rows: Array) -> Array:
        def clear_row(row: Array, rows: Array) -> Array:
            return lax.dynamic_update_slice(rows, zeros, (batch.astype(row.dtype), row, *[row * 0] * len(elem)))

        return lax.fori_loop(first[batch], last[batch], clear_row, rows)

    rows = lax.fori_loop(0, first.size, one, buffer.reshape(first.size, size, *elem))
    return rows.reshape(buffer.shape)


def check(index: Array, size: Array, *, batch_dims: int) -> Array:
    """Return the index where it is in `[0, size)`, else -1."""

    def one(index: Array, size: Array) -> Array:
        limits = jnp.iinfo(index.dtype)
        row = jnp.clip(index, max(-1, limits.min), min(jnp.iinfo(jnp.int32).max, limits.max)).astype(jnp.int32)
        return jnp.where((row >= 0) & (row < size), row, -1)

    return _batched(one, batch_dims)(index, size)
