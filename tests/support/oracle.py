"""What the row ops mean, in NumPy: Python loops over the positions of the index, one row at a time.

The functions have the names and arguments of the library's, so that a test can run one program on both. An index
out of range is dropped. Nothing here calls the library or JAX.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np


def _visited(buffer: np.ndarray, index: Any, where: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    """(position, row) of every position that takes part, in order."""
    index = np.asarray(index)
    where = np.broadcast_to(True if where is None else where, index.shape)
    for k in np.ndindex(index.shape):
        if where[k] and 0 <= int(index[k]) < buffer.shape[0]:
            yield k, int(index[k])


def _rows(buffer: np.ndarray, index: Any, value: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(value).astype(buffer.dtype), np.shape(index) + buffer.shape[1:])


def ta_read(buffer: Any, index: Any, *, where: Any = None, mode: str | None = None) -> np.ndarray:
    buffer = np.asarray(buffer)
    rows = np.zeros(np.shape(index) + buffer.shape[1:], buffer.dtype)
    for k, row in _visited(buffer, index, where):
        rows[k] = buffer[row]
    return rows


def ta_write(buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None) -> np.ndarray:
    return ta_swap(buffer, index, value, where=where)[0]


def ta_swap(
    buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None, reverse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    buffer = np.array(buffer)
    value = _rows(buffer, index, value)
    old = np.zeros_like(value)
    visited = list(_visited(buffer, index, where))
    for k, row in reversed(visited) if reverse else visited:
        old[k] = buffer[row]
        buffer[row] = value[k]
    return buffer, old


def ta_add(
    buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None, reverse: bool = False
) -> np.ndarray:
    buffer = np.array(buffer)
    value = _rows(buffer, index, value)
    visited = list(_visited(buffer, index, where))
    for k, row in reversed(visited) if reverse else visited:
        buffer[row] = plus(buffer[row], value[k])
    return buffer


def ta_max(buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None) -> np.ndarray:
    buffer = np.array(buffer)
    value = _rows(buffer, index, value)
    for k, row in _visited(buffer, index, where):
        buffer[row] = larger(buffer[row], value[k])
    return buffer


def ta_stack(buffer: Any, size: Any = None) -> np.ndarray:
    buffer = np.array(buffer)
    for row in range(buffer.shape[0]):
        if size is not None and row >= int(size):
            buffer[row] = np.zeros_like(buffer[row])
    return buffer


def ta_clear(buffer: Any, start: Any, stop: Any) -> np.ndarray:
    buffer = np.array(buffer)
    for row in range(buffer.shape[0]):
        if int(start) <= row < int(stop):
            buffer[row] = np.zeros_like(buffer[row])
    return buffer


def ta_check(index: Any, size: Any, *, where: Any = None, mode: str | None = None) -> np.ndarray:
    index = np.asarray(index)
    counts = np.broadcast_to(True if where is None else where, index.shape)
    live = [int(i) if w and 0 <= int(i) < int(size) else -1 for i, w in zip(index.flat, counts.flat, strict=True)]
    return np.array(live, np.int32).reshape(index.shape)


def visiting_order(index: Any, where: Any, size: int, *, reverse: bool) -> np.ndarray:
    """The positions of an index `[*batch, count]` sorted by row, and by when they are visited: strays come last."""
    order = np.zeros(index.shape, np.int32)
    for b in np.ndindex(index.shape[:-1]):
        takes_part = np.full(index.shape[-1], True) if where is None else where[b]
        keys = [int(i) if w and 0 <= i < size else size for i, w in zip(index[b], takes_part, strict=True)]
        order[b] = sorted(range(len(keys))[:: -1 if reverse else 1], key=keys.__getitem__)
    return order


# --- arithmetic of every dtype ---------------------------------------------------------------------------------


def bits(dtype: Any) -> int:
    """How many bits of each element count: ml_dtypes gives a whole byte to the types that are packed below one."""
    dtype = np.dtype(dtype)
    for name, width in (("int2", 2), ("int4", 4), ("float4", 4)):
        if dtype.name.removeprefix("u").startswith(name):
            return width
    return dtype.itemsize * 8


def is_integer(dtype: Any) -> bool:
    return np.dtype(dtype).name.removeprefix("u").startswith("int")


def plus(a: Any, b: Any) -> np.ndarray:
    """Sum of two arrays of one dtype: bools are or-ed, integers wrap, small floats are added in float32 and rounded."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype == bool:
        return np.logical_or(a, b)
    if is_integer(a.dtype):
        wide = object if a.dtype.itemsize == 8 else np.int64
        n = bits(a.dtype)
        half = 0 if a.dtype.name.startswith("u") else 2 ** (n - 1)
        total = np.asarray(a.astype(wide) + b.astype(wide), wide)
        return np.asarray((total + half) % 2**n - half).astype(a.dtype)
    with np.errstate(all="ignore"):
        if a.dtype.itemsize <= 2:
            return sum_of_small_floats(a, b)
        return np.asarray(a + b)


def larger(a: Any, b: Any) -> np.ndarray:
    """Maximum of two arrays of one dtype: bools are or-ed, NaN stays, and 0 is larger than -0."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype == bool:
        return np.logical_or(a, b)
    with np.errstate(all="ignore"):
        # NumPy does not know all dtypes, and a double holds what is smaller.
        x, y = (n.astype(np.float64) if a.dtype.itemsize < 8 else n for n in (a, b))
        return np.where((x != x) | (x > y) | ((x == y) & ~np.signbit(x)), a, b).astype(a.dtype)


# --- comparison ------------------------------------------------------------------------------------------------


def bytes_of(x: Any) -> np.ndarray:
    """The bytes of `x`, without those bits that its dtype does not use."""
    x = np.ascontiguousarray(np.asarray(x))
    return x.reshape(-1).view(np.uint8) & (2 ** min(bits(x.dtype), 8) - 1)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Equal in shape, dtype and every bit, so that NaNs and signs of zeros count."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(bytes_of(actual), bytes_of(expected))


def assert_same_numbers(actual: Any, expected: Any) -> None:
    """As `assert_same_bits`, but any NaN equals any other."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    actual_nan, expected_nan = (x != x for x in (actual, expected))
    np.testing.assert_array_equal(actual_nan, expected_nan)
    assert_same_bits(actual[~actual_nan], expected[~actual_nan])


def random_bits(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Random bit patterns, so all numbers there are and all NaNs too, but only 0 and 1 for bool."""
    dtype = np.dtype(dtype)
    if dtype == np.dtype(bool):
        return rng.integers(0, 2, shape).astype(bool)
    n = int(np.prod(shape))
    if bits(dtype) < 8 and is_integer(dtype):
        low = 0 if dtype.name.startswith("u") else -(2 ** (bits(dtype) - 1))
        return rng.integers(low, low + 2 ** bits(dtype), shape).astype(dtype)
    limit = 2 ** min(bits(dtype), 8)
    return rng.integers(0, limit, n * dtype.itemsize).astype(np.uint8).view(dtype).reshape(shape)


#: Whether the platform that is tested takes subnormals for zeros, as XLA's threads on a CPU do, and a GPU does not.
FLUSHES = True


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormals of float32 become zeros of the same sign, if the platform does that."""
    if not FLUSHES:
        return x.astype(np.float32)
    tiny = np.abs(x.astype(np.float32)) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), x.astype(np.float32)), x.astype(np.float32))


def sum_of_small_floats(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums by way of float32, as XLA's threads calculate them."""
    with np.errstate(all="ignore"):
        return flush(flush(a) + flush(b)).astype(a.dtype)


# --- derivatives -----------------------------------------------------------------------------------------------


def gradient(f: Callable[..., Any], args: Sequence[np.ndarray], step: float = 1e-6) -> list[np.ndarray]:
    """Gradient of the scalar function `f` with respect to every argument, by central differences."""

    def partial(n: int, k: tuple[int, ...]) -> float:
        ends = []
        for h in (step, -step):
            moved = [np.array(a, np.float64) for a in args]
            moved[n][k] += h
            ends.append(float(f(*moved)))
        return (ends[0] - ends[1]) / (2 * step)

    return [np.array([partial(n, k) for k in np.ndindex(a.shape)]).reshape(a.shape) for n, a in enumerate(args)]


FLOAT8 = [
    ml_dtypes.float8_e3m4,
    ml_dtypes.float8_e4m3,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
SMALL_INTEGERS = [ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4]
PACKED = [*SMALL_INTEGERS, ml_dtypes.float4_e2m1fn]
DTYPES = [
    np.bool_,
    *INTEGERS,
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    np.float64,
    *FLOAT8,
    np.complex64,
    np.complex128,
    *PACKED,
]


def name_of(dtype: Any) -> str:
    """Test id of a dtype."""
    return np.dtype(dtype).name
