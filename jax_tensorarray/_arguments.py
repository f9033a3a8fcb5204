"""Check and convert what users pass to the row ops. Every message says what was given and what is allowed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray._lowering.mlir import LOWERINGS

Array = jax.Array

#: An index that is known is left to NumPy: JAX takes longer to make an array of it than to write a row.
Index = jax.Array | np.ndarray[Any, Any]

_INT32_MAX = np.iinfo(np.int32).max


def out_of_range(op: str, index: int, size: int) -> str:
    """Text of an index error, the same from Python and from the kernels."""
    return f"{op}: index {index} is out of range for a TensorArray of size {size}"


def row_operands(
    op: str, buffer: Any, index: Any, where: Any, mode: str | None
) -> tuple[Array, Index, tuple[Array, ...], str | None]:
    """What all row ops take, checked and converted; `where` becomes no operand or one."""
    buffer, mode = as_buffer(op, buffer), as_mode(op, mode)
    masked = where is not None and where is not True
    index, mode = as_index(op, index, buffer.shape[0], mode, masked=masked)
    return buffer, index, as_where(op, where, index.shape), mode


def _as_array(x: Any) -> Array:
    """`jnp.asarray`, which takes as long as a small op also where there is nothing to do."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def as_buffer(op: str, buffer: Any) -> Array:
    """A buffer `[T, *elem]`."""
    array = _as_array(buffer)
    if not isinstance(array.dtype, np.dtype):  # keys of jax.random
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


def check_lowering(op: str, lowering: str) -> None:
    """One of "auto", "ffi" and "xla"."""
    if lowering not in LOWERINGS:
        raise ValueError(f'{op}: lowering must be "auto", "ffi" or "xla", got {lowering!r}')


def as_index(op: str, index: Any, size: int, mode: str | None, *, masked: bool) -> tuple[Index, str | None]:
    """An integer index, and the mode that is left to check at run time.

    Indices known while tracing are checked here. `masked` says that a `where` decides, at run time, which count.
    """
    if isinstance(index, list | tuple) and any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(index)):
        index = jnp.asarray(index)  # a list of them is an index too
    if not hasattr(index, "dtype") or isinstance(index, np.ndarray | np.generic):
        return _as_constant_index(op, index, size, mode, masked=masked)
    _check_integer(op, index.dtype)
    array = _as_array(index)
    packed = array.dtype.kind == "V" and jnp.iinfo(array.dtype).bits < 8
    return array.astype(jnp.int32) if packed else array, mode


def _as_constant_index(op: str, index: Any, size: int, mode: str | None, *, masked: bool) -> tuple[Index, str | None]:
    values = _as_integers(op, index)
    stray = np.asarray((values < 0) | (values >= size), bool)
    if not stray.any():
        mode = "drop"  # nothing is left to check
    elif mode != "drop" and not masked:
        raise IndexError(out_of_range(op, values[stray][0], size))
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in (np.int32, np.uint32, *((np.int64, np.uint64) if jax.config.jax_enable_x64 else ())):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype), mode
    # No dtype holds them all. What the widest cannot hold is out of range, and -1 stands for it.
    limits = np.iinfo(np.int64 if jax.config.jax_enable_x64 else np.int32)
    fits = np.asarray((values >= limits.min) & (values <= limits.max), bool)
    if not (fits | stray).all():
        raise OverflowError(
            f"{op}: index {values[~(fits | stray)][0]} does not fit into the integers that JAX has by default; "
            'jax.config.update("jax_enable_x64", True) gives it larger ones'
        )
    narrow = np.full(values.shape, -1, limits.dtype)
    narrow[fits] = values[fits].astype(limits.dtype)
    return narrow, mode


def _as_integers(op: str, index: Any) -> np.ndarray[Any, Any]:
    """Python or NumPy integers as an array: of dtype object if they need more than 64 bits."""
    wrong = TypeError(f"{op}: index must be an integer or an array of integers, got {index!r}")
    try:
        values = np.asarray(index)
    except ValueError:  # ragged
        raise wrong from None
    if not hasattr(index, "dtype") and (values.size == 0 or values.dtype in (np.float64, object)):
        values = np.asarray(index, object)
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values.flat):
            raise wrong
        return values if values.size else values.astype(np.int32)
    _check_integer(op, values.dtype)
    return values


def _check_integer(op: str, dtype: Any) -> None:
    is_usual = isinstance(dtype, np.dtype) and dtype.kind in "iu"
    if not is_usual and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{op}: index must have an integer dtype, got {dtype}")


def as_where(op: str, where: Any, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """No operand if every row takes part, else one mask of the index's shape."""
    if where is None or where is True:
        return ()
    array = _as_array(where)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{op}: where must be bool, got {array.dtype}")
    return (_broadcast(op, "where", array, shape, "an index"),)


def as_value(op: str, value: Any, buffer: Array, index_shape: tuple[int, ...]) -> Array:
    """A value of the buffer's dtype and of shape `[*I, *elem]`."""
    if isinstance(value, list | tuple):
        raise TypeError(f"{op}: value must be an array or a number, got {value!r}; jnp.asarray makes one of it")
    rows = _broadcast(op, "value", _of_dtype(op, value, buffer.dtype), (*index_shape, *buffer.shape[1:]), "rows")
    return _divided_as(buffer, rows, len(index_shape))


def _of_dtype(op: str, value: Any, dtype: Any) -> Array:
    if isinstance(value, jax.Array) and value.dtype == dtype and not jax.typeof(value).weak_type:
        return value
    try:
        promoted = jnp.result_type(dtype, value)
    except ValueError:  # no implicit promotion between the two, or a strict promotion mode
        promoted = None
    if promoted is None or promoted != dtype:  # NumPy takes None for float64
        given = getattr(value, "dtype", None) or jnp.result_type(value)
        raise TypeError(
            f"{op}: a value of dtype {given} cannot be stored in a TensorArray of dtype {dtype} without loss; "
            f"convert it with .astype({str(dtype)!r}) if that is meant"
        )
    return jnp.asarray(value, dtype)


def _divided_as(buffer: Array, rows: Array, positions: int) -> Array:
    """The rows, divided among devices as the buffer is, where types say how: on meshes with explicit axes."""
    whole, own = jax.typeof(buffer), jax.typeof(rows)
    spec = [*[None] * positions, *[*whole.sharding.spec, *[None] * whole.ndim][1 : whole.ndim]]
    if spec == [*own.sharding.spec, *[None] * own.ndim][: own.ndim]:
        return rows
    return jax.sharding.reshard(rows, jax.sharding.PartitionSpec(*spec))


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


def as_size(op: str, size: Any, name: str = "size") -> Array:
    """A scalar number of rows; `name` is what the user knows it by."""
    if isinstance(size, np.ndarray) and not size.ndim:
        size = size[()]
    if isinstance(size, int | np.integer) and not isinstance(size, bool):
        return jnp.asarray(max(min(int(size), _INT32_MAX), -1), jnp.int32)
    array = jnp.asarray(size)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must have an integer dtype, got {array.dtype}")
    if array.ndim:
        raise ValueError(f"{op}: {name} must be a scalar, got shape {array.shape}")
    return array
