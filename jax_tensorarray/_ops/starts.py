"""Index arithmetic: where the boxes of a row op start, whether they are in range, and the numbers of their rows.

An index along one axis has the shape `[*batch, *I]`. Along `d` axes it has the shape `[*batch, *I, d]`, like that of a
gather. A box has one row along each axis, but the rows of the window along the last axes.

    index [1, 4], window (2,)          # two boxes
    # has the rows
    [[1, 2], [4, 5]]                   # as kernels take them

These functions do not use `jax.numpy`, which takes several times as long to trace. They compare in the dtype of an
index, so they work without x64, too.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_tensorarray._types import INT32_MAX, Array

# --- shapes ------------------------------------------------------------------------------------------------------


def positions_of(index: Any, index_dims: int) -> tuple[int, ...]:
    """Return the shape `[*batch, *I]` of the positions of an index."""
    shape: tuple[int, ...] = np.shape(index)
    return shape if index_dims == 1 else shape[:-1]


def sizes_of(buffer: Any, params: Any) -> tuple[int, ...]:
    """Return the sizes of the axes of the rows of an op with these parameters."""
    sizes: tuple[int, ...] = buffer.shape[params["batch_dims"] :][: params["index_dims"]]
    return sizes


def box_along(sizes: Sequence[int], window: Sequence[int]) -> list[int]:
    """Return the sizes of a box along these axes: those of the window along the last ones, 1 along the others."""
    return [*[1] * (len(sizes) - len(window)), *window]


# --- arrays ------------------------------------------------------------------------------------------------------


def like(x: Array, value: int) -> Array:
    """Return a number in the dtype and shape of an array."""
    number: Any = np.asarray(value).astype(x.dtype)[()]
    return lax.broadcast_in_dim(number, x.shape, ()) if x.ndim else number


def as_dtype(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def reshaped(x: Array, shape: Sequence[int]) -> Array:
    return x if x.shape == (*shape,) else lax.reshape(x, tuple(shape))


def repeated(x: Array, window: Sequence[int]) -> Array:
    """Repeat an array along new last axes: those of a window."""
    return lax.broadcast_in_dim(x, (*x.shape, *window), range(x.ndim)) if window else x


def for_each(x: Array, batch: Sequence[int]) -> Array:
    """Repeat an index or a mask along the batch axes whose examples share it."""
    shape = (*batch, *x.shape[len(batch) :])
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, range(x.ndim))


# --- starts ------------------------------------------------------------------------------------------------------


def along_axes(index: Array, index_dims: int) -> list[Array]:
    """Return the starts of an index along each axis."""
    return [index] if index_dims == 1 else [index[..., k] for k in range(index_dims)]


def joined(starts: Sequence[Array]) -> Array:
    """Return the index with these starts along each axis."""
    if len(starts) == 1:
        return starts[0]
    return lax.concatenate([lax.expand_dims(x, [x.ndim]) for x in starts], starts[0].ndim)


def widened(index: Array, size: int) -> Array:
    """Convert an index to a dtype that holds the numbers of all rows.

    XLA clamps a start in the dtype of the start. In a smaller dtype, the upper limit would wrap.
    """
    dtype = np.dtype(np.int32 if size <= INT32_MAX else np.int64)
    return index if index.dtype.itemsize >= dtype.itemsize else as_dtype(index, dtype)


def clamped(start: Array, last: int) -> Array:
    """Move starts into the range from 0 to `last`."""
    kind = start.dtype.type
    return lax.clamp(kind(0), start, kind(min(last, np.iinfo(start.dtype).max)))


def is_out_of_range(index: Array, size: Any) -> Array:
    """Return which indices are out of range; `size` is a number, or an int32 array of the same shape."""
    if not isinstance(size, int):
        index, size = widened(index, INT32_MAX), lax.max(size, like(size, 0))
    below = lax.lt(index, like(index, 0))
    if isinstance(size, int) and size > np.iinfo(index.dtype).max:
        return below
    limit = like(index, size) if isinstance(size, int) else as_dtype(size, index.dtype)
    return lax.bitwise_or(below, lax.ge(index, limit))


def in_range(starts: Sequence[Array], sizes: Sequence[int], window: Sequence[int]) -> Array:
    """Return which boxes with that window are in range along all axes."""
    boxes = zip(starts, sizes, box_along(sizes, window), strict=True)
    return lax.bitwise_not(functools.reduce(lax.bitwise_or, (is_out_of_range(x, size - n + 1) for x, size, n in boxes)))


def every_row(first: Array, count: int, size: int = INT32_MAX) -> Array:
    """Return `count` consecutive numbers from each first one on, along a last axis, in a dtype for all rows."""
    first = repeated(widened(first, size), [count])
    rows = lax.add(first, lax.broadcasted_iota(first.dtype, first.shape, first.ndim - 1))
    # A number that wraps must stay out of range.
    return lax.select(lax.lt(rows, first), first, rows) if rows.dtype.kind == "u" else rows


# --- numbers of rows ---------------------------------------------------------------------------------------------


def counting(buffer: Any, params: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context for the numbers of rows, which may need 64-bit integers."""
    total = math.prod(sizes_of(buffer, params))
    is_large = isinstance(total, int) and total > INT32_MAX  # it may be symbolic in `jax.export`
    return jax.enable_x64(True) if is_large else contextlib.nullcontext()


def numbers_of_rows(buffer: Any, index: Array, *where: Array, **params: Any) -> list[Array]:
    """Return the numbers of all rows of each example, the last axis fastest, and the mask of these rows.

    `params` are `primitive.Params`. Call it in the context `counting`.
    """
    sizes, window, mode = sizes_of(buffer, params), params["window"], params["mode"]
    if params.get("settled"):
        return [index, *where]
    starts = along_axes(index, len(sizes))
    numbers = numbers_in_boxes(starts, sizes, window, whole=params["whole"], drops=mode == "drop", clips=mode == "clip")
    batch = buffer.shape[: params["batch_dims"]]
    return [for_each(x, batch) for x in (numbers, *(repeated(x, window) for x in where))]


def numbers_in_boxes(
    starts: Sequence[Array], sizes: Sequence[int], window: Sequence[int], *, whole: bool, drops: bool, clips: bool
) -> Array:
    """Return the numbers of the rows of boxes, the last axis fastest. A skipped row has a number out of range.

    If boxes are `whole`, `drops` skips a box that is partly out of range, and `clips` moves it into range. Otherwise,
    along one axis, each row is in range or out of range by itself.
    """
    if len(sizes) == 1 and not whole:
        return every_row(starts[0], window[0]) if window else starts[0]
    total = math.prod(sizes)
    dtype, numbers = np.dtype(np.int32 if total <= INT32_MAX else np.int64), None
    for start, size, count in zip(starts, sizes, box_along(sizes, window), strict=True):
        start = as_dtype(clamped(start, size - count) if clips else start, dtype)
        numbers = start if numbers is None else lax.add(lax.mul(numbers, like(numbers, size)), start)
    assert numbers is not None
    if drops:  # from this number on, all rows of a box have negative numbers
        numbers = lax.select(in_range(starts, sizes, window), numbers, like(numbers, -total))
    rank, numbers = numbers.ndim, repeated(numbers, window)
    for axis in range(len(window)):
        step = math.prod(sizes[len(sizes) - len(window) + axis + 1 :])
        along = lax.broadcasted_iota(dtype, numbers.shape, rank + axis)
        numbers = lax.add(numbers, lax.mul(along, like(numbers, step)))
    return numbers
