"""The slices, gathers and scatters of XLA's own that calls become, and what keeps reads of a buffer before its updates.

`slices` chooses the calls and says how each becomes one of these.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from jax_tensorarray import _gates
from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.build import (
    at_positions,
    case,
    clamped,
    compare,
    counted,
    every_row,
    flatten,
    for_each,
    in_range,
    integer,
    is_out_of_bounds,
    repeated,
    reshaped,
    splat,
    starts_of,
    tensor,
    widened,
    zeros,
)
from jax_tensorarray._lowering.calls import (
    CALLS,
    CHECKED,
    FALLBACK,
    IN_RANGE,
    LOWERING,
    PREFIX,
    TAPE,
    UNORDERED,
    WINDOW,
    box_of,
    clips,
    config,
    index_sizes,
    mask_of,
    target,
    window_of,
)
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    nested_operands,
    num_bytes,
    operation,
    terminator,
)


class Choice(NamedTuple):
    """How a call is rewritten."""

    masked: bool = False  #: a `where` operand decides whether it does anything
    drops: bool = False  #: its index may be out of range, and then it does nothing
    does_both: bool = False  #: it reads the rows that it updates
    ordered: bool = False  #: others read the buffer
    passes_on: bool = False  #: the buffer goes on from here
    shared: int = 0  #: how many batch axes have one index for all examples
    by_windows: bool = False  #: its rows are one or several windows, moved as a whole
    at_once: bool = False  #: all rows are moved by one gather or one scatter
    opaque_zero: Value = None  #: a number that is 0, but XLA cannot see that
    is_costly: bool = False  #: a call takes less time, as long as no other op has to be one too


#: The operation that replaces a slice of a buffer.
UPDATE = "stablehlo.dynamic_update_slice"


class Rewriter:
    """Rewrites the chosen calls of one block, in order.

    Reads of a buffer come before its update, in one of two ways. Each gives the buffer that is there afterwards and a
    number for the index of the update: an optimization barrier, after which the buffer is another value, or a number
    that is 0.
    """

    def __init__(self, barriers_hold: bool) -> None:
        self.barriers_hold = barriers_hold
        self.passed: dict[Value, Value] = {}
        self.read_before: dict[Value, set[Value]] = {}  #: by buffer: the rows read before it
        self.tokens: dict[Value, Value] = {}
        self.opaque_zero: Value = None

    def rewrite(self, operations: Sequence[tuple[Operation, Choice | None]]) -> None:
        for op, choice in operations:
            for user, number, value in list(nested_operands(op) if self.passed else ()):
                if value in self.passed:
                    user.operands[number] = self.passed[value]
            if choice is None:
                if WINDOW in op.attributes and FALLBACK not in op.attributes:
                    flatten(op)
                for name in (LOWERING, CHECKED, IN_RANGE, TAPE, UNORDERED):
                    if name in op.attributes:
                        del op.attributes[name]
                continue
            self.opaque_zero = choice.opaque_zero
            with ir.InsertionPoint(op), op.location:
                results = REWRITES.get(target(op).removeprefix(PREFIX), Rewriter.combine)(self, op, choice)
            for old, new in zip(op.results, results, strict=True):
                old.replace_all_uses_with(new)
            op.erase()

    def after(self, buffer: Value, readers: Sequence[Value]) -> tuple[Value, Value | None]:
        """Return the buffer after the readers, and a number for the index of an update, or None."""
        before = self.read_before.get(buffer, set())
        readers = [r for r in readers if r not in before]
        if not readers:
            return buffer, None
        if self.barriers_hold:
            passed = list(hlo.optimization_barrier([buffer, *readers]))
            self.passed.update(zip([buffer, *readers], passed, strict=True))
            self.read_before[passed[0]] = before.union(passed[1:])
            return passed[0], None
        tokens = [self.tokens[r] if r in self.tokens else self._token_of(r) for r in readers if 0 not in r.type.shape]
        return buffer, functools.reduce(hlo.add, tokens) if tokens else None

    def made_once(self, buffer: Value) -> Value:
        """Return a buffer to read of.

        XLA would make an updated one again in the fusion that reads, of the buffer before the update. It would also
        repeat a slice of one that a step computes as a whole, and read the one before after its memory is needed.
        """
        if isinstance(buffer, ir.BlockArgument) or not self.barriers_hold:
            return buffer
        if operation(buffer.owner).name != UPDATE and not _is_computed_for_carry(buffer):
            return buffer
        self.passed[buffer] = hlo.optimization_barrier([buffer])
        return self.passed[buffer]

    def read_first(self, buffer: Value, of: Any, read: Callable[[Value], Value]) -> tuple[Value, Value | None, Value]:
        """Return the buffer after `read(buffer)`, a number for the index of an update or None, and what was read.

        What is read has the type `of`.
        """
        if self.barriers_hold:
            buffer = self.made_once(buffer)
            # A slice does not pass a barrier as it is: XLA would make it again for each of its uses.
            rows = reshaped(read(buffer), [n for n in of.shape if n != 1])
            buffer, token = self.after(buffer, [rows])
            result = reshaped(self.passed[rows], of.shape)
            self.read_before[buffer].add(result)
            return buffer, token, result
        number = integer(32)
        rows, token = self._branch(
            [of, number],
            lambda: [read(buffer), splat(number, 0)],
            lambda: [splat(of, 0), splat(number, 1)],
        )
        self.tokens[rows] = token
        return buffer, token, rows

    def _branch(self, types: Sequence[ir.Type], *branches: Callable[[], Sequence[Value]]) -> Sequence[Value]:
        """Return what the first of two branches makes. It is the one that is run, but XLA does not know that."""
        is_other = compare(self.opaque_zero, splat(self.opaque_zero.type, 0), "NE")
        return case(hlo.convert(integer(32), is_other), types, branches)

    def _token_of(self, value: Value) -> Value:
        """Return a number that is 0, once `value` is there."""
        ones, element = [1] * value.type.rank, value.type.element_type
        first = hlo.slice(value, *map(mlir.dense_int_array, ([0] * len(ones), ones, ones)))
        first = reshaped(hlo.real(first) if isinstance(element, ir.ComplexType) else first, ())
        number = integer(32)
        zero, other = lambda: [splat(number, 0)], lambda: [hlo.convert(number, first)]
        return self._branch([number], zero, other)[0]

    def read(self, op: Operation, choice: Choice) -> list[Value]:
        buffer, result = op.operands[0], op.results[0].type
        if choice.at_once:
            rows = _AtOnce.of(op, choice).gathered
        else:
            accesses, _ = _accesses(op, choice)

            def rows(buffer: Value) -> Value:
                return _joined([access.taken(access.row_of(buffer)) for access in accesses], result, choice.shared)

        if choice.ordered:
            return [self.read_first(buffer, result, rows)[-1]]
        is_sliced = not choice.at_once  # a gather is never made twice
        return [rows(self.made_once(buffer) if choice.passes_on or is_sliced else buffer)]

    def _update(self, op: Operation, choice: Choice, combine: Callable[[Value, Value], Value] | None) -> list[Value]:
        """Return the updated buffer, and the old rows if the op returns them."""
        if choice.at_once:
            return self._update_at_once(op, choice, combine)
        accesses, readers = _accesses(op, choice)
        value, taken = op.operands[2], {}
        if len(accesses) > 1 and UNORDERED in op.attributes and self.barriers_hold:
            readers = [*readers, value]  # all rows are made before the first one is updated
        buffer, waits = self.after(op.operands[0], readers)
        value = self.passed.get(value, value)
        for access in reversed(accesses) if config(op).reverse else accesses:
            new, tokens = access.part_of(value), [waits]
            if choice.does_both:
                if choice.ordered:
                    buffer, token, old = self.read_first(buffer, new.type, access.row_of)
                    tokens.append(token)
                else:
                    buffer = self.made_once(buffer)
                    old = access.row_of(buffer)
                new = new if combine is None else combine(old, new)
                new = new if access.mask is None else hlo.select(access.mask, new, old)
                taken[access.place] = access.taken(old)
            buffer = access.after(tokens).with_row(buffer, new)
        if len(op.results) == 1:
            return [buffer]
        return [buffer, _joined([taken[access.place] for access in accesses], op.results[1].type, choice.shared)]

    def _update_at_once(
        self, op: Operation, choice: Choice, combine: Callable[[Value, Value], Value] | None
    ) -> list[Value]:
        rows, old = _AtOnce.of(op, choice), []
        buffer, token = self.after(op.operands[0], rows.readers)
        tokens = [token]
        if choice.does_both:
            of = op.results[1].type
            if choice.ordered:
                buffer, token, taken = self.read_first(buffer, of, rows.gathered)
                tokens.append(token)
            else:
                taken = rows.gathered(buffer)
            old.append(taken)
        return [rows.scattered(buffer, op.operands[2], combine if not choice.does_both else None, tokens), *old]

    def write(self, op: Operation, choice: Choice) -> list[Value]:
        return self._update(op, choice, None)

    def combine(self, op: Operation, choice: Choice) -> list[Value]:
        return self._update(op, choice, CALLS[target(op).removeprefix(PREFIX)].combine)

    def swap(self, op: Operation, choice: Choice) -> list[Value]:
        return self._update(op, choice, lambda old, value: value)

    def fence(self, op: Operation, choice: Choice) -> list[Value]:
        buffer, *readers = op.operands
        buffer, token = self.after(buffer, readers)
        if self.barriers_hold:
            return [buffer]
        # An update that changes nothing, but XLA does not know that either: one element by itself.
        rank, number = buffer.type.rank, integer(32)
        first = _Access(0, (), (splat(number, 0),) * rank, (1,) * rank, None, 0)
        of = tensor(first.shape, buffer.type.element_type)
        _, own, element = self.read_first(buffer, of, first.row_of)
        return [first.after([token, own]).with_row(buffer, element)]

    def clear(self, op: Operation, choice: Choice) -> list[Value]:
        """Write zeros row by row, mostly none at all: a call would keep XLA from making one function of the loop."""
        buffer, start, stop, *readers = op.operands
        buffer, token = self.after(buffer, readers)
        number, shape = start.type, buffer.type.shape
        if token is not None:
            start = hlo.add(start, token if token.type == number else hlo.convert(number, token))
        first = hlo.maximum(start, splat(number, 0))

        def clear_row(k: Value, rows: Value) -> list[Value]:
            row = zeros(tensor([1, *shape[1:]], rows.type.element_type))
            return [hlo.dynamic_update_slice(rows, row, [k, *[splat(number, 0)] * (len(shape) - 1)])]

        return list(counted(first, hlo.minimum(stop, splat(number, shape[0])), [buffer], clear_row))

    def check(self, op: Operation, choice: Choice) -> list[Value]:
        index, size = op.operands
        result = op.results[0].type
        row = hlo.convert(result, index)
        if not choice.drops:
            return [row]
        return [hlo.select(is_out_of_bounds(index, at_positions(size, result.shape)), splat(result, -1), row)]


def _is_computed_for_carry(buffer: Value) -> bool:
    """Return whether a step of a loop computes all of a large array elementwise, and carries it on."""
    maker = operation(buffer.owner)
    around = operation(maker.block.owner)
    if around.name != "stablehlo.while" or num_bytes(buffer) < _gates.ORDERED_BYTES_OF_ALL:
        return False
    return maker.name in _ELEMENTWISE and any(operation(use.owner) == terminator(maker.block) for use in buffer.uses)


_ELEMENTWISE = frozenset(
    f"stablehlo.{name}" for name in ("add", "convert", "divide", "maximum", "minimum", "multiply", "select", "subtract")
)

#: The rewriters of calls that do not say how they combine two rows.
REWRITES = {name: getattr(Rewriter, name) for name in ("read", "write", "swap", "fence", "check", "clear")}


# --- the rows of an op -----------------------------------------------------------------------------------------


class _Access(NamedTuple):
    """One slice of a buffer: a row, or the rows of one index in all examples that share it."""

    shared: int  #: number of outermost batch axes whose examples share it
    place: tuple[int, ...]  #: of the index, after these axes
    start: tuple[Value, ...]
    shape: tuple[int, ...]
    mask: Value | None  #: of that shape: False where the op does nothing
    axis: int  #: the axis of the rows

    def after(self, tokens: Sequence[Value | None]) -> "_Access":
        """Return the same access, once the tokens, which are 0, are there."""
        start = list(self.start)
        for token in tokens:
            if token is not None:
                at = start[self.axis]
                start[self.axis] = hlo.add(at, token if token.type == at.type else hlo.convert(at.type, token))
        return self._replace(start=tuple(start))

    def row_of(self, buffer: Value) -> Value:
        return hlo.dynamic_slice(buffer, self.start, mlir.dense_int_array(self.shape))

    def with_row(self, buffer: Value, row: Value) -> Value:
        return hlo.dynamic_update_slice(buffer, row, self.start)

    def taken(self, row: Value) -> Value:
        """Return the row as the op returns it: zeros where the op does nothing."""
        return row if self.mask is None else hlo.select(self.mask, row, splat(row.type, 0))

    def part_of(self, value: Value) -> Value:
        """Return the part of an operand `[*batch, *I, *row]` that belongs here."""
        return _part(value, self.shared, self.place, self.shape)


def _accesses(op: Operation, choice: Choice) -> tuple[list[_Access], Sequence[Value]]:
    """Return the slices that a call stands for, in the order of its positions, and the readers that it waits for."""
    shape, batch_dims, sizes = op.operands[0].type.shape, config(op).batch_dims or 0, index_sizes(op)
    starts, where, box = _positions(op, choice)
    batch, inner, elem = shape[: choice.shared], batch_dims - choice.shared, shape[batch_dims + len(sizes) :]
    taken, found = (*batch, *[1] * inner, *box, *elem), []
    for place in np.ndindex(*starts[0].type.shape):
        rows = [widened(_part(x, 0, place, ()), max(shape)) for x in starts]
        mask = None if where is None else _part(where, choice.shared, place, batch)
        if choice.drops:
            inside = in_range(rows, sizes, box)
            inside = inside if mask is None else hlo.broadcast_in_dim(mask.type, inside, mlir.dense_int_array([]))
            mask = inside if mask is None else hlo.and_(mask, inside)
        if mask is not None:
            dims = mlir.dense_int_array(range(mask.type.rank))
            mask = hlo.broadcast_in_dim(tensor(taken, mask.type.element_type), mask, dims)
        of = rows[0].type
        before, after = [0] * choice.shared + list(place[:inner]), [0] * len(elem)
        start = [*(splat(of, at) for at in before), *rows, *(splat(of, at) for at in after)]
        found.append(_Access(choice.shared, place, tuple(start), taken, mask, batch_dims))
    return found, readers_of(op)


def readers_of(op: Operation) -> list[Value]:
    """Return the rows that a call waits for: none if its readers need no order."""
    facts = config(op)
    first = len(CALLS[target(op).removeprefix(PREFIX)].operands) - (not facts.masked) + bool(facts.sorted)
    return [] if UNORDERED in op.attributes else list(op.operands)[first:]


class _AtOnce(NamedTuple):
    """The rows of a call as those of one gather or scatter.

    A buffer has the axes `[*shared, *own, *sizes, *elem]`, where a box starts along an axis is `[*own, *I]`.
    """

    starts: list[Value]
    sizes: list[int]
    box: list[int]
    windows: int  #: how many of the last axes of a box the rows have
    mask: Value | None  #: of the positions: False where the op does nothing
    drops: bool  #: boxes out of range are left out
    moves: bool  #: they are moved into range
    shared: int
    own: int
    reverse: bool
    readers: Sequence[Value]

    @classmethod
    def of(cls, op: Operation, choice: Choice) -> "_AtOnce":
        facts, sizes = config(op), index_sizes(op)
        shared = 0 if choice.masked else choice.shared  # an example may have a mask of its own
        starts, mask, box = _positions(op, choice._replace(shared=shared))
        starts = [widened(x, max(sizes)) for x in starts]
        windows = len(window_of(op)) if choice.by_windows else 0
        own, moves = (facts.batch_dims or 0) - shared, clips(op) and IN_RANGE not in op.attributes
        reverse = bool(facts.reverse)
        return cls(starts, sizes, box, windows, mask, choice.drops, moves, shared, own, reverse, readers_of(op))

    @property
    def at(self) -> int:
        """The first axis of the rows."""
        return self.shared + self.own

    @property
    def rank(self) -> int:
        """The number of axes of the positions."""
        return self.starts[0].type.rank

    @property
    def collapsed(self) -> list[int]:
        """The axes along which a window has no axis."""
        return list(range(self.at, self.at + len(self.sizes) - self.windows))

    def dims(self, rank: int) -> list[int]:
        """Return the axes of the rows `[*shared, *own, *I, *window, *elem]` that are not axes of the positions."""
        return [*range(self.shared), *range(self.shared + self.rank, rank)]

    @staticmethod
    def joined(starts: Sequence[Value]) -> Value:
        parts = [reshaped(start, [*start.type.shape, 1]) for start in starts]
        return parts[0] if len(parts) == 1 else hlo.concatenate(parts, mlir.i64_attr(parts[0].type.rank - 1))

    def gathered(self, buffer: Value) -> Value:
        """Return the rows of a buffer, zeros where the op does nothing."""
        shape, rank, first = buffer.type.shape, self.rank, self.at + len(self.sizes)
        elem, rows = shape[first:], list(range(self.at, first))
        dims = hlo.GatherDimensionNumbers.get(
            offset_dims=self.dims(self.shared + rank + self.windows + len(elem)),
            collapsed_slice_dims=self.collapsed,
            operand_batching_dims=list(range(self.shared, self.at)),
            start_indices_batching_dims=list(range(self.own)),
            start_index_map=rows,
            index_vector_dim=rank,
        )
        taken = mlir.dense_int_array([*shape[: self.shared], *[1] * self.own, *self.box, *elem])
        rows = hlo.gather(buffer, self.joined(self.starts), dims, taken)
        mask = self.mask
        if self.drops:
            inside = in_range(self.starts, self.sizes, self.box)
            mask = inside if mask is None else hlo.and_(mask, inside)
        if mask is None:
            return rows
        whole = tensor(rows.type.shape, mask.type.element_type)
        positions = mlir.dense_int_array(range(self.shared, self.shared + rank))
        return hlo.select(hlo.broadcast_in_dim(whole, mask, positions), rows, splat(rows.type, 0))

    def scattered(
        self,
        buffer: Value,
        value: Value,
        combine: Callable[[Value, Value], Value] | None,
        tokens: Sequence[Value | None],
    ) -> Value:
        """Return the buffer with the value in its rows, once the tokens, which are 0, are there."""
        rank, element = self.rank, buffer.type.element_type
        row, *others = self.starts
        if self.moves:
            row, *others = (clamped(x, size - n) for x, size, n in zip(self.starts, self.sizes, self.box, strict=True))
        for token in [token for token in tokens if token is not None]:
            number = hlo.convert(tensor([], row.type.element_type), token)
            row = hlo.add(row, hlo.broadcast_in_dim(row.type, number, mlir.dense_int_array([])))
        if self.mask is not None:  # XLA leaves out a window that is out of range
            row = hlo.select(self.mask, row, splat(row.type, -1))
        start = self.joined([row, *others])
        if self.reverse:
            start = hlo.reverse(start, mlir.dense_int_array(range(self.own, rank)))
            value = hlo.reverse(value, mlir.dense_int_array(range(self.at, self.shared + rank)))
        dims = hlo.ScatterDimensionNumbers.get(
            update_window_dims=self.dims(value.type.rank),
            inserted_window_dims=self.collapsed,
            input_batching_dims=list(range(self.shared, self.at)),
            scatter_indices_batching_dims=list(range(self.own)),
            scattered_dims_to_operand_dims=list(range(self.at, self.at + len(self.sizes))),
            index_vector_dim=rank,
        )
        one_each = ir.BoolAttr.get(math.prod(row.type.shape[self.own :]) == 1)
        op = hlo.ScatterOp([buffer.type], [buffer], start, [value], dims, unique_indices=one_each)
        scalar = tensor([], element)
        block = op.regions[0].blocks.append(scalar, scalar)
        with ir.InsertionPoint(block):
            old, new = block.arguments
            hlo.return_([new if combine is None else combine(old, new)])
        return op.results[0]


def _positions(op: Operation, choice: Choice) -> tuple[list[Value], Value | None, list[int]]:
    """Return where the boxes of a call start along each axis, its mask for each example, and the sizes of the boxes.

    The starts have no axes for the examples that share them.
    """
    shape, mask, window, box = op.operands[0].type.shape, mask_of(op), window_of(op), box_of(op)
    batch_dims, sizes = config(op).batch_dims or 0, index_sizes(op)
    starts = [reshaped(x, x.type.shape[choice.shared :]) for x in starts_of(op)]
    starts = [for_each(x, shape[choice.shared : batch_dims]) for x in starts]
    mask = None if mask is None else for_each(mask, shape[:batch_dims])
    if not window or choice.by_windows:
        return starts, mask, box
    mask = None if mask is None else repeated(mask, window)
    return [every_row(*starts, *window, *sizes)], mask, [1]


def _part(value: Value, shared: int, place: Sequence[int], shape: Sequence[int]) -> Value:
    """Return the elements of `value` at one place of the axes that follow the shared ones, in that shape."""
    before, after = [0] * shared, list(value.type.shape)
    if place:
        start = [*before, *place, *[0] * (len(after) - shared - len(place))]
        after[shared : shared + len(place)] = [at + 1 for at in place]
        value = hlo.slice(value, *map(mlir.dense_int_array, (start, after, [1] * len(after))))
    return reshaped(value, shape)


def _joined(rows: Sequence[Value], result: Any, shared: int) -> Value:
    """Return the result of an op, joined of the rows at its places."""
    if len(rows) > 1:
        batch, row = result.shape[:shared], math.prod(result.shape[shared:]) // len(rows)
        rows = [hlo.concatenate([reshaped(r, [*batch, 1, row]) for r in rows], mlir.i64_attr(shared))]
    return reshaped(rows[0], result.shape)
