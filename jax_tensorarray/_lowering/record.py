"""Check indices in loops by a sticky error code: the loop carries the first index out of range, a call after it raises.

    row = ta_read[...] b i
    # becomes, in a loop that carries `code`
    code = where((code == 0) & ((i < 0) | (i >= n)), (number of the op, i), code)
    row = ta_read[checked="recorded" ...] b i

A call of a kernel raises at once, but takes ten times as long as a slice of one row. So XLA's own arithmetic checks the
index instead, and records an index that does not fit into an int32 as the nearest int32. After an error, the result of
the op does not matter, and a loop that counts its steps runs to its end. Any other loop stops as soon as the record is
not empty, because it might wait forever for a row that was dropped.

The record passes through loops and branches, and the program raises it after each of them. The call that raises it has
the name, the source line and the number of rows of each op.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._lowering.equations import Atom, Block, equation_at, is_static
from jax_tensorarray._lowering.ownership import mask_of
from jax_tensorarray._lowering.scopes import (
    Scope,
    added_by_step,
    all_equations,
    argument,
    index_number,
    init_of,
    is_strict,
    rebuilt,
    with_bodies,
)
from jax_tensorarray._lowering.source_lines import SourceLines
from jax_tensorarray._ops.calls import TAPE_PARAM, Named
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.fence import ta_zero_p
from jax_tensorarray._ops.primitive import KERNEL_OPS
from jax_tensorarray._ops.starts import (
    as_dtype,
    box_along,
    for_each,
    is_out_of_range,
    like,
    repeated,
    reshaped,
    sizes_of,
    widened,
)
from jax_tensorarray._types import INT32_MAX, Equation

#: The code, an int64: 0 until an index is out of range, then 2^32 times the number of the op plus the index as an
#: int32. If the program computes a size, the number of rows follows, an int32. Op and index share one number because
#: each number that a loop carries adds two operations per step on a CPU, a fusion and a copy.
Record = list[Atom]

_INT32, _INT64 = (ShapedArray((), np.dtype(t)) for t in (np.int32, np.int64))


def drop_out_of_bounds(jaxpr: Any) -> Any:
    """Make every index out of range drop its op, for platforms without calls."""
    return _recorded_where(is_strict, jaxpr)


def check_by_record(jaxpr: Any, default: str, outside: Any, opaque_zero: bool) -> Any:
    """Record the first index that is out of range, and make ops drop such an index.

    If `lowering` or the `default` lets any op become a slice, the program records the indices of all its ops, also
    outside of loops. Otherwise kernels raise by themselves. With `opaque_zero` every loop with an op gets a record, and
    XLA does not know that it begins empty.
    """
    jaxpr = _recorded_where(lambda eqn: is_strict(eqn) and _is_never_out(eqn), jaxpr)
    program = Scope(jaxpr)
    if not any(_may_be_slice(scope, eqn, default, opaque_zero) for scope, eqn in _equations(program)):
        return jaxpr
    return Threader(Scope(_tested_in_steps(program)), SourceLines(outside), opaque_zero).run()


def _may_be_slice(scope: Scope, eqn: Equation, default: str, opaque_zero: bool) -> bool:
    """Return whether an op may become a slice and then needs a record or a zero."""
    if not _can_be_recorded(eqn) and not (opaque_zero and _may_be_ordered(eqn)):
        return False
    lowering = eqn.params.get("lowering", "auto")
    lowering = default if lowering == "auto" else lowering
    return lowering == "xla" or (lowering == "auto" and scope.is_in_loop)


def _equations(scope: Scope) -> Iterator[tuple[Scope, Equation]]:
    """Yield the equations of a jaxpr and of the loops and branches in it, with their scopes."""
    return all_equations(scope, Scope.scopes_in)


def _recorded_where(test: Callable[[Equation], bool], jaxpr: Any) -> Any:
    """Return a jaxpr in which the ops that pass a test drop an index out of range."""

    def change(scope: Scope, eqn: Equation, block: Block) -> Equation:
        return _recorded(eqn) if test(eqn) else eqn

    return rebuilt(Scope(jaxpr), change, Scope.scopes_in)


# --- ops -------------------------------------------------------------------------------------------------------


def _can_be_recorded(eqn: Equation) -> bool:
    """Return whether an op raises, and its index can be recorded instead."""
    if not is_strict(eqn):
        return False
    index, size = eqn.invars[index_number(eqn)].aval, _size(eqn)
    return is_static(index) and (size is None or (isinstance(size, int) and size <= INT32_MAX))


def _may_be_ordered(eqn: Equation) -> bool:
    """Return whether a later pass may order an op of ours, for which it needs an opaque zero."""
    return eqn.primitive in KERNEL_OPS and not eqn.params.get("unordered")


def _size(eqn: Equation) -> int | None:
    """Return the number of rows, unless the program computes it."""
    return None if eqn.primitive is ta_check_p else sizes_of(eqn.invars[0].aval, eqn.params)[0]


def _is_never_out(eqn: Equation) -> bool:
    """Return whether an index needs no check: it is empty, or the step number of a tape."""
    batch = eqn.invars[0].aval.shape[: eqn.params["batch_dims"]]
    return 0 in (*batch, *eqn.invars[index_number(eqn)].aval.shape) or bool(eqn.params.get(TAPE_PARAM))


def _recorded(eqn: Equation) -> Equation:
    return eqn.replace(params=eqn.params | {"checked": "recorded"})


# --- where the record goes -------------------------------------------------------------------------------------


class _Position(NamedTuple):
    """The rows that an op addresses."""

    index: Atom
    span: int  #: how many rows begin at each index
    size: Any  #: the number of rows of the buffer, an int32 variable `[*batch]` or a number
    mask: Atom | None  #: bool of the shape of the index: False where the op does nothing

    @property
    def key(self) -> "_Position | None":
        """Return the position as a key, or None if it contains a literal: literals have no hash."""
        return None if any(isinstance(x, Literal) for x in self) else self


def _position(scope: Scope, eqn: Equation) -> _Position:
    index, size = eqn.invars[index_number(eqn)], _size(eqn)
    if eqn.primitive is ta_check_p:
        constant = scope.constant(eqn.invars[1])
        return _Position(index, 1, eqn.invars[1] if constant is None else constant, None)
    mask = mask_of(eqn)
    one, one_mask = _shared(scope, index), None if mask is None else _shared(scope, mask)
    if one is not None and (mask is None) == (one_mask is None):  # the program repeats one number
        index, mask = one, one_mask
    (span,) = box_along([0], eqn.params["window"])
    return _Position(index, span, size, mask)


def _shared(scope: Scope, atom: Atom) -> Atom | None:
    """Return the scalar that the program repeats to an array, or None."""
    if not atom.aval.ndim:
        return atom
    operands = scope.operands(atom, "broadcast_in_dim", "reshape")
    return _shared(scope, operands[0]) if operands else None


class Threader:
    """Threads the record through the ops, loops and branches that need it."""

    def __init__(self, program: Scope, lines: SourceLines, opaque_zero: bool) -> None:
        self.scope, self.lines, self.opaque_zero = program, lines, opaque_zero
        self.checking: dict[Scope, bool] = {}
        #: The number of each op, from 1. An op is its name, its source line, and the number of rows unless computed.
        self.ops: dict[tuple[Named, int | None], int] = {}
        positions = (_position(scope, eqn) for scope, eqn in _equations(program) if _can_be_recorded(eqn))
        computes = any(not isinstance(position.size, int) for position in positions)
        self.types = [_INT64, *[_INT32] * computes]

    def run(self) -> Any:
        empty: Record = [Literal(t.dtype.type(0), t) for t in self.types]
        block, _ = self._thread(self.scope, empty, frozenset(), raises=True)
        return block.jaxpr()

    def new_record(self) -> Record:
        """Return new variables for a record."""
        return [_compat.new_variable(t) for t in self.types]

    def checks(self, scope: Scope) -> bool:
        """Return whether a jaxpr checks an index."""
        if scope not in self.checking:
            self.checking[scope] = any(self._checks(scope, eqn) for eqn in scope.jaxpr.eqns)
        return self.checking[scope]

    def _checks(self, scope: Scope, eqn: Equation) -> bool:
        return _can_be_recorded(eqn) or any(map(self.checks, scope.scopes_in(eqn)))

    def _needs(self, scope: Scope, eqn: Equation) -> bool:
        """Return whether an equation needs the record."""
        if _can_be_recorded(eqn) or _stops_at_error(scope, eqn) or (self.opaque_zero and _may_be_ordered(eqn)):
            return True
        return any(self._needs(inner, e) for inner in scope.scopes_in(eqn) for e in inner.jaxpr.eqns)

    def _thread(
        self, scope: Scope, record: Record, recorded: Any, *, raises: bool = False, zero: bool = False
    ) -> tuple[Block, Record]:
        """Pass the record through a jaxpr, and return the new block and the record at its end.

        With `raises` the record begins empty, and the jaxpr raises it. `recorded` are the positions that have been
        checked before. With `zero` the code is the opaque zero of the jaxpr.
        """
        block, state = Block(scope.closed), _State(record, set(recorded), empty=raises and not self.opaque_zero)
        if raises and self.opaque_zero and scope.jaxpr.eqns:
            state.record = self._unknown(block, record, scope.jaxpr.eqns[0])
        if zero and self.opaque_zero:
            _mark_zero(block, record, scope.eqn)
        for eqn in scope.jaxpr.eqns:
            self._equation(scope, block, eqn, state, raises=raises)
        if raises and state.unraised:
            state.record = self._raised(block, state.record, scope.jaxpr.eqns[-1])
        return block, state.record

    def _unknown(self, block: Block, record: Record, at: Equation) -> Record:
        """Return an empty record. A call returns it, so XLA does not know that it is empty."""
        result = _compat.new_variable(_INT32)
        params = {"batch_dims": 0, "mode": "drop", "op": "record", "checked": "", "lowering": "ffi"}
        operands = [Literal(np.int32(n), _INT32) for n in (0, 1)]
        block.eqns.append(equation_at(at, ta_check_p, operands, result, **params))
        return [*block.call(_as_code, [result], at), *record[1:]]

    def _equation(self, scope: Scope, block: Block, eqn: Equation, state: "_State", *, raises: bool = False) -> None:
        checks = self._checks(scope, eqn)
        if not checks and (state.empty or not list(scope.scopes_in(eqn)) or not self._needs(scope, eqn)):
            block.add(eqn)  # no index has been checked so far
            return
        state.empty, state.unraised = state.empty and not checks, state.unraised or checks
        if _can_be_recorded(eqn):
            position = _position(scope, eqn)
            if position.key is None or not state.recorded & {position.key, position._replace(mask=None).key}:
                state.recorded.add(position.key)
                state.record = self._checked(block, eqn, position, state.record)
            block.add(_recorded(eqn))
            return
        if eqn.primitive.name == "while":
            state.record = self._loop(scope, block, eqn, state.record)
        else:
            state.record = self._branches(scope, block, eqn, state)
        if raises and state.unraised:
            state.record, state.unraised = self._raised(block, state.record, eqn), False

    def _branches(self, scope: Scope, block: Block, eqn: Equation, state: "_State") -> Record:
        branches = []
        for inner in scope.branches(eqn):
            before, recorded = self.new_record(), _renamed(state.recorded, eqn.invars[1:], inner.jaxpr.invars)
            new, after = self._thread(inner, before, recorded, zero=scope.is_in_loop)
            branches.append(_with_more(new, inner, before, after))
        return self._with_record(block, eqn, state.record, branches=tuple(branches))

    def _loop(self, scope: Scope, block: Block, eqn: Equation, record: Record) -> Record:
        """Add a loop with the record as its last carries. Its condition checks no index."""
        condition, body = scope.condition(eqn), scope.body(eqn)
        before, of_condition, test = self.new_record(), self.new_record(), Block(condition.closed)
        new, after = self._thread(body, before, frozenset(), zero=True)
        if self.opaque_zero and any(map(_may_be_ordered, condition.jaxpr.eqns)):
            _mark_zero(test, of_condition, eqn)
        for each in condition.jaxpr.eqns:
            test.add(each)
        predicate = [test.read(condition.jaxpr.outvars[0])]
        if _stops_at_error(scope, eqn):
            predicate = test.call(_and_is_empty, [*predicate, of_condition[0]], eqn)
        new_condition = test.jaxpr([*condition.jaxpr.invars, *of_condition], predicate)
        new_body = _with_more(new, body, before, after)
        return self._with_record(block, eqn, record, cond_jaxpr=new_condition, body_jaxpr=new_body)

    def _with_record(self, block: Block, eqn: Equation, record: Record, **params: Any) -> Record:
        """Add a loop or conditional that takes and returns the record."""
        after = self.new_record()
        invars = [*map(block.read, eqn.invars), *record]
        block.add(eqn, invars=invars, outvars=[*eqn.outvars, *after], params=eqn.params | params)
        return after

    def _checked(self, block: Block, eqn: Equation, position: _Position, record: Record) -> Record:
        """Return the record after an op: the index of the op if it is the first one out of range."""
        index, span, size, mask = position
        constant = size if isinstance(size, int) else None
        op = Named(eqn.params["op"], self.lines.of(eqn)), constant
        code = Literal(np.int64(self.ops.setdefault(op, len(self.ops) + 1) << 32), _INT64)
        operands = [code, index, *([size] if constant is None else []), *([] if mask is None else [mask])]
        operands = [*map(block.read, operands), *record]
        return block.call(_after_check, operands, eqn, span=span, size=constant, masked=mask is not None)

    def _raised(self, block: Block, record: Record, at: Equation) -> Record:
        """Raise the record unless it is empty. Return the record that the call returns."""
        result = _compat.new_variable(ShapedArray((len(self.ops),), np.dtype(np.int32)))
        operands = block.call(_of_ops, record, at, sizes=tuple(size for _, size in self.ops))
        ops = tuple(op for op, _ in self.ops)
        params = {"batch_dims": 1, "mode": "error", "op": "record", "ops": ops, "effect": True}
        block.eqns.append(equation_at(at, ta_check_p, operands, result, **params))
        return [*block.call(_smallest_as_code, [result], at), *record[1:]]


def _mark_zero(block: Block, record: Record, at: Equation) -> None:
    block.eqns.append(equation_at(at, ta_zero_p, record[:1], _compat.new_variable(_INT64)))


def _with_more(block: Block, scope: Scope, arguments: Sequence[Any], results: Sequence[Atom]) -> Any:
    """Return the closed jaxpr of a block with more arguments and results than its scope."""
    outvars = [*map(block.read, scope.jaxpr.outvars), *results]
    return block.jaxpr([*scope.jaxpr.invars, *arguments], outvars)


class _State:
    """The state of the record on the way through a jaxpr."""

    def __init__(self, record: Record, recorded: set[Any], *, empty: bool) -> None:
        #: The positions in `recorded` have been checked. The record is still `empty` if that is known.
        self.record, self.recorded, self.empty = record, recorded, empty
        self.unraised = False  #: whether an index has been checked since the last call that raises


def _renamed(positions: Any, operands: Sequence[Atom], invars: Sequence[Any]) -> Any:
    """Return positions in the variables of a branch, if they have such."""
    names: dict[Any, Any] = {}
    for x, v in zip(operands, invars, strict=True):
        if not isinstance(x, Literal):
            names.setdefault(x, v)

    def has_name(x: Any) -> bool:
        return x is None or isinstance(x, int) or x in names

    return {
        _Position(names[p.index], p.span, names.get(p.size, p.size), None if p.mask is None else names[p.mask])
        for p in positions
        if p is not None and p.index in names and has_name(p.size) and has_name(p.mask)
    }


# --- loops -----------------------------------------------------------------------------------------------------


def _stops_at_error(scope: Scope, eqn: Equation) -> bool:
    """Return whether `eqn` is a loop that does not count to a number: it might run forever on wrong rows."""
    if eqn.primitive.name != "while":
        return False
    return not counts(scope, eqn, _compat.opened(eqn.params["cond_jaxpr"]).outvars[0])


def counts(scope: Scope, loop: Equation, predicate: Atom) -> bool:
    """Return whether a loop with this condition counts its steps to a number."""
    condition = scope.condition(loop)
    compared = condition.operands(predicate, "lt")
    number = condition.carried(compared[0]) if compared else None
    if number is None:
        return False
    by = added_by_step(scope, loop, number)
    return by is not None and by > 0 and _is_fixed(scope, loop, compared[1])


def _is_fixed(scope: Scope, loop: Equation, end: Atom) -> bool:
    """Return whether a value of a condition is a constant, perhaps through a carry that never changes."""
    condition = scope.condition(loop)
    number = condition.carried(end)
    if number is None:
        return condition.constant(end) is not None
    passed_on = _compat.opened(loop.params["body_jaxpr"]).outvars[number] is argument(loop, number)
    return passed_on and scope.constant(init_of(loop, number)) is not None


def _tested_in_steps(scope: Scope) -> Any:
    """Return a jaxpr in which no condition of a loop checks an index, because a condition cannot return a record.

    Instead, we evaluate the condition before the first step and at the end of each, and the loop carries the result.
    """

    def checks(scope: Scope, eqn: Equation) -> bool:
        is_loop = eqn.primitive.name == "while"
        return is_loop and any(_can_be_recorded(e) for _, e in _equations(scope.condition(eqn)))

    def entered(scope: Scope, eqn: Equation) -> Iterable[Scope]:
        return () if checks(scope, eqn) else scope.scopes_in(eqn)

    def change(scope: Scope, eqn: Equation, block: Block) -> Equation:
        if not checks(scope, eqn):
            return eqn
        return _tested_in_step(block, with_bodies(eqn, [*map(_tested_in_steps, scope.scopes_in(eqn))]))

    return rebuilt(scope, change, entered)


def _tested_in_step(block: Block, loop: Equation) -> Equation:
    """Return such a loop, and add the first evaluation of its condition to the block."""
    params, body = loop.params, _compat.opened(loop.params["body_jaxpr"])
    count = params["cond_nconsts"]
    of_condition, operands = loop.invars[:count], loop.invars[count:]
    carry = operands[params["body_nconsts"] :]
    (first,) = block.inlined(params["cond_jaxpr"], [*of_condition, *carry], loop, block.eqns.append)
    *consts, result, before = (_compat.new_variable(x.aval) for x in [*of_condition, first, first])
    carried = [*(_compat.new_variable(x.aval) for x in carry), _compat.new_variable(first.aval)]
    step, test = Block(params["body_jaxpr"]), Block(params["cond_jaxpr"])
    step.eqns, test.constvars, test.consts = list(body.eqns), [], []
    (after,) = step.inlined(params["cond_jaxpr"], [*consts, *body.outvars], loop, step.eqns.append)
    changes = {
        "cond_jaxpr": test.jaxpr(carried, carried[-1:]),
        "body_jaxpr": step.jaxpr([*consts, *body.invars, before], [*body.outvars, after]),
        "cond_nconsts": 0,
        "body_nconsts": count + params["body_nconsts"],
    }
    return loop.replace(invars=[*loop.invars, first], outvars=[*loop.outvars, result], params=params | changes)


def _and_is_empty(predicate: Any, code: Any) -> Any:
    return [lax.bitwise_and(predicate, for_each(lax.eq(code, np.int64(0)), predicate.shape))]


# --- functions that are traced once for each type of their operands ----------------------------------------------
#
# They call nothing of `jax.numpy`, which takes several times as long to trace.


def _as_code(x: Any) -> Any:
    return [as_dtype(x, np.int64)]


def _smallest_as_code(checked: Any) -> Any:
    """Return the smallest number, at most 0."""
    return _as_code(lax.min(lax.reduce_min(checked, (0,)), np.int32(0)))


def _after_check(op: Any, index: Any, *rest: Any, span: int, size: int | None, masked: bool) -> Any:
    """Return the record after the check of an index: the old one, unless that is empty and the index out of range."""
    of_size, rest = (size, rest) if size is not None else (rest[0], rest[1:])
    mask, record = (rest[0], rest[1:]) if masked else (None, rest)
    index, of_size, outside = _first_out_of_range(index, span, of_size, mask)
    of_index = [lax.add(op, as_dtype(_clipped(index), np.int64)), of_size if size is None else np.int32(size)]
    first = lax.bitwise_and(outside, lax.eq(record[0], np.int64(0)))
    return [lax.select(first, new, old) for new, old in zip(of_index, record, strict=False)]


def _clipped(index: Any) -> Any:
    """Return the int32 nearest to an index. It is out of range if the index is."""
    kind = index.dtype.type
    if index.dtype == np.int64:
        index = lax.clamp(kind(-INT32_MAX - 1), index, kind(INT32_MAX))
    elif index.dtype in (np.uint32, np.uint64):
        index = lax.min(index, kind(INT32_MAX))
    return as_dtype(index, np.int32)


def _first_out_of_range(index: Any, span: int, size: Any, mask: Any) -> Any:
    """Return the first index out of range, the number of rows of its example, and whether there is one."""
    if mask is not None:  # examples may share one of the two
        shape = np.broadcast_shapes(index.shape, mask.shape)
        index, mask = (
            x if x.shape == shape else lax.broadcast_in_dim(x, shape, tuple(range(len(shape)))) for x in (index, mask)
        )
    if span > 1:
        # The first row out of range is the first row, or the one after the last row of the buffer.
        index = widened(index, size)
        index = lax.select(lax.le(index, like(index, size - span)), index, lax.max(index, like(index, size)))
    sizes = size if isinstance(size, int) else repeated(size, index.shape[size.ndim :])
    outside = is_out_of_range(index, sizes)
    if mask is not None:
        outside = lax.bitwise_and(outside, mask)
    if not index.ndim:
        return index, sizes, outside
    flat = (math.prod(index.shape),)
    positions, none = lax.iota(np.dtype(np.uint32), flat[0]), np.uint32(flat[0])
    first = lax.reduce_min(lax.select(reshaped(outside, flat), positions, like(positions, flat[0])), (0,))

    def at_first(x: Any) -> Any:
        return reshaped(lax.dynamic_slice(reshaped(x, flat), [first], [1]), ())

    return at_first(index), sizes if isinstance(sizes, int) else at_first(sizes), lax.lt(first, none)


def _of_ops(code: Any, *size: Any, sizes: tuple[int | None, ...]) -> Any:
    """Return an index and a number of rows for each op: from the record for its op, row 0 of 1 for the others."""
    shape = (len(sizes),)
    index = as_dtype(code, np.int32)  # the lower half
    op = lax.sub(code, as_dtype(index, np.int64))
    is_here = lax.eq(lax.broadcast_in_dim(op, shape, ()), np.arange(1, len(sizes) + 1, dtype=np.int64) << 32)
    index = lax.broadcast_in_dim(index, shape, ())
    rows = lax.broadcast_in_dim(size[0], shape, ()) if size else np.array(sizes, np.int32)
    return [lax.select(is_here, index, like(index, 0)), lax.select(is_here, rows, like(index, 1))]
