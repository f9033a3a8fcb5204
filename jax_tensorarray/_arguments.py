"""Check and convert what users pass to the row ops. Every message says what was given and what is allowed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

_INT32_MAX = np.iinfo(np.int32).max


def out_of_range(op: str, index: int, size: int) -> str:
    """Text of an index error, the same from Python and from the kernels."""
    return f"{op}: index {index} is out of range for a TensorArray of size {size}"


def as_buffer(op: str, buffer: Any) -> Array:
    """A buffer `[T, *elem]`."""
    array = jnp.asarray(buffer)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{op}: a TensorArray holds plain numbers, got dtype {array.dtype}; for random keys use "
            "jax.random.key_data and jax.random.wrap_key_data"
        )
    if array.ndim == 0:
        raise ValueError(f"{op}: buffer must have shape [T, *elem], got a scalar of dtype {array.dtype}")
    return array


def as_mode(op: str, mode: str | None) -> str | None:
    """One of None, "error" and "drop"."""
    if mode not in (None, "error", "drop"):
        raise ValueError(f'{op}: mode must be None, "error" or "drop", got {mode!r}')
    return mode


def as_index(op: str, index: Any, size: int, mode: str | None, *, masked: bool) -> tuple[Array, str | None]:
    """An integer index, and the mode that is left to check at run time.

    Indices known while tracing are checked here. `masked` says that a `where` decides, at run time, which count.
    """
    if not hasattr(index, "dtype") or isinstance(index, np.ndarray | np.generic):
        return _as_constant_index(op, index, size, mode, masked=masked)
    _check_integer(op, index.dtype)
    array = jnp.asarray(index)
    return array.astype(jnp.int32) if jnp.iinfo(array.dtype).bits < 8 else array, mode


def _as_constant_index(op: str, index: Any, size: int, mode: str | None, *, masked: bool) -> tuple[Array, str | None]:
    try:
        if isinstance(index, int) and not isinstance(index, bool):
            values = np.asarray(index, object)  # of any magnitude
        else:
            values = np.asarray(index)
            if values.dtype == np.float64 and not hasattr(index, "dtype"):
                values = np.asarray(index, object)  # an empty list, or Python integers that no one dtype holds
            if values.dtype != object:
                _check_integer(op, values.dtype)
            values = values.astype(object)
    except ValueError:
        raise TypeError(f"{op}: index must be an integer or an array of integers, got {index!r}") from None
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values.flat):
        raise TypeError(f"{op}: index must be an integer or an array of integers, got {index!r}")
    stray = [v for v in values.flat if not 0 <= v < size]
    if stray and mode != "drop" and not masked:
        raise IndexError(out_of_range(op, stray[0], size))
    if all(abs(v) <= _INT32_MAX for v in values.flat):
        dtype: Any = np.int32
    elif all(0 <= v <= np.iinfo(np.uint32).max for v in values.flat):
        dtype = np.uint32
    elif jax.config.jax_enable_x64:
        dtype = np.uint64 if all(0 <= v <= np.iinfo(np.uint64).max for v in values.flat) else np.int64
    else:
        dtype = np.int32
    # What the dtype cannot hold is out of range: -1 stands for it.
    limits = np.iinfo(dtype)
    values = (
        np.vectorize(lambda v: v if limits.min <= v <= limits.max else -1, otypes=[object])(values)
        if values.size
        else values
    )
    checked = mode if stray else "drop"
    return jnp.asarray(values.astype(dtype)), checked


def _check_integer(op: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{op}: index must have an integer dtype, got {dtype}")


def as_where(op: str, where: Any, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """No operand if every row takes part, else one mask of the index's shape."""
    if where is None or where is True:
        return ()
    array = jnp.asarray(where)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{op}: where must be bool, got {array.dtype}")
    return (_broadcast(op, "where", array, shape, "an index"),)


def as_value(op: str, value: Any, buffer: Array, index_shape: tuple[int, ...]) -> Array:
    """A value of the buffer's dtype and of shape `[*I, *elem]`."""
    try:
        promoted = jnp.result_type(buffer.dtype, value)
    except ValueError:  # no implicit promotion between the two, or a strict promotion mode
        promoted = None
    if promoted is None or promoted != buffer.dtype:  # NumPy takes None for float64
        given = getattr(value, "dtype", None) or jnp.result_type(value)
        raise TypeError(
            f"{op}: a value of dtype {given} cannot be stored in a TensorArray of dtype {buffer.dtype} without loss; "
            f"convert it with .astype({str(buffer.dtype)!r}) if that is meant"
        )
    return _broadcast(op, "value", jnp.asarray(value, buffer.dtype), (*index_shape, *buffer.shape[1:]), "rows")


def _broadcast(op: str, name: str, array: Array, shape: tuple[int, ...], what: str) -> Array:
    if array.shape == shape:
        return array
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: {name} of shape {array.shape} does not fit {what} of shape {shape}")
    return jnp.broadcast_to(array, shape)


def as_size(op: str, size: Any) -> Array:
    """A scalar number of rows."""
    if isinstance(size, np.ndarray) and not size.ndim:
        size = size[()]
    if isinstance(size, int | np.integer) and not isinstance(size, bool):
        return jnp.asarray(max(min(int(size), _INT32_MAX), -1), jnp.int32)
    array = jnp.asarray(size)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: size must have an integer dtype, got {array.dtype}")
    if array.ndim:
        raise ValueError(f"{op}: size must be a scalar, got shape {array.shape}")
    return array
