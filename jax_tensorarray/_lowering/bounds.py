"""Interval analysis: find indices that are provably in range: loop counters, `jnp.arange`, and numbers near these.

    row = ta_read[...] b clip(where(i < 0, i + n, i), 0, n - 1)        # `i` counts the steps of a loop of `n`
    # becomes
    row = ta_read[checked="in range" ...] b i

The bounds of a value are the least and the greatest number that its elements can be. They follow from the equations
that compute it, on every path through the program, and by induction for a carry. Numbers that may wrap, and data, have
no bounds: `record` checks such an index.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import kinds
from jax_tensorarray._lowering.equations import Atom, Block, has_type_of
from jax_tensorarray._lowering.scopes import (
    Scope,
    added_by_step,
    addresses_rows,
    index_number,
    init_of,
    inner_scopes,
    joined_columns,
    with_bodies,
)
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.starts import box_along, sizes_of
from jax_tensorarray._types import Equation

Bounds = tuple[int, int]

#: The longest chain of equations that we follow to the bounds of a value.
_DEEPEST = 50

#: Operations that return elements of some operands as they are, or in another dtype.
_CHOOSING = {
    **dict.fromkeys(("broadcast_in_dim", "copy", "dynamic_slice", "reshape", "rev", "slice"), slice(1)),
    **dict.fromkeys(("squeeze", "stop_gradient", "transpose"), slice(1)),
    **dict.fromkeys(("convert_element_type", "concatenate", "stack"), slice(None)),
    "dynamic_update_slice": slice(2),
    "select_n": slice(1, None),
}
#: The bounds of a result, computed from the bounds of two operands; a bool is 0 or 1.
_COMBINING: dict[str, Callable[[Bounds, Bounds], Bounds | None]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: (x[0] * y[0], x[1] * y[1]) if x[0] >= 0 and y[0] >= 0 else None,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "div": lambda x, y: (x[0] // y[1], x[1] // y[0]) if x[0] >= 0 and y[0] > 0 else None,
    "rem": lambda x, y: (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None,
    "and": lambda x, y: (int(x == y == (1, 1)), min(x[1], y[1])) if x[0] >= 0 and y[0] >= 0 else None,
    "lt": lambda x, y: (int(x[1] < y[0]), int(x[0] < y[1])),
    "le": lambda x, y: (int(x[1] <= y[0]), int(x[0] <= y[1])),
    "gt": lambda x, y: (int(y[1] < x[0]), int(y[0] < x[1])),
    "ge": lambda x, y: (int(y[1] <= x[0]), int(y[0] <= x[1])),
    "eq": lambda x, y: (int(x == y and x[0] == x[1]), int(x[0] <= y[1] and y[0] <= x[1])),
    "ne": lambda x, y: (int(x[1] < y[0] or y[1] < x[0]), int(x != y or x[0] != x[1])),
}


def mark_those_in_range(jaxpr: Any, *, keeps_selects: bool = False) -> Any:
    """Set `checked="in range"` on every row op and check whose index is provably in range.

    We also simplify the index. With `keeps_selects`, for GPUs, selects stay: arithmetic costs nothing there, and XLA
    duplicates a cheap index into two kernels. Then XLA no longer sees that both use the same row.
    """
    return _marked(Scope(jaxpr), BoundsOf(keeps_selects=keeps_selects))


def _marked(scope: Scope, bounds: "BoundsOf") -> Any:
    block, changed = Block(scope.closed), False
    simple: dict[Any, Atom] = {}
    for eqn in scope.jaxpr.eqns:
        new = with_bodies(eqn, [_marked(x, bounds) for x in inner_scopes(scope, eqn)])
        if addresses_rows(eqn):
            index = eqn.invars[index_number(eqn)]
            if all(_is_in_range(bounds(scope, x), count) for x, count in _starts_and_counts(scope, eqn, index)):
                _simplified(scope, index, bounds, block, simple)
                block.names.update(simple)  # for all later equations, or XLA would compute both indices
                new = eqn.replace(params=eqn.params | {"checked": "in range"})
        changed |= new is not eqn
        block.add(new)
    if block.names:
        _drop_unused(block, scope.jaxpr.outvars)
    return block.jaxpr() if changed else scope.closed


def _drop_unused(block: Block, outvars: Iterable[Atom]) -> None:
    """Drop equations that only the index before its simplification used: dead-code elimination."""
    uses = {x for x in map(block.read, outvars) if not isinstance(x, Literal)}
    live = []
    for eqn in reversed(block.eqns):
        if eqn.primitive.name not in kinds.FUSED or not uses.isdisjoint(eqn.outvars):
            live.append(eqn)
            uses.update(x for x in eqn.invars if not isinstance(x, Literal))
    block.eqns = live[::-1]


def _starts_and_counts(scope: Scope, eqn: Equation, index: Atom) -> Iterable[tuple[Atom, int | None]]:
    """Return for each axis the start of an op, and how many starts are in range: None if the program computes that."""
    if eqn.primitive is ta_check_p:
        return [(index, scope.constant(eqn.invars[1]))]
    sizes = sizes_of(eqn.invars[0].aval, eqn.params)
    counts = [size - rows + 1 for size, rows in zip(sizes, box_along(sizes, eqn.params["window"]), strict=True)]
    return zip(joined_columns(scope, index, len(sizes)) or [index] * len(sizes), counts, strict=True)


def _is_in_range(bounds: Bounds | None, count: int | None) -> bool:
    return bounds is not None and count is not None and 0 <= bounds[0] <= bounds[1] < count


def _simplified(scope: Scope, atom: Atom, bounds: "BoundsOf", block: Block, done: dict[Any, Atom]) -> Atom:
    """Return the same numbers by fewer operations: `i` for `clip(where(i < 0, i + n, i), 0, n - 1)` if that is `i`."""
    eqn = scope.maker(atom)
    if eqn is None:
        return atom
    if atom not in done:
        done[atom] = _fewer(scope, atom, eqn, bounds, block, done)
    return done[atom]


def _fewer(scope: Scope, atom: Any, eqn: Equation, bounds: "BoundsOf", block: Block, done: dict[Any, Atom]) -> Atom:
    def simplified(x: Atom) -> Atom:
        return _simplified(scope, x, bounds, block, done)

    name = eqn.primitive.name
    if name == "convert_element_type" and has_type_of(eqn.invars[0], atom):
        return simplified(eqn.invars[0])
    of_predicate = bounds(scope, eqn.invars[0]) if name == "select_n" and not bounds.keeps_selects else None
    if of_predicate in ((0, 0), (1, 1)):
        return simplified(eqn.invars[1 + of_predicate[0]])
    if name == "slice" and (piece := _joined_piece(scope, eqn)) is not None:
        return simplified(piece)
    if name in ("max", "min"):  # what `jnp.clip` consists of
        for k in (0, 1):
            limit, other = (bounds(scope, x) for x in (eqn.invars[k], eqn.invars[1 - k]))
            beyond = limit and other and (limit[1] <= other[0] if name == "max" else other[1] <= limit[0])
            if beyond and has_type_of(eqn.invars[1 - k], atom):
                return simplified(eqn.invars[1 - k])
    if name == "clamp":
        lower, value, upper = (bounds(scope, x) for x in eqn.invars)
        if lower and value and upper and lower[1] <= value[0] and value[1] <= upper[0]:  # whatever the limits are
            return simplified(eqn.invars[1])
    if name not in _KEEPING:
        return atom
    operands = [simplified(x) for x in eqn.invars]
    if all(a is b for a, b in zip(operands, eqn.invars, strict=True)):
        return atom
    new = _compat.new_variable(atom.aval)
    block.eqns.append(eqn.replace(invars=operands, outvars=[new]))
    return new


def _joined_piece(scope: Scope, eqn: Equation) -> Atom | None:
    """Return the operand of a concatenation that a slice is equal to, or None."""
    if set(eqn.params["strides"] or ()) - {1}:
        return None  # its elements may come from several operands
    joined = scope.maker(eqn.invars[0], "concatenate")
    if joined is None:
        return None
    axis = joined.params["dimension"]
    first = eqn.params["start_indices"][axis]
    for piece in joined.invars:
        if first <= 0:
            return piece if first == 0 and piece.aval.shape == eqn.outvars[0].aval.shape else None
        first -= piece.aval.shape[axis]
    return None


#: The operations whose operands are simplified too.
_KEEPING = frozenset(("add", "broadcast_in_dim", "clamp", "concatenate", "mul", "reshape", "squeeze"))


class BoundsOf:
    """Finds the bounds of values. None means that there are no bounds."""

    def __init__(self, outer: "BoundsOf | None" = None, *, keeps_selects: bool = False) -> None:
        self.bounds_of: dict[tuple[Scope, Any], Bounds | None] = {}
        self.depth: int = 0 if outer is None else outer.depth
        self.assumes, self.keeps_selects = outer is not None, keeps_selects

    def __call__(self, scope: Scope, atom: Atom) -> Bounds | None:
        kind = getattr(atom.aval, "dtype", None)
        if not isinstance(kind, np.dtype) or kind.kind not in "iub":
            return None
        if isinstance(atom, Literal):
            return _of_array(atom.val)
        key = scope, atom
        if key not in self.bounds_of:
            self.bounds_of[key] = None  # meanwhile: a value that depends on itself has no bounds
            if self.depth < _DEEPEST:
                self.depth += 1
                eqn = scope.maker(atom)
                interval = self._argument(scope, atom) if eqn is None else self._result(scope, atom, eqn)
                self.depth -= 1
                self.bounds_of[key] = interval or (0, 1) if kind.kind == "b" else _unless_wrapped(interval, kind)
        return self.bounds_of[key]

    def _argument(self, scope: Scope, atom: Any) -> Bounds | None:
        if (operand := scope.operand(atom)) is not None:
            return self(scope.outer, operand)  # type: ignore[arg-type]
        if (number := scope.carried(atom)) is not None:
            return self._carried(scope.outer, scope.eqn, number, in_step=scope.role == "body")  # type: ignore[arg-type]
        for v, value in zip(scope.jaxpr.constvars, getattr(scope.closed, "consts", ()), strict=False):
            if v is atom:
                return _of_array(value)
        return None

    def _result(self, scope: Scope, atom: Any, eqn: Equation) -> Bounds | None:
        name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
        if name == "iota":
            return 0, params["shape"][params["dimension"]] - 1
        if name == "sign" and (bounds := self(scope, operands[0])) is not None:
            return max(-1, min(bounds[0], 1)), max(-1, min(bounds[1], 1))
        if name == "clamp":
            least, _, most = (self(scope, x) for x in operands)
            return None if least is None or most is None else (min(least[0], most[0]), most[1])
        if name == "select_n" and (of_predicate := self(scope, operands[0])) in ((0, 0), (1, 1)):
            return self(scope, operands[1 + of_predicate[0]])
        if name == "slice" and (piece := _joined_piece(scope, eqn)) is not None:
            return self(scope, piece)
        if name == "convert_element_type" and atom.aval.dtype == np.bool_:
            bounds = self(scope, operands[0])
            return None if bounds is None else (int(not bounds[0] <= 0 <= bounds[1]), int(bounds != (0, 0)))
        if name in _CHOOSING:
            return _union([self(scope, x) for x in operands[_CHOOSING[name]]])
        if name == "and" and self._exclude_each_other(scope, *operands):
            return 0, 0
        if name in _COMBINING:
            a, b = (self(scope, x) for x in operands)
            return None if a is None or b is None else _COMBINING[name](a, b)
        number = next(k for k, v in enumerate(eqn.outvars) if v is atom)
        if name == "cond":
            return _union([self(inner, inner.jaxpr.outvars[number]) for inner in scope.branches(eqn)])
        if name == "optimization_barrier":
            return self(scope, operands[number])
        if name == "while":
            return self._carried(scope, eqn, number, in_step=False)
        if name == "jit":
            inner = scope.within(eqn, "call", eqn.params["jaxpr"])
            return self(inner, inner.jaxpr.outvars[number])
        return None

    def _exclude_each_other(self, scope: Scope, signs_differ: Atom, has_rest: Atom) -> bool:
        """Return whether `sign(x) != 1` and `remainder(x, y) != 0` exclude each other: if `x` is not negative.

        `jnp` rounds a quotient down if both conditions hold. Only 0 is not negative and has another sign than 1, and
        its remainder is 0.
        """
        signs, rest = (scope.operands(_bare(scope, condition), "ne") for condition in (signs_differ, has_rest))
        if not signs or not rest or self(scope, signs[1]) != (1, 1) or scope.constant(rest[1]) != 0:
            return False
        of_sign, of_rest = scope.operands(signs[0], "sign"), scope.operands(rest[0], "rem")
        same = of_sign and of_rest and of_sign[0] is of_rest[0]
        bounds = self(scope, of_sign[0]) if same else None
        return bounds is not None and bounds[0] >= 0

    def _carried(self, scope: Scope, loop: Equation, number: int, *, in_step: bool) -> Bounds | None:
        """Return the bounds of a carried value when a step begins or, without `in_step`, also after the last one."""
        start, body = self(scope, init_of(loop, number)), scope.body(loop)
        if start is None:
            return None
        if (by := added_by_step(scope, loop, number)) is not None:
            most = self._most_steps(scope, loop) if by else 0
            moved = None if most is None else by * max(most - in_step, 0)
            return None if moved is None else (start[0] + min(moved, 0), start[1] + max(moved, 0))
        if self.assumes:  # an induction within an induction would take long
            return None
        after = body, body.jaxpr.outvars[number]
        carried = body, body.jaxpr.invars[loop.params["body_nconsts"] + number]
        bounds = _union([start, self._after_step(after, carried, start)])
        is_fixed = bounds is not None and bounds == _union([bounds, self._after_step(after, carried, bounds)])
        return bounds if is_fixed else None

    def _after_step(self, value: tuple[Scope, Atom], carried: tuple[Scope, Any], bounds: Bounds) -> Bounds | None:
        """Return the bounds of a value if `carried` has these bounds."""
        inside = BoundsOf(self)
        inside.bounds_of.update({key: b for key, b in self.bounds_of.items() if b is not None})
        inside.bounds_of[carried] = bounds
        return inside(*value)

    def _most_steps(self, scope: Scope, loop: Equation) -> int | None:
        """Bound the trip count of a loop whose condition compares a counter with a number."""
        condition, most = scope.condition(loop), []
        for counter, limit in _less_than(condition, condition.jaxpr.outvars[0]):
            end, number = self(condition, limit), condition.carried(counter)
            if end is None or number is None:
                continue
            start, by = self(scope, init_of(loop, number)), added_by_step(scope, loop, number)
            if start is not None and by is not None and by > 0:
                last = max(start[1], end[1] - 1 + by)
                if _unless_wrapped((start[0], last), counter.aval.dtype) is not None:
                    most.append(max(0, -((start[0] - end[1]) // by)))
        return min(most, default=None)


def _less_than(scope: Scope, predicate: Atom) -> Iterator[tuple[Atom, Atom]]:
    """Yield pairs of numbers such that the first is less than the second if the predicate is true."""
    predicate = _bare(scope, predicate)
    if less := scope.operands(predicate, "lt"):
        yield less[0], less[1]
    for operand in scope.operands(predicate, "and"):
        yield from _less_than(scope, operand)


def _bare(scope: Scope, predicate: Atom) -> Atom:
    """Strip conversions of a bool to a bool, such as `b != 0`."""
    while True:
        differ = scope.operands(predicate, "ne")
        is_bool = differ and scope.constant(differ[1]) == 0
        made_of = differ[:1] if is_bool else scope.operands(predicate, "convert_element_type")
        if not made_of or getattr(made_of[0].aval, "dtype", None) != np.bool_:
            return predicate
        predicate = made_of[0]


def _union(some: list[Bounds | None]) -> Bounds | None:
    intervals = [bounds for bounds in some if bounds is not None]
    if not intervals or len(intervals) < len(some):
        return None
    return min(b[0] for b in intervals), max(b[1] for b in intervals)


def _unless_wrapped(bounds: Bounds | None, dtype: Any) -> Bounds | None:
    """Return the bounds if the dtype has all these numbers, else None."""
    info = np.iinfo(dtype)
    return bounds if bounds is not None and info.min <= bounds[0] and bounds[1] <= info.max else None


def _of_array(value: Any) -> Bounds | None:
    numbers = np.asarray(value)
    is_integer = numbers.dtype.kind in "iub" and numbers.size
    return (int(numbers.min()), int(numbers.max())) if is_integer else None
