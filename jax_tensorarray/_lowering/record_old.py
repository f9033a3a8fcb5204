"""Indices out of range as data: a loop carries a record of the first one, and a call after the loop raises it.

A call of a kernel raises where it is, and takes ten times as long as a slice of one row. So in a loop an op has its
index checked by arithmetic of XLA's own: the first that is out of range becomes the record, which is the op, the index
and the number of rows. The result of the op does not matter then, and a loop that counts its steps runs to its end. Any
other loop goes on only while the record is empty, since what it waits for may be due to a row that was not there.

The record passes through loops, branches and functions, and `main` has it raised after each of them.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.build import (
    at_positions,
    compare,
    custom_call,
    for_each,
    integer,
    is_out_of_bounds,
    repeated,
    replaced,
    return_from,
    splat,
    tensor,
    widened,
)
from jax_tensorarray._lowering.calls import (
    CHECKED,
    CONFIG,
    LOWERING,
    OPAQUE_ZERO,
    PREFIX,
    TAPE,
    UNORDERED,
    addresses_rows,
    box_of,
    config,
    index_and_size,
    is_ours,
    lowering_of,
    mask_of,
    may_raise,
    target,
    with_config,
)
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    added_by_step,
    callee,
    constant,
    directly_in,
    entry,
    functions_in_loops,
    is_in_loop,
    nested_operands,
    operands_of,
    operation,
    shared_scalar,
    terminator,
    walk,
)
from jax_tensorarray._lowering.places import Places
from jax_tensorarray._types import INT32_MAX

#: The last value is the code of the first index that was out of range, or 0. Before it come numbers that do not fit in.
FirstError = Sequence[Value]


def check_by_record(functions: dict[str, Operation], default: str, places: Places, *, opaque_zero: bool) -> None:
    """Have indices in loops recorded if they are out of range; `strict` ops become `CHECKED` ones, which drop them.

    This is done only if one of the ops may become a slice, by its `lowering` or the `default`: kernels raise by
    themselves. With `opaque_zero` every loop that has an op gets a record, and XLA cannot know that it begins empty.
    """
    strict = [op for function in functions.values() for op in walk(function) if _is_strict(op)]
    for op in strict:
        if _is_never_out(op):
            _set_checked(op)
    in_loops = functions_in_loops(functions)
    ours = [op for function in functions.values() for op in walk(function) if _may_be_ordered(op)]
    asking = [*ours, *strict] if opaque_zero else strict
    asked = {(lowering_of(op, default), is_in_loop(op, in_loops)) for op in asking if opaque_zero or _is_strict(op)}
    if asked & {("auto", True), ("xla", True), ("xla", False)}:
        with ir.Location.unknown():
            RecordThreader(functions, _Codes([op for op in strict if _is_strict(op)], places), opaque_zero).run()


def drop_out_of_bounds(functions: dict[str, Operation]) -> None:
    """Make `strict` ops `CHECKED` ones, so that no index raises, on platforms where no call can."""
    for function in functions.values():
        for op in walk(function):
            if addresses_rows(op) and may_raise(op):
                _set_checked(op)


# --- ops -------------------------------------------------------------------------------------------------------


def _is_strict(op: Operation) -> bool:
    """Return whether an op raises, and can be recorded instead."""
    if not addresses_rows(op) or not may_raise(op):
        return False
    index, size = index_and_size(op)
    return index.type.has_static_shape and (size is None or size <= INT32_MAX)


def _may_be_ordered(op: Operation) -> bool:
    """Return whether an order may be put between an op of ours and others, which takes an opaque zero."""
    return is_ours(op) and UNORDERED not in op.attributes


def _is_never_out(op: Operation) -> bool:
    """Return whether there is nothing to check: no index or no example at all, or the number of a step."""
    index, _ = index_and_size(op)
    batch = op.operands[0].type.shape[: config(op).batch_dims or 0]
    return 0 in (*batch, *index.type.shape) or TAPE in op.attributes


def _set_checked(op: Operation) -> None:
    op.attributes[CONFIG] = with_config(op, strict=False)
    op.attributes[CHECKED] = ir.UnitAttr.get()


# --- where the record goes -------------------------------------------------------------------------------------

_WHILE, _CALL = "stablehlo.while", "func.call"
_BRANCHES = ("stablehlo.case", "stablehlo.if")
_PASSED_THROUGH = frozenset({_WHILE, *_BRANCHES})


def _steps(op: Operation) -> Iterator[Operation]:
    """Yield all operations that a record gets to in `op`, in its loops and branches too, but not in what it calls."""
    for inner in directly_in(op):
        yield inner
        if inner.name in _PASSED_THROUGH:
            yield from _steps(inner)


def _only_called(functions: dict[str, Operation]) -> list[str]:
    """Return `main`, and the functions that a record gets to wherever they are used: these may have more arguments."""
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


class RecordThreader:
    """Hands the record to whatever checks an index or waits for something, and takes it back from there."""

    def __init__(self, functions: dict[str, Operation], codes: "_Codes", opaque_zero: bool) -> None:
        self.functions, self.names = functions, _only_called(functions)
        self.codes, self.opaque_zero = codes, opaque_zero
        self.checking = self._functions_with(_is_strict)
        for name in self.names:
            for loop in reversed([op for op in _steps(functions[name]) if op.name == _WHILE]):
                if any(map(self._checks, map(operation, _condition(loop).operations))):
                    _carry_predicate(loop)
        self.needing = self._functions_with(self._needs_itself)

    def _functions_with(self, holds: Callable[[Operation], bool]) -> set[str]:
        """Return the names of the functions in which something `holds`, or in what they call."""
        found: set[str] = set()
        while True:
            more = {n for n in self.names if any(holds(op) or callee(op) in found for op in _steps(self.functions[n]))}
            if more == found:
                return found
            found = more

    def _checks(self, op: Operation) -> bool:
        """Return whether an index is checked by `op`, or in it."""
        return any(_is_strict(x) or callee(x) in self.checking for x in _with_steps(op))

    def _needs(self, op: Operation) -> bool:
        """Return whether `op` has to know the record."""
        return any(self._needs_itself(x) or callee(x) in self.needing for x in _with_steps(op))

    def _needs_itself(self, op: Operation) -> bool:
        return _is_strict(op) or _waits(op) or (self.opaque_zero and _may_be_ordered(op))

    def run(self) -> None:
        for name in self.names:
            if name in self.needing and name != "main":
                self._extend_function(self.functions[name])
        block = entry(self.functions["main"])
        with ir.InsertionPoint.at_block_begin(block):
            empty = [splat(t, 0) for t in self.codes.types]
            if self.opaque_zero:  # XLA cannot know what a call returns
                zero, one = (splat(integer(32), n) for n in (0, 1))
                empty[-1] = hlo.convert(self.codes.types[-1], _call_of_check("record", zero, one, raises=False))
        self._thread(block, empty, frozenset(), raises=True)  # last: by now all that functions check is known

    def _thread(self, block: ir.Block, first_error: FirstError, known: Set[Any], *, raises: bool = False) -> FirstError:
        """Pass the record through a block, and return the record at its end.

        With `raises` it begins empty, and is raised. `known` are the positions that have been checked before.
        """
        empty, unraised, known = raises and not self.opaque_zero, False, set(known)
        for op, after in pairwise([operation(op) for op in block.operations]):
            is_row_op, checks = _is_strict(op), self._checks(op)
            # Until the first check there is nothing to wait for.
            if not checks and (not self._needs(op) or is_ours(op) or (empty and op.name != _CALL)):
                continue
            empty, unraised = empty and not checks, unraised or checks
            if is_row_op:
                position = _position(op)
                if not known & {position, position._replace(mask=None)}:
                    known.add(position)
                    with ir.InsertionPoint(op), op.location:
                        first_error = self.codes.checked(op, position, first_error)
                _set_checked(op)
                continue
            first_error = self._extend(op, first_error, known)
            if raises and unraised:
                first_error, unraised = self.codes.raised(first_error, after), False
        return self.codes.raised(first_error, terminator(block)) if raises and unraised else first_error

    def _extend(self, op: Operation, first_error: FirstError, known: Set[Any]) -> FirstError:
        """Replace a loop, a conditional or a call by one that passes the record through."""
        if op.name == _WHILE:
            waits, condition, body = _waits(op), _condition(op), op.regions[1].blocks[0]
            *_, seen = self._arguments(condition, op)
            _return_more(body, self._thread(body, self._arguments(body, op), known))
            if waits:
                end = terminator(condition)
                with ir.InsertionPoint(end), end.location:
                    goes_on = hlo.and_(end.operands[0], compare(seen, splat(seen.type, 0), "EQ"))
                return_from(condition, [goes_on])
        for block in (region.blocks[0] for region in op.regions if op.name in _BRANCHES):
            _return_more(block, self._thread(block, first_error, known))
        new = replaced(op, [*op.operands, *([] if op.name in _BRANCHES else first_error)], self.codes.types)
        if self.opaque_zero and new.name == _WHILE:
            new.attributes[OPAQUE_ZERO] = ir.UnitAttr.get()
        return list(new.results)[-len(first_error) :]

    def _arguments(self, block: ir.Block, op: Operation) -> FirstError:
        """Add the record as further arguments of a block of `op`, and return these."""
        return [block.add_argument(t, op.location) for t in self.codes.types]

    def _extend_function(self, function: Operation) -> None:
        block, types, attributes = entry(function), self.codes.types, function.attributes
        _return_more(block, self._thread(block, self._arguments(block, function), frozenset()))
        if self.opaque_zero:
            attributes[OPAQUE_ZERO] = ir.UnitAttr.get()
        old = attributes["function_type"].value
        attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get([*old.inputs, *types], [*old.results, *types])
        )
        for name in ("arg_attrs", "res_attrs"):
            if name in attributes:
                attributes[name] = ir.ArrayAttr.get([*attributes[name], *[ir.DictAttr.get({})] * len(types)])


def _with_steps(op: Operation) -> list[Operation]:
    return [op, *(_steps(op) if op.name in _PASSED_THROUGH else [])]


# --- loops -----------------------------------------------------------------------------------------------------


def _condition(loop: Operation) -> ir.Block:
    return loop.regions[0].blocks[0]


def _waits(op: Operation) -> bool:
    """Return whether `op` is a loop that might run for ever on wrong rows: one that does not count to a number."""
    return op.name == _WHILE and not _counts(op)


def may_wait(op: Operation) -> bool:
    """Return whether `op` is a loop that need not come to an end: it counts to no number, whatever else it looks at."""
    if op.name != _WHILE:
        return False
    conditions = [terminator(_condition(op)).operands[0]]
    for value in conditions:  # grows meanwhile
        conditions += operands_of(value, "and") or []
    return not any(_counts(op, value) for value in conditions)


def _counts(loop: Operation, predicate: Value | None = None) -> bool:
    condition, body = _condition(loop), loop.regions[1].blocks[0]
    compared = operands_of(predicate or terminator(condition).operands[0], "compare", "LT")
    if not compared or not _is_argument(compared[0], condition):
        return False
    step, end = compared
    if _is_argument(end, condition):  # a value that the loop is given and passes on
        number = end.arg_number
        if terminator(body).operands[number] != body.arguments[number]:
            return False
        end = loop.operands[number]
    number = step.arg_number
    by = added_by_step(body.arguments[number], terminator(body).operands[number], {})
    return constant(end) is not None and by is not None and by > 0


def _is_argument(value: Value, block: ir.Block) -> bool:
    return isinstance(value, ir.BlockArgument) and value.owner == block


def _carry_predicate(loop: Operation) -> None:
    """Have a loop evaluate its condition before the first step and after each, where a record can be made of it."""
    condition, body, location = _condition(loop), loop.regions[1].blocks[0], loop.location
    predicate = terminator(condition).operands[0]
    kind = predicate.type
    start = _copy(condition, dict(zip(condition.arguments, loop.operands, strict=True)), loop, predicate)
    end = terminator(body)
    goes_on = _copy(condition, dict(zip(condition.arguments, end.operands, strict=True)), end, predicate)
    _return_more(body, [goes_on])
    body.add_argument(kind, location)
    carried = condition.add_argument(kind, location)
    return_from(condition, [carried])
    for op in reversed([operation(op) for op in condition.operations][:-1]):
        op.erase()
    replaced(loop, [*loop.operands, start], [kind])


def _copy(block: ir.Block, renamed: dict[Value, Value], before: Operation, result: Value) -> Value:
    """Copy the operations of a block to another place with other arguments, and return the copy of `result`."""
    with ir.InsertionPoint(before):
        for op in [operation(op) for op in block.operations][:-1]:
            new = operation(op.clone())
            for user, number, value in list(nested_operands(new)):
                if value in renamed:
                    user.operands[number] = renamed[value]
            renamed |= dict(zip(op.results, new.results, strict=True))
    return renamed.get(result, result)


def _return_more(block: ir.Block, values: Sequence[Value]) -> None:
    return_from(block, [*terminator(block).operands, *values])


# --- what it says ----------------------------------------------------------------------------------------------


class _Position(NamedTuple):
    """The rows that an op addresses."""

    index: Value
    span: int  #: each index is the first of so many rows
    size: Value | int  #: how many rows there are, if need be as int32 `[*batch]`
    mask: Value | None  #: bool of the shape of the index: False where the op does nothing


def _position(op: Operation) -> _Position:
    index, size = index_and_size(op)
    mask = mask_of(op)
    if target(op) == PREFIX + "check":
        return _Position(index, 1, op.operands[1] if size is None else size, mask)
    one, one_mask = shared_scalar(index), None if mask is None else shared_scalar(mask)
    if one is not None and (mask is None) == (one_mask is None):  # the program repeats one number
        index, mask = one, one_mask
    (span,) = box_of(op)
    return _Position(index, span, size, mask)


#: A code has a number of an op and of a size in the upper half. Ops of one name in one place have one number, and
#: this many numbers have places.
_OPS, _PLACES = 2**12, 2**11


class _Codes:
    """Writes and reads a record: its code has the lower half of the index, and above it the numbers of the op and size.

    A program with indices of 64 bits carries their upper half beside the code. A computed size comes before it.
    """

    def __init__(self, strict: Sequence[Operation], places: Places) -> None:
        self.places = places
        positions = list(map(_position, strict))
        elements = [p.index.type.element_type for p in positions]
        self.is_wide = any(e.width == 64 or (e.width == 32 and e.is_unsigned) for e in elements)
        self.computes = any(not isinstance(p.size, int) for p in positions)
        self.ops: list[tuple[str, bool]] = []  #: names with places, and whether the index is an uint64
        self.sizes: list[int | None] = []
        self.types = [*[integer(32)] * (self.computes + self.is_wide), integer(64)]

    def checked(self, op: Operation, position: _Position, first_error: FirstError) -> FirstError:
        """Return the record after an op. The op's index becomes the record if it is the first that is out of range."""
        index, size, outside = _first_out_of_bounds(position)
        element, code = index.type.element_type, first_error[-1].type
        is_long = element.is_unsigned and element.width == 64
        name = self.places.named(op) if len(self.ops) < _PLACES else config(op).op or ""
        number = _number(self.ops, (name, is_long)) + 1
        of_size = _number(self.sizes, position.size if isinstance(position.size, int) else None)
        whole = hlo.bitcast_convert(code, index) if is_long else hlo.convert(code, index)
        lower = hlo.and_(whole, splat(code, _LOWER))
        found = [hlo.or_(lower, splat(code, (of_size * _OPS + number) << 32))]
        if self.is_wide:
            found.insert(0, hlo.convert(integer(32), hlo.shift_right_logical(whole, splat(code, 32))))
        if self.computes:
            found.insert(0, size)
        first = hlo.and_(outside, compare(first_error[-1], splat(code, 0), "EQ"))
        return [hlo.select(first, new, old) for new, old in zip(found, first_error, strict=True)]

    def raised(self, first_error: FirstError, before: Operation) -> FirstError:
        """Raise the record if there is one, and return it as it is after that."""
        with ir.InsertionPoint(before), before.location:
            found = self._read(first_error)
            raised = [self._raised(is_long, *found) for is_long in dict.fromkeys(long for _, long in self.ops)]
            return [*first_error[:-1], hlo.convert(first_error[-1].type, functools.reduce(hlo.or_, raised))]

    def _raised(self, is_long: bool, index: Value, size: Value, op: Value) -> Value:
        """Check the index of the one op that was recorded, and no rows of the others."""
        numbers = {n: name for n, (name, long) in enumerate(self.ops, 1) if long == is_long}
        own = hlo.constant(ir.DenseElementsAttr.get(np.array([*numbers], np.int32)))
        each = [repeated(x, [len(numbers)]) for x in (index, size, op)]
        is_here = compare(own, each.pop(), "EQ")
        index, size = (hlo.select(is_here, x, splat(x.type, n)) for x, n in zip(each, (0, 1), strict=True))
        if is_long:
            index = hlo.bitcast_convert(tensor(index.type.shape, ir.IntegerType.get_unsigned(64)), index)
        return _smallest(_call_of_check("\n".join(numbers.values()), index, size, raises=True))

    def _read(self, first_error: FirstError) -> tuple[Value, Value, Value]:
        """Return the index, the size and the number of the op."""
        *others, code = first_error
        half = splat(code.type, 32)
        upper = hlo.convert(integer(32), hlo.shift_right_logical(code, half))
        if self.is_wide:
            lower = hlo.and_(code, splat(code.type, _LOWER))
            index = hlo.or_(hlo.shift_left(hlo.convert(code.type, others[-1]), half), lower)
        else:
            index = hlo.shift_right_arithmetic(hlo.shift_left(code, half), half)
        of_size = hlo.shift_right_logical(upper, splat(upper.type, _OPS.bit_length() - 1))
        size = others[0] if self.computes else splat(upper.type, 1)
        for number, known in enumerate(self.sizes):
            if known is not None:
                size = hlo.select(compare(of_size, splat(upper.type, number), "EQ"), splat(upper.type, known), size)
        return index, size, hlo.and_(upper, splat(upper.type, _OPS - 1))


_LOWER = 2**32 - 1


def _number(known: list[Any], one: Any) -> int:
    """Return the number of something, which it keeps from then on."""
    if one not in known:
        known.append(one)
    return known.index(one)


def _call_of_check(op: str, index: Value, size: Value, *, raises: bool) -> Value:
    """Have a kernel check an index, and return the index."""
    attributes = {"op": ir.StringAttr.get(op), "strict": ir.BoolAttr.get(raises)}
    result = custom_call("check", [index, size], tensor(index.type.shape, integer(32).element_type), attributes)
    call = operation(result.owner)
    call.attributes["has_side_effect"] = ir.BoolAttr.get(raises)
    call.attributes[LOWERING] = ir.StringAttr.get("ffi")
    return result


def _first_out_of_bounds(position: _Position) -> tuple[Value, Value, Value]:
    """Return the first index that is out of range, the number of rows there, and whether there is one."""
    index, span, size, mask = position
    if mask is not None:  # examples may share one of the two
        shape = [n if m == 1 else m for m, n in zip(index.type.shape, mask.type.shape, strict=True)]
        index, mask = for_each(index, shape), for_each(mask, shape)
    if span > 1:
        # The first number out of range is the first of all, or the number after the last row of the buffer.
        index = widened(index, size)
        fits = compare(index, splat(index.type, size - span), "LE")
        index = hlo.select(fits, index, hlo.maximum(index, splat(index.type, size)))
    shape, int32 = index.type.shape, ir.IntegerType.get_signless(32)
    sizes = splat(tensor(shape, int32), size) if isinstance(size, int) else at_positions(size, shape)
    if shape:
        flat = [math.prod(shape)]
        index, sizes, mask = (
            v if v is None else hlo.reshape(tensor(flat, v.type.element_type), v) for v in (index, sizes, mask)
        )
    outside = is_out_of_bounds(index, size if isinstance(size, int) else sizes)
    if mask is not None:
        outside = hlo.and_(outside, mask)
    if not shape:
        return index, sizes, outside
    if isinstance(size, int) and _fits_beside_its_place(index):
        first, found = _first_in_one_number(index, outside)
        return first, splat(integer(32), size), found
    places = tensor(index.type.shape, ir.IntegerType.get_signless(64))
    place = tensor([], places.element_type)
    none = splat(place, index.type.shape[0])
    candidates = hlo.select(outside, hlo.iota(places, mlir.i64_attr(0)), splat(places, index.type.shape[0]))
    first = _smallest(candidates, none)
    at, rows = (
        hlo.reshape(tensor([], v.type.element_type), hlo.dynamic_slice(v, [first], mlir.dense_int_array([1])))
        for v in (index, sizes)
    )
    return at, rows, compare(first, none, "LT")


def _fits_beside_its_place(index: Value) -> bool:
    element = index.type.element_type
    return element.width < 32 or (element.width == 32 and not element.is_unsigned)


def _first_in_one_number(index: Value, outside: Value) -> tuple[Value, Value]:
    """Return the first index that is flagged, and whether there is one.

    Place and index are halves of one number, so that one reduction finds both: these are done in every step.
    """
    whole = tensor(index.type.shape, ir.IntegerType.get_signless(64))
    half = splat(whole, 32)
    places = hlo.shift_left(hlo.iota(whole, mlir.i64_attr(0)), half)
    both = hlo.or_(places, hlo.and_(hlo.convert(whole, index), splat(whole, _LOWER)))
    none = splat(integer(64), 2**63 - 1)
    first = _smallest(hlo.select(outside, both, splat(whole, 2**63 - 1)), none)
    half = splat(integer(64), 32)
    return hlo.shift_right_arithmetic(hlo.shift_left(first, half), half), compare(first, none, "NE")


def _smallest(values: Value, none: Value | None = None) -> Value:
    """Return the smallest of some numbers and `none`, by default 0."""
    kind = tensor([], values.type.element_type)
    reduce = hlo.ReduceOp([kind], [values], [splat(kind, 0) if none is None else none], mlir.dense_int_array([0]))
    block = reduce.regions[0].blocks.append(kind, kind)
    with ir.InsertionPoint(block):
        hlo.return_([hlo.minimum(*block.arguments)])
    return reduce.results[0]
