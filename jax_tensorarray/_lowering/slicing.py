"""Row ops as functions of arrays that use XLA's own slices, gathers and scatters.

`choice` chooses the ops and describes each by a `How`. If an op both reads and updates a buffer, its function orders
the read before the update. `slices.Rewriter` orders different ops.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jax_tensorarray._ops.reference import added
from jax_tensorarray._ops.starts import (
    as_dtype,
    box_along,
    clamped,
    every_row,
    for_each,
    in_range,
    is_out_of_range,
    like,
    numbers_in_boxes,
    repeated,
    reshaped,
    widened,
)
from jax_tensorarray._types import Array


class How(NamedTuple):
    """How to write an op as XLA's own operations."""

    # The op. A buffer has the axes `[*batch, *sizes, *elem]`.
    batch_dims: int = 0
    sizes: tuple[int, ...] = ()
    window: tuple[int, ...] = ()  #: the sizes of its boxes along the last of these axes
    rows: tuple[int, ...] = ()  #: the shape of the rows that it reads
    masked: bool = False  #: a mask decides whether it does anything
    reverse: bool = False  #: it visits its positions from last to first
    combine: Callable[[Array, Array], Array] | None = None  #: from the old row and the value to the new row
    takes: bool = False  #: it returns the old rows

    # Its new form.
    drops: bool = False  #: it skips an index out of range
    clips: bool = False  #: it moves boxes into range
    does_both: bool = False  #: it reads the rows that it updates
    ordered: bool = False  #: other ops read the buffer
    shared: int = 0  #: how many batch axes share one index among all examples
    together: int = 0  #: how many of the innermost batch axes share one index in each example; they are part of a box
    by_windows: bool = False  #: it moves whole windows, not their rows
    at_once: bool = False  #: one gather or scatter moves all rows
    is_whole: bool = False  #: a mask says which examples get all rows of another array
    if_any: bool = False  #: a branch runs only if the mask is true for some example

    # Its context.
    barriers_hold: bool = True
    is_duplicated: bool = False  #: XLA would compute the buffer again in the fusion that reads it
    tokens: bool = False  #: the last operand is a 0 for the index of an update that depends on other reads

    @property
    def outer_dims(self) -> int:
        """The number of batch axes that are not part of a box."""
        return self.batch_dims - self.together

    @property
    def by_branch(self) -> bool:
        """Whether a branch orders reads before updates: the first operand is a 0, but XLA does not know that."""
        return self.ordered and not self.barriers_hold


class _Operands(NamedTuple):
    buffer: Array
    starts: list[Array]  #: along each axis, in the shape of the positions
    value: Array | None
    mask: Array | None
    zero: Array | None
    token: Array | None


def _operands(how: How, operands: Sequence[Array], *, takes_value: bool) -> _Operands:
    """Name the operands of a function: `[zero,] buffer, index..., [value,] [mask,] [token]`.

    The index is one array, or one for each axis.
    """
    rest = list(operands)
    zero = rest.pop(0) if how.by_branch else None
    token = rest.pop() if how.tokens else None
    mask = rest.pop() if how.masked else None
    value = rest.pop() if takes_value else None
    buffer, *index = rest
    axes = len(how.sizes)
    if axes > 1 and len(index) == 1:
        index = [lax.slice_in_dim(index[0], k, k + 1, axis=index[0].ndim - 1) for k in range(axes)]
    starts = index if axes == 1 else [reshaped(x, x.shape[:-1]) for x in index]
    return _Operands(buffer, starts, value, mask, zero, token)


# --- the order of reads and updates -----------------------------------------------------------------------------


def barrier(*operands: Array) -> Sequence[Array]:
    passed: Sequence[Array] = lax.optimization_barrier(operands)
    return passed


def shaped(x: Array, shape: tuple[int, ...]) -> list[Array]:
    return [reshaped(x, shape)]


def token_of(zero: Array, value: Array) -> list[Array]:
    """Return a 0 that depends on `value`."""
    ones = (1,) * value.ndim
    first = reshaped(lax.slice(value, (0,) * value.ndim, ones), ())
    first = lax.real(first) if first.dtype.kind == "c" else first
    return _branch(zero, lambda: [np.int32(0)], lambda: [as_dtype(first, np.int32)])


def sum_of(*tokens: Array) -> list[Array]:
    return [functools.reduce(lax.add, tokens)]


def _branch(zero: Array, run: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Return the results of the first of two branches. It always runs, but XLA does not know that."""
    return list(lax.cond(lax.ne(zero, like(zero, 0)), other, run))


def _zeros(shape: Sequence[int], dtype: Any) -> Array:
    return lax.full(tuple(shape), 0, dtype)


def _read_first(
    zero: Array | None, buffer: Array, read: Callable[[Array], Array], shape: Sequence[int]
) -> tuple[Array, Array | None, Array]:
    """Return the buffer after `read(buffer)`, a 0 for the index of an update or None, and the rows."""
    if zero is None:
        # XLA would repeat a slice behind a barrier for each of its uses, but not a reshape of the slice.
        rows = reshaped(read(buffer), [n for n in shape if n != 1])
        buffer, rows = lax.optimization_barrier((buffer, rows))
        return buffer, None, reshaped(rows, shape)
    rows, token = _branch(zero, lambda: [read(buffer), np.int32(0)], lambda: [_zeros(shape, buffer.dtype), np.int32(1)])
    return buffer, token, rows


# --- ops ---------------------------------------------------------------------------------------------------------


def read(*operands: Array, how: How) -> list[Array]:
    """Return the rows that an op reads: after the new buffer if there is a barrier, before a 0 if there is a branch."""
    inputs = _operands(how, operands, takes_value=False)
    buffer = inputs.buffer
    if how.at_once:
        rows = _AtOnce.of(how, inputs).gathered
    else:
        accesses = _accesses(how, inputs)

        def rows(buffer: Array) -> Array:
            return _joined([access.taken(access.row_of(buffer)) for access in accesses], how.rows, how.shared)

    if how.is_duplicated:
        (buffer,) = barrier(buffer)
    if not how.ordered:
        return [buffer, rows(buffer)] if how.is_duplicated else [rows(buffer)]
    buffer, token, taken = _read_first(inputs.zero, buffer, rows, how.rows)
    return [buffer, taken] if token is None else [taken, token]


def update(*operands: Array, how: How) -> list[Array]:
    """Return the updated buffer, and the old rows if the op returns them."""
    inputs = _operands(how, operands, takes_value=True)
    if how.at_once:
        return _update_at_once(how, inputs)
    buffer, value, taken, is_duplicated = inputs.buffer, inputs.value, {}, how.is_duplicated
    accesses = _accesses(how, inputs)
    for access in reversed(accesses) if how.reverse else accesses:
        new, tokens = access.part_of(value), [inputs.token]  # type: ignore[arg-type]
        if how.does_both:
            if is_duplicated:
                (buffer,) = barrier(buffer)
            if how.ordered:
                buffer, token, old = _read_first(inputs.zero, buffer, access.row_of, access.shape)
                tokens.append(token)
            else:
                old = access.row_of(buffer)
            new = new if how.combine is None else how.combine(old, new)
            new = new if access.mask is None else lax.select(access.mask, new, old)
            taken[access.position] = access.taken(old)
        buffer = access.after(tokens).with_row(buffer, new)
        is_duplicated = how.barriers_hold
    if not how.takes:
        return [buffer]
    return [buffer, _joined([taken[access.position] for access in accesses], how.rows, how.shared)]


def replace(buffer: Array, value: Array, mask: Array, *token: Array, dims: Sequence[int], if_any: bool) -> list[Array]:
    """Return a buffer with the rows of `value` where a mask is true. `dims` are the axes of `value` in the buffer.

    XLA selects in place, but touches all rows. With `if_any` a branch skips the select if the mask is true for no
    example.
    """
    for zero in token:  # reads of the buffer come first
        mask |= lax.ne(zero, like(zero, 0))

    def replaced() -> Array:
        new = lax.broadcast_in_dim(value, buffer.shape, dims)
        return lax.select(lax.broadcast_in_dim(mask, buffer.shape, range(mask.ndim)), new, buffer)

    return [lax.cond(lax.reduce_or(mask, range(mask.ndim)), replaced, lambda: buffer) if if_any else replaced()]


def _update_at_once(how: How, inputs: _Operands) -> list[Array]:
    rows, buffer, tokens, old = _AtOnce.of(how, inputs), inputs.buffer, [inputs.token], []
    if how.is_duplicated:
        (buffer,) = barrier(buffer)
    if how.does_both:
        if how.ordered:
            buffer, token, taken = _read_first(inputs.zero, buffer, rows.gathered, how.rows)
            tokens.append(token)
        else:
            taken = rows.gathered(buffer)
        old.append(taken)
    return [rows.scattered(buffer, inputs.value, how.combine, tokens), *old]  # type: ignore[arg-type]


def fence(zero: Array, buffer: Array, *token: Array) -> list[Array]:
    """Replace one element by itself. XLA does not know that this changes nothing."""
    start: Any = (np.int32(0),) * buffer.ndim
    first = _Access(0, (), start, (1,) * buffer.ndim, None, 0)
    _, token_of_read, element = _read_first(zero, buffer, first.row_of, first.shape)
    return [first.after([*token, token_of_read]).with_row(buffer, element)]


def clear(buffer: Array, start: Array, stop: Array, *token: Array) -> list[Array]:
    """Write zeros row by row, mostly to no rows. With a call, XLA could not compile the loop to one function."""
    for each in token:
        start = lax.add(start, as_dtype(each, start.dtype))
    first, last = lax.max(start, like(start, 0)), lax.min(stop, like(stop, buffer.shape[0]))
    zero, row = like(start, 0), _zeros((1, *buffer.shape[1:]), buffer.dtype)

    def clear_row(state: Any) -> Any:
        k, end, rows = state
        return lax.add(k, like(k, 1)), end, _updated_at(rows, row, [k, *[zero] * (rows.ndim - 1)])

    return [lax.while_loop(lambda state: lax.lt(state[0], state[1]), clear_row, (first, last, buffer))[2]]


def check(index: Array, size: Array, *, drops: bool) -> list[Array]:
    """Return an index as int32. With `drops`, it is -1 where it is out of range."""
    row = as_dtype(index, np.int32)
    if not drops:
        return [row]
    sizes = size if size.ndim == index.ndim else lax.broadcast_in_dim(size, index.shape, range(size.ndim))
    return [lax.select(is_out_of_range(index, sizes), like(row, -1), row)]


def flat(*operands: Array, how: How) -> list[Array]:
    """Return the operands of a kernel: the numbers of all rows of each example, and the mask of these rows.

    A skipped row has a number out of range. `drops` skips a box that is not in range as a whole, and `clips` moves it
    into range.
    """
    inputs = _operands(how, operands, takes_value=False)
    batch = inputs.buffer.shape[: how.batch_dims]
    mask = [] if inputs.mask is None else [for_each(repeated(inputs.mask, how.window), batch)]
    whole = how.clips or how.by_windows
    rows = numbers_in_boxes(inputs.starts, how.sizes, how.window, whole=whole, drops=how.drops, clips=how.clips)
    return [for_each(rows, batch), *mask]


# --- the rows of an op -------------------------------------------------------------------------------------------


def _sliced_at(buffer: Array, start: Sequence[Array], shape: Sequence[int]) -> Array:
    """Return a slice. A negative start does not count from the end, unlike that of `lax.dynamic_slice`."""
    rows: Array = lax.dynamic_slice_p.bind(buffer, *start, slice_sizes=tuple(shape))
    return rows


def _updated_at(buffer: Array, row: Array, start: Sequence[Array]) -> Array:
    updated: Array = lax.dynamic_update_slice_p.bind(buffer, row, *start)
    return updated


class _Access(NamedTuple):
    """One slice of a buffer: a row, or the rows of one index in all examples that share it."""

    shared: int  #: the number of outermost batch axes whose examples share it
    position: tuple[int, ...]  #: in the index, after these axes and without the axes that are part of a box
    start: tuple[Array, ...]
    shape: tuple[int, ...]
    mask: Array | None  #: of that shape: False where the op does nothing
    axis: int  #: the axis of the rows

    def after(self, tokens: Sequence[Array | None]) -> "_Access":
        """Return the same access, but depending on tokens, which are 0."""
        start = list(self.start)
        for token in tokens:
            if token is not None:
                at = start[self.axis]
                start[self.axis] = lax.add(at, as_dtype(token, at.dtype))
        return self._replace(start=tuple(start))

    def row_of(self, buffer: Array) -> Array:
        return _sliced_at(buffer, self.start, self.shape)

    def with_row(self, buffer: Array, row: Array) -> Array:
        return _updated_at(buffer, row, self.start)

    def taken(self, row: Array) -> Array:
        """Return the row as the op returns it: zeros where the op does nothing."""
        return row if self.mask is None else lax.select(self.mask, row, _zeros(row.shape, row.dtype))

    def part_of(self, value: Array) -> Array:
        """Return the part of an operand `[*batch, *I, *row]` for this slice."""
        return _part(value, self.shared, self.position, self.shape)


def _accesses(how: How, inputs: _Operands) -> list[_Access]:
    """Return the slices of an op, in the order of its positions."""
    shape, batch_dims, sizes = inputs.buffer.shape, how.batch_dims, how.sizes
    starts, where, box = _positions(how, inputs, how.shared)
    batch, inner, elem = shape[: how.shared], how.outer_dims - how.shared, shape[batch_dims + len(sizes) :]
    taken, accesses = _shape_taken(how, shape, how.shared, box), []
    for position in np.ndindex(*starts[0].shape):
        rows = [widened(_part(x, 0, position, ()), max(shape)) for x in starts]
        mask = None if where is None else _part(where, how.shared, position, batch)
        if how.drops:
            inside = in_range(rows, sizes, box)
            if mask is None:
                mask = inside
            else:
                mask = lax.bitwise_and(mask, lax.broadcast_in_dim(inside, mask.shape, ()) if mask.ndim else inside)
        if mask is not None:
            mask = lax.broadcast_in_dim(mask, taken, range(mask.ndim))
        number = rows[0].dtype.type
        before, after = [*[0] * how.shared, *position[:inner], *[0] * how.together], [0] * len(elem)
        start = [*map(number, before), *rows, *map(number, after)]
        accesses.append(_Access(how.shared, position, tuple(start), taken, mask, batch_dims))
    return accesses


def _shape_taken(how: How, shape: Sequence[int], shared: int, box: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the part of a buffer of that shape at one position."""
    outer, dims = how.outer_dims, how.batch_dims
    return (*shape[:shared], *[1] * (outer - shared), *shape[outer:dims], *box, *shape[dims + len(how.sizes) :])


def _positions(how: How, inputs: _Operands, shared: int) -> tuple[list[Array], Array | None, list[int]]:
    """Return where the boxes of an op start along each axis, its mask for each example, and the sizes of the boxes.

    The starts have no axes for the examples that share them. Neither they nor the mask have the axes `together`.
    """
    shape, mask, window, box = inputs.buffer.shape, inputs.mask, how.window, box_along(how.sizes, how.window)
    outer = how.outer_dims

    def for_outer(x: Array, first: int) -> Array:
        return for_each(reshaped(x, (*x.shape[first:outer], *x.shape[how.batch_dims :])), shape[first:outer])

    starts = [for_outer(x, shared) for x in inputs.starts]
    mask = None if mask is None else for_outer(mask, 0)
    if not window or how.by_windows:
        return starts, mask, box
    mask = None if mask is None else repeated(mask, window)
    return [every_row(starts[0], window[0], how.sizes[0])], mask, [1]


def _part(value: Array, shared: int, position: Sequence[int], shape: Sequence[int]) -> Array:
    """Take one position along the axes after the shared ones, in that shape."""
    before, after = [0] * shared, list(value.shape)
    if position:
        start = [*before, *position, *[0] * (len(after) - shared - len(position))]
        after[shared : shared + len(position)] = [at + 1 for at in position]
        value = lax.slice(value, start, after)
    return reshaped(value, shape)


def _joined(rows: Sequence[Array], shape: Sequence[int], shared: int) -> Array:
    """Concatenate the rows at the positions of an op to its result."""
    if len(rows) > 1:
        batch, row = shape[:shared], math.prod(shape[shared:]) // len(rows)
        rows = [lax.concatenate([reshaped(r, [*batch, 1, row]) for r in rows], shared)]
    return reshaped(rows[0], shape)


class _AtOnce(NamedTuple):
    """The rows of an op in one gather or scatter.

    A buffer has the axes `[*shared, *each, *together, *sizes, *elem]`, and a start along an axis `[*each, *I]`. Rows
    have the axes `[*shared, *each, *together, *I, *window, *elem]`.
    """

    how: How
    starts: list[Array]
    box: list[int]
    windows: int  #: how many of the last axes of a box are axes of the rows
    mask: Array | None  #: of the positions: False where the op does nothing
    shared: int  #: the number of batch axes whose examples share their positions
    each: int  #: the number of the batch axes whose examples have positions of their own

    @classmethod
    def of(cls, how: How, inputs: _Operands) -> "_AtOnce":
        shared = 0 if how.masked else how.shared  # an example may have a mask of its own
        starts, mask, box = _positions(how, inputs, shared)
        starts = [widened(x, max(how.sizes)) for x in starts]
        windows = len(how.window) if how.by_windows else 0
        return cls(how, starts, box, windows, mask, shared, how.outer_dims - shared)

    @property
    def at(self) -> int:
        """The first axis of the rows."""
        return self.how.batch_dims

    @property
    def rank(self) -> int:
        """The number of axes of the positions."""
        return self.starts[0].ndim

    @property
    def collapsed(self) -> tuple[int, ...]:
        """The axes of the buffer that rows do not have."""
        return tuple(range(self.at, self.at + len(self.how.sizes) - self.windows))

    def dims(self, rank: int) -> tuple[int, ...]:
        """Return the axes of the rows that are not axes of the positions."""
        return tuple(k for k in range(rank) if k not in (*self.along_each, *self.along_index))

    @property
    def along_each(self) -> range:
        """The axes `*each` of the buffer and of the rows."""
        return range(self.shared, self.shared + self.each)

    @property
    def along_index(self) -> range:
        """The axes `*I` of the rows."""
        return range(self.at, self.at + self.rank - self.each)

    @staticmethod
    def joined(starts: Sequence[Array]) -> Array:
        parts = [reshaped(start, [*start.shape, 1]) for start in starts]
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, parts[0].ndim - 1)

    def gathered(self, buffer: Array) -> Array:
        """Return the rows of a buffer, zeros where the op does nothing."""
        shape, sizes = buffer.shape, self.how.sizes
        first = self.at + len(sizes)
        dims = lax.GatherDimensionNumbers(
            offset_dims=self.dims(self.along_index.stop + self.windows + len(shape) - first),
            collapsed_slice_dims=self.collapsed,
            operand_batching_dims=tuple(self.along_each),
            start_indices_batching_dims=tuple(range(self.each)),
            start_index_map=tuple(range(self.at, first)),
        )
        taken = _shape_taken(self.how, shape, self.shared, self.box)
        rows = lax.gather(buffer, self.joined(self.starts), dims, taken, mode="clip")
        mask = self.mask
        if self.how.drops:
            inside = in_range(self.starts, sizes, self.box)
            mask = inside if mask is None else lax.bitwise_and(mask, inside)
        if mask is None:
            return rows
        mask = lax.broadcast_in_dim(mask, rows.shape, (*self.along_each, *self.along_index))
        return lax.select(mask, rows, _zeros(rows.shape, rows.dtype))

    def scattered(
        self,
        buffer: Array,
        value: Array,
        combine: Callable[[Array, Array], Array] | None,
        tokens: Sequence[Array | None],
    ) -> Array:
        """Return the buffer with the value in its rows. The result depends on the tokens, which are 0."""
        rank, how = self.rank, self.how
        row, *others = self.starts
        if how.clips:
            row, *others = (clamped(x, size - n) for x, size, n in zip(self.starts, how.sizes, self.box, strict=True))
        for token in [token for token in tokens if token is not None]:
            row = lax.add(row, lax.broadcast_in_dim(as_dtype(token, row.dtype), row.shape, ()))
        if self.mask is not None:  # XLA skips a window that is out of range
            row = lax.select(self.mask, row, like(row, -1))
        start = self.joined([row, *others])
        if how.reverse:
            start = lax.rev(start, tuple(range(self.each, rank)))
            value = lax.rev(value, tuple(self.along_index))
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=self.dims(value.ndim),
            inserted_window_dims=self.collapsed,
            operand_batching_dims=tuple(self.along_each),
            scatter_indices_batching_dims=tuple(range(self.each)),
            scatter_dims_to_operand_dims=tuple(range(self.at, self.at + len(how.sizes))),
        )
        one_each = math.prod(row.shape[self.each :]) == 1
        updated: Array = SCATTERS[combine](buffer, start, value, dims, unique_indices=one_each, mode="drop")
        return updated


def _scatter_sum(buffer: Array, start: Array, value: Array, dims: Any, **options: Any) -> Array:
    scatter = lax.scatter_max if buffer.dtype == np.bool_ else lax.scatter_add
    return scatter(buffer, start, value, dims, **options)


#: Scatters, by the function of the old row and the value that returns the new row.
SCATTERS: dict[Any, Callable[..., Array]] = {None: lax.scatter, added: _scatter_sum, lax.max: lax.scatter_max}
