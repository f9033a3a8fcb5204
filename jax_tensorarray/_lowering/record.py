"""Indices out of range as data: a loop carries a record of the first one, and a call behind the loop raises it.

A call of a kernel raises where it is, and takes ten times as long as a slice of one row. So in a loop an op has its
index checked by arithmetic of XLA's own: the first that is out of range becomes the record, which is the op, the index
and the number of rows. What the op then does is of no account, and a loop that counts its steps runs to its end. Any
other loop goes on only while the record is empty, since what it waits for may be due to a row that was not there.

The record passes through loops, branches and functions, and `main` has it raised behind each of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.mlir import (
    CALLS,
    CHECKED,
    CONFIG,
    INT32_MAX,
    LOWERING,
    PREFIX,
    TAPE,
    UNKNOWN,
    Operation,
    Value,
    astray,
    callee,
    compare,
    config,
    constant,
    custom_call,
    entry,
    functions_in_loops,
    is_in_loop,
    is_ours,
    lowering_of,
    nested_operands,
    operation,
    shared_scalar,
    splat,
    target,
    tensor,
    terminator,
    walk,
)


class Record(NamedTuple):
    """The first index that was out of range."""

    site: Value  #: int32: the number of what it was an index of, 0 for none
    index: Value  #: int64; an uint64 has its bits here
    size: Value  #: int32: how many rows there were


def _types() -> Record:
    bits = map(ir.IntegerType.get_signless, (32, 64, 32))
    return Record(*(tensor([], element) for element in bits))


def check_by_record(functions: dict[str, Operation], default: str, *, unknown: bool) -> None:
    """Have indices in loops recorded if they are out of range; `strict` ops become `CHECKED` ones, which drop them.

    Only where one of them may become a slice, by its `lowering` or the `default`: kernels of their own raise. With
    `unknown` every loop that has an op gets a record, and XLA cannot know that it begins empty.
    """
    strict = [op for function in functions.values() for op in walk(function) if _is_strict(op)]
    for op in strict:
        if _cannot_stray(op):
            _set_checked(op)
    in_loops = functions_in_loops(functions)
    asking = [op for function in functions.values() for op in walk(function) if is_ours(op)] if unknown else strict
    asked = {(lowering_of(op, default), is_in_loop(op, in_loops)) for op in asking if unknown or _is_strict(op)}
    if asked & {("auto", True), ("xla", True), ("xla", False)}:
        with ir.Location.unknown():
            _Threading(functions, unknown).run()


# --- ops -------------------------------------------------------------------------------------------------------


def _is_strict(op: Operation) -> bool:
    """Whether an op raises, and can be recorded instead."""
    if not is_ours(op) or CONFIG not in op.attributes or "strict" not in config(op):
        return False
    index, size = _index_and_size(op)
    return config(op)["strict"].value and index.type.has_static_shape and (size is None or size <= INT32_MAX)


def _index_and_size(op: Operation) -> tuple[Value, int | None]:
    """The index of an op, and the number of rows unless that is an operand."""
    if target(op) == PREFIX + "check":
        return op.operands[0], None
    buffer, index = op.operands[:2]
    return index, buffer.type.shape[config(op)["batch_dims"].value]


def _cannot_stray(op: Operation) -> bool:
    """Whether there is nothing to check: no index at all, the number of a step, or one that is in the program."""
    index, size = _index_and_size(op)
    number = constant(index)
    is_row = number is not None and size is not None and 0 <= number < size
    return is_row or 0 in index.type.shape or config(op)["op"].value == TAPE


def _set_checked(op: Operation) -> None:
    attributes = {item.name: item.attr for item in config(op)}
    op.attributes[CONFIG] = ir.DictAttr.get(attributes | {"strict": ir.BoolAttr.get(False)})
    op.attributes[CHECKED] = ir.UnitAttr.get()


# --- where the record goes -------------------------------------------------------------------------------------

_WHILE, _CALL = "stablehlo.while", "func.call"
_BRANCHES = ("stablehlo.case", "stablehlo.if")


def _steps(op: Operation) -> Iterator[Operation]:
    """All that a record gets to in `op`, in its loops and branches too, but not in what it calls."""
    for region in op.regions:
        for inner in map(operation, region.blocks[0].operations):
            yield inner
            if inner.name in (_WHILE, *_BRANCHES):
                yield from _steps(inner)


def _only_called(functions: dict[str, Operation]) -> list[str]:
    """`main`, and the functions that a record gets to wherever they are used: these may have more arguments."""
    uses = Counter(callee(op) for function in functions.values() for op in walk(function))
    allowed = set(functions)
    while True:
        reached = ["main"] if "main" in allowed else []
        calls: Counter[str | None] = Counter()
        for name in reached:  # grows meanwhile
            called = [found for op in _steps(functions[name]) if (found := callee(op)) is not None]
            calls.update(called)
            reached += [found for found in dict.fromkeys(called) if found in allowed and found not in reached]
        remaining = {name for name in reached if name == "main" or calls[name] == uses[name]}
        if remaining == allowed:
            return reached
        allowed = remaining


class _Threading:
    """Hands the record to whatever checks an index or waits for something, and takes it back from there."""

    def __init__(self, functions: dict[str, Operation], unknown: bool) -> None:
        self.functions, self.names, self.unknown = functions, _only_called(functions), unknown
        self.sites: list[tuple[str, bool]] = []  #: names of ops, and whether they have an uint64 as index
        self.checking = self._functions_with(_is_strict)
        for name in self.names:
            for loop in reversed([op for op in _steps(functions[name]) if op.name == _WHILE]):
                if any(map(self._checks, map(operation, _condition(loop).operations))):
                    _carry_predicate(loop)
        self.needing = self._functions_with(self._needs_itself)

    def _functions_with(self, holds: Callable[[Operation], bool]) -> set[str]:
        """The names of those in which something `holds`, or in what they call."""
        found: set[str] = set()
        while True:
            more = {n for n in self.names if any(holds(op) or callee(op) in found for op in _steps(self.functions[n]))}
            if more == found:
                return found
            found = more

    def _checks(self, op: Operation) -> bool:
        """Whether an index is checked by `op`, or in it."""
        return any(_is_strict(x) or callee(x) in self.checking for x in _with_steps(op))

    def _needs(self, op: Operation) -> bool:
        """Whether `op` has to know the record."""
        return any(self._needs_itself(x) or callee(x) in self.needing for x in _with_steps(op))

    def _needs_itself(self, op: Operation) -> bool:
        return _is_strict(op) or _waits(op) or (self.unknown and is_ours(op))

    def run(self) -> None:
        for name in self.names:
            if name in self.needing and name != "main":
                self._extend_function(self.functions[name])
        block = entry(self.functions["main"])
        with ir.InsertionPoint.at_block_begin(block):
            types = _types()
            empty = Record(*(splat(t, 0) for t in types))
            if self.unknown:  # what a call gives is
                attributes = {"op": ir.StringAttr.get("record"), "strict": ir.BoolAttr.get(False)}
                site = custom_call("check", [empty.site, splat(types.size, 1)], types.site, attributes)
                operation(site.owner).attributes[LOWERING] = ir.StringAttr.get("ffi")
                empty = empty._replace(site=site)
        self._thread(block, empty, raises=True)  # last: by now all that functions check is known

    def _thread(self, block: ir.Block, record: Record, *, raises: bool = False) -> Record:
        """The record at the end of a block that begins with it; `raises`: it begins empty, and is raised."""
        empty, unraised = raises and not self.unknown, False
        for op, after in pairwise([operation(op) for op in block.operations]):
            is_row_op, checks = _is_strict(op), self._checks(op)
            # Until the first check there is nothing to wait for.
            if not checks and (not self._needs(op) or is_ours(op) or (empty and op.name != _CALL)):
                continue
            empty, unraised = empty and not checks, unraised or checks
            if is_row_op:
                with ir.InsertionPoint(op), op.location:
                    record = self._checked(op, record)
                _set_checked(op)
                continue
            record = self._extend(op, record)
            if raises and unraised:
                record, unraised = self._raised(record, after), False
        return self._raised(record, terminator(block)) if raises and unraised else record

    def _extend(self, op: Operation, record: Record) -> Record:
        """Replace a loop, a conditional or a call by one that passes the record through."""
        if op.name == _WHILE:
            waits, condition, body = _waits(op), _condition(op), op.regions[1].blocks[0]
            seen, inner = (
                Record(*(block.add_argument(t, op.location) for t in _types())) for block in (condition, body)
            )
            _return_more(body, self._thread(body, inner))
            if waits:
                end = terminator(condition)
                with ir.InsertionPoint(end), end.location:
                    goes_on = hlo.and_(end.operands[0], _is_at(seen, 0))
                _return(condition, [goes_on])
        for block in (region.blocks[0] for region in op.regions if op.name in _BRANCHES):
            _return_more(block, self._thread(block, record))
        new = _with_more(op, [] if op.name in _BRANCHES else record, _types())
        if self.unknown and new.name == _WHILE:
            new.attributes[UNKNOWN] = ir.UnitAttr.get()
        return Record(*list(new.results)[-len(record) :])

    def _extend_function(self, function: Operation) -> None:
        block, types, attributes = entry(function), _types(), function.attributes
        record = Record(*(block.add_argument(t, function.location) for t in types))
        _return_more(block, self._thread(block, record))
        if self.unknown:
            attributes[UNKNOWN] = ir.UnitAttr.get()
        old = attributes["function_type"].value
        attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get([*old.inputs, *types], [*old.results, *types])
        )
        for name in ("arg_attrs", "res_attrs"):
            if name in attributes:
                attributes[name] = ir.ArrayAttr.get([*attributes[name], *[ir.DictAttr.get({})] * len(types)])

    def _checked(self, op: Operation, record: Record) -> Record:
        """The record after an op, whose own index becomes it if that is the first that is out of range."""
        index, size, mask = _position(op)
        index_at, size_at, strays = _first_stray(index, size, mask)
        is_unsigned = index.type.element_type.is_unsigned and index.type.element_type.width == 64
        site = (config(op)["op"].value, is_unsigned)
        if site not in self.sites:
            self.sites.append(site)
        types = _types()
        found = Record(
            splat(types.site, self.sites.index(site) + 1),
            hlo.bitcast_convert(types.index, index_at) if is_unsigned else hlo.convert(types.index, index_at),
            size_at,
        )
        first = hlo.and_(strays, _is_at(record, 0))
        return Record(*(hlo.select(first, new, old) for new, old in zip(found, record, strict=True)))

    def _raised(self, record: Record, before: Operation) -> Record:
        """The record, once it has been raised if it is not empty."""
        types, raised = _types(), None
        with ir.InsertionPoint(before), before.location:
            for number, (name, is_unsigned) in enumerate(self.sites):
                is_here = _is_at(record, number + 1)
                index = hlo.select(is_here, record.index, splat(types.index, 0))
                if is_unsigned:
                    index = hlo.bitcast_convert(tensor([], ir.IntegerType.get_unsigned(64)), index)
                size = hlo.select(is_here, record.size, splat(types.size, 1))
                attributes = {"op": ir.StringAttr.get(name), "strict": ir.BoolAttr.get(True)}
                none = custom_call("check", [index, size], types.site, attributes)
                none.owner.attributes["has_side_effect"] = ir.BoolAttr.get(True)
                raised = none if raised is None else hlo.or_(raised, none)
        assert raised is not None
        return record._replace(site=raised)


def _with_steps(op: Operation) -> list[Operation]:
    return [op, *(_steps(op) if op.name in (_WHILE, *_BRANCHES) else [])]


def _is_at(record: Record, site: int) -> Value:
    return compare(record.site, splat(record.site.type, site), "EQ")


# --- loops -----------------------------------------------------------------------------------------------------


def _condition(loop: Operation) -> ir.Block:
    return loop.regions[0].blocks[0]


def _waits(op: Operation) -> bool:
    """Whether `op` is a loop that might run for ever if its rows were others: one that does not count to a number."""
    return op.name == _WHILE and not _counts(op)


def _counts(loop: Operation) -> bool:
    condition, body = _condition(loop), loop.regions[1].blocks[0]
    predicate = terminator(condition).operands[0]
    if isinstance(predicate, ir.BlockArgument) or operation(predicate.owner).name != "stablehlo.compare":
        return False
    compare = operation(predicate.owner)
    step, end = compare.operands
    if "LT" not in str(compare.attributes["comparison_direction"]) or not _is_argument(step, condition):
        return False
    if _is_argument(end, condition):  # what the loop is told and passes on
        number = end.arg_number
        if terminator(body).operands[number] != body.arguments[number]:
            return False
        end = loop.operands[number]
    next_step = terminator(body).operands[step.arg_number]
    if constant(end) is None or isinstance(next_step, ir.BlockArgument):
        return False
    add = operation(next_step.owner)
    return (
        add.name == "stablehlo.add"
        and add.operands[0] == body.arguments[step.arg_number]
        and (constant(add.operands[1]) or 0) > 0
    )


def _is_argument(value: Value, block: ir.Block) -> bool:
    return isinstance(value, ir.BlockArgument) and value.owner == block


def _carry_predicate(loop: Operation) -> None:
    """Have a loop evaluate its condition before the first step and behind each, where a record can be made of it."""
    condition, body, location = _condition(loop), loop.regions[1].blocks[0], loop.location
    predicate = terminator(condition).operands[0]
    kind = predicate.type
    start = _copy(condition, dict(zip(condition.arguments, loop.operands, strict=True)), loop, predicate)
    end = terminator(body)
    goes_on = _copy(condition, dict(zip(condition.arguments, end.operands, strict=True)), end, predicate)
    _return_more(body, [goes_on])
    body.add_argument(kind, location)
    carried = condition.add_argument(kind, location)
    _return(condition, [carried])
    for op in reversed([operation(op) for op in condition.operations][:-1]):
        op.erase()
    _with_more(loop, [start], [kind])


def _copy(block: ir.Block, renamed: dict[Value, Value], before: Operation, result: Value) -> Value:
    """`result` of the operations of a block, copied to another place with other arguments."""
    with ir.InsertionPoint(before):
        for op in [operation(op) for op in block.operations][:-1]:
            new = operation(op.clone())
            for user, number, value in list(nested_operands(new)):
                if value in renamed:
                    user.operands[number] = renamed[value]
            renamed |= dict(zip(op.results, new.results, strict=True))
    return renamed.get(result, result)


def _return(block: ir.Block, values: Sequence[Value]) -> None:
    end = terminator(block)
    with ir.InsertionPoint(end):
        ir.Operation.create(end.name, [], values, loc=end.location)
    end.erase()


def _return_more(block: ir.Block, values: Sequence[Value]) -> None:
    _return(block, [*terminator(block).operands, *values])


def _with_more(op: Operation, operands: Sequence[Value], types: Sequence[ir.Type]) -> Operation:
    """Replace an operation, whose regions fit already, by one with more operands and more results."""
    attributes = {name: op.attributes[name] for name in op.attributes}
    with ir.InsertionPoint(op):
        new = ir.Operation.create(
            op.name,
            [*(result.type for result in op.results), *types],
            [*op.operands, *operands],
            attributes,
            regions=len(op.regions),
            loc=op.location,
        )
    for old_region, new_region in zip(op.regions, new.regions, strict=True):
        old_region.blocks[0].append_to(new_region)
    for old, result in zip(op.results, new.results, strict=False):
        old.replace_all_uses_with(result)
    op.erase()
    return new


# --- indices ---------------------------------------------------------------------------------------------------


def _position(op: Operation) -> tuple[Value, Value, Value | None]:
    """Index, number of rows (int32) and mask of an op, all of one shape: scalars, or one-dimensional."""
    index, rows = _index_and_size(op)
    attributes = config(op)
    mask = None
    if "masked" in attributes and attributes["masked"].value:
        mask = op.operands[len(CALLS[target(op).removeprefix(PREFIX)].operands) - 1]
    shape, int32 = index.type.shape, ir.IntegerType.get_signless(32)
    if rows is not None:
        one, of_mask = shared_scalar(index), None if mask is None else shared_scalar(mask)
        if one is not None and (mask is None) == (of_mask is None):
            index, mask, shape = one, of_mask, []
        size = splat(tensor(shape, int32), rows)
    else:
        size = op.operands[1]
        dims = mlir.dense_int_array(range(size.type.rank))
        size = hlo.broadcast_in_dim(tensor(shape, int32), size, dims) if size.type.rank < len(shape) else size
    if not shape:
        return index, size, mask
    flat = [math.prod(shape)]
    index, size, mask = (
        v if v is None else hlo.reshape(tensor(flat, v.type.element_type), v) for v in (index, size, mask)
    )
    return index, size, mask


def _first_stray(index: Value, size: Value, mask: Value | None) -> tuple[Value, Value, Value]:
    """The first index that is out of range, with the number of rows there, and whether there is one."""
    strays = astray(index, size)
    if mask is not None:
        strays = hlo.and_(strays, mask)
    if not index.type.rank:
        return index, size, strays
    places = tensor(index.type.shape, ir.IntegerType.get_signless(64))
    place = tensor([], places.element_type)
    none = splat(place, index.type.shape[0])
    candidates = hlo.select(strays, hlo.iota(places, mlir.i64_attr(0)), splat(places, index.type.shape[0]))
    reduce = hlo.ReduceOp([place], [candidates], [none], mlir.dense_int_array([0]))
    smaller = reduce.regions[0].blocks.append(place, place)
    with ir.InsertionPoint(smaller):
        hlo.return_([hlo.minimum(*smaller.arguments)])
    first = reduce.results[0]
    at, rows = (
        hlo.reshape(tensor([], v.type.element_type), hlo.dynamic_slice(v, [first], mlir.dense_int_array([1])))
        for v in (index, size)
    )
    return at, rows, compare(first, none, "LT")
