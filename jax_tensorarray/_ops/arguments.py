"""Check and convert the arguments of the row ops. Each error says what was given and what is allowed."""

import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray._ops.calls import LOWERINGS
from jax_tensorarray._types import INT32_MAX, Array

#: A constant index stays in NumPy: JAX takes longer to convert it to an array than to write a row.
Index = jax.Array | np.ndarray[Any, Any]


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 80


def _noun(op: str) -> str:
    """Return a noun for the first argument of an op: names of methods begin with TensorArray."""
    return "TensorArray" if op.startswith("TensorArray") else "buffer"


def out_of_range(op: str, index: int, size: int) -> str:
    """Return the text of an index error, the same from Python and from the kernels."""
    return f"{op}: index {index} is out of range for a {_noun(op)} of size {size}"


def row_operands(
    op: str, buffer: Any, index: Any, where: Any, mode: str | None
) -> tuple[Array, Index, tuple[Array, ...], str | None]:
    """Check and convert the operands of all row ops. `where` becomes one operand or none."""
    buffer, mode = as_buffer(op, buffer), as_mode(op, mode)
    masked = where is not None and where is not True
    index, mode = as_index(op, index, buffer.shape[0], mode, masked=masked)
    return buffer, index, as_where(op, where, index.shape), mode


def _is_tensor_array(x: Any) -> bool:
    from jax_tensorarray import TensorArray  # made of these ops

    return isinstance(x, TensorArray)


_NUMBERS = (bool, int, float, complex)


def is_array_like(x: Any) -> bool:
    """Return whether `x` is an array of numbers, or has a protocol for conversion to one.

    We do not try the conversion: the caller must see an error or an interrupt in it.
    """
    if isinstance(x, (*_NUMBERS, jax.Array)):
        return True
    if isinstance(x, np.ndarray | np.generic):
        return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_
    if isinstance(x, type | str | bytes):
        return False
    if isinstance(x, Sequence):
        return all(map(is_array_like, x))
    if any(hasattr(x, name) for name in ("__jax_array__", "__array__", "__array_interface__")):
        return not _is_tensor_array(x)
    try:
        memoryview(x)
    except TypeError:
        return False
    return True


def _as_array(op: str, name: str, x: Any, allowed: str) -> Array:
    """Return an array of numbers. `jnp.asarray` takes as long as a small op, even for an array."""
    if not isinstance(x, jax.Array):
        if not is_array_like(x):
            raise TypeError(_must_be(op, name, x, allowed) + _way_out(op, x))
        return _converted(op, name, x, allowed, jnp.asarray)
    return x


#: How users convert numbers to random keys and back.
FOR_KEYS = (
    "jax.random.key_data converts random keys to numbers, and jax.random.wrap_key_data converts numbers to random keys"
)


def is_extended(dtype: Any) -> bool:
    """Return whether JAX has no arithmetic for elements of a dtype, such as random keys. Row ops can only move them."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def check_numbers(op: str, buffer: Array) -> None:
    """Raise an error if the buffer of an op that computes holds random keys."""
    if is_extended(buffer.dtype):
        raise TypeError(
            f"{op}: buffer must hold numbers or bools, got dtype {buffer.dtype}; random keys can only be read, written "
            f"and swapped. {FOR_KEYS}"
        )


def _converted(op: str, name: str, x: Any, allowed: str, convert: Any) -> Any:
    """Return `convert(x)`. A ragged list and an integer too large for any dtype raise TypeError."""
    try:
        return convert(x)
    except (ValueError, OverflowError) as error:
        if not isinstance(x, list | tuple | int):
            raise
        raise TypeError(_must_be(op, name, x, allowed)) from error


def _must_be(op: str, name: str, x: Any, allowed: str) -> str:
    text = f"dtype {x.dtype}" if isinstance(x, np.ndarray | np.generic) else _short.repr(x)
    return f"{op}: {name} must be {allowed}, got {text}"


def _way_out(op: str, x: Any) -> str:
    if _is_tensor_array(x):
        return "; a TensorArray is read and written by its own methods"
    if isinstance(x, list | tuple) or x is None or jax.tree_util.all_leaves([x]):
        return ""
    return f"; for a tree of arrays call {op} for each of them, by jax.tree.map, or use TensorArray.like"


def as_buffer(op: str, buffer: Any) -> Array:
    """Return a buffer `[T, *elem]`."""
    array = _as_array(op, "buffer", buffer, "an array of shape [T, *elem]")
    if array.ndim == 0:
        raise ValueError(f"{op}: buffer must have shape [T, *elem], got a scalar of dtype {array.dtype}")
    return array


def as_mode(op: str, mode: str | None) -> str | None:
    """Return the mode: None, "error" or "drop"."""
    if mode is not None and not (isinstance(mode, str) and mode in ("error", "drop")):
        raise ValueError(f'{op}: mode must be None, "error" or "drop", got {mode!r}')
    return mode


def check_lowering(op: str, lowering: str) -> None:
    """Check that the lowering is "auto", "ffi" or "xla"."""
    if not isinstance(lowering, str) or lowering not in LOWERINGS:
        raise ValueError(f'{op}: lowering must be "auto", "ffi" or "xla", got {lowering!r}')


def as_index(
    op: str, index: Any, size: int, mode: str | None, *, masked: bool, length: int = 1
) -> tuple[Index, str | None]:
    """Return an integer index, and the mode for the check at run time.

    We check a constant index here, of which each entry is the first of `length` rows. `masked` says that a traced
    `where` may exclude some.
    """
    array = _index_like(op, index)
    if not isinstance(array, jax.Array):
        return _as_constant_index(op, array, size, mode, masked=masked, length=length)
    _check_integer(op, array.dtype)
    packed = array.dtype.kind == "V" and jnp.iinfo(array.dtype).bits < 8
    return array.astype(jnp.int32) if packed else array, mode


_INTEGERS = "an integer or an array of integers"


def _index_like(op: str, index: Any) -> Any:
    """Return an index, constant or traced, before checks of dtype and range."""
    if isinstance(index, jax.Array | int):
        return index
    if isinstance(index, np.ndarray) and index.dtype == object:
        index = index.tolist()  # integers; some need more than 64 bits
    if isinstance(index, tuple):
        raise TypeError(_must_be(op, "index", index, _INTEGERS))
    if isinstance(index, list):
        leaves = jax.tree.leaves(index)
        if any(isinstance(i, bool) or getattr(i, "dtype", None) == np.bool_ for i in leaves):
            raise TypeError(_must_be(op, "index", index, _INTEGERS) + _MASK)
        is_jax = any(isinstance(i, jax.core.Tracer) for i in leaves)
    else:
        is_jax = hasattr(index, "__jax_array__")
    if is_jax or not is_array_like(index):
        return _as_array(op, "index", index, _INTEGERS)
    return index


_MASK = "; a mask is given by where"


def _as_constant_index(
    op: str, index: Any, size: int, mode: str | None, *, masked: bool, length: int
) -> tuple[Index, str | None]:
    values = _as_integers(op, index)
    stray = np.asarray((values < 0) | (values >= size - length + 1), bool)
    if not stray.any():
        mode = "drop"  # no check is needed at run time
    elif mode != "drop" and not masked:
        first = values[stray][0]
        raise IndexError(out_of_range(op, size if 0 <= first < size else first, size))
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for dtype in (np.int32, np.uint32, *((np.int64, np.uint64) if jax.config.jax_enable_x64 else ())):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype), mode
    # No dtype holds all entries. An entry that does not fit into the widest is out of range, and becomes the least.
    limits = np.iinfo(np.int64 if jax.config.jax_enable_x64 else np.int32)
    fits = np.asarray((values >= limits.min) & (values <= limits.max), bool)
    if not (fits | stray).all():
        raise OverflowError(
            f"{op}: index {values[~(fits | stray)][0]} does not fit into 32 bits. JAX has larger integers only "
            'with jax.config.update("jax_enable_x64", True)'
        )
    narrow = np.full(values.shape, limits.min, limits.dtype)
    narrow[fits] = values[fits].astype(limits.dtype)
    return narrow, mode


def _as_integers(op: str, index: Any) -> np.ndarray[Any, Any]:
    """Return Python or NumPy integers as an array, of dtype object if they need more than 64 bits."""
    values = _converted(op, "index", index, _INTEGERS, np.asarray)
    if not hasattr(index, "dtype") and (values.size == 0 or values.dtype in (np.float64, object)):
        values = np.asarray(index, object)
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values.flat):
            raise TypeError(_must_be(op, "index", index, _INTEGERS))
        return values if values.size else values.astype(np.int32)
    _check_integer(op, values.dtype)
    return values


def _check_integer(op: str, dtype: Any) -> None:
    is_usual = isinstance(dtype, np.dtype) and dtype.kind in "iu"
    if not is_usual and not jnp.issubdtype(dtype, jnp.integer):
        is_mask = _MASK if dtype == np.bool_ else ""
        raise TypeError(f"{op}: index must have an integer dtype, got {dtype}{is_mask}")


def as_where(op: str, where: Any, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Return no operand without a mask, else one mask of the shape of the index."""
    if where is None or where is True:
        return ()
    array = _as_array(op, "where", where, "bool or an array of bools")
    if array.dtype != jnp.bool_:
        raise TypeError(f"{op}: where must be bool, got {array.dtype}")
    return (_broadcast(op, "where", array, shape, "an index"),)


def as_value(
    op: str, value: Any, buffer: Array, index_shape: tuple[int, ...], batch_dims: int = 0, index_dims: int = 1
) -> Array:
    """Return a value of the buffer's dtype, broadcast to `[*index_shape, *elem]`.

    `index_shape` is `[*batch, *I]`, or `[*batch, *I, length]` if each index is the first of `length` rows.
    """
    allowed = "an array or a number"
    if isinstance(value, list | tuple):
        raise TypeError(_must_be(op, "value", value, allowed) + "; convert it with jnp.asarray")
    if not (isinstance(value, (*_NUMBERS, np.ndarray, np.generic)) and is_array_like(value)):
        value = _as_array(op, "value", value, allowed)
    shape = (*index_shape, *buffer.shape[batch_dims + index_dims :])
    rows = _broadcast(op, "value", _of_dtype(op, value, buffer.dtype), shape, "rows")
    positions = [None] * (len(index_shape) - batch_dims)
    return _divided_as(buffer, rows, [*range(batch_dims), *positions, *range(batch_dims + index_dims, buffer.ndim)])


def _of_dtype(op: str, value: Any, dtype: Any) -> Array:
    if isinstance(value, jax.Array) and value.dtype == dtype and not jax.typeof(value).weak_type:
        return value
    if isinstance(value, int) and jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise OverflowError(f"{op}: value {value} does not fit into {dtype}, [{limits.min}, {limits.max}]")
    value_dtype = getattr(value, "dtype", None) or jnp.result_type(value)
    if is_extended(dtype) or is_extended(value_dtype):
        raise TypeError(
            f"{op}: a value of dtype {value_dtype} cannot be stored in a {_noun(op)} of dtype {dtype}; {FOR_KEYS}"
        )
    try:
        promoted = jnp.result_type(dtype, value)
    except ValueError:  # no implicit promotion between the two, or a strict promotion mode
        promoted = None
    if promoted is None or promoted != dtype:  # NumPy takes None for float64
        raise TypeError(
            f"{op}: a value of dtype {value_dtype} cannot be stored in a {_noun(op)} of dtype {dtype} without loss; "
            f"convert it with .astype({str(dtype)!r}) if that is meant"
        )
    return jnp.asarray(value, dtype)


def _divided_as(buffer: Array, rows: Array, dims: Sequence[int | None]) -> Array:
    """Shard the rows like the buffer, on meshes with explicit axes.

    `dims` maps each axis of the rows to an axis of the buffer.
    """
    buffer_type, rows_type = jax.typeof(buffer), jax.typeof(rows)
    of_buffer = [*buffer_type.sharding.spec, *[None] * buffer_type.ndim]
    spec = [None if d is None else of_buffer[d] for d in dims]
    if spec == [*rows_type.sharding.spec, *[None] * rows_type.ndim][: rows_type.ndim]:
        return rows
    return jax.sharding.reshard(rows, buffer_type.sharding.update(spec=jax.sharding.PartitionSpec(*spec)))


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


def as_dtype(op: str, dtype: Any) -> Any:
    """Return the dtype of a buffer. Without x64, JAX narrows 64-bit types."""
    if isinstance(dtype, type) and issubclass(dtype, jax.dtypes.extended):
        raise TypeError(
            f"{op}: dtype must be the dtype of an array, got {dtype}; each implementation of random keys has its own, "
            "such as jax.random.key(0).dtype"
        )
    try:
        return jnp.zeros((), dtype).dtype
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: dtype must be a number type or bool, got {_short.repr(dtype)}") from error


def as_size(op: str, size: Any, name: str = "size") -> Array:
    """Return a scalar number of rows; `name` is the name of the argument in messages."""
    if isinstance(size, np.ndarray) and not size.ndim:
        size = size[()]
    if isinstance(size, int | np.integer) and not isinstance(size, bool):
        return jnp.asarray(max(min(int(size), INT32_MAX), -1), jnp.int32)
    array = _as_array(op, name, size, "an integer")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must have an integer dtype, got {array.dtype}")
    if array.ndim:
        raise ValueError(f"{op}: {name} must be a scalar, got shape {array.shape}")
    return array
