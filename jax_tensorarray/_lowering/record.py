"""Indices out of range as data: a loop carries a record of the first one, and a call after the loop raises it.

A call of a kernel raises where it is, and takes ten times as long as a slice of one row. So in a loop an op has its
index checked by arithmetic of XLA's own: the first that is out of range becomes the record, which is the op, the index
and the number of rows. The result of the op does not matter then, and a loop that counts its steps runs to its end. Any
other loop goes on only while the record is empty, since what it waits for may be due to a row that was not there.

The record passes through loops and branches, and the program has it raised after each of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._lowering.arrays import as_dtype, is_out_of_range, like, widened
from jax_tensorarray._lowering.equations import Atom, Block, is_static
from jax_tensorarray._lowering.ownership import mask_of
from jax_tensorarray._lowering.places import Places
from jax_tensorarray._lowering.scopes import (
    Scope,
    added_by_step,
    argument,
    index_number,
    init_of,
    is_strict,
    rebuilt,
)
from jax_tensorarray._ops.calls import TAPE_PARAM, Named, box_along
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.fence import ta_zero_p
from jax_tensorarray._ops.primitive import CALLED
from jax_tensorarray._ops.starts import sizes_of
from jax_tensorarray._types import INT32_MAX, Equation

#: The last value is the code of the first index that was out of range, or 0. Before it come numbers that do not fit in.
Record = list[Atom]


def drop_out_of_bounds(jaxpr: Any) -> Any:
    """Have no index raise, on platforms where no call can."""
    return _recorded_where(is_strict, jaxpr)


def check_by_record(jaxpr: Any, default: str, outside: Any, opaque_zero: bool) -> Any:
    """Have indices in loops recorded if they are out of range. An op whose index is recorded drops it.

    This is done only if one of the ops may become a slice, by its `lowering` or the `default`: kernels raise by
    themselves. With `opaque_zero` every loop that has an op gets a record, and XLA cannot know that it begins empty.
    """
    jaxpr = _recorded_where(lambda eqn: is_strict(eqn) and _is_never_out(eqn), jaxpr)
    asked = set(_asked(jaxpr, default, False, opaque_zero))
    if not asked & {("auto", True), ("xla", True), ("xla", False)}:
        return jaxpr
    return Threader(jaxpr, Places(outside), opaque_zero).run()


def _asked(jaxpr: Any, default: str, in_loop: bool, opaque_zero: bool) -> Any:
    """Yield the `lowering` of each op that may be recorded or need a zero, and whether it is in a loop."""
    for eqn in _compat.opened(jaxpr).eqns:
        name = eqn.primitive.name
        if _can_be_recorded(eqn) or (opaque_zero and _may_be_ordered(eqn)):
            asked = eqn.params.get("lowering", "auto")
            yield (default if asked == "auto" else asked), in_loop
        elif name == "while":
            for which in ("cond_jaxpr", "body_jaxpr"):
                yield from _asked(eqn.params[which], default, True, opaque_zero)
        elif name == "cond":
            for branch in eqn.params["branches"]:
                yield from _asked(branch, default, in_loop, opaque_zero)


def _recorded_where(test: Callable[[Equation], bool], jaxpr: Any) -> Any:
    """Return a jaxpr in which the ops that pass a test drop an index that is out of range."""

    def change(scope: Scope, eqn: Equation, block: Block) -> Equation:
        return _recorded(eqn) if test(eqn) else eqn

    return rebuilt(Scope(jaxpr), change, Scope.scopes_in)


# --- ops -------------------------------------------------------------------------------------------------------


def _can_be_recorded(eqn: Equation) -> bool:
    """Return whether an op raises, and can be recorded instead."""
    if not is_strict(eqn):
        return False
    index, size = eqn.invars[index_number(eqn)].aval, _size(eqn)
    return is_static(index) and (size is None or (isinstance(size, int) and size <= INT32_MAX))


def _may_be_ordered(eqn: Equation) -> bool:
    """Return whether an order may be put between an op of ours and others, which takes an opaque zero."""
    return eqn.primitive in CALLED and not eqn.params.get("unordered")


def _size(eqn: Equation) -> int | None:
    """Return the number of rows, unless the program computes it."""
    return None if eqn.primitive is ta_check_p else sizes_of(eqn.invars[0].aval, eqn.params)[0]


def _is_never_out(eqn: Equation) -> bool:
    """Return whether there is nothing to check: no index or no example at all, or the number of a step."""
    batch = eqn.invars[0].aval.shape[: eqn.params["batch_dims"]]
    return 0 in (*batch, *eqn.invars[index_number(eqn)].aval.shape) or bool(eqn.params.get(TAPE_PARAM))


def _recorded(eqn: Equation) -> Equation:
    return eqn.replace(params=eqn.params | {"checked": "recorded"})


# --- where the record goes -------------------------------------------------------------------------------------


class _Position(NamedTuple):
    """The rows that an op addresses."""

    index: Atom
    span: int  #: each index is the first of so many rows
    size: Any  #: how many rows there are, a variable of int32 `[*batch]` or a number
    mask: Atom | None  #: bool of the shape of the index: False where the op does nothing

    @property
    def key(self) -> "_Position | None":
        """Return the position, None if it is not one of variables only: literals have no hash."""
        return None if any(isinstance(x, Literal) for x in self) else self


def _position(scope: Scope, eqn: Equation) -> _Position:
    index, size = eqn.invars[index_number(eqn)], _size(eqn)
    if eqn.primitive is ta_check_p:
        known = scope.constant(eqn.invars[1])
        return _Position(index, 1, eqn.invars[1] if known is None else known, None)
    mask = mask_of(eqn)
    one, one_mask = _shared(scope, index), None if mask is None else _shared(scope, mask)
    if one is not None and (mask is None) == (one_mask is None):  # the program repeats one number
        index, mask = one, one_mask
    (span,) = box_along([0], eqn.params["window"])
    return _Position(index, span, size, mask)


def _shared(scope: Scope, atom: Atom) -> Atom | None:
    """Return the scalar that all elements of an array are, if the program makes it of one."""
    if not atom.aval.ndim:
        return atom
    operands = scope.operands(atom, "broadcast_in_dim", "reshape", "expand_dims")
    return _shared(scope, operands[0]) if operands else None


class Threader:
    """Hands the record to whatever checks an index or waits for something, and takes it back from there."""

    def __init__(self, jaxpr: Any, places: Places, opaque_zero: bool) -> None:
        self.scope, self.opaque_zero = Scope(jaxpr), opaque_zero
        self.checking: dict[Scope, bool] = {}
        self.codes = _Codes(list(_positions(self.scope)), places)

    def run(self) -> Any:
        empty: Record = [Literal(np.zeros((), t.dtype)[()], t) for t in self.codes.types]
        block, _ = self._thread(self.scope, empty, frozenset(), raises=True)
        return block.jaxpr()

    def checks(self, scope: Scope) -> bool:
        """Return whether an index is checked in a jaxpr."""
        if scope not in self.checking:
            self.checking[scope] = any(self._checks(scope, eqn) for eqn in scope.jaxpr.eqns)
        return self.checking[scope]

    def _checks(self, scope: Scope, eqn: Equation) -> bool:
        return _can_be_recorded(eqn) or any(map(self.checks, scope.scopes_in(eqn)))

    def _needs(self, scope: Scope, eqn: Equation) -> bool:
        """Return whether an equation has to know the record."""
        if _can_be_recorded(eqn) or _waits(scope, eqn) or (self.opaque_zero and _may_be_ordered(eqn)):
            return True
        return any(self._needs(inner, e) for inner in scope.scopes_in(eqn) for e in inner.jaxpr.eqns)

    def _thread(
        self, scope: Scope, record: Record, known: Any, *, raises: bool = False, zero: bool = False
    ) -> tuple[Block, Record]:
        """Pass the record through a jaxpr, and return the block that is made of it, and the record at its end.

        With `raises` it begins empty, and is raised. `known` are the positions that have been checked before. With
        `zero` the code is made known as the zero of the jaxpr.
        """
        block, state = Block(scope.closed), _State(record, set(known), empty=raises and not self.opaque_zero)
        if raises and self.opaque_zero and scope.jaxpr.eqns:
            state.record = self._unknown(block, record, scope.jaxpr.eqns[0])
        if zero and self.opaque_zero:
            self._say_zero(block, record, scope.eqn)
        for eqn in scope.jaxpr.eqns:
            self._equation(scope, block, eqn, state, raises)
        if raises and state.unraised:
            state.record = self.codes.raised(block, state.record, state.last)
        return block, state.record

    def _unknown(self, block: Block, record: Record, at: Equation) -> Record:
        """Return an empty record. XLA cannot know that it is empty, since a call returns it."""
        operands = [Literal(np.int32(n), ShapedArray((), np.dtype(np.int32))) for n in (0, 1)]
        result = _compat.new_variable(operands[0].aval)
        params = {"batch_dims": 0, "mode": "drop", "op": "record", "checked": "", "lowering": "ffi"}
        block.eqns.append(
            at.replace(invars=operands, outvars=[result], primitive=ta_check_p, params=params, effects=set())
        )
        return [*record[:-1], *block.call(_as_code, [result], at)]

    def _say_zero(self, block: Block, record: Record, at: Equation) -> None:
        result = _compat.new_variable(record[-1].aval)
        block.eqns.append(
            at.replace(invars=[record[-1]], outvars=[result], primitive=ta_zero_p, params={}, effects=set())
        )

    def _equation(self, scope: Scope, block: Block, eqn: Equation, state: "_State", raises: bool) -> None:
        checks = self._checks(scope, eqn)
        if not checks and (state.empty or not list(scope.scopes_in(eqn)) or not self._needs(scope, eqn)):
            block.add(eqn)  # until the first check there is nothing to wait for
            return
        state.empty, state.unraised = state.empty and not checks, state.unraised or checks
        state.last = eqn
        if _can_be_recorded(eqn):
            position = _position(scope, eqn)
            if position.key is None or not state.known & {position.key, position._replace(mask=None).key}:
                state.known.add(position.key)
                state.record = self.codes.checked(block, eqn, position, state.record)
            block.add(_recorded(eqn))
            return
        if eqn.primitive.name == "while":
            state.record = self._loop(scope, block, eqn, state)
        else:
            state.record = self._branches(scope, block, eqn, state)
        if raises and state.unraised:
            state.record, state.unraised = self.codes.raised(block, state.record, eqn), False

    def _branches(self, scope: Scope, block: Block, eqn: Equation, state: "_State") -> Record:
        branches = []
        for inner in scope.branches(eqn):
            own = [_compat.new_variable(t) for t in self.codes.types]
            known = _renamed(state.known, eqn.invars[1:], inner.jaxpr.invars)
            made, after = self._thread(inner, list(own), known, zero=scope.is_in_loop)
            outvars = [*(made.read(v) for v in inner.jaxpr.outvars), *after]
            branches.append(made.jaxpr([*inner.jaxpr.invars, *own], outvars))
        record = [_compat.new_variable(t) for t in self.codes.types]
        block.add(
            eqn,
            invars=[*map(block.read, eqn.invars), *state.record],
            outvars=[*eqn.outvars, *record],
            params=eqn.params | {"branches": tuple(branches)},
        )
        return list(record)

    def _loop(self, scope: Scope, block: Block, eqn: Equation, state: "_State") -> Record:
        """Add a loop that carries the record, after its own carries."""
        params, types = eqn.params, self.codes.types
        waits, condition, body = _waits(scope, eqn), scope.condition(eqn), scope.body(eqn)
        a, b = params["cond_nconsts"], params["body_nconsts"]
        operands = [*map(block.read, eqn.invars)]
        of_condition, of_body, carry = operands[:a], operands[a : a + b], operands[a + b :]
        more_outs: list[Any] = []
        if self.checks(condition):
            # The condition is evaluated before the first step and after each, where a record can be made of it.
            inner = self._again(condition)
            goes_on, *state.record = block.inlined(
                inner, [*of_condition, *carry, *state.record], eqn, block.eqns.append
            )
            carry, more_outs = [*carry, goes_on], [_compat.new_variable(goes_on.aval)]
        own = [_compat.new_variable(t) for t in types]
        made, after = self._thread(body, list(own), frozenset(), zero=True)
        outs = [made.read(v) for v in body.jaxpr.outvars]
        invars = list(body.jaxpr.invars)
        if more_outs:
            consts = [_compat.new_variable(x.aval) for x in of_condition]
            goes_on, *after = made.inlined(inner, [*consts, *outs, *after], eqn, made.eqns.append)
            outs, invars = [*outs, goes_on], [*consts, *invars, _compat.new_variable(goes_on.aval)]
            of_body, of_condition = [*of_condition, *of_body], []
        new_body = made.jaxpr([*invars, *own], [*outs, *after])
        seen = [_compat.new_variable(t) for t in types]
        if more_outs:
            test, arguments = Block(condition.closed), [_compat.new_variable(x.aval) for x in carry]
            test.constvars, test.consts = [], []
            predicate: Atom = arguments[-1]
        else:
            test, arguments = Block(condition.closed), list(condition.jaxpr.invars)
            if self.opaque_zero and any(map(_may_be_ordered, condition.jaxpr.eqns)):
                self._say_zero(test, seen, eqn)
            for each in condition.jaxpr.eqns:
                test.add(each)
            predicate = test.read(condition.jaxpr.outvars[0])
        if waits:
            (predicate,) = test.call(_and_is_empty, [predicate, seen[-1]], eqn)
        new_condition = test.jaxpr([*arguments, *seen], [predicate])
        record = [_compat.new_variable(t) for t in types]
        block.add(
            eqn,
            invars=[*of_condition, *of_body, *carry, *state.record],
            outvars=[*eqn.outvars, *more_outs, *record],
            params=params
            | {
                "cond_jaxpr": new_condition,
                "body_jaxpr": new_body,
                "cond_nconsts": len(of_condition),
                "body_nconsts": len(of_body),
            },
        )
        return list(record)

    def _again(self, condition: Scope) -> Any:
        """Return the closed jaxpr of a condition that takes the record and returns it."""
        own = [_compat.new_variable(t) for t in self.codes.types]
        made, after = self._thread(condition, list(own), frozenset())
        outs = [made.read(condition.jaxpr.outvars[0]), *after]
        return made.jaxpr([*condition.jaxpr.invars, *own], outs)


class _State:
    """What is known of the record on the way through a jaxpr."""

    def __init__(self, record: Record, known: set[Any], *, empty: bool) -> None:
        self.record, self.known, self.empty = record, known, empty
        self.unraised: bool = False
        self.last: Any = None


def _renamed(known: Any, operands: Sequence[Atom], invars: Sequence[Any]) -> Any:
    """Return the known positions, keyed by the variables of a branch."""
    names: dict[Any, Any] = {}
    for x, v in zip(operands, invars, strict=True):
        if not isinstance(x, Literal):
            names.setdefault(x, v)

    def there(x: Any) -> bool:
        return x is None or isinstance(x, int) or x in names

    return {
        _Position(names[p.index], p.span, names.get(p.size, p.size), None if p.mask is None else names[p.mask])
        for p in known
        if p is not None and p.index in names and there(p.size) and there(p.mask)
    }


def _positions(scope: Scope) -> Any:
    """Yield the positions of the ops that can be recorded."""
    for eqn in scope.jaxpr.eqns:
        if _can_be_recorded(eqn):
            yield _position(scope, eqn)
        for inner in scope.scopes_in(eqn):
            yield from _positions(inner)


# --- loops -----------------------------------------------------------------------------------------------------


def _waits(scope: Scope, eqn: Equation) -> bool:
    """Return whether `eqn` is a loop that might run for ever on wrong rows: one that does not count to a number."""
    if eqn.primitive.name != "while":
        return False
    return not counts(scope, eqn, _compat.opened(eqn.params["cond_jaxpr"]).outvars[0])


def counts(scope: Scope, loop: Equation, predicate: Atom) -> bool:
    """Return whether a loop that goes on while a value of its condition is true counts its steps to a number."""
    condition = scope.condition(loop)
    compared = condition.operands(predicate, "lt")
    number = condition.carried(compared[0]) if compared else None
    if number is None:
        return False
    by = added_by_step(scope, loop, number)
    return by is not None and by > 0 and _is_fixed(scope, loop, compared[1])


def _is_fixed(scope: Scope, loop: Equation, end: Atom) -> bool:
    """Return whether a value of a condition is a constant, which the loop may have been given and pass on."""
    condition = scope.condition(loop)
    number = condition.carried(end)
    if number is None:
        return condition.constant(end) is not None
    passed_on = _compat.opened(loop.params["body_jaxpr"]).outvars[number] is argument(loop, number)
    return passed_on and scope.constant(init_of(loop, number)) is not None


def _and_is_empty(predicate: Any, code: Any) -> Any:
    is_empty = lax.eq(code, np.int64(0))
    return [
        lax.bitwise_and(predicate, lax.broadcast_in_dim(is_empty, predicate.shape, ()) if predicate.ndim else is_empty)
    ]


# --- what it says ----------------------------------------------------------------------------------------------

#: A code has a number of an op and of a size in the upper half. Ops of one name in one place have one number, and
#: this many numbers have places.
_OPS, _PLACES = 2**12, 2**11

_LOWER = 2**32 - 1


class _Codes:
    """Writes and reads a record: its code has the lower half of the index, and above it the numbers of the op and size.

    A program with indices of 64 bits carries their upper half beside the code. A computed size comes before it.
    """

    def __init__(self, positions: Sequence[_Position], places: Places) -> None:
        self.places = places
        dtypes = [p.index.aval.dtype for p in positions]
        self.is_wide = any(d.itemsize == 8 or d == np.uint32 for d in dtypes)
        self.computes = any(not isinstance(p.size, int) for p in positions)
        self.ops: list[tuple[Named, bool]] = []  #: and whether the index is an uint64
        self.sizes: list[int | None] = []
        more = [ShapedArray((), np.dtype(np.int32))] * (self.computes + self.is_wide)
        self.types = [*more, ShapedArray((), np.dtype(np.int64))]

    def checked(self, block: Block, eqn: Equation, position: _Position, record: Record) -> Record:
        """Return the record after an op. The op's index becomes the record if it is the first that is out of range."""
        index, span, size, mask = position
        is_long = index.aval.dtype == np.uint64
        op = Named(eqn.params["op"], self.places.of(eqn) if len(self.ops) < _PLACES else None)
        number = _number(self.ops, (op, is_long)) + 1
        of_size = _number(self.sizes, size if isinstance(size, int) else None)
        upper = Literal(np.int64((of_size * _OPS + number) << 32), ShapedArray((), np.dtype(np.int64)))
        operands = [index, *([] if isinstance(size, int) else [size]), *([] if mask is None else [mask])]
        return block.call(
            _after_check,
            [upper, *map(block.read, operands), *record],
            eqn,
            span=span,
            size=size if isinstance(size, int) else None,
            masked=mask is not None,
            is_wide=self.is_wide,
            computes=self.computes,
        )

    def raised(self, block: Block, record: Record, at: Equation) -> Record:
        """Raise the record if there is one, and return it as it is after that."""
        sizes = [Literal(np.int32(n or 0), ShapedArray((), np.dtype(np.int32))) for n in self.sizes]
        known = tuple(k for k, n in enumerate(self.sizes) if n is not None)
        found = block.call(_read, [*sizes, *record], at, known=known, is_wide=self.is_wide, computes=self.computes)
        results = []
        for long in dict.fromkeys(is_long for _, is_long in self.ops):
            ops = {n: op for n, (op, is_long) in enumerate(self.ops, 1) if is_long == long}
            operands = block.call(_of_ops, found, at, numbers=tuple(ops), is_long=long)
            result = _compat.new_variable(ShapedArray((len(ops),), np.dtype(np.int32)))
            params = {"batch_dims": 1, "mode": "error", "op": "record", "ops": tuple(ops.values()), "effect": True}
            block.eqns.append(
                at.replace(invars=operands, outvars=[result], primitive=ta_check_p, params=params, effects=set())
            )
            results.append(result)
        return [*record[:-1], *block.call(_smallest_of_all, results, at)]


def _number(known: list[Any], one: Any) -> int:
    """Return the number of something, which it keeps from then on."""
    if one not in known:
        known.append(one)
    return known.index(one)


# --- functions that are traced once for each type of their operands ----------------------------------------------
#
# They call nothing of `jax.numpy`, which takes several times as long to trace.


def _as_code(x: Any) -> Any:
    return [as_dtype(x, np.int64)]


def _smallest_of_all(*checked: Any) -> Any:
    """Return the smallest number, at most 0."""
    smallest = [lax.min(lax.reduce_min(x, (0,)), np.int32(0)) for x in checked]
    return [as_dtype(functools.reduce(lax.bitwise_or, smallest), np.int64)]


def _after_check(
    upper: Any, index: Any, *rest: Any, span: int, size: int | None, masked: bool, is_wide: bool, computes: bool
) -> Any:
    """Return the record after the check of an index: the given one if there is one, or nothing is out of range."""
    of_size, rest = (size, rest) if size is not None else (rest[0], rest[1:])
    mask, record = (rest[0], rest[1:]) if masked else (None, rest)
    index, of_size, outside = _first_out_of_range(index, span, of_size, mask)
    is_long = index.dtype == np.uint64
    whole = lax.bitcast_convert_type(index, np.int64) if is_long else as_dtype(index, np.int64)
    found: list[Any] = [lax.bitwise_or(lax.bitwise_and(whole, np.int64(_LOWER)), upper)]
    if is_wide:
        found.insert(0, as_dtype(lax.shift_right_logical(whole, np.int64(32)), np.int32))
    if computes:
        found = [np.int32(of_size) if isinstance(of_size, int) else of_size, *found]
    first = lax.bitwise_and(outside, lax.eq(record[-1], np.int64(0)))
    return [lax.select(first, new, old) for new, old in zip(found, record, strict=True)]


def _first_out_of_range(index: Any, span: int, size: Any, mask: Any) -> Any:
    """Return the first index that is out of range, the number of rows there, and whether there is one."""
    if mask is not None:  # examples may share one of the two
        shape = np.broadcast_shapes(index.shape, mask.shape)
        index, mask = (
            x if x.shape == shape else lax.broadcast_in_dim(x, shape, tuple(range(len(shape)))) for x in (index, mask)
        )
    if span > 1:
        # The first number out of range is the first of all, or the number after the last row of the buffer.
        index = widened(index, size)
        index = lax.select(lax.le(index, like(index, size - span)), index, lax.max(index, like(index, size)))
    shape, sizes = index.shape, size
    if not isinstance(size, int) and size.shape != shape:
        sizes = lax.broadcast_in_dim(size, shape, tuple(range(size.ndim)))
    if shape:
        flat = (math.prod(shape),)
        index, sizes, mask = (
            x if x is None or isinstance(x, int) or x.shape == flat else lax.reshape(x, flat)
            for x in (index, sizes, mask)
        )
    outside = is_out_of_range(index, sizes)
    if mask is not None:
        outside = lax.bitwise_and(outside, mask)
    if not shape:
        return index, sizes, outside
    if isinstance(size, int) and (index.dtype.itemsize < 4 or index.dtype == np.int32):
        first, found = _first_in_one_number(index, outside)
        return first, size, found
    places, none = lax.iota(np.dtype(np.int64), index.shape[0]), np.int64(index.shape[0])
    first = lax.reduce_min(lax.select(outside, places, like(places, index.shape[0])), (0,))
    at = lax.reshape(lax.dynamic_slice(index, [first], [1]), ())
    rows = size if isinstance(size, int) else lax.reshape(lax.dynamic_slice(sizes, [first], [1]), ())
    return at, rows, lax.lt(first, none)


def _first_in_one_number(index: Any, outside: Any) -> Any:
    """Return the first index that is flagged, and whether there is one.

    Place and index are halves of one number, so that one reduction finds both: these are done in every step.
    """
    none, half = 2**63 - 1, np.int64(32)
    places = lax.iota(np.dtype(np.int64), index.shape[0])
    lower = lax.bitwise_and(as_dtype(index, np.int64), like(places, _LOWER))
    both = lax.bitwise_or(lax.shift_left(places, like(places, 32)), lower)
    first = lax.reduce_min(lax.select(outside, both, like(both, none)), (0,))
    return lax.shift_right_arithmetic(lax.shift_left(first, half), half), lax.ne(first, np.int64(none))


def _read(*operands: Any, known: tuple[int, ...], is_wide: bool, computes: bool) -> Any:
    """Return the index, the size and the number of the op that a record says."""
    count = len(operands) - 1 - is_wide - computes
    sizes, (*others, code) = operands[:count], operands[count:]
    half = np.int64(32)
    upper = as_dtype(lax.shift_right_logical(code, half), np.int32)
    if is_wide:
        lower = lax.bitwise_and(code, np.int64(_LOWER))
        index = lax.bitwise_or(lax.shift_left(as_dtype(others[-1], np.int64), half), lower)
    else:
        index = lax.shift_right_arithmetic(lax.shift_left(code, half), half)
    of_size = lax.shift_right_logical(upper, np.int32(_OPS.bit_length() - 1))
    size = others[0] if computes else np.int32(1)
    for number in known:
        size = lax.select(lax.eq(of_size, np.int32(number)), sizes[number], size)
    return [index, size, lax.bitwise_and(upper, np.int32(_OPS - 1))]


def _of_ops(index: Any, size: Any, op: Any, *, numbers: tuple[int, ...], is_long: bool) -> Any:
    """Return the index of the op that was recorded, and the sizes. No other op was stray."""
    shape = (len(numbers),)
    index, size, op = (lax.broadcast_in_dim(x, shape, ()) for x in (index, size, op))
    is_here = lax.eq(op, np.array(numbers, np.int32))
    index, size = lax.select(is_here, index, like(index, 0)), lax.select(is_here, size, like(size, 1))
    return [lax.bitcast_convert_type(index, np.uint64) if is_long else index, size]
