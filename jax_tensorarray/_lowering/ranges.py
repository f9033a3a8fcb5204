"""Between which bounds the integers of a StableHLO module lie, as far as the program says so.

An index that is in range for every input needs no check while the program runs. The indices of most loops are such:
counters, slices of an `iota`, and what is computed from these. Nothing is assumed of what the program is given.

Counters are recognised as what grows by a constant in each step of a loop, bounded by its condition. All else that a
loop carries is guessed to stay as it starts, then checked. Functions are looked at anew for each of their callers.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.mlir import (
    PREFIX,
    WRITTEN_FIRST,
    Operation,
    Value,
    entry,
    operation,
    target,
    terminator,
    walk,
)


class Interval(NamedTuple):
    """All integers from `low` to `high`; none if `low` is more."""

    low: float
    high: float

    @property
    def is_empty(self) -> bool:
        return self.low > self.high

    def __or__(self, other: "Interval") -> "Interval":
        if self.is_empty or other.is_empty:
            return other if self.is_empty else self
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def __and__(self, other: "Interval") -> "Interval":
        return Interval(max(self.low, other.low), min(self.high, other.high))

    def holds(self, other: "Interval") -> bool:
        return other.is_empty or (self.low <= other.low and other.high <= self.high)


EMPTY = Interval(math.inf, -math.inf)
EVERYTHING = Interval(-math.inf, math.inf)
FALSE, TRUE = Interval(0, 0), Interval(1, 1)
EITHER = FALSE | TRUE

#: The operations whose call has led to where a value is, outermost first.
Calls = tuple[Operation, ...]
Key = tuple[Value, Calls]


def limits(type_: ir.Type) -> Interval:
    """What the elements of a tensor can be at all."""
    element = ir.RankedTensorType(type_).element_type if isinstance(type_, ir.RankedTensorType) else None
    if not isinstance(element, ir.IntegerType):
        return EVERYTHING
    if element.width == 1:
        return EITHER
    if element.is_unsigned:
        return Interval(0, 2**element.width - 1)
    return Interval(-(2 ** (element.width - 1)), 2 ** (element.width - 1) - 1)


def _is_integer(value: Value) -> bool:
    return limits(value.type) != EVERYTHING


class _Context(NamedTuple):
    """What has been found out, under which assumptions."""

    known: dict[Key, Interval]
    steps: dict[tuple[Operation, Calls], float]
    guessed: dict[Key, Interval]
    cases: dict[Key, Interval]
    of_all_cases: "_Context | None"  #: the one around, if there are cases


class Ranges:
    """The interval of every integer value of a module."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.functions = functions
        self.callers: dict[str, list[Operation]] = {}
        for function in functions.values():
            for op in walk(function):
                if op.name == "func.call":
                    self.callers.setdefault(op.attributes["callee"].value, []).append(op)
        self.context = _Context({}, {}, {}, {}, None)
        self.depth = 0  # of assumptions within assumptions

    def of(self, value: Value, calls: Calls = ()) -> Interval:
        """Where all elements of `value` lie."""
        key, context = (value, calls), self.context
        if key in context.guessed:
            return context.guessed[key]
        if key in context.cases:
            return context.cases[key]
        if context.of_all_cases is not None and _is_carried(value):
            return self._in(context.of_all_cases, lambda: self.of(value, calls))
        if key not in self.known:
            everything = limits(value.type)
            self.known[key] = everything  # for those who come back here while it is being found out
            if everything != EVERYTHING:
                found = self._of_argument(value, calls) if _is_argument(value) else self._of_result(value, calls)
                self.known[key] = found if everything.holds(found) else everything
        return self.known[key]

    @property
    def known(self) -> dict[Key, Interval]:
        return self.context.known

    def guessing(self, key: Key, guess: Interval, question: Callable[[], Interval]) -> Interval:
        """The answer to a question if the value of `key` were in an interval in every step of its loop."""
        return self._in(_Context({}, {}, self.context.guessed | {key: guess}, {}, None), question)

    def in_case(self, key: Key, case: Interval, question: Callable[[], Interval]) -> Interval:
        """The answer to a question if the value of `key` were in an interval in this one step.

        It says nothing of earlier steps, so what a loop carries is looked at without it.
        """
        c = self.context
        return self._in(_Context({}, c.steps, c.guessed, c.cases | {key: case}, c.of_all_cases or c), question)

    def _in(self, context: "_Context", question: Callable[[], Interval]) -> Interval:
        before, self.context = self.context, context
        self.depth += 1
        try:
            return question()
        finally:
            self.context = before
            self.depth -= 1

    # --- arguments of functions and loops ----------------------------------------------------------------------

    def _of_argument(self, value: Value, calls: Calls) -> Interval:
        owner = operation(value.owner.owner)
        if owner.name == "func.func":
            if calls:
                return self.of(calls[-1].operands[value.arg_number], calls[:-1])
            callers = self.callers.get(owner.attributes["sym_name"].value, [])
            found = EMPTY if callers else EVERYTHING
            for call in callers:
                found |= self.of(call.operands[value.arg_number], ())
            return found
        if owner.name == "stablehlo.while":
            in_body = value.owner == owner.regions[1].blocks[0]
            return self._carried(owner, value.arg_number, calls, in_body=in_body)
        return EVERYTHING

    def _carried(self, loop: Operation, k: int, calls: Calls, *, in_body: bool) -> Interval:
        """Carry `k` of a loop: before a step, or (not `in_body`) before its condition, which is after the last too."""
        body = loop.regions[1].blocks[0]
        argument, after = body.arguments[k], terminator(body).operands[k]
        start = self.of(loop.operands[k], calls)
        if after == argument:
            return start
        if not in_body:
            return start | self.of(after, calls)
        bound = self._bound(loop, k, calls)
        grows = self._growth(after, calls, (argument, calls), start.low)
        if grows.low > -math.inf or grows.high < math.inf:
            steps = self.steps(loop, calls) - 1
            # 0 * inf is no number, and stands for 0 here.
            low = start.low + (grows.low * steps if grows.low < 0 else 0)
            high = start.high + (grows.high * steps if grows.high > 0 else 0)
            within = Interval(low, high) & bound
            last = Interval(within.low + min(grows.low, 0), within.high + max(grows.high, 0))
            if limits(argument.type).holds(last):  # else it wraps
                return within
        if self.depth < _MOST_ASSUMED:
            guess = start & bound
            for attempt in range(3):
                found = bound & self.guessing((argument, calls), guess, lambda: self.of(after, calls))
                if guess.holds(found):
                    return guess
                grown = guess | found
                if attempt:  # it will go on so, as far as the condition lets it
                    low = -math.inf if grown.low < guess.low else guess.low
                    high = math.inf if grown.high > guess.high else guess.high
                    grown = Interval(low, high) & bound & limits(argument.type)
                guess = grown
        return limits(argument.type) & bound

    def _bound(self, loop: Operation, k: int, calls: Calls) -> Interval:
        """What the condition of a loop says of carry `k` where it holds."""
        condition = loop.regions[0].blocks[0]
        found = EVERYTHING
        for left, direction, right in self._conjuncts(terminator(condition).operands[0], calls):
            for one, how, other in ((left, direction, right), (right, _MIRRORED[direction], left)):
                if self.origin(one, calls) == (condition.arguments[k], calls):
                    limit = self.of(other, calls)
                    if how in ("LT", "LE", "EQ"):
                        found &= Interval(-math.inf, limit.high - (how == "LT"))
                    if how in ("GT", "GE", "EQ"):
                        found &= Interval(limit.low + (how == "GT"), math.inf)
        return found

    def _conjuncts(self, predicate: Value, calls: Calls) -> Iterator[tuple[Value, str, Value]]:
        """The comparisons all of which hold where `predicate` does, and that are made where it is made."""
        value, at = self.origin(predicate, calls)
        op = None if _is_argument(value) or at != calls else operation(value.owner)
        if op is not None and op.name == "stablehlo.and":
            for operand in op.operands:
                yield from self._conjuncts(operand, calls)
        elif op is not None and op.name == "stablehlo.compare" and _is_integer(op.operands[0]):
            yield op.operands[0], _direction(op), op.operands[1]

    def steps(self, loop: Operation, calls: Calls) -> float:
        """How many steps a loop takes at most, by the counters that its condition bounds."""
        key, steps = (loop, calls), self.context.steps
        if key not in steps:
            steps[key] = math.inf
            body = loop.regions[1].blocks[0]
            fewest = math.inf
            for k, argument in enumerate(body.arguments):
                if not _is_integer(argument) or (bound := self._bound(loop, k, calls)) == EVERYTHING:
                    continue
                start = self.of(loop.operands[k], calls)
                grows = self._growth(terminator(body).operands[k], calls, (argument, calls), start.low)
                if grows.low > 0 and limits(argument.type).high >= bound.high + grows.high:
                    fewest = min(fewest, (bound.high - start.low) // grows.low + 1)
                elif grows.high < 0 and limits(argument.type).low <= bound.low + grows.low:
                    fewest = min(fewest, (start.high - bound.low) // -grows.high + 1)
            steps[key] = max(fewest, 1)
        return steps[key]

    def origin(self, value: Value, calls: Calls) -> Key:
        """Where a value has been computed, past functions that return and operations that pass it on."""
        while True:
            if _is_argument(value):
                if operation(value.owner.owner).name != "func.func" or not calls:
                    return value, calls
                value, calls = calls[-1].operands[value.arg_number], calls[:-1]
                continue
            op = operation(value.owner)
            if op.name == "func.call":
                value, calls = self._returned(value), (*calls, op)
            elif op.name in ("stablehlo.optimization_barrier", "stablehlo.reshape") or (
                op.name == "stablehlo.convert" and op.operands[0].type == value.type
            ):
                value = op.operands[_number(value) if op.name.endswith("barrier") else 0]
            else:
                return value, calls

    def _returned(self, value: Value) -> Value:
        call = operation(value.owner)
        return terminator(entry(self.functions[call.attributes["callee"].value])).operands[_number(value)]

    def _growth(self, after: Value, calls: Calls, before: Key, least: float) -> Interval:
        """How much more `after` is than `before`, which starts with `least` or more."""
        grows = self._difference(after, calls, before, least)
        # What does not shrink stays as large as it was first. What may shrink has no such bound.
        return grows if grows.low >= 0 else self._difference(after, calls, before, -math.inf)

    def _difference(self, value: Value, calls: Calls, other: Key, least: float) -> Interval:
        """A value minus another one that is `least` or more."""
        value, calls = self.origin(value, calls)
        if (value, calls) == other:
            return FALSE
        op = None if _is_argument(value) else operation(value.owner)
        if op is not None and op.name in ("stablehlo.add", "stablehlo.subtract"):
            root, more = self.offset(value, calls)
            if root == other:  # that of anything else may wrap where `other` does not
                return more
        if op is not None and op.name == "stablehlo.select":
            one, another = (self._difference(v, calls, other, least) for v in op.operands[1:])
            return one | another
        if op is not None and op.name in ("stablehlo.maximum", "stablehlo.minimum"):
            one, another = (self._difference(v, calls, other, least) for v in op.operands)
            low = max(one.low, another.low)
            if op.name == "stablehlo.minimum" or -math.inf < min(one.low, another.low) < 0:
                low = min(one.low, another.low)  # one of the two may wrap, and then be the other way round
            return Interval(low, max(one.high, another.high))
        return Interval(-math.inf, self.of(value, calls).high - least)

    def offset(self, value: Value, calls: Calls, most: int = 8) -> tuple[Key, Interval]:
        """A value as another one plus something in an interval, `most` additions before it."""
        value, calls = self.origin(value, calls)
        itself = (value, calls), FALSE
        if _is_argument(value) or not most:
            return itself
        op = operation(value.owner)
        if op.name in ("stablehlo.add", "stablehlo.subtract"):
            sign = 1 if op.name == "stablehlo.add" else -1
            left, right = op.operands
            for one, other in ((left, right), (right, left))[: 1 + (sign == 1)]:
                amount = self._constant(other, calls)
                if amount is not None:
                    root, more = self.offset(one, calls, most - 1)
                    return root, Interval(more.low + sign * amount, more.high + sign * amount)
        return itself

    def _constant(self, value: Value, calls: Calls) -> float | None:
        found = self.of(value, calls)
        return found.low if found.low == found.high else None

    # --- results of operations ---------------------------------------------------------------------------------

    def _of_result(self, value: Value, calls: Calls) -> Interval:
        op, k = operation(value.owner), _number(value)
        context = self.context
        if context.of_all_cases is not None and op.name not in _ONE_BY_ONE and not all(map(_is_scalar, context.cases)):
            # What holds of one element at a time says nothing where they are moved.
            return self._in(context.of_all_cases, lambda: self.of(value, calls))
        if op.name == "func.call":
            return self.of(self._returned(value), (*calls, op)) if len(calls) < _DEEPEST else EVERYTHING
        if op.name == "stablehlo.while":
            return self._carried(op, k, calls, in_body=False)
        if op.name in ("stablehlo.case", "stablehlo.if"):
            found = EMPTY
            for region in op.regions:
                found |= self.of(terminator(region.blocks[0]).operands[k], calls)
            return found
        if op.name == "stablehlo.select":
            return self._select(op, calls)
        if op.name == "stablehlo.constant":
            return _of_constant(op)
        if op.name == "stablehlo.iota":
            return Interval(0, value.type.shape[op.attributes["iota_dimension"].value] - 1)
        if op.name in ("stablehlo.optimization_barrier", "stablehlo.sort"):
            return self.of(op.operands[k], calls)
        if op.name == "chlo.top_k" and k == 1:
            return Interval(0, op.operands[0].type.shape[-1] - 1)
        if target(op).startswith(PREFIX):
            return self._of_row_op(op, k, calls)
        if op.name in _SAME:
            return self.of(op.operands[0], calls)
        if op.name in _JOINED:
            found = EMPTY
            for operand in op.operands[: _JOINED[op.name]]:
                found |= self.of(operand, calls)
            return found
        if op.name == "stablehlo.compare" and _is_integer(op.operands[0]):
            return _compare(_direction(op), *(self.of(v, calls) for v in op.operands))
        rule = _ARITHMETIC.get(op.name)
        if rule is None or not all(map(_is_integer, op.operands)):
            return EVERYTHING
        operands = [self.of(v, calls) for v in op.operands]
        return EMPTY if any(x.is_empty for x in operands) else rule(*operands)

    def _of_row_op(self, op: Operation, k: int, calls: Calls) -> Interval:
        """What our own calls give. Rows that are skipped are zeros."""
        name = target(op).removeprefix(PREFIX)
        if name == "empty" and WRITTEN_FIRST in op.attributes:
            return EMPTY
        if name in ("fence", "read_part"):
            return self.of(op.operands[0], calls)
        if name in ("read", "mask", "clear"):
            return self.of(op.operands[0], calls) | FALSE
        if name in ("write", "write_part"):
            return self.of(op.operands[0], calls) | self.of(op.operands[2], calls)
        if name == "swap":
            # Of duplicates, a later one takes out what an earlier one has put in.
            return self.of(op.operands[0], calls) | self.of(op.operands[2], calls) | FALSE
        return EVERYTHING

    def _select(self, op: Operation, calls: Calls) -> Interval:
        predicate, on_true, on_false = op.operands
        found = self._chosen(op, calls)
        if self.depth >= _MOST_ASSUMED or EMPTY in (self.of(on_true, calls), self.of(on_false, calls)):
            return found
        if self.of(predicate, calls) == EITHER:
            # Such as the select of a floor division: which it is depends on the sign of something else.
            for key, at in dict.fromkeys(self._thresholds(predicate, calls)):
                whole, by_case = self.of(*key), EMPTY
                if not whole.low <= at <= whole.high or whole.low == whole.high:
                    continue  # there is only one case
                for part in (Interval(-math.inf, at - 1), Interval(at, at), Interval(at + 1, math.inf)):
                    if not (case := whole & part).is_empty:
                        by_case |= self.in_case(key, case, lambda: self._chosen(op, calls))
                found &= by_case
        return found

    def _chosen(self, op: Operation, calls: Calls) -> Interval:
        predicate, on_true, on_false = op.operands
        which = self.of(predicate, calls)
        found = EMPTY
        if which.high == 1:
            found |= self.of(on_true, calls)
        if which.low == 0:
            found |= self.of(on_false, calls)
        return found

    def _thresholds(self, predicate: Value, calls: Calls) -> Iterator[tuple[Key, float]]:
        """Values and numbers such that a predicate depends on which of the two is less."""
        value, calls = self.origin(predicate, calls)
        if _is_argument(value):
            return
        op = operation(value.owner)
        if op.name == "stablehlo.sign" and _is_integer(value):
            yield self.origin(op.operands[0], calls), 0
        elif op.name == "stablehlo.compare" and _is_integer(op.operands[0]):
            for one, other in (op.operands, reversed(op.operands)):
                yield from self._thresholds(one, calls)
                limit = self._constant(other, calls)
                if limit is not None and limits(one.type) != EITHER:
                    root, more = self.offset(one, calls)
                    yield (root, limit - more.low) if more.low == more.high else (self.origin(one, calls), limit)
        elif op.name in ("stablehlo.and", "stablehlo.or", "stablehlo.not"):
            for operand in op.operands:
                yield from self._thresholds(operand, calls)


_DEEPEST = 50  # calls in calls
_MOST_ASSUMED = 3

_SAME = frozenset(
    "stablehlo." + name
    for name in ("broadcast_in_dim", "dynamic_slice", "reshape", "gather", "reverse", "slice", "transpose")
)
#: Operations whose results are elements of operands: of so many of them, or of all.
_JOINED = {"stablehlo.concatenate": None, "stablehlo.dynamic_update_slice": 2, "stablehlo.pad": 2}

#: Operations of which each element is made of those in the same place, and what passes values on.
_ONE_BY_ONE = frozenset(
    "stablehlo." + name for name in ("compare", "constant", "iota", "optimization_barrier", "reshape", "select")
) | {"func.call"}

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


def _is_argument(value: Value) -> bool:
    return isinstance(value, ir.BlockArgument)


def _is_carried(value: Value) -> bool:
    """Whether a loop carries a value from step to step, or out."""
    return operation(value.owner.owner if _is_argument(value) else value.owner).name == "stablehlo.while"


def _is_scalar(key: Key) -> bool:
    return not key[0].type.rank


def _number(value: Value) -> int:
    return int(ir.OpResult(value).result_number)


def _direction(compare: Operation) -> str:
    return str(compare.attributes["comparison_direction"]).split()[-1].rstrip(">")


def _of_constant(op: Operation) -> Interval:
    elements = op.attributes["value"]
    if not isinstance(elements, ir.DenseElementsAttr):
        return EVERYTHING
    type_ = ir.IntegerType(ir.RankedTensorType(elements.type).element_type)
    if elements.is_splat:
        number = int(ir.IntegerAttr(elements.get_splat_value()).value)
        number = number % 2**type_.width if type_.is_unsigned or type_.width == 1 else number
        return Interval(number, number)
    array = np.array(elements) if type_.width >= 8 else None
    if array is None:
        return EVERYTHING
    return Interval(int(array.min()), int(array.max())) if array.size else EMPTY


def _corners(function: Callable[[float, float], float]) -> Callable[[Interval, Interval], Interval]:
    """The interval of a function that is monotonic in each of its two arguments."""

    def rule(x: Interval, y: Interval) -> Interval:
        values = [function(a, b) for a in x for b in y]
        return Interval(min(values), max(values))

    return rule


def _divide(x: Interval, y: Interval) -> Interval:
    if y.low <= 0 <= y.high:
        return EVERYTHING
    return _corners(lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))(x, y)


def _remainder(x: Interval, y: Interval) -> Interval:
    """The remainder of a division that rounds towards zero: of the sign of `x`."""
    if y.low <= 0 <= y.high:
        return EVERYTHING
    most = max(abs(y.low), abs(y.high)) - 1
    return Interval(max(x.low, -most) if x.low < 0 else 0, min(x.high, most) if x.high > 0 else 0)


def _compare(direction: str, x: Interval, y: Interval) -> Interval:
    if x.is_empty or y.is_empty:
        return EMPTY
    if direction in ("GT", "GE"):
        return _compare(_MIRRORED[direction], y, x)
    if direction in ("LT", "LE"):
        always, never = (x.high < y.low, x.low >= y.high) if direction == "LT" else (x.high <= y.low, x.low > y.high)
    else:
        always, never = x.low == x.high == y.low == y.high, (x & y).is_empty
        if direction == "NE":
            always, never = never, always
    return TRUE if always else FALSE if never else EITHER


def _and(x: Interval, y: Interval) -> Interval:
    if x.low < 0 and y.low < 0:
        return EVERYTHING
    return Interval(x.low if x.low == x.high == y.low == y.high else 0, min(z.high for z in (x, y) if z.low >= 0))


def _or(x: Interval, y: Interval) -> Interval:
    if x.low < 0 or y.low < 0:
        return EVERYTHING
    return Interval(max(x.low, y.low), 2 ** int(max(x.high, y.high)).bit_length() - 1)


_ARITHMETIC: dict[str, Callable[..., Interval]] = {
    "stablehlo.add": lambda x, y: Interval(x.low + y.low, x.high + y.high),
    "stablehlo.subtract": lambda x, y: Interval(x.low - y.high, x.high - y.low),
    "stablehlo.multiply": _corners(lambda a, b: a * b),
    "stablehlo.divide": _divide,
    "stablehlo.remainder": _remainder,
    "stablehlo.negate": lambda x: Interval(-x.high, -x.low),
    "stablehlo.abs": lambda x: Interval(
        0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high)), max(abs(x.low), abs(x.high))
    ),
    "stablehlo.sign": lambda x: Interval((x.low > 0) - (x.low < 0), (x.high > 0) - (x.high < 0)),
    "stablehlo.minimum": lambda x, y: Interval(min(x.low, y.low), min(x.high, y.high)),
    "stablehlo.maximum": lambda x, y: Interval(max(x.low, y.low), max(x.high, y.high)),
    "stablehlo.clamp": lambda low, x, high: Interval(
        min(max(x.low, low.low), high.low), min(max(x.high, low.high), high.high)
    ),
    "stablehlo.convert": lambda x: x,
    "stablehlo.and": _and,
    "stablehlo.or": _or,
}
_ONE_BY_ONE |= _ARITHMETIC.keys()
