"""Where the boxes of a row op start, and the numbers of their rows, which kernels take.

An index along one axis has the shape `[*batch, *I]`. Along `d` axes it has the shape `[*batch, *I, d]`, as a gather has
it. A box has one row along each axis, or those of a window along the last of the axes.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._ops.calls import box_along, steps_along
from jax_tensorarray._types import INT32_MAX

Array = jax.Array


def positions_of(index: Any, index_dims: int) -> tuple[int, ...]:
    """Return the shape `[*batch, *I]` of the positions of an index."""
    shape: tuple[int, ...] = np.shape(index)
    return shape if index_dims == 1 else shape[:-1]


def along_axes(index: Array, index_dims: int) -> list[Array]:
    """Return where an index starts along each axis."""
    return [index] if index_dims == 1 else [index[..., k] for k in range(index_dims)]


def joined(starts: Sequence[Array]) -> Array:
    """Return the index that starts there along each axis."""
    if len(starts) == 1:
        return starts[0]
    return lax.concatenate([lax.expand_dims(x, [x.ndim]) for x in starts], starts[0].ndim)


def sizes_of(buffer: Any, params: Any) -> tuple[int, ...]:
    """Return the sizes of the axes along which an op with these parameters starts."""
    sizes: tuple[int, ...] = buffer.shape[params["batch_dims"] :][: params["index_dims"]]
    return sizes


def in_range(starts: Sequence[Array], sizes: Sequence[int], window: Sequence[int]) -> Array:
    """Return which boxes with that window are in range along all axes."""
    inside: Any = True
    for start, size, count in zip(starts, sizes, box_along(sizes, window), strict=True):
        last = min(size - count, jnp.iinfo(start.dtype).max)  # no more than the dtype of the start can hold
        inside &= (start >= 0) & (start <= last)
    return inside


def every_row(first: Array, count: int) -> Array:
    """Return consecutive numbers from the first ones on, along a last axis."""
    if jnp.iinfo(first.dtype).bits < 32:
        first = first.astype(jnp.int32)
    first = repeated(first, [count])
    rows = first + lax.broadcasted_iota(first.dtype, first.shape, first.ndim - 1)
    # What wraps to a row stays out of range.
    return jnp.where(rows < first, first, rows) if jnp.iinfo(rows.dtype).min == 0 else rows


def repeated(x: Array, window: Sequence[int]) -> Array:
    """Repeat an index or a mask along the axes of a window."""
    return lax.broadcast_in_dim(x, (*x.shape, *window), range(x.ndim))


def for_each(x: Array, batch: tuple[int, ...]) -> Array:
    """Repeat an index or a mask along the batch axes whose examples share it."""
    shape = (*batch, *x.shape[len(batch) :])
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, range(x.ndim))


def counting(buffer: Any, params: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context for the numbers of rows, which may need integers that JAX does not have."""
    total = math.prod(sizes_of(buffer, params))
    is_large = isinstance(total, int) and total > INT32_MAX  # else it may be a symbol of `jax.export`
    return jax.enable_x64(True) if is_large else contextlib.nullcontext()


def numbers_of_rows(buffer: Any, index: Array, *where: Array, **params: Any) -> list[Array]:
    """Return the numbers of all rows in each example, the last axis fastest, and the mask of these rows.

    The number of a row that is left out may be any number out of range. `params` are `primitive.Params`. Call it in
    the context `counting`.
    """
    sizes, window = sizes_of(buffer, params), params["window"]
    if params.get("settled"):
        return [index, *where]
    if len(sizes) == 1 and not params["whole"]:
        numbers = every_row(index, *window) if window else index
    else:
        starts, total = along_axes(index, len(sizes)), math.prod(sizes)
        dtype: Any = jnp.int32 if total <= INT32_MAX else jnp.int64
        numbers = dtype(0)
        for start, size, count in zip(starts, sizes, box_along(sizes, window), strict=True):
            last = min(size - count, jnp.iinfo(start.dtype).max)
            numbers = numbers * dtype(size) + jnp.clip(start, 0, last).astype(dtype)
        if params["mode"] == "drop":
            numbers = jnp.where(in_range(starts, sizes, window), numbers, dtype(-total))  # no row of the box is one
        rank, numbers = numbers.ndim, repeated(numbers, window)
        for k, step in enumerate(steps_along(sizes)[len(sizes) - len(window) :]):
            numbers += lax.broadcasted_iota(dtype, numbers.shape, rank + k) * dtype(step)
    batch = buffer.shape[: params["batch_dims"]]
    return [for_each(x, batch) for x in (numbers, *(repeated(x, window) for x in where))]
