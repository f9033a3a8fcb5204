"""Row ops as XLA's own slices, where these do the same in place: XLA fuses them with what makes or uses the row.

A call of ours stays outside of every fusion and costs a fixed time; a loop without calls may even become one function
of machine code. But a call raises and updates in place whatever is around it, and slices do neither. So a slice stands
for a call where

- the index is one row, or a few except on a GPU, and it need not be in range or is checked already (`record`). On a
  CPU more rows in a loop are one gather or one scatter;
- everything that reads the buffer comes before its update by data dependence. That is so if what is read is for the
  update only. Otherwise an optimization barrier around the buffer and the row that was read makes it so, in versions
  of XLA that keep it until memory has been assigned. In others a branch does, since XLA does not know that it is always
  run: it returns a 0 beside the row, for the index of the update. Either keeps XLA from reading the row again after the
  update, in a fusion of its own.

`lowering` is "auto" for slices as above, "ffi" for calls everywhere, and "xla" for slices also outside of loops, where
a separate call then has to raise.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from jax_tensorarray import _compat, _gates
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
    LOWERINGS,
    PREFIX,
    TAPE,
    UNORDERED,
    UPDATING,
    WHOLE,
    WINDOW,
    WITHOUT_KERNELS,
    aliased,
    box_of,
    clips,
    config,
    index_sizes,
    is_ours,
    lowering_of,
    mask_of,
    may_raise,
    opaque_zero_at,
    target,
    window_of,
)
from jax_tensorarray._lowering.mlir import (
    LoopsAround,
    Operation,
    Value,
    blocks,
    entry,
    functions_in_loops,
    is_in_loop,
    nested_operands,
    num_bytes,
    operation,
    terminator,
    walk,
)
from jax_tensorarray._lowering.uses import Uses
from jax_tensorarray._union_find import UnionFind

#: The default of `lowering`.
VARIABLE = "JAX_TENSORARRAY_LOWERING"


def use_slices(functions: dict[str, Operation], *, platform: str | None, divided: bool = False) -> None:
    """Rewrite the calls in `functions` for which slices are as good.

    Args:
        functions: the functions of a module in which `ordering` has put readers before updates.
        platform: the only platform that the module will run on, if that is known and the module is not divided among
            devices: slices of a buffer with divided rows would gather it. In other modules only tapes become slices.
        divided: whether the module is divided nevertheless, without kernels. A slice for each example would gather.
    """
    # All are chosen before the first is rewritten: the hash of an operation depends on its contents.
    chooser = _Chooser(functions, platform, divided)
    chosen = [
        [(op, chooser.choose(op)) for op in map(operation, block.operations)]
        for function in functions.values()
        for block in blocks(function)
    ]
    conflicts = LayoutConflicts(functions, chooser.in_loops)
    for operations in chosen:
        conflicts.add_depths(operations)
    chosen = [conflicts.without_costly(operations) for operations in chosen]
    for operations in chosen:
        conflicts.add(operations)
    for operations in chosen:
        _Rewriter(chooser.barriers_hold).rewrite(conflicts.choices(operations))


def default_lowering() -> str:
    """Return the value of `JAX_TENSORARRAY_LOWERING`."""
    found = os.environ.get(VARIABLE, "auto")
    if found not in LOWERINGS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(LOWERINGS)}, got {found!r}")
    return found


# --- what becomes a slice --------------------------------------------------------------------------------------


class _Choice(NamedTuple):
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


class _Chooser:
    def __init__(self, functions: dict[str, Operation], platform: str | None, divided: bool) -> None:
        self.uses = Uses(functions)
        self.default, self.platform, self.divided = default_lowering(), platform, divided
        self.most_slices = _gates.SLICES if platform == "cpu" or platform in WITHOUT_KERNELS else 1
        self.barriers_hold = platform is not None and _compat.barriers_hold(platform)
        self.slices_of_a_loop = _gates.SLICES_ON_CPU if self.barriers_hold else 1
        self.in_loops = functions_in_loops(functions)
        calls = [op for function in functions.values() for op in walk(function) if target(op) == PREFIX + "check"]
        self.checks_outside = any(_may_be_lost(op) and not is_in_loop(op, self.in_loops) for op in calls)

    def choose(self, op: Operation) -> _Choice | None:
        """Return how to rewrite a call, or None if it stays a call."""
        name = target(op).removeprefix(PREFIX)
        if target(op) == name or (name not in _REWRITES and CALLS[name].combine is None):
            return None
        is_tape = name in ("read", "write") and config(op).op == TAPE
        if not is_tape and (lowering_of(op, self.default) == "ffi" or self.platform is None):
            return None
        if name == "fence":
            choice = _Choice(ordered=True, passes_on=True)
            return self._ordered(op, choice) if len(op.operands) > 1 and _has_elements(op.operands[0]) else None
        if name == "check":
            return None if may_raise(op) else _Choice(drops=self._needs_mask(op))
        if name == "clear":
            # On a GPU each step of an inner loop would wait for the host.
            are_usual = all(str(at.type) == "tensor<i32>" for at in list(op.operands)[1:3])
            is_faster = self.platform == "cpu" and is_in_loop(op, self.in_loops) and are_usual
            choice = _Choice(ordered=True, passes_on=True)
            return self._ordered(op, choice) if is_faster and _has_elements(op.operands[0]) else None
        of_row = self._choose_row(op, name, is_tape)
        return of_row if of_row is None or not of_row.ordered else self._ordered(op, of_row)

    def _ordered(self, op: Operation, choice: _Choice) -> _Choice | None:
        """Return the choice with what it takes to put reads before updates, or None if that is not there."""
        if self.barriers_hold:
            return choice
        opaque_zero = opaque_zero_at(op)
        is_box = choice.by_windows and len(window_of(op)) > 1  # which a call would move by single elements
        is_costly = choice.does_both and num_bytes(op.operands[2]) > _gates.SLICED_BYTES and not is_box
        return None if opaque_zero is None else choice._replace(opaque_zero=opaque_zero, is_costly=is_costly)

    def _choose_row(self, op: Operation, name: str, is_tape: bool) -> _Choice | None:
        buffer, index = op.operands[:2]
        facts = config(op)
        types, batch_dims = (buffer.type, index.type), facts.batch_dims or 0
        if not all(isinstance(t, ir.RankedTensorType) and t.has_static_shape for t in types):
            return None
        sizes = index_sizes(op)
        if len(sizes) < (facts.index_dims or 1) or 0 in buffer.type.shape[: batch_dims + len(sizes)]:
            return None
        # XLA moves the small floats through larger ones, which does not leave all of them as they are.
        element = str(buffer.type.element_type)
        if element.startswith("f8") or (may_raise(op) and not is_tape):
            return None
        if element == "bf16" and name == "max":  # XLA takes the smallest of these for 0
            return None
        # If an example has finished its loop, its step is a row that no tape has.
        in_range = is_tape and (facts.strict or CHECKED in op.attributes)
        drops = not in_range and not clips(op) and self._needs_mask(op)
        masked = bool(facts.masked)
        shared, window = _shared_axes(index, batch_dims), window_of(op)
        by_windows = bool(window) and (WHOLE in op.attributes or not drops)
        shape = index.type.shape[batch_dims : index.type.rank - (len(sizes) > 1)]
        positions = [*buffer.type.shape[shared:batch_dims], *shape, *(() if by_windows else window)]
        if self.divided and shared < batch_dims:
            return None
        # A GPU visits many positions in a sorted order. The positions of one slice need not be sorted.
        count, each = math.prod(positions), math.prod(positions[batch_dims - shared :])
        is_box = by_windows and len(window) > 1
        most = self.slices_of_a_loop if self.platform == "cpu" else self.most_slices
        if self.platform == "cpu" and name == "write" and 1 < count <= most and _is_costly(op.operands[2]):
            most = 1
        at_once = count > most and not is_tape and self._can_be_at_once(op, name, element, each, is_box)
        is_sorted = bool(facts.sorted) and not (by_windows and count == 1) and not at_once
        if is_sorted or not (at_once or 0 < count <= self.most_slices):
            return None
        does_both = name == "swap" if at_once else name != "read" and (name != "write" or masked or drops)
        choice = _Choice(masked, drops, shared=shared, does_both=does_both, by_windows=by_windows, at_once=at_once)
        if is_tape:
            return choice
        if self.checks_outside and not is_in_loop(op, self.in_loops):
            # Of a slice XLA may know the result without the index, and then nobody asks whether that is right.
            return None
        if name == "read":
            updated = not self.uses.is_never_updated(buffer, op.block)
            # A gather is never made twice. An update that waits for it is made of it, or else needs a barrier.
            of_older = isinstance(buffer, ir.BlockArgument) or not self.uses.is_updated_in(buffer, op.block)
            in_order = at_once and self.platform == "cpu" and of_older and not _is_waited_for(op)
            is_ordered = updated and not in_order and UNORDERED not in op.attributes
            return choice._replace(ordered=is_ordered, passes_on=updated)
        is_alone = _is_alone(op, reads_too=choice.does_both) or UNORDERED in op.attributes
        return choice._replace(ordered=not is_alone, passes_on=True)

    def _can_be_at_once(self, op: Operation, name: str, element: str, each: int, is_box: bool) -> bool:
        """Return whether a gather or a scatter does what a call does, which has `each` positions in an example.

        Of a box every element would be a position of a call. So boxes, one in each example, are moved as plain JAX
        moves them on every platform.
        """
        if not is_in_loop(op, self.in_loops):
            return False
        if self.platform != "cpu" and not (is_box and (each == 1 or name == "read")):
            return False
        if name == "swap":
            return each == 1  # of two positions, one might take out what the other puts in
        # XLA adds small floats through larger ones, and before jaxlib 0.12 converts all of a bfloat16 buffer.
        if element == "bf16" and not self.barriers_hold:
            return name == "read" and self.uses.is_never_updated(op.operands[0], op.block)
        return name in ("read", "write") or element not in ("bf16", "f16")

    def _needs_mask(self, op: Operation) -> bool:
        """Return whether the index of `op` may be out of range with an effect that anybody can see.

        Nobody can see it if it has been recorded on a CPU, which raises before it returns anything. A GPU returns
        arrays and raises later.
        """
        return IN_RANGE not in op.attributes and (CHECKED not in op.attributes or self.platform != "cpu")


def _is_costly(rows: Value) -> bool:
    """Return whether rows are computed by functions that XLA for CPUs computes many times faster in vectors."""
    values = [rows]
    for value in values:
        if isinstance(value, ir.BlockArgument) or len(values) > _FAR:
            break
        op = operation(value.owner)
        if (
            op.name in _IN_VECTORS
            and value.type.has_static_shape
            and math.prod(value.type.shape) >= _gates.VECTOR_ELEMENTS
        ):
            return True
        if not op.regions and op.block == operation(rows.owner).block:
            values.extend(v for v in op.operands if not isinstance(v, ir.BlockArgument))
    return False


_IN_VECTORS = frozenset(
    f"stablehlo.{name}" for name in ("exponential", "log", "log_plus_one", "logistic", "sine", "cosine", "tanh")
)
_FAR = 16


def _may_be_lost(check: Operation) -> bool:
    """Return whether a check raises as long as its result is used, and not otherwise."""
    return may_raise(check) and not check.attributes["has_side_effect"].value


def _has_elements(buffer: Value) -> bool:
    kind = buffer.type
    return isinstance(kind, ir.RankedTensorType) and kind.has_static_shape and kind.rank > 0 and 0 not in kind.shape


def _is_alone(update: Operation, *, reads_too: bool) -> bool:
    """Return whether nothing but `update` uses a buffer between two steps of a loop, so there is nothing to order.

    If it does not read the buffer, other updates may follow: they are a chain. The row that it reads itself is read
    first, since the new row is made of it; only "swap" gives it to others.
    """
    buffer, updated = update.operands[0], update.results[0]
    if len(list(buffer.uses)) > 1 or len(update.results) > 1:
        return False
    if not reads_too:
        return True
    if not isinstance(buffer, ir.BlockArgument) or operation(buffer.owner.owner).name != "stablehlo.while":
        return False
    uses = list(updated.uses)
    return len(uses) == 1 and operation(uses[0].owner) == terminator(buffer.owner)


class LayoutConflicts:
    """Drops choices so that no buffer passes from a slice to a call in a loop, or the other way round.

    A call demands a layout. If a barrier has left the layout to XLA, XLA makes sure of it with a copy for an update by
    a slice.
    """

    def __init__(self, functions: dict[str, Operation], in_loops: set[str]) -> None:
        self.buffers: UnionFind[Value] = UnionFind()
        self.calls: set[tuple[Value, bool]] = set()
        self.in_loops, self.loops_around = in_loops, LoopsAround(functions)
        self.depths: dict[tuple[Value, bool], int] = {}  #: in how many loops the innermost of the others is
        for function in functions.values():
            for op in walk(function):
                for one, other in _same_buffer(op, functions):
                    self.buffers.join(one, other)

    def _key(self, op: Operation) -> tuple[Value, bool]:
        return self.buffers.find(op.operands[0]), is_in_loop(op, self.in_loops)

    def add_depths(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> None:
        for op, choice in operations:
            if choice is not None and not choice.is_costly:
                key = self._key(op)
                self.depths[key] = max(self.depths.get(key, 0), self.loops_around(op))

    def without_costly(
        self, operations: Sequence[tuple[Operation, _Choice | None]]
    ) -> list[tuple[Operation, _Choice | None]]:
        """Return the choices without those that take longer than calls, unless another op is in an inner loop."""
        return [
            (op, None if choice is not None and choice.is_costly and self._is_innermost(op) else choice)
            for op, choice in operations
        ]

    def _is_innermost(self, op: Operation) -> bool:
        return self.loops_around(op) >= self.depths.get(self._key(op), 0)

    def add(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> None:
        """Note the calls that stay."""
        for op, choice in operations:
            if choice is None and is_ours(op) and target(op) not in _ON_NO_BUFFER:
                self.calls.add(self._key(op))

    def choices(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> list[tuple[Operation, _Choice | None]]:
        return [
            (op, None if choice is not None and choice.passes_on and self._key(op) in self.calls else choice)
            for op, choice in operations
        ]


_ON_NO_BUFFER = frozenset(PREFIX + name for name in ("check", "empty"))


def _same_buffer(op: Operation, functions: dict[str, Operation]) -> Iterator[tuple[Value, Value]]:
    """Yield the pairs of values of `op` that may be one buffer."""
    if target(op) in UPDATING or op.name == _UPDATE:
        yield op.operands[0], op.results[0]
    elif pairs := aliased(op):
        yield from ((op.operands[operand], op.results[result]) for operand, result in pairs)
    elif op.name == "stablehlo.optimization_barrier":
        yield from zip(op.operands, op.results, strict=True)
    elif op.name == "stablehlo.while":
        for region in op.regions:
            yield from zip(op.operands, region.blocks[0].arguments, strict=True)
        yield from zip(terminator(op.regions[1].blocks[0]).operands, op.results, strict=True)
        yield from zip(op.operands, op.results, strict=True)
    elif op.name == "stablehlo.case":
        for region in op.regions:
            yield from zip(terminator(region.blocks[0]).operands, op.results, strict=True)
    elif op.name == "func.call":
        block = entry(functions[op.attributes["callee"].value])
        yield from zip(op.operands, block.arguments, strict=True)
        yield from zip(terminator(block).operands, op.results, strict=True)


# --- the slices ------------------------------------------------------------------------------------------------


_UPDATE = "stablehlo.dynamic_update_slice"


class _Rewriter:
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

    def rewrite(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> None:
        for op, choice in operations:
            for user, number, value in list(nested_operands(op)):
                if value in self.passed:
                    user.operands[number] = self.passed[value]
            if choice is None:
                if WINDOW in op.attributes and FALLBACK not in op.attributes:
                    flatten(op)
                for name in (LOWERING, CHECKED, IN_RANGE, UNORDERED):
                    if name in op.attributes:
                        del op.attributes[name]
                continue
            self.opaque_zero = choice.opaque_zero
            with ir.InsertionPoint(op), op.location:
                results = _REWRITES.get(target(op).removeprefix(PREFIX), _Rewriter.combine)(self, op, choice)
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

        XLA would make an updated one again in the fusion that reads, of the buffer before the update.
        """
        if isinstance(buffer, ir.BlockArgument) or operation(buffer.owner).name != _UPDATE or not self.barriers_hold:
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

    def read(self, op: Operation, choice: _Choice) -> list[Value]:
        buffer, result = op.operands[0], op.results[0].type
        if choice.at_once:
            rows = _AtOnce.of(op, choice).gathered
        else:
            accesses, _ = _accesses(op, choice)

            def rows(buffer: Value) -> Value:
                return _joined([access.taken(access.row_of(buffer)) for access in accesses], result, choice.shared)

        if choice.ordered:
            return [self.read_first(buffer, result, rows)[-1]]
        return [rows(self.made_once(buffer) if choice.passes_on else buffer)]

    def _update(self, op: Operation, choice: _Choice, combine: Callable[[Value, Value], Value] | None) -> list[Value]:
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
        self, op: Operation, choice: _Choice, combine: Callable[[Value, Value], Value] | None
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

    def write(self, op: Operation, choice: _Choice) -> list[Value]:
        return self._update(op, choice, None)

    def combine(self, op: Operation, choice: _Choice) -> list[Value]:
        return self._update(op, choice, CALLS[target(op).removeprefix(PREFIX)].combine)

    def swap(self, op: Operation, choice: _Choice) -> list[Value]:
        return self._update(op, choice, lambda old, value: value)

    def fence(self, op: Operation, choice: _Choice) -> list[Value]:
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

    def clear(self, op: Operation, choice: _Choice) -> list[Value]:
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

    def check(self, op: Operation, choice: _Choice) -> list[Value]:
        index, size = op.operands
        result = op.results[0].type
        row = hlo.convert(result, index)
        if not choice.drops:
            return [row]
        return [hlo.select(is_out_of_bounds(index, at_positions(size, result.shape)), splat(result, -1), row)]


#: The rewriters of calls that do not say how they combine two rows.
_REWRITES = {name: getattr(_Rewriter, name) for name in ("read", "write", "swap", "fence", "check", "clear")}


# --- the rows of an op -----------------------------------------------------------------------------------------


def _shared_axes(index: Value, batch_dims: int) -> int:
    """Return how many of the outermost batch axes have one index for all examples."""
    shape = index.type.shape
    return next((k for k in range(batch_dims) if shape[k] != 1), batch_dims)


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


def _accesses(op: Operation, choice: _Choice) -> tuple[list[_Access], Sequence[Value]]:
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
    return found, _readers(op)


def _is_waited_for(read: Operation) -> bool:
    """Return whether an update of the buffer waits for what is read, although it is not made of it."""
    users = [operation(use.owner) for use in read.results[0].uses]
    return any(read.results[0] in _readers(user) for user in users if target(user) in UPDATING)


def _readers(op: Operation) -> list[Value]:
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
    def of(cls, op: Operation, choice: _Choice) -> "_AtOnce":
        facts, sizes = config(op), index_sizes(op)
        shared = 0 if choice.masked else choice.shared  # an example may have a mask of its own
        starts, mask, box = _positions(op, choice._replace(shared=shared))
        starts = [widened(x, max(sizes)) for x in starts]
        windows = len(window_of(op)) if choice.by_windows else 0
        own, moves = (facts.batch_dims or 0) - shared, clips(op) and IN_RANGE not in op.attributes
        reverse = bool(facts.reverse)
        return cls(starts, sizes, box, windows, mask, choice.drops, moves, shared, own, reverse, _readers(op))

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


def _positions(op: Operation, choice: _Choice) -> tuple[list[Value], Value | None, list[int]]:
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
