"""Functions of arrays that passes put into programs: numbers of rows, and whether they are in range.

They are traced once for each type of their operands (`equations.traced`), and in x64. They call nothing of `jax.numpy`,
which takes several times as long to trace.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_tensorarray._types import INT32_MAX

Array = jax.Array


def like(x: Array, value: int) -> Array:
    """Return a number in the dtype of an array, in each of its places."""
    number: Any = np.asarray(value).astype(x.dtype)[()]
    return lax.broadcast_in_dim(number, x.shape, ()) if x.ndim else number


def as_dtype(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def reshaped(x: Array, shape: Sequence[int]) -> Array:
    return x if x.shape == (*shape,) else lax.reshape(x, tuple(shape))


def repeated(x: Array, more: Sequence[int]) -> Array:
    """Repeat an array along new last axes."""
    return lax.broadcast_in_dim(x, (*x.shape, *more), range(x.ndim)) if more else x


def for_each(x: Array, batch: Sequence[int]) -> Array:
    """Repeat an index or a mask along the batch axes whose examples share it."""
    shape = (*batch, *x.shape[len(batch) :])
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, range(x.ndim))


def is_unsigned(x: Array) -> bool:
    return np.dtype(x.dtype).kind == "u"


def widened(index: Array, size: int) -> Array:
    """Convert an index to a dtype that has all rows.

    XLA clamps a start in the start's own dtype. In a smaller dtype the last row that it clamps to would wrap.
    """
    bits, own = 32 if size <= INT32_MAX else 64, index.dtype.itemsize * 8
    if own > bits or (own == bits and (bits == 64 or not is_unsigned(index))):
        return index
    return as_dtype(index, np.dtype(np.int64 if bits == 64 or (is_unsigned(index) and own == 32) else np.int32))


def is_out_of_range(index: Array, size: Any) -> Array:
    """Return which indices are out of range; `size` is a number, or an int32 array of the same shape."""
    is_number = isinstance(size, int)
    index = widened(index, size if is_number else INT32_MAX)
    if is_number:
        limit = like(index, size)
    else:
        limit = as_dtype(lax.max(size, like(size, 0)) if is_unsigned(index) else size, index.dtype)
    outside = lax.ge(index, limit)
    return outside if is_unsigned(index) else lax.bitwise_or(outside, lax.lt(index, like(index, 0)))


def in_range(starts: Sequence[Array], sizes: Sequence[int], box: Sequence[int]) -> Array:
    """Return which boxes are in range along all axes."""
    each = [is_out_of_range(x, size - n + 1) for x, size, n in zip(starts, sizes, box, strict=True)]
    return lax.bitwise_not(functools.reduce(lax.bitwise_or, each))


def every_row(first: Array, count: int, size: int) -> Array:
    """Return consecutive numbers from the first ones on, along a last axis, in a dtype that has all rows."""
    first = repeated(widened(first, size), [count])
    rows = lax.add(first, lax.broadcasted_iota(first.dtype, first.shape, first.ndim - 1))
    # What wraps to a row stays out of range.
    return lax.select(lax.lt(rows, first), first, rows) if is_unsigned(first) else rows


def clamped(start: Array, last: int) -> Array:
    """Move starts into the range from 0 to `last`."""
    kind = start.dtype.type
    return lax.clamp(kind(0), start, kind(last))
