"""Row ops as XLA's own slices, where these do the same in place: XLA fuses them with what makes or uses the row.

A call of ours stays outside of every fusion and costs a fixed time; a loop without calls may even become one function
of machine code. But a call checks its index and updates in place whatever is around it, and slices do neither. So a
slice stands for a call where

- the index is one row, and in range for every input of the program (`ranges`), or need not be;
- everything that reads the buffer comes before its update by data dependence. An optimization barrier around the
  buffer and the row that was read makes it so, in versions of XLA that keep it until memory has been assigned. It
  also keeps XLA from reading the row once more behind the update, in a fusion of its own.

`lowering` says which: "auto" as above, "ffi" for calls everywhere, and "xla" for slices also where the index is to be
checked, by a call of its own.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from jax_tensorarray import _compat
from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.mlir import (
    CALLS,
    IN_PLACE,
    LOWERING,
    LOWERINGS,
    PREFIX,
    TAPE,
    Module,
    Operation,
    Value,
    blocks,
    config,
    custom_call,
    entry,
    functions_in_loops,
    is_inside,
    nested_operands,
    operation,
    target,
    terminator,
    walk,
)
from jax_tensorarray._lowering.ranges import Interval, Ranges, limits
from jax_tensorarray._lowering.union_find import UnionFind

#: The default of `lowering`.
VARIABLE = "JAX_TENSORARRAY_LOWERING"

_INT32_MAX = 2**31 - 1


def use_slices(functions: dict[str, Operation], *, platform: str | None) -> None:
    """Rewrite the calls in `functions` for which slices are as good.

    Args:
        functions: those of a module in which `ordering` has put readers before updates.
        platform: the only one that the module will run on, if that is known and it is not divided among devices:
            slices of buffers whose rows are, would gather them. Of other modules only tapes become slices.
    """
    # All are chosen before the first is rewritten: the hash of an operation is that of what it says.
    chooser = _Chooser(functions, platform)
    chosen = [
        [(op, chooser.choose(op)) for op in map(operation, block.operations)]
        for function in functions.values()
        for block in blocks(function)
    ]
    unmixed = _Unmixed(functions)
    for operations in chosen:
        unmixed.add(operations)
    for operations in chosen:
        _Rewriter().rewrite(unmixed.choices(operations))


def default_lowering() -> str:
    """The value of `JAX_TENSORARRAY_LOWERING`."""
    found = os.environ.get(VARIABLE, "auto")
    if found not in LOWERINGS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(LOWERINGS)}, got {found!r}")
    return found


# --- what becomes a slice --------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """How a call is rewritten."""

    masked: bool = False  #: a `where` operand decides whether it does anything
    drops: bool = False  #: its index may be out of range, and then it does nothing
    checks: bool = False  #: its index may be out of range, which is an error
    ordered: bool = False  #: others read the buffer
    passes_on: bool = False  #: the buffer goes on from here


class _Chooser:
    def __init__(self, functions: dict[str, Operation], platform: str | None) -> None:
        self.module, self.ranges = Module(functions), Ranges(functions)
        self.default, self.platform = default_lowering(), platform
        self.barriers_hold = platform is not None and _compat.barriers_hold(platform)
        self.updated: dict[Operation, set[Value]] = {}  # by the last operation of a block

    def choose(self, op: Operation) -> _Choice | None:
        """None: it stays a call."""
        name = target(op).removeprefix(PREFIX)
        if target(op) == name or (name not in _REWRITES and CALLS[name].combine is None):
            return None
        lowering = op.attributes[LOWERING].value if LOWERING in op.attributes else self.default
        is_tape = name in ("read", "write") and config(op)["op"].value == TAPE
        if not is_tape and (lowering == "ffi" or self.platform is None):
            return None
        if name == "fence":
            return _Choice(ordered=True, passes_on=True) if self.barriers_hold and len(op.operands) > 1 else None
        if name == "check":
            size = self._range(op.operands[1])
            return _Choice() if Interval(0, size.low - 1).holds(self._range(op.operands[0])) else None
        choice = self._choose_row(op, name, lowering, is_tape)
        return choice if choice is None or self.barriers_hold or not choice.ordered else None

    def _choose_row(self, op: Operation, name: str, lowering: str, is_tape: bool) -> _Choice | None:
        buffer, index = op.operands[:2]
        attributes = config(op)
        if not (isinstance(buffer.type, ir.RankedTensorType) and buffer.type.has_static_shape and buffer.type.shape[0]):
            return None
        # XLA moves the small floats by way of larger ones, which does not leave all of them as they are.
        if index.type.rank or attributes["batch_dims"].value or str(buffer.type.element_type).startswith("f8"):
            return None
        in_range = is_tape or Interval(0, buffer.type.shape[0] - 1).holds(self._range(index))
        strict = attributes["strict"].value
        if strict and not in_range and lowering != "xla":
            return None
        choice = _Choice(masked=attributes["masked"].value, drops=not (strict or in_range))
        choice = choice._replace(checks=strict and not in_range)
        # An index that is masked out is no error. The call that checks counts rows in int32, and XLA leaves it out of a
        # slice of the only row, which needs no index.
        if choice.checks and (choice.masked or not 1 < buffer.type.shape[0] <= _INT32_MAX):
            return None
        if is_tape:
            return choice
        if name == "read":
            updated = not self._is_never_updated(buffer, op.block)
            return choice._replace(ordered=updated, passes_on=updated)
        return choice._replace(
            ordered=not _is_alone(op, reads_too=name != "write" or choice.masked or choice.drops), passes_on=True
        )

    def _range(self, value: Value) -> Interval:
        try:
            return self.ranges.of(value)
        except RecursionError:  # thousands of operations, one made of the other
            return limits(value.type)

    def _updated_in(self, block: ir.Block) -> set[Value]:
        """The values that operations of a block update, or what is inside these."""
        key = terminator(block)
        if key not in self.updated:
            uses = (use for op in block.operations for use in nested_operands(operation(op)))
            self.updated[key] = {value for user, number, value in uses if self.module.owns(user, number)}
        return self.updated[key]

    def _is_never_updated(self, value: Value, block: ir.Block) -> bool:
        """Whether nothing updates `value` after it has been read in `block`."""
        if value in self._updated_in(block):
            return False
        if not isinstance(value, ir.BlockArgument):
            inside = operation(block.owner)
            if inside.name == "func.func":  # its callers may update what it returns
                return value not in terminator(block).operands
            return is_inside(value, inside)
        owner = operation(value.owner.owner)
        if owner.name == "stablehlo.while":
            return value.arg_number in self.module.invariants(owner)
        if owner.name == "func.func":
            callers = self.ranges.callers.get(owner.attributes["sym_name"].value, [])
            return all(self._is_never_updated(call.operands[value.arg_number], call.block) for call in callers)
        return False


def _is_alone(update: Operation, *, reads_too: bool) -> bool:
    """Whether nothing but `update` uses a buffer between two steps of a loop, so that there is nothing to order.

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


class _Unmixed:
    """Of choices those after which no buffer passes from a slice to a call in a loop, or the other way round.

    A call demands a layout. For an update by a slice XLA makes sure of it with a copy, where a barrier has made the
    layout its own to choose.
    """

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.buffers: UnionFind[Value] = UnionFind()
        self.calls: set[tuple[Value, bool]] = set()
        self.in_loops = functions_in_loops(functions)
        for function in functions.values():
            for op in walk(function):
                for one, other in _same_buffer(op, functions):
                    self.buffers.join(one, other)

    def _key(self, op: Operation) -> tuple[Value, bool]:
        return self.buffers.find(op.operands[0]), _is_in_loop(op, self.in_loops)

    def add(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> None:
        """Take note of the calls that stay."""
        for op, choice in operations:
            if choice is None and target(op).startswith(PREFIX) and target(op) not in _ON_NO_BUFFER:
                self.calls.add(self._key(op))

    def choices(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> list[tuple[Operation, _Choice | None]]:
        return [
            (op, None if choice is not None and choice.passes_on and self._key(op) in self.calls else choice)
            for op, choice in operations
        ]


_ON_NO_BUFFER = frozenset(PREFIX + name for name in ("check", "empty"))


def _same_buffer(op: Operation, functions: dict[str, Operation]) -> Iterator[tuple[Value, Value]]:
    """The values of `op` that may be one buffer, by pairs."""
    if target(op) in IN_PLACE or op.name == "stablehlo.dynamic_update_slice":
        yield op.operands[0], op.results[0]
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


def _is_in_loop(op: Operation, functions_in_loops: set[str]) -> bool:
    while op.name != "func.func":
        op = operation(op.block.owner)
        if op.name == "stablehlo.while":
            return True
    return op.attributes["sym_name"].value in functions_in_loops


# --- the slices ------------------------------------------------------------------------------------------------


class _Rewriter:
    """Rewrites the chosen calls of one block, in order; readers after a barrier take what has passed it."""

    def __init__(self) -> None:
        self.passed: dict[Value, Value] = {}

    def rewrite(self, operations: Sequence[tuple[Operation, _Choice | None]]) -> None:
        for op, choice in operations:
            if LOWERING in op.attributes:
                del op.attributes[LOWERING]
            for user, number, value in list(nested_operands(op)):
                if value in self.passed:
                    user.operands[number] = self.passed[value]
            if choice is None:
                continue
            with ir.InsertionPoint(op), op.location:
                results = _REWRITES.get(target(op).removeprefix(PREFIX), _Rewriter.combine)(self, op, choice)
            for old, new in zip(op.results, results, strict=True):
                old.replace_all_uses_with(new)
            op.erase()

    def barrier(self, *values: Value) -> list[Value]:
        """The values, of which none is there before all are. Later uses become uses of these."""
        if len(values) == 1:
            return list(values)
        passed = list(hlo.optimization_barrier(values))
        self.passed.update(zip(values, passed, strict=True))
        return passed

    def read(self, op: Operation, choice: _Choice) -> list[Value]:
        buffer, index, *rest = op.operands
        index, mask, _ = _position(op, buffer, index, rest, choice)
        row = _row(buffer, index)
        if mask is not None:
            row = hlo.select(mask, row, _splat(row.type, 0))
        if choice.ordered:
            _, row = self.barrier(buffer, row)
        return [row]

    def _update(self, op: Operation, choice: _Choice, combine: Callable[[Value, Value], Value] | None) -> list[Value]:
        """The updated buffer and the old row, if that was read."""
        buffer, index, value, *rest = op.operands
        index, mask, readers = _position(op, buffer, index, rest, choice)
        buffer, *_ = self.barrier(buffer, *readers)
        if combine is None and mask is None:
            return [_with_row(buffer, index, value)]
        old = _row(buffer, index)
        if choice.ordered:
            buffer, old = self.barrier(buffer, old)
        new = value if combine is None else combine(old, value)
        if mask is None:
            return [_with_row(buffer, index, new), old]
        taken = hlo.select(mask, old, _splat(old.type, 0))
        return [_with_row(buffer, index, hlo.select(mask, new, old)), taken]

    def write(self, op: Operation, choice: _Choice) -> list[Value]:
        return self._update(op, choice, None)[:1]

    def combine(self, op: Operation, choice: _Choice) -> list[Value]:
        return self._update(op, choice, CALLS[target(op).removeprefix(PREFIX)].combine)[:1]

    def swap(self, op: Operation, choice: _Choice) -> list[Value]:
        return self._update(op, choice, lambda old, value: value)

    def fence(self, op: Operation, choice: _Choice) -> list[Value]:
        return self.barrier(*op.operands)[:1]

    def check(self, op: Operation, choice: _Choice) -> list[Value]:
        return [hlo.convert(op.results[0].type, op.operands[0])]


#: Of the calls that do not say how they combine two rows.
_REWRITES = {name: getattr(_Rewriter, name) for name in ("read", "write", "swap", "fence", "check")}


def _position(
    op: Operation, buffer: Value, index: Value, rest: Sequence[Value], choice: _Choice
) -> tuple[Value, Value | None, Sequence[Value]]:
    """Index, mask and readers that a call waits for, of the operands that follow its buffer and value."""
    mask = rest[0] if choice.masked else None
    size = buffer.type.shape[0]
    index = _widened(index, size)
    if choice.checks:
        attributes = {name: config(op)[name] for name in ("op", "strict")}
        shape = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        index = custom_call("check", [index, _splat(shape, size)], shape, attributes)
    if choice.drops:
        for limit, direction in ((0, "GE"), (size - 1, "LE")):
            holds = hlo.compare(index, _splat(index.type, limit), hlo.ComparisonDirectionAttr.get(direction))
            mask = holds if mask is None else hlo.and_(mask, holds)
    return index, mask, rest[choice.masked :]


def _widened(index: Value, size: int) -> Value:
    """The index in a dtype that has all rows: XLA clamps a start in its own dtype, to a last row that wraps if not."""
    element, bits = index.type.element_type, 32 if size <= _INT32_MAX else 64
    if element.width > bits or (element.width == bits and (bits == 64 or not element.is_unsigned)):
        return index
    wide = 64 if element.is_unsigned and element.width == 32 else bits
    return hlo.convert(ir.RankedTensorType.get([], ir.IntegerType.get_signless(wide)), index)


def _row(buffer: Value, index: Value) -> Value:
    _, *row = buffer.type.shape
    rows = hlo.dynamic_slice(buffer, _start(buffer, index), mlir.dense_int_array((1, *row)))
    return hlo.reshape(_tensor_like(buffer, row), rows)


def _with_row(buffer: Value, index: Value, value: Value) -> Value:
    _, *row = buffer.type.shape
    return hlo.dynamic_update_slice(buffer, hlo.reshape(_tensor_like(buffer, [1, *row]), value), _start(buffer, index))


def _start(buffer: Value, index: Value) -> list[Value]:
    return [index, *[_splat(index.type, 0)] * (buffer.type.rank - 1)] if buffer.type.rank > 1 else [index]


def _tensor_like(value: Value, shape: Sequence[int]) -> ir.Type:
    return ir.RankedTensorType.get(shape, value.type.element_type)


def _splat(type_: Any, value: int) -> Value:
    """A constant tensor, all elements of which are that number."""
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        part = _splat(ir.RankedTensorType.get(type_.shape, element.element_type), value)
        return hlo.complex(part, _splat(part.type, 0))
    is_integer = isinstance(element, ir.IntegerType)
    number = ir.IntegerAttr.get(element, value) if is_integer else ir.FloatAttr.get(element, float(value))
    return hlo.constant(ir.DenseElementsAttr.get_splat(type_, number))
