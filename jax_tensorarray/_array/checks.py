"""Check and convert the arguments of a TensorArray: indices, sizes, shapes and rows.

For constant arguments, the messages are those of TensorFlow's eager TensorArray.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import _faults
from jax_tensorarray._ops import arguments
from jax_tensorarray._types import Array

#: The shape of a row: None for an unknown dimension, or for the whole shape if the rank is unknown, too.
Shape = tuple[int | None, ...] | None


def as_index(op: str, index: Any) -> Any:
    """Return a constant index as a Python integer, and a traced one unchanged."""
    if isinstance(index, int) and not isinstance(index, bool):
        return index
    if not is_integral(index):
        raise TypeError(f"{op}: index must be an integer, got {_described(index)}")
    if index.ndim:
        raise TypeError(f"{op}: index must be a scalar, got shape {index.shape}; use gather or scatter for many")
    return index if isinstance(index, jax.core.Tracer) else int(index)


def is_integral(x: Any) -> bool:
    """Return whether `x` is an array of integers, or a number of NumPy."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and bool(jnp.issubdtype(x.dtype, jnp.integer))


def as_indices(op: str, indices: Any) -> Any:
    """Return constant indices as a copy in NumPy, and traced ones as an array of JAX."""
    if any(isinstance(i, jax.core.Tracer) for i in jax.tree.leaves(indices)):
        traced = jnp.asarray(indices)
        if not jnp.issubdtype(traced.dtype, jnp.integer):
            raise TypeError(f"{op}: indices must be integers, got {_described(indices)}")
        return traced
    try:
        array = np.array(indices)
    except ValueError as error:
        if not isinstance(indices, list | tuple):
            raise
        raise TypeError(f"{op}: indices must be an array of integers, got {indices!r}") from error
    if not array.size and not hasattr(indices, "dtype"):
        return array.astype(np.int32)
    if array.dtype == object and all(type(i) is int for i in array.flat):
        return array  # some need more than 64 bits, so they are out of range
    if array.dtype == object:
        _raise_what_numpy_hides(indices)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: indices must be integers, got {_described(indices)}")
    return array


def options(
    op: str, name: Any, where: Any, mode: Any, shape: tuple[int, ...] = ()
) -> tuple[Array | np.ndarray[Any, Any] | None, str | None]:
    """Return `where` for an index of this shape, and the mode.

    None stands for all rows. Return a constant `where` as NumPy bools, and a traced one as a tracer.
    """
    check_name(op, name, "where and mode are")
    mode = arguments.as_mode(op, mode)
    if where is None or where is True:
        return None, mode
    if where is False:
        return np.zeros(shape, bool), mode
    is_jax = any(isinstance(w, jax.core.Tracer) for w in jax.tree.leaves(where)) or hasattr(where, "__jax_array__")
    with nullcontext() if is_jax else jax.ensure_compile_time_eval():
        (mask,) = arguments.as_where(op, where, shape)
    return mask if isinstance(mask, jax.core.Tracer) else np.asarray(mask), mode


def takes_none(where: Any) -> bool:
    """Return whether a `where` from `options` is constant, and excludes all rows."""
    return isinstance(where, np.ndarray | np.generic) and not where.any()


def check_name(op: str, name: Any, others: str) -> None:
    """Check TensorFlow's `name`. We ignore it, but must not ignore another argument at its position."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{op}: name must be a string, got {_described(name)}; {others} given by keyword")


def as_flag(op: str, name: str, flag: Any) -> bool:
    """Return a bool, which must be constant."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be True or False, got {_described(flag)}")
    return bool(flag)


def known_size(size: Any, name: str = "size") -> int | None:
    """Return the number of rows from the user as a Python integer, or None if it is traced."""
    if isinstance(size, jax.core.Tracer) and jnp.issubdtype(size.dtype, jnp.integer) and not size.ndim:
        return None
    if not isinstance(size, bool):
        try:
            n = size.__index__()
        except (AttributeError, TypeError):
            pass
        else:
            if n < 0:
                raise ValueError(f"TensorArray: {name} must not be negative, got {n}")
            return int(n)
    raise TypeError(f"TensorArray: {name} must be an integer, got {_described(size)}")


def as_dtype(dtype: Any) -> Any:
    """Return a dtype of JAX. Without x64, JAX narrows 64-bit types."""
    try:
        is_extended = arguments.is_extended(dtype)
        canonical = np.dtype(np.bool_ if is_extended else jax.dtypes.canonicalize_dtype(dtype))
    except TypeError as error:
        raise TypeError(f"TensorArray: dtype must be a number type or bool, got {dtype!r}") from error
    if is_extended:
        return arguments.as_dtype("TensorArray", dtype)
    if not (jnp.issubdtype(canonical, jnp.number) or canonical == np.bool_):
        raise TypeError(f"TensorArray: dtype must be a number type or bool, got {dtype!r}")
    return canonical


def warn_if_narrowed(dtype: Any) -> None:
    """Warn like JAX of an explicit dtype that JAX narrows. Python's own types mean the widest one."""
    canonical = as_dtype(dtype)
    if canonical == dtype or any(dtype is widest for widest in (int, float, complex)):
        return
    name = np.dtype(dtype).name
    warnings.warn(
        f"Explicitly requested dtype {name} requested in TensorArray is not available, and will be truncated to "
        f"dtype {canonical.name}. To enable more dtypes, set the jax_enable_x64 configuration option or the "
        "JAX_ENABLE_X64 shell environment variable.",
        stacklevel=_faults.level_of_user(),
    )


def as_shape(shape: Any) -> Shape:
    """Return an `element_shape`: None, or a tuple of dimensions, some of them perhaps None."""
    if shape is None:
        return None
    if getattr(shape, "rank", shape) is None:  # tf.TensorShape(None)
        return None
    try:
        dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    except TypeError:
        dims = (shape,)
    for d in dims:
        if isinstance(d, bool) or not (d is None or isinstance(d, int | np.integer)):
            raise TypeError(f"TensorArray: element_shape must be made of integers and None, got {shape!r}")
        if d is not None and d < 0:
            raise ValueError(f"TensorArray: element_shape must not be negative, got {shape!r}")
    return tuple(None if d is None else int(d) for d in dims)


def is_known(shape: Shape) -> bool:
    """Return whether every dimension is known."""
    return shape is not None and None not in shape


def is_compatible(shape: Shape, expected: Shape) -> bool:
    """Return whether both can be shapes of the same row."""
    if shape is None or expected is None:
        return True
    return len(shape) == len(expected) and all(None in (a, b) or a == b for a, b in zip(shape, expected, strict=True))


def check_shape(op: str, shape: Shape, expected: Shape) -> None:
    if not is_compatible(shape, expected):
        raise ValueError(f"{op}: Incompatible shape for value ({shape}), expected ({expected})")


_PYTHON_KINDS = {bool: "b", int: "i", float: "f", complex: "c"}
#: Kinds of Python numbers, and of empty lists, that a dtype of each kind can hold; random keys are of the kind "k".
_HOLDS = {"b": "b?", "i": "bi?", "f": "bif?", "c": "bifc?", "k": ""}


def as_rows(op: str, value: Any, dtype: Any = None) -> Array:
    """Return `value` as an array of `dtype`. Convert Python numbers and lists. Arrays must have the dtype.

    With None the dtype is that of the value.
    """
    is_like = isinstance(value, jax.Array) and (dtype is None or value.dtype == dtype)
    if is_like and not getattr(value, "weak_type", False):  # random keys lack this attribute
        return value
    if isinstance(value, np.ndarray):
        value = value.copy()  # JAX may alias this memory, and read it later
    kind = _python_kind(value)
    if kind is None or dtype is None:
        value = _as_array(op, value, dtype)
        dtype = value.dtype if dtype is None else dtype
        if not jax.typeof(value).weak_type and value.dtype != dtype:
            raise _wrong_dtype(op, value.dtype, dtype)
        kind = _kind(value.dtype) if value.dtype != dtype else None
    if kind is not None and kind not in _HOLDS[_kind(dtype)]:
        raise _wrong_dtype(op, jnp.asarray(value).dtype, dtype)
    if kind == "i" and _kind(dtype) == "i" and not hasattr(value, "dtype"):
        _check_bounds(op, value, dtype)
    try:
        return jnp.asarray(value, dtype)
    except ValueError as error:
        raise ValueError(f"{op}: value must be an array, or nested lists of equal lengths, got {value!r}") from error


def _as_array(op: str, value: Any, dtype: Any) -> Array:
    if arguments.is_array_like(value):
        return jnp.asarray(value)
    _raise_what_numpy_hides(value)
    value_dtype = np.dtype(str if any(isinstance(v, str) for v in jax.tree.leaves(value)) else object)
    wrong = "" if dtype is None else f": {_mismatch(value_dtype, dtype)}"
    raise TypeError(f"{op}: value must be made of numbers, got {value!r}{wrong}")


def _raise_what_numpy_hides(value: Any) -> None:
    """Raise the error of a failing `len(value)`. NumPy hides it, and treats the value as if it had no length.

    The exception may be an interrupt, which must not become an error about dtypes.
    """
    if isinstance(value, list | tuple):
        for v in value:
            _raise_what_numpy_hides(v)
    elif hasattr(type(value), "__len__"):
        len(value)


def _kind(dtype: Any) -> str:
    for kind, family in (("b", jnp.bool_), ("i", jnp.integer), ("f", jnp.floating), ("c", jnp.complexfloating)):
        if jnp.issubdtype(dtype, family):
            return kind
    if arguments.is_extended(dtype):
        return "k"
    raise TypeError(f"TensorArray: cannot hold dtype {dtype}")


def _python_kind(value: Any) -> str | None:
    """Return the kind of a Python number or of nested lists of numbers, "?" for empty lists, or None for others."""
    if type(value) in _PYTHON_KINDS:
        return _PYTHON_KINDS[type(value)]
    if not isinstance(value, list | tuple):
        return None
    kinds = {_python_kind(v) for v in value}
    return None if None in kinds else max(kinds, key="?bifc".index, default="?")  # type: ignore[arg-type]


def _check_bounds(op: str, value: Any, dtype: Any) -> None:
    limits = jnp.iinfo(dtype)
    for v in jax.tree.leaves(value):
        if not limits.min <= v <= limits.max:
            raise OverflowError(f"{op}: value {v} does not fit into {np.dtype(dtype).name}")


def _wrong_dtype(op: str, value_dtype: Any, dtype: Any) -> TypeError:
    is_extended = arguments.is_extended(value_dtype) or arguments.is_extended(dtype)
    way_out = arguments.FOR_KEYS if is_extended else "convert value with .astype if that is meant"
    return TypeError(f"{op}: {_mismatch(value_dtype, dtype)}; {way_out}")


def _mismatch(value_dtype: Any, dtype: Any) -> str:
    return f"TensorArray dtype is {dtype.name} but Op is trying to write dtype {value_dtype.name}"


def number_of_rows(op: str, leaves: list[Array]) -> int:
    """Return the leading dimension of all leaves of a value."""
    for x in leaves:
        if not x.ndim:
            raise ValueError(f"{op}: value must have rows along its first axis, got a scalar")
    counts = {x.shape[0] for x in leaves}
    if len(counts) > 1:
        raise ValueError(f"{op}: leaves of value have different numbers of rows: {sorted(counts)}")
    return int(leaves[0].shape[0])


def as_lengths(lengths: Any) -> list[int]:
    """Return the `lengths` of `split` as Python integers."""
    if any(isinstance(n, jax.core.Tracer) for n in jax.tree.leaves(lengths)):
        raise TypeError(
            "TensorArray.split: lengths are shapes and must be known while tracing; give Python integers, or "
            "unstack rows that are padded to one length"
        )
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise TypeError(f"TensorArray.split: lengths must be integers, got {lengths!r}") from None
    if array.dtype == object or array.dtype.kind in "SU":
        _raise_what_numpy_hides(lengths)
        raise TypeError(f"TensorArray.split: lengths must be integers, got {lengths!r}")
    if array.ndim != 1:
        raise ValueError(f"Expected lengths to be a vector, received shape: {list(array.shape)}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"TensorArray.split: lengths must be integers, got {array.dtype}")
    if (array < 0).any():
        raise ValueError(f"TensorArray.split: lengths must not be negative, got {array.tolist()}")
    return [int(n) for n in array]


def check_lengths(lengths: list[int], value: Array) -> None:
    if not value.ndim:
        raise ValueError("Expected value to be at least a vector, but received shape: []")
    if sum(lengths) != value.shape[0]:
        raise ValueError(
            "Expected sum of lengths to be equal to values.shape[0], but sum of lengths is "
            f"{sum(lengths)} and value's shape is: {list(value.shape)}"
        )


def concatenated(rows: list[Array], shape: Shape, dtype: Any) -> Array:
    """Concatenate rows of different lengths. `shape` is their common shape, as far as it is known."""
    for i, row in enumerate(rows):
        if not row.ndim:
            raise ValueError(f"Concat saw a scalar shape at index {i} but requires at least vectors.")
        if row.shape[1:] != rows[0].shape[1:]:
            raise ValueError(
                f"Concat saw shape {row.shape} at index {i} and shape {rows[0].shape} at index 0, which differ in more "
                "than their length"
            )
    if rows:
        return jnp.concatenate(rows)
    if not shape or None in shape[1:]:
        raise ValueError("TensorArray.concat: there are no rows, and the shape of one is not known; give element_shape")
    return jnp.zeros((0, *shape[1:]), dtype)


def joined(rows: Array) -> Array:
    """Concatenate the rows of `[n, length, ...]`: `[n * length, ...]`."""
    if rows.ndim < 2:
        raise ValueError("Concat saw a scalar shape at index 0 but requires at least vectors.")
    return rows.reshape(math.prod(rows.shape[:2]), *rows.shape[2:])


def readable(index: Any, size: int, where: Any, mode: str | None) -> tuple[Any, Any, str | None]:
    """Check constant indices to read from a constant size (see `_checked`). IndexError for one that is not below it."""
    return _checked(index, size, where, mode, _unreadable, size)


def _unreadable(index: int, size: int) -> str:
    if index < 0:
        return f"Reading from negative indices (index {index}) is not allowed."
    return f"Tried to read from index {index} but array size is: {size}"


_MOST = 2**48  # bytes that a machine can address


def writable(
    index: Any, size: int | None, max_size: int | None, where: Any, mode: str | None, at_end: bool = False
) -> tuple[Any, Any, str | None]:
    """Check constant indices to write (see `_checked`). IndexError for one that is out of range.

    `size` is None if the array grows. `at_end` says that the user has given no index.
    """
    limit = max_size if size is None else size
    error = _unappendable if at_end else _unwritable
    return _checked(index, _MOST if limit is None else limit, where, mode, error, size, max_size)


class NeedsMaxSizeError(ValueError):
    """An array needs a `max_size` to grow to a traced size."""


def needs_max_size(op: str) -> NeedsMaxSizeError:
    return NeedsMaxSizeError(
        f"{op}: inside jit, grad, vmap and loops a TensorArray with dynamic_size=True grows no further than max_size: "
        "give TensorArray(..., max_size=n), the largest number of rows it may have. The loops of jax_tensorarray find "
        "it from their max_steps, or from a maximum_iterations that is known while tracing. If yours is traced, "
        "give max_steps=n too. growing(f) doubles the bound as often as needed. (At indices that are known while "
        "tracing, outside of loops, the array grows without one)"
    )


def _unappendable(index: int, size: int | None, max_size: int | None) -> str:
    return f"TensorArray.append: there are {index} rows, and max_size is {max_size}; give a larger one for more rows"


def _unwritable(index: int, size: int | None, max_size: int | None) -> str:
    if index < 0:
        return f"Writing to negative indices (index {index}) is not allowed."
    if size is not None:
        return f"Tried to write to index {index} but array is not resizeable and size is: {size}"
    if max_size is not None:
        return f"Tried to write to index {index}, which is out of range: max_size is {max_size}"
    return f"Tried to write to index {index}, and no array has so many rows"


def _checked(
    index: Any, limit: int, where: Any, mode: str | None, error: Callable[..., str], *sizes: int | None
) -> tuple[Any, Any, str | None]:
    """Return constant indices in [0, limit), or -1 if masked or dropped, and `where` and `mode` for the run time.

    If an error depends on a traced `where`, return the arguments. Otherwise the mode is "drop".
    """
    is_traced = isinstance(where, jax.core.Tracer)
    if is_traced and mode != "drop":
        return index, where, mode
    mask, checked = None if is_traced else where, index
    if isinstance(index, int):
        is_masked = mask is not None and not mask
        strays = () if 0 <= index < limit or is_masked else (index,)
        checked = -1 if is_masked or strays else index
    else:
        counts = np.full(index.shape, True) if mask is None else mask
        stray = np.asarray((index < 0) | (index >= limit), bool) & counts
        skipped, strays = stray | ~counts, index[stray].tolist()
        if skipped.any():
            checked = np.full(index.shape, -1)  # the dtype of the index may have no -1
            checked[~skipped] = index[~skipped]
    if strays and mode != "drop":
        raise IndexError(error(strays[0], *sizes))
    return checked, where if is_traced else None, "drop"


def _described(x: Any) -> str:
    if hasattr(x, "dtype") and not isinstance(x, jax.Array | np.ndarray | np.generic):
        library = type(x).__module__.partition(".")[0]
        return f"{library}.{type(x).__name__} of {x.dtype}, which is no array of JAX or NumPy"
    return f"dtype {x.dtype}" if hasattr(x, "dtype") else repr(x)
