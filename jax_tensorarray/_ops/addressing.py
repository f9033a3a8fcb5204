"""Convert the arguments that address rows to operands and parameters of a row op.

An index addresses rows along one axis. With `axis`, the axes before it are batch axes, and the index has size 1 along
them because all share it. A tuple addresses several axes, and we concatenate its parts along a last axis. With
`length`, each index is the first of that many rows. If a tuple has a `length`, each of these rows becomes a position.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._ops import arguments
from jax_tensorarray._ops.arguments import Index
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.primitive import Params, row_params
from jax_tensorarray._ops.starts import every_row, joined, positions_of
from jax_tensorarray._types import INT32_MAX, Array


class RowOperands(NamedTuple):
    """The operands of a row op except the value, and its parameters."""

    op: str
    buffer: Array
    at: Index
    where: tuple[Array, ...]
    params: Params

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands of an op that takes no value."""
        return (self.buffer, self.at, *self.where)

    def with_value(self, value: Any) -> tuple[Any, ...]:
        """Return the operands of an op that takes a value.

        We broadcast the value to `[*batch, *I, *elem]`, with `length` to `[*batch, *I, length, *elem]`, and convert it
        to the dtype of the buffer.
        """
        batch_dims, index_dims = self.params["batch_dims"], self.params["index_dims"]
        positions = positions_of(self.at, index_dims)[batch_dims:]
        shape = (*self.buffer.shape[:batch_dims], *positions, *self.params["window"])
        rows = arguments.as_value(self.op, value, self.buffer, shape, batch_dims, index_dims)
        return (self.buffer, self.at, rows, *self.where)


def rows(
    op: str,
    buffer: Any,
    index: Any,
    *,
    axis: Any = 0,
    length: Any = None,
    where: Any = None,
    mode: str | None = None,
    lowering: str = "auto",
) -> RowOperands:
    """Return the operands of `op` from the arguments that all row ops have."""
    arguments.check_lowering(op, lowering)
    if length is None and type(axis) is int and axis == 0 and not isinstance(index, tuple):
        buffer, index, mask, mode = arguments.row_operands(op, buffer, index, where, mode)
        return RowOperands(op, buffer, index, mask, row_params(op, mode, lowering=lowering))

    buffer, mode = arguments.as_buffer(op, buffer), arguments.as_mode(op, mode)
    masked = where is not None and where is not True
    axis = _as_axis(op, axis, buffer)
    parts = _as_parts(op, index, axis, buffer)
    sizes = buffer.shape[axis : axis + len(parts)]
    names = [op if len(parts) == 1 and axis == 0 else f"{op}(axis={axis + k})" for k in range(len(parts))]
    length = None if length is None else _as_length(op, length, axis + len(parts) - 1, buffer)
    lengths = [*[1] * (len(parts) - 1), length or 1]
    indices = [  # for each axis, with the mode for the check at run time
        arguments.as_index(name, part, size, mode, masked=masked, length=most)
        for name, part, size, most in zip(names, parts, sizes, lengths, strict=True)
    ]
    shape = _common_shape(op, [index.shape for index, _ in indices])
    mask = arguments.as_where(op, where, shape)
    if length == 0 or (length and len(parts) > 1):
        *others, (first, last_mode) = indices
        indices = [*((index[..., None], mode) for index, mode in others), (_every_row(first, length), last_mode)]
        shape = (*shape, length)
        mask = tuple(lax.broadcast_in_dim(m, shape, range(m.ndim)) for m in mask)
        length = None
    if len(parts) == 1:
        ((at, mode),) = indices
    else:
        at, mode = _joined(op, names, indices, sizes, shape, mask, mode), "drop"
    batch = buffer.shape[:axis]
    ones = (1,) * axis
    at = at.reshape((*ones, *at.shape))
    if 0 in batch:
        at = _index_of_empty_batch(batch, names, indices, sizes, shape, length, mask)
    masks = [m.reshape((*ones, *m.shape)) for m in mask]
    of = {"lowering": lowering, "batch_dims": axis, "index_dims": len(parts), "window": _window(length)}
    params = row_params(names[0], mode, **of)
    return RowOperands(op, buffer, at, tuple(masks), params)


def _as_axis(op: str, axis: Any, buffer: Array) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"{op}: axis must be an integer that is known while tracing, got {axis!r}")
    if not -buffer.ndim <= axis < buffer.ndim:
        raise ValueError(f"{op}: axis {axis} is out of range for a buffer of shape {buffer.shape}")
    return int(axis) % buffer.ndim


def _as_parts(op: str, index: Any, axis: int, buffer: Array) -> tuple[Any, ...]:
    parts = index if isinstance(index, tuple) else (index,)
    if not parts:
        raise TypeError(f"{op}: index must be an integer, an array of integers or a tuple of these, got ()")
    if len(parts) > buffer.ndim - axis:
        rest = f" from axis {axis} on" if axis else ""
        raise IndexError(
            f"{op}: index has {len(parts)} parts, more than there are axes in a buffer of shape {buffer.shape}{rest}"
        )
    return parts


def _as_length(op: str, length: Any, axis: int, buffer: Array) -> int:
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise TypeError(f"{op}: length must be an integer that is known while tracing, got {length!r}")
    if not 0 <= length <= buffer.shape[axis]:
        raise ValueError(f"{op}: length {length} is not in [0, {buffer.shape[axis]}], the size of axis {axis}")
    return int(length)


def _window(length: int | None) -> tuple[int, ...]:
    return () if length is None else (length,)


def _common_shape(op: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        texts = " and ".join(map(str, shapes))
        raise ValueError(f"{op}: index has parts of shapes {texts}, which do not fit each other") from None


def _every_row(first: Index, length: int) -> Index:
    """Return `length` consecutive numbers from each entry of an index on."""
    if isinstance(first, jax.Array):
        return every_row(first, length)
    bounded = np.asarray(np.minimum(first.astype(object), 2**62), np.int64)  # a uint64 may be larger than any int64
    return bounded[..., None] + np.arange(length)


def _joined(
    op: str,
    names: Sequence[str],
    indices: Sequence[tuple[Index, str | None]],
    sizes: Sequence[int],
    shape: tuple[int, ...],
    mask: Sequence[Array],
    mode: str | None,
) -> Index:
    """Check the indices of several axes, and concatenate them along a last axis. -1 is out of range."""
    if max(sizes) > INT32_MAX and not jax.config.jax_enable_x64:
        raise OverflowError(
            f"{op}: a tuple that addresses axes of the sizes {tuple(sizes)} needs 64-bit integers, which JAX has only "
            'with jax.config.update("jax_enable_x64", True)'
        )
    dtype: Any = np.int32 if max(sizes) <= INT32_MAX else np.int64
    rows = list[Any]()
    for name, (index, mode_of_index), size in zip(names, indices, sizes, strict=True):
        if isinstance(index, jax.Array) or mode_of_index != "drop":
            index = ta_check(jnp.broadcast_to(index, shape), size, where=mask[0] if mask else None, mode=mode, op=name)
            rows.append(index.astype(dtype))
        else:
            row = np.where((index >= 0) & (index < size), index.astype(dtype), dtype(-1))  # its dtype may have no -1
            rows.append(np.broadcast_to(row, shape))
    if any(isinstance(row, jax.Array) for row in rows):
        return joined(list(map(jnp.asarray, rows)))
    return np.stack(rows, axis=-1)


def _index_of_empty_batch(
    batch: tuple[int, ...],
    names: Sequence[str],
    indices: Sequence[tuple[Any, str | None]],
    sizes: Sequence[int],
    shape: tuple[int, ...],
    length: int | None,
    mask: Sequence[Array],
) -> Any:
    """Return the index for an empty batch of buffers, which must still raise for an index out of range.

    We read rows without elements, which raises, and make the index from the result.
    """
    from jax_tensorarray._ops.read import ta_read_p  # its arguments come from here

    at = jnp.zeros((*batch, *shape, *([len(names)] if len(names) > 1 else [])), jnp.int32)
    for name, (index, mode), size in zip(names, indices, sizes, strict=True):
        if mode != "drop":
            params = row_params(name, mode, window=_window(length))
            rows = ta_read_p.bind(jnp.zeros((size, 0), jnp.int32), jnp.broadcast_to(index, shape), *mask, **params)
            at += rows.reshape(at.shape)
    return at
