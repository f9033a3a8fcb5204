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

import math
import os
from collections.abc import Iterator, Sequence

from jax.interpreters.mlir import ir

from jax_tensorarray import _compat, _gates
from jax_tensorarray._lowering.calls import (
    CALLS,
    CHECKED,
    IN_RANGE,
    LOWERINGS,
    PREFIX,
    TAPE,
    UNORDERED,
    UPDATING,
    WHOLE,
    WITHOUT_KERNELS,
    aliased,
    clips,
    config,
    index_sizes,
    is_ours,
    lowering_of,
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
    num_bytes,
    operation,
    terminator,
    walk,
)
from jax_tensorarray._lowering.slicing_old import REWRITES, UPDATE, Choice, Rewriter, readers_of
from jax_tensorarray._lowering.uses_old import Uses
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
        Rewriter(chooser.barriers_hold).rewrite(conflicts.choices(operations))


def default_lowering() -> str:
    """Return the value of `JAX_TENSORARRAY_LOWERING`."""
    found = os.environ.get(VARIABLE, "auto")
    if found not in LOWERINGS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(LOWERINGS)}, got {found!r}")
    return found


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

    def choose(self, op: Operation) -> Choice | None:
        """Return how to rewrite a call, or None if it stays a call."""
        name = target(op).removeprefix(PREFIX)
        if target(op) == name or (name not in REWRITES and CALLS[name].combine is None):
            return None
        is_tape = name in ("read", "write") and TAPE in op.attributes
        if not is_tape and (lowering_of(op, self.default) == "ffi" or self.platform is None):
            return None
        if name == "fence":
            choice = Choice(ordered=True, passes_on=True)
            return self._ordered(op, choice) if len(op.operands) > 1 and _has_elements(op.operands[0]) else None
        if name == "check":
            return None if may_raise(op) else Choice(drops=self._needs_mask(op))
        if name == "clear":
            # On a GPU each step of an inner loop would wait for the host.
            are_usual = all(str(at.type) == "tensor<i32>" for at in list(op.operands)[1:3])
            is_faster = self.platform == "cpu" and is_in_loop(op, self.in_loops) and are_usual
            choice = Choice(ordered=True, passes_on=True)
            return self._ordered(op, choice) if is_faster and _has_elements(op.operands[0]) else None
        of_row = self._choose_row(op, name, is_tape)
        return of_row if of_row is None or not of_row.ordered else self._ordered(op, of_row)

    def _ordered(self, op: Operation, choice: Choice) -> Choice | None:
        """Return the choice with what it takes to put reads before updates, or None if that is not there."""
        if self.barriers_hold:
            return choice
        opaque_zero = opaque_zero_at(op)
        is_box = choice.by_windows and len(window_of(op)) > 1  # which a call would move by single elements
        is_costly = choice.does_both and num_bytes(op.operands[2]) > _gates.SLICED_BYTES and not is_box
        return None if opaque_zero is None else choice._replace(opaque_zero=opaque_zero, is_costly=is_costly)

    def _choose_row(self, op: Operation, name: str, is_tape: bool) -> Choice | None:
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
        choice = Choice(masked, drops, shared=shared, does_both=does_both, by_windows=by_windows, at_once=at_once)
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
    name = "has_side_effect"
    return may_raise(check) and not (name in check.attributes and check.attributes[name].value)


def _shared_axes(index: Value, batch_dims: int) -> int:
    """Return how many of the outermost batch axes have one index for all examples."""
    shape = index.type.shape
    return next((k for k in range(batch_dims) if shape[k] != 1), batch_dims)


def _is_waited_for(read: Operation) -> bool:
    """Return whether an update of the buffer waits for what is read, although it is not made of it."""
    users = [operation(use.owner) for use in read.results[0].uses]
    return any(read.results[0] in readers_of(user) for user in users if target(user) in UPDATING)


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

    def add_depths(self, operations: Sequence[tuple[Operation, Choice | None]]) -> None:
        for op, choice in operations:
            if choice is not None and not choice.is_costly:
                key = self._key(op)
                self.depths[key] = max(self.depths.get(key, 0), self.loops_around(op))

    def without_costly(
        self, operations: Sequence[tuple[Operation, Choice | None]]
    ) -> list[tuple[Operation, Choice | None]]:
        """Return the choices without those that take longer than calls, unless another op is in an inner loop."""
        return [
            (op, None if choice is not None and choice.is_costly and self._is_innermost(op) else choice)
            for op, choice in operations
        ]

    def _is_innermost(self, op: Operation) -> bool:
        return self.loops_around(op) >= self.depths.get(self._key(op), 0)

    def add(self, operations: Sequence[tuple[Operation, Choice | None]]) -> None:
        """Note the calls that stay."""
        for op, choice in operations:
            if choice is None and is_ours(op) and target(op) not in _ON_NO_BUFFER:
                self.calls.add(self._key(op))

    def choices(self, operations: Sequence[tuple[Operation, Choice | None]]) -> list[tuple[Operation, Choice | None]]:
        return [
            (op, None if choice is not None and choice.passes_on and self._key(op) in self.calls else choice)
            for op, choice in operations
        ]


_ON_NO_BUFFER = frozenset(PREFIX + name for name in ("check", "empty"))


def _same_buffer(op: Operation, functions: dict[str, Operation]) -> Iterator[tuple[Value, Value]]:
    """Yield the pairs of values of `op` that may be one buffer."""
    if target(op) in UPDATING or op.name == UPDATE:
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
