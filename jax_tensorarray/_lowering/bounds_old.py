"""Finds indices that the compiler can prove to be in range: loop counters, `jnp.arange`, and numbers near these.

The bounds of a value are the least and the greatest number that any of its elements may be. They follow from the
operations that make it, on every path that the program may take. A number that wraps or is data has no bounds, and the
index is checked (`record`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import (
    IN_RANGE,
    PREFIX,
    addresses_rows,
    box_of,
    index_number,
    index_sizes,
    target,
)
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    added_by_step,
    callee,
    callers_of,
    constant,
    direction_of,
    entry,
    joined_columns,
    operands_of,
    operation,
    terminator,
    walk,
)

Bounds = tuple[int, int]

#: Values that are made by a longer chain of operations are not looked at.
_DEEPEST = 40

#: Operations that return elements of some operands as they are, or in another dtype.
_CHOOSING = {
    **dict.fromkeys(["broadcast_in_dim", "reshape", "slice", "dynamic_slice", "reverse", "transpose"], slice(1)),
    **dict.fromkeys(["convert", "concatenate"], slice(None)),
    "dynamic_update_slice": slice(2),
    "select": slice(1, None),
}
#: The bounds that these operations make of the bounds of two operands; a bool is 0 or 1.
_COMBINING: dict[str, Callable[[Bounds, Bounds], Bounds | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "subtract": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "multiply": lambda x, y: (x[0] * y[0], x[1] * y[1]) if x[0] >= 0 and y[0] >= 0 else None,
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "divide": lambda x, y: (x[0] // y[1], x[1] // y[0]) if x[0] >= 0 and y[0] > 0 else None,
    "remainder": lambda x, y: (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None,
    "and": lambda x, y: (int(x == y == (1, 1)), min(x[1], y[1])) if x[0] >= 0 and y[0] >= 0 else None,
    "LT": lambda x, y: (int(x[1] < y[0]), int(x[0] < y[1])),
    "LE": lambda x, y: (int(x[1] <= y[0]), int(x[0] <= y[1])),
    "GT": lambda x, y: (int(y[1] < x[0]), int(y[0] < x[1])),
    "GE": lambda x, y: (int(y[1] <= x[0]), int(y[0] <= x[1])),
    "EQ": lambda x, y: (int(x == y and x[0] == x[1]), int(x[0] <= y[1] and y[0] <= x[1])),
    "NE": lambda x, y: (int(x[1] < y[0] or y[1] < x[0]), int(x != y or x[0] != x[1])),
}


def mark_those_in_range(functions: dict[str, Operation]) -> None:
    """Mark every row op and check whose index is provably in range."""
    bounds = BoundsOf(functions, callers_of(functions))
    for op in [op for function in functions.values() for op in walk(function) if addresses_rows(op)]:
        number = index_number(op)
        index = op.operands[number]
        if all(_is_in_range(bounds(start), places) for start, places in _starts_and_places(op, index)):
            op.attributes[IN_RANGE] = ir.UnitAttr.get()
            op.operands[number] = _simplified(index, bounds)


def _starts_and_places(op: Operation, index: Value) -> Iterable[tuple[Value, int | None]]:
    """Return, for each axis, where an op starts, and in how many places it can start unless the program computes it."""
    if target(op) == PREFIX + "check":
        return [(index, constant(op.operands[1]))]
    sizes = index_sizes(op)
    places = [size - count + 1 for size, count in zip(sizes, box_of(op), strict=True)]
    return zip(joined_columns(index, len(sizes)) or [index] * len(sizes), places, strict=True)


def _is_in_range(bounds: Bounds | None, places: int | None) -> bool:
    return bounds is not None and places is not None and 0 <= bounds[0] <= bounds[1] < places


def _simplified(value: Value, bounds: "BoundsOf") -> Value:
    """Return the same numbers by fewer operations: `i` for `clip(where(i < 0, i + n, i), 0, n - 1)` if that is `i`."""
    if isinstance(value, ir.BlockArgument):
        return value
    op = operation(value.owner)
    name = op.name.removeprefix("stablehlo.")
    if name == "convert" and op.operands[0].type == value.type:
        return _simplified(op.operands[0], bounds)
    if name == "select" and (of_predicate := bounds(op.operands[0])) in ((0, 0), (1, 1)):
        return _simplified(op.operands[2 - of_predicate[0]], bounds)
    if name == "slice" and (piece := _joined_piece(op)) is not None:
        return _simplified(piece, bounds)
    if name == "clamp":
        lower, found, upper = map(bounds, op.operands)
        if lower and found and upper and lower[1] <= found[0] and found[1] <= upper[0]:  # whatever the limits are
            return _simplified(op.operands[1], bounds)
    if name not in _KEEPING:
        return value
    operands = [_simplified(x, bounds) for x in op.operands]
    if operands == list(op.operands):
        return value
    with ir.InsertionPoint(op):
        new = op.clone()
    for number, operand in enumerate(operands):
        new.operands[number] = operand
    return new.results[0]


def _joined_piece(op: Operation) -> Value | None:
    """Return the array that a slice takes out of several that have been concatenated, if it is one of them."""
    if set(ir.DenseI64ArrayAttr(op.attributes["strides"])) - {1}:
        return None  # its parts may be of several
    joined = operands_of(op.operands[0], "concatenate")
    axis = operation(op.operands[0].owner).attributes["dimension"].value if joined else 0
    first = list(ir.DenseI64ArrayAttr(op.attributes["start_indices"]))[axis] if joined else 0
    for piece in joined:
        if first <= 0:
            return piece if first == 0 and piece.type == op.results[0].type else None
        first -= piece.type.shape[axis]
    return None


#: The operations whose operands are simplified too.
_KEEPING = frozenset(("add", "broadcast_in_dim", "clamp", "concatenate", "multiply", "reshape"))


class BoundsOf:
    """Finds the bounds of a value of a module, or None.

    With `call`, a function is analysed for that call only, and `outer` gives the bounds of the call's operands.
    """

    def __init__(
        self,
        functions: dict[str, Operation],
        callers: dict[str, list[Operation]],
        call: Operation = None,
        outer: "BoundsOf | None" = None,
    ) -> None:
        self.functions, self.callers, self.call, self.outer = functions, callers, call, outer
        self.known: dict[Value, Bounds | None] = {}
        self.depth: int = 0 if outer is None else outer.depth
        self.assumes: bool = outer is not None and outer.assumes

    def __call__(self, value: Value) -> Bounds | None:
        if value not in self.known:
            self.known[value] = None  # meanwhile: what depends on itself has none
            kind = value.type.element_type if isinstance(value.type, ir.RankedTensorType) else None
            if isinstance(kind, ir.IntegerType) and self.depth < _DEEPEST:
                self.depth += 1
                found = self._argument(value) if isinstance(value, ir.BlockArgument) else self._result(value)
                self.depth -= 1
                self.known[value] = found or (0, 1) if kind.width == 1 else _unless_wrapped(found, kind)
        return self.known[value]

    def _any(self, values: Iterable[Value]) -> Bounds | None:
        return _union(list(map(self, values)))

    def _argument(self, value: Value) -> Bounds | None:
        owner, number = operation(value.owner.owner), value.arg_number
        if owner.name == "stablehlo.while":
            return self._carried(owner, number, in_step=value.owner == owner.regions[1].blocks[0])
        if owner.name != "func.func":
            return None
        if self.outer is not None:
            return self.outer(self.call.operands[number])
        return self._any(call.operands[number] for call in self.callers[owner.attributes["sym_name"].value])

    def _result(self, value: Value) -> Bounds | None:
        op, number = operation(value.owner), ir.OpResult(value).result_number
        name = op.name.removeprefix("stablehlo.")
        if name == "constant":
            return _of_constant(op.attributes["value"])
        if name == "iota":
            return 0, value.type.shape[op.attributes["iota_dimension"].value] - 1
        if name == "sign" and (bounds := self(op.operands[0])) is not None:
            return max(-1, min(bounds[0], 1)), max(-1, min(bounds[1], 1))
        if name == "clamp":
            least, _, most = map(self, op.operands)
            return None if least is None or most is None else (min(least[0], most[0]), most[1])
        if name == "select" and (of_predicate := self(op.operands[0])) in ((0, 0), (1, 1)):
            return self(op.operands[2 - of_predicate[0]])
        if name == "slice" and (piece := _joined_piece(op)) is not None:
            return self(piece)
        if name in _CHOOSING:
            return self._any(list(op.operands)[_CHOOSING[name]])
        if name == "and" and self._exclude_each_other(*op.operands):
            return 0, 0
        if (kind := direction_of(op) if name == "compare" else name) in _COMBINING:
            left, right = map(self, op.operands)
            return None if left is None or right is None else _COMBINING[kind](left, right)
        if name in ("case", "if"):
            return self._any(terminator(region.blocks[0]).operands[number] for region in op.regions)
        if name == "optimization_barrier":
            return self(op.operands[number])
        if name == "while":
            return self._carried(op, number, in_step=False)
        if (called := callee(op)) is not None:
            inside = BoundsOf(self.functions, self.callers, op, self)
            return inside(terminator(entry(self.functions[called])).operands[number])
        return None

    def _exclude_each_other(self, signs_differ: Value, has_rest: Value) -> bool:
        """Return whether two conditions of jnp, which both hold if a quotient is rounded down, can never both hold.

        They are `sign(x) != 1` and `remainder(x, y) != 0`. If x is not negative, only 0 has another sign, and it has no
        remainder.
        """
        signs, rest = (operands_of(_bare(condition), "compare", "NE") for condition in (signs_differ, has_rest))
        if not signs or not rest or self(signs[1]) != (1, 1) or constant(rest[1]) != 0:
            return False
        of_sign, of_rest = operands_of(signs[0], "sign"), operands_of(rest[0], "remainder")
        bounds = self(of_sign[0]) if of_sign and of_sign == of_rest[:1] else None
        return bounds is not None and bounds[0] >= 0

    def _carried(self, loop: Operation, number: int, *, in_step: bool) -> Bounds | None:
        """Return the bounds of a carried value: when a step begins or, if not `in_step`, also after the last one."""
        start, body = self(loop.operands[number]), loop.regions[1].blocks[0]
        carried, after = body.arguments[number], terminator(body).operands[number]
        if start is None:
            return None
        if (by := added_by_step(carried, after, self.functions)) is not None:
            most = self._most_steps(loop) if by else 0
            moved = None if most is None else by * max(most - in_step, 0)
            return None if moved is None else (start[0] + min(moved, 0), start[1] + max(moved, 0))
        if self.assumes:  # one induction in another would take long
            return None
        kept = _union([start, self._after_step(after, carried, start)])
        return kept if kept is not None and kept == _union([kept, self._after_step(after, carried, kept)]) else None

    def _after_step(self, value: Value, carried: Value, bounds: Bounds) -> Bounds | None:
        """Return the bounds of a value on the assumption that `carried` has those bounds."""
        inside = BoundsOf(self.functions, self.callers, self.call, self.outer)
        inside.assumes, inside.depth = True, self.depth
        inside.known.update({known: b for known, b in self.known.items() if b is not None})
        inside.known[carried] = bounds
        return inside(value)

    def _most_steps(self, loop: Operation) -> int | None:
        """Return the most steps that a loop can have, if a number that grows with each has to be less than another."""
        condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
        most = []
        for counter, limit in _less_than(terminator(condition).operands[0]):
            end = self(limit)
            if end is None or not isinstance(counter, ir.BlockArgument) or counter.owner != condition:
                continue
            number = counter.arg_number
            start, after = self(loop.operands[number]), terminator(body).operands[number]
            by = added_by_step(body.arguments[number], after, self.functions)
            if start is not None and by is not None and by > 0:
                last = max(start[1], end[1] - 1 + by)
                if _unless_wrapped((start[0], last), counter.type.element_type) is not None:
                    most.append(max(0, -((start[0] - end[1]) // by)))
        return min(most, default=None)


def _less_than(predicate: Value) -> Iterator[tuple[Value, Value]]:
    """Yield pairs of numbers such that the first is less than the second if the predicate is true."""
    predicate = _bare(predicate)
    if less := operands_of(predicate, "compare", "LT"):
        yield less[0], less[1]
    for operand in operands_of(predicate, "and"):
        yield from _less_than(operand)


def _bare(predicate: Value) -> Value:
    """Return a bool without the operations that turn it into a bool again."""
    while True:
        differ = operands_of(predicate, "compare", "NE")
        made_of = differ[:1] if differ and constant(differ[1]) == 0 else operands_of(predicate, "convert")
        if not made_of or getattr(made_of[0].type.element_type, "width", None) != 1:
            return predicate
        predicate = made_of[0]


def _union(found: list[Bounds | None]) -> Bounds | None:
    known = [bounds for bounds in found if bounds is not None]
    return (min(b[0] for b in known), max(b[1] for b in known)) if known and len(known) == len(found) else None


def _unless_wrapped(bounds: Bounds | None, kind: Any) -> Bounds | None:
    """Return the bounds if the dtype has all these numbers, else None."""
    least = 0 if kind.is_unsigned else -(2 ** (kind.width - 1))
    return bounds if bounds is not None and least <= bounds[0] and bounds[1] < least + 2**kind.width else None


def _of_constant(attribute: Any) -> Bounds | None:
    try:
        numbers = np.asarray(ir.DenseIntElementsAttr(attribute))
    except (TypeError, ValueError):  # of 4 bits, or kept elsewhere
        return None
    return (int(numbers.min()), int(numbers.max())) if numbers.size else None
