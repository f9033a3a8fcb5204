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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from jax_tensorarray import _compat, _gates
from jax_tensorarray._lowering import slicing
from jax_tensorarray._lowering.aliases import aliased
from jax_tensorarray._lowering.equations import Atom, Block, has_type_of, is_of_numbers, is_static
from jax_tensorarray._lowering.ordering import num_bytes
from jax_tensorarray._lowering.ownership import has_buffer, mask_of, operands_of, readers_of, updates, waits_of
from jax_tensorarray._lowering.places import Places
from jax_tensorarray._lowering.scopes import (
    Scope,
    addresses_rows,
    all_scopes,
    home_of,
    inner_scopes,
    is_strict,
    joined_columns,
    with_bodies,
)
from jax_tensorarray._lowering.slicing import SCATTERS, How
from jax_tensorarray._lowering.uses import Uses
from jax_tensorarray._ops import sorting
from jax_tensorarray._ops.calls import LOWERINGS, TAPE_PARAM, WITHOUT_KERNELS
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.empty import ta_empty_p
from jax_tensorarray._ops.fence import ta_fence_p, ta_zero_p
from jax_tensorarray._ops.primitive import CALLED, ROW_OPS, is_packed, may_raise
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import positions_of, sizes_of
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation
from jax_tensorarray._union_find import UnionFind

#: The default of `lowering`.
VARIABLE = "JAX_TENSORARRAY_LOWERING"


class Choice(NamedTuple):
    """How an op is rewritten."""

    how: How = How()
    passes_on: bool = False  #: the buffer goes on from here
    is_costly: bool = False  #: a call takes less time, as long as no other op has to be one too


def use_slices(jaxpr: Any, *, platform: str | None, divided: bool, outside: Any) -> Any:
    """Rewrite the ops for which slices are as good, and have the others be calls.

    Args:
        jaxpr: a closed jaxpr in which `ordering` has put readers before updates.
        platform: the only platform that the program will run on, if that is known and the program is not divided among
            devices: slices of a buffer with divided rows would gather it. In other programs only tapes become slices.
        divided: whether the program is divided nevertheless, without kernels. A slice for each example would gather.
        outside: the place in the source that calls the program.
    """
    program = Scope(jaxpr)
    chooser = _Chooser(program, platform, divided)
    chosen: dict[Scope, _Chosen] = {}
    for scope in all_scopes(program):
        chosen[scope] = [(eqn, chooser.choose(scope, eqn)) for eqn in scope.jaxpr.eqns]
    conflicts = LayoutConflicts(chosen)
    for scope, choices in chosen.items():
        conflicts.add_depths(scope, choices)
    chosen = {scope: conflicts.without_costly(scope, choices) for scope, choices in chosen.items()}
    for scope, choices in chosen.items():
        conflicts.add(scope, choices)
    chosen = {scope: conflicts.choices(scope, choices) for scope, choices in chosen.items()}
    return Rewriter(chosen, chooser.barriers_hold, Places(outside)).jaxpr(program, frozenset())


def default_lowering() -> str:
    """Return the value of `JAX_TENSORARRAY_LOWERING`."""
    found = os.environ.get(VARIABLE, "auto")
    if found not in LOWERINGS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(LOWERINGS)}, got {found!r}")
    return found


def loops_around(scope: Scope) -> int:
    """Return in how many loops a jaxpr is."""
    count = 0
    while scope.outer is not None:
        count += scope.role in ("body", "condition")
        scope = scope.outer
    return count


# --- which ops become slices -------------------------------------------------------------------------------------


class _Chooser:
    def __init__(self, program: Scope, platform: str | None, divided: bool) -> None:
        self.uses = Uses()
        self.default, self.platform, self.divided = default_lowering(), platform, divided
        self.most_slices = _gates.SLICES if platform == "cpu" or platform in WITHOUT_KERNELS else 1
        self.barriers_hold = platform is not None and _compat.barriers_hold(platform)
        self.slices_of_a_loop = _gates.SLICES_ON_CPU if self.barriers_hold else 1
        self.checks_outside = any(
            eqn.primitive is ta_check_p and is_strict(eqn) and not eqn.params.get("effect")
            for scope in all_scopes(program)
            if not scope.is_in_loop
            for eqn in scope.jaxpr.eqns
        )

    def choose(self, scope: Scope, eqn: Equation) -> Choice | None:
        """Return how to rewrite an equation, or None if it stays."""
        primitive = eqn.primitive
        is_row_op = primitive in ROW_OPS
        if not is_row_op and primitive not in _OTHERS:
            return None
        is_tape = primitive in (ta_read_p, ta_write_p) and bool(eqn.params[TAPE_PARAM])
        asked = eqn.params.get("lowering", "auto")
        if not is_tape and ((self.default if asked == "auto" else asked) == "ffi" or self.platform is None):
            return None
        if primitive is ta_fence_p:
            how = How(ordered=True, barriers_hold=self.barriers_hold)
            # One that waits for nothing keeps XLA from making the buffer again: a branch would not.
            is_there = (len(eqn.invars) > 1 or self.barriers_hold) and _has_elements(eqn.invars[0].aval)
            return self._ordered(scope, eqn, Choice(how, passes_on=True)) if is_there else None
        if primitive is ta_check_p:
            return None if is_strict(eqn) else Choice(How(drops=self._needs_mask(eqn)))
        if primitive is ta_clear_p:
            # On a GPU each step of an inner loop would wait for the host.
            are_usual = all(x.aval.shape == () and x.aval.dtype == np.int32 for x in eqn.invars[1:3])
            is_faster = self.platform == "cpu" and scope.is_in_loop and are_usual
            how = How(ordered=True, barriers_hold=self.barriers_hold)
            of = Choice(how, passes_on=True)
            return self._ordered(scope, eqn, of) if is_faster and _has_elements(eqn.invars[0].aval) else None
        of_row = self._choose_row(scope, eqn, is_tape)
        return of_row if of_row is None or not of_row.how.ordered else self._ordered(scope, eqn, of_row)

    def _ordered(self, scope: Scope, eqn: Equation, choice: Choice) -> Choice | None:
        """Return the choice with what it takes to put reads before updates, or None if that is not there."""
        if self.barriers_hold:
            return choice
        if zero_of(scope) is None:
            return None
        how = choice.how
        is_box = how.by_windows and len(how.window) > 1  # which a call would move by single elements
        is_costly = how.does_both and num_bytes(eqn.invars[2]) > _gates.SLICED_BYTES and not is_box
        return choice._replace(is_costly=is_costly)

    def _choose_row(self, scope: Scope, eqn: Equation, is_tape: bool) -> Choice | None:
        primitive, params = eqn.primitive, eqn.params
        buffer, index, *rest = operands_of(eqn)
        types, batch_dims = (buffer.aval, index.aval), params["batch_dims"]
        if not all(is_static(t) for t in types) or not isinstance(buffer.aval.dtype, np.dtype):
            return None
        sizes, window = sizes_of(buffer.aval, params), params["window"]
        if 0 in buffer.aval.shape[: batch_dims + len(sizes)] or is_packed(buffer.aval.dtype):
            return None
        # XLA moves the small floats through larger ones, which does not leave all of them as they are.
        element = buffer.aval.dtype.name
        if element.startswith("float8") or (is_strict(eqn) and not is_tape):
            return None
        if element == "bfloat16" and primitive.name == "ta_max":  # XLA takes the smallest of these for 0
            return None
        is_read, is_write, is_swap = (primitive is p for p in (ta_read_p, ta_write_p, ta_swap_p))
        combine = ROW_OPS[primitive].combine
        if not (is_read or is_write or is_swap or combine):
            return None
        raises, clips = may_raise(params), params["whole"] and params["mode"] == "clip"
        # If an example has finished its loop, its step is a row that no tape has.
        in_range = is_tape and raises
        drops = not in_range and not clips and self._needs_mask(eqn)
        masked = mask_of(eqn) is not None
        shared = _shared_axes(index.aval, batch_dims)
        by_windows = bool(window) and (params["whole"] or not drops)
        shape = positions_of(index.aval, params["index_dims"])[batch_dims:]
        positions = [*buffer.aval.shape[shared:batch_dims], *shape, *(() if by_windows else window)]
        if self.divided and shared < batch_dims:
            return None
        # A GPU visits many positions in a sorted order. The positions of one slice need not be sorted.
        count, each = math.prod(positions), math.prod(positions[batch_dims - shared :])
        is_box = by_windows and len(window) > 1
        most = self.slices_of_a_loop if self.platform == "cpu" else self.most_slices
        if self.platform == "cpu" and is_write and 1 < count <= most and _is_costly(scope, rest[0]):
            most = 1
        at_once = count > most and not is_tape and self._can_be_at_once(scope, eqn, element, each, is_box)
        is_sorted = not is_read and self._is_sorted(sizes, math.prod((*shape, *window)))
        if (is_sorted and not (by_windows and count == 1) and not at_once) or not (
            at_once or 0 < count <= self.most_slices
        ):
            return None
        does_both = is_swap if at_once else not is_read and (not is_write or masked or drops)
        how = How(
            batch_dims=batch_dims,
            sizes=sizes,
            window=window,
            rows=_rows_of(buffer.aval, index.aval, params),
            masked=masked,
            reverse=bool(params["reverse"]),
            combine=combine,
            takes=is_swap,
            drops=drops,
            moves=clips and params.get("checked") != "in range",
            does_both=does_both,
            shared=shared,
            by_windows=by_windows,
            at_once=at_once,
            barriers_hold=self.barriers_hold,
        )
        if is_tape:
            return Choice(how)
        if self.checks_outside and not scope.is_in_loop:
            # Of a slice XLA may know the result without the index, and then nobody asks whether that is right.
            return None
        unordered = bool(params.get("unordered"))
        if is_read:
            updated = not self.uses.is_never_updated(scope, buffer)
            # A gather is never made twice. An update that waits for it is made of it, or else needs a barrier.
            of_older = scope.maker(buffer) is None or not self.uses.is_updated_in(scope, buffer)
            in_order = at_once and self.platform == "cpu" and of_older and not _is_waited_for(scope, eqn)
            is_ordered = updated and not in_order and not unordered
            is_ordered |= not at_once and self._is_made_again(scope, buffer)
            return Choice(how._replace(ordered=is_ordered), passes_on=updated)
        is_ordered = not (unordered or _is_alone(self.uses, scope, eqn, reads_too=does_both))
        return Choice(how._replace(ordered=is_ordered), passes_on=True)

    def _is_made_again(self, scope: Scope, buffer: Atom) -> bool:
        """Return whether XLA may make this version of a buffer again, in a fusion that reads a row of it.

        Such a fusion reads the version before, and XLA copies that if the update may come first: always if the row is
        the one that was updated. Where barriers hold, `_Rows` puts one in front of the read.
        """
        maker = scope.maker(buffer)
        return (
            not self.barriers_hold
            and scope.is_in_loop
            and maker is not None
            and updates(maker)
            and num_bytes(buffer) >= _gates.ORDERED_BYTES
        )

    def _is_sorted(self, sizes: Sequence[int], count: int) -> bool:
        platforms = sorting.PLATFORMS if self.platform is None else (self.platform,)
        return any(sorting.is_sorted(platform, math.prod(sizes), count) for platform in platforms)

    def _can_be_at_once(self, scope: Scope, eqn: Equation, element: str, each: int, is_box: bool) -> bool:
        """Return whether a gather or a scatter does what a call does, which has `each` positions in an example.

        Of a box every element would be a position of a call. So boxes, one in each example, are moved as plain JAX
        moves them on every platform.
        """
        is_read, is_write, is_swap = (eqn.primitive is p for p in (ta_read_p, ta_write_p, ta_swap_p))
        if not scope.is_in_loop:
            return False
        if self.platform != "cpu" and not (is_box and (each == 1 or is_read)):
            return False
        if is_swap:
            return each == 1  # of two positions, one might take out what the other puts in
        # XLA adds small floats through larger ones, and before jaxlib 0.12 converts all of a bfloat16 buffer.
        if element == "bfloat16" and not self.barriers_hold:
            return is_read and self.uses.is_never_updated(scope, eqn.invars[0])
        if not is_read and ROW_OPS[eqn.primitive].combine not in SCATTERS:
            return False
        return is_read or is_write or element not in ("bfloat16", "float16")

    def _needs_mask(self, eqn: Equation) -> bool:
        """Return whether the index of an op may be out of range with an effect that anybody can see.

        Nobody can see it if it has been recorded on a CPU, which raises before it returns anything. A GPU returns
        arrays and raises later.
        """
        checked = eqn.params.get("checked")
        return checked != "in range" and (checked != "recorded" or self.platform != "cpu")


#: What may be rewritten besides row ops.
_OTHERS = frozenset({ta_fence_p, ta_check_p, ta_clear_p})


def zero_of(scope: Scope) -> Atom | None:
    """Return a number that is 0 unless an index is stray and that XLA cannot know, if a jaxpr has one."""
    return next((eqn.outvars[0] for eqn in scope.jaxpr.eqns if eqn.primitive is ta_zero_p), None)


def _rows_of(buffer: Any, index: Any, params: Any) -> tuple[int, ...]:
    """Return the shape of the rows that an op is for: `[*batch, *I, *window, *elem]`."""
    batch_dims, index_dims = params["batch_dims"], params["index_dims"]
    positions = positions_of(index, index_dims)[batch_dims:]
    return (*buffer.shape[:batch_dims], *positions, *params["window"], *buffer.shape[batch_dims + index_dims :])


def _has_elements(aval: Any) -> bool:
    return is_static(aval) and bool(aval.ndim) and 0 not in aval.shape


def _is_costly(scope: Scope, rows: Atom) -> bool:
    """Return whether rows are computed by functions that XLA for CPUs computes many times faster in vectors."""
    values = [rows]
    for value in values:
        eqn = scope.maker(value)
        if eqn is None or len(values) > _FAR:
            break
        if eqn.primitive.name in _IN_VECTORS and math.prod(value.aval.shape) >= _gates.VECTOR_ELEMENTS:
            return True
        if not inner_scopes(scope, eqn):
            values.extend(v for v in eqn.invars if scope.maker(v) is not None)
    return False


_IN_VECTORS = frozenset(("exp", "log", "log1p", "logistic", "sin", "cos", "tanh"))
_FAR = 16


def _shared_axes(index: Any, batch_dims: int) -> int:
    """Return how many of the outermost batch axes have one index for all examples."""
    return next((k for k in range(batch_dims) if index.shape[k] != 1), batch_dims)


def _is_waited_for(scope: Scope, read: Equation) -> bool:
    """Return whether an update of the buffer waits for what is read, although it is not made of it."""
    (row,) = read.outvars
    return any(updates(eqn) and any(v is row for v in readers_of(eqn)) for eqn in scope.jaxpr.eqns)


def _is_alone(uses: Uses, scope: Scope, update: Equation, *, reads_too: bool) -> bool:
    """Return whether nothing but `update` uses a buffer between two steps of a loop, so there is nothing to order.

    If it does not read the buffer, other updates may follow: they are a chain. The row that it reads itself is read
    first, since the new row is made of it; only "swap" gives it to others.
    """
    buffer, updated = update.invars[0], update.outvars[0]
    if isinstance(buffer, Literal) or len(update.outvars) > 1 or _count(uses, scope, buffer) > 1:
        return False
    if not reads_too:
        return True
    if scope.carried(buffer) is None:
        return False
    return _count(uses, scope, updated) == 1 and any(v is updated for v in scope.jaxpr.outvars)


def _count(uses: Uses, scope: Scope, value: Any) -> int:
    """Return how often a value is used where it is made, and in the branches there."""
    return len(list(uses.all_uses(*home_of(scope, value))))


# --- all ops on a buffer in a loop are slices, or all are calls ----------------------------------------------------

_Chosen = Sequence[tuple[Equation, Choice | None]]


class LayoutConflicts:
    """Drops choices so that no buffer passes from a slice to a call in a loop, or the other way round.

    A call demands a layout. If a barrier has left the layout to XLA, XLA makes sure of it with a copy for an update by
    a slice.
    """

    def __init__(self, scopes: Iterable[Scope]) -> None:
        self.buffers: UnionFind[tuple[Scope, Any]] = UnionFind()
        self.calls: set[tuple[Any, bool]] = set()
        self.depths: dict[tuple[Any, bool], int] = {}  #: in how many loops the innermost of the others is
        for scope in scopes:
            for eqn in scope.jaxpr.eqns:
                for (a, one), (b, other) in _same_buffer(scope, eqn):
                    if not isinstance(one, Literal) and not isinstance(other, Literal) and _may_be_buffer(one.aval):
                        self.buffers.join((a, one), (b, other))

    def _key(self, scope: Scope, eqn: Equation) -> tuple[Any, bool]:
        return self.buffers.find((scope, _hashable(eqn.invars[0]))), scope.is_in_loop

    def add_depths(self, scope: Scope, choices: _Chosen) -> None:
        for eqn, choice in choices:
            if choice is not None and not choice.is_costly:
                key = self._key(scope, eqn)
                self.depths[key] = max(self.depths.get(key, 0), loops_around(scope))

    def without_costly(self, scope: Scope, choices: _Chosen) -> _Chosen:
        """Return the choices without those that take longer than calls, unless another op is in an inner loop."""
        return [
            (eqn, None if choice is not None and choice.is_costly and self._is_innermost(scope, eqn) else choice)
            for eqn, choice in choices
        ]

    def _is_innermost(self, scope: Scope, eqn: Equation) -> bool:
        return loops_around(scope) >= self.depths.get(self._key(scope, eqn), 0)

    def add(self, scope: Scope, choices: _Chosen) -> None:
        """Note the calls that stay."""
        for eqn, choice in choices:
            if choice is None and has_buffer(eqn) and not is_packed(eqn.invars[0].aval.dtype):
                self.calls.add(self._key(scope, eqn))

    def choices(self, scope: Scope, choices: _Chosen) -> _Chosen:
        return [
            (eqn, None if choice is not None and choice.passes_on and self._key(scope, eqn) in self.calls else choice)
            for eqn, choice in choices
        ]


def _may_be_buffer(aval: Any) -> bool:
    """Return whether a type has axes. A token has no shape."""
    return bool(getattr(aval, "ndim", 0))


def _hashable(atom: Atom) -> Any:
    return id(atom) if isinstance(atom, Literal) else atom


_Place = tuple[Scope, Any]  #: a value, and the scope in which it has that name


def _same_buffer(scope: Scope, eqn: Equation) -> Iterator[tuple[_Place, _Place]]:
    """Yield the pairs of values of an equation that may be one buffer."""

    def pairs(one: Scope, some: Iterable[Any], other: Scope, others: Iterable[Any]) -> Iterator[Any]:
        return (((one, a), (other, b)) for a, b in zip(some, others, strict=True))

    name, params = eqn.primitive.name, eqn.params
    if updates(eqn) or name == "dynamic_update_slice":
        yield from pairs(scope, eqn.invars[:1], scope, eqn.outvars[:1])
    elif name == "optimization_barrier":
        yield from pairs(scope, eqn.invars, scope, eqn.outvars)
    elif name == "while":
        condition, body, a, b = scope.condition(eqn), scope.body(eqn), params["cond_nconsts"], params["body_nconsts"]
        carry = eqn.invars[a + b :]
        yield from pairs(scope, [*eqn.invars[:a], *carry], condition, condition.jaxpr.invars)
        yield from pairs(scope, eqn.invars[a:], body, body.jaxpr.invars)
        yield from pairs(scope, eqn.outvars, body, body.jaxpr.outvars)
        yield from pairs(scope, carry, scope, eqn.outvars)
    elif name == "cond":
        for inner in scope.branches(eqn):
            yield from pairs(scope, eqn.invars[1:], inner, inner.jaxpr.invars)
            yield from pairs(scope, eqn.outvars, inner, inner.jaxpr.outvars)
    elif name in ("jit", "pjit", "shard_map"):
        for inner in inner_scopes(scope, eqn):
            yield from pairs(scope, eqn.invars, inner, inner.jaxpr.invars)
            yield from pairs(scope, eqn.outvars, inner, inner.jaxpr.outvars)
    else:
        for operand, result in aliased(eqn):
            yield (scope, eqn.invars[operand]), (scope, eqn.outvars[result])


# --- the slices --------------------------------------------------------------------------------------------------


class Rewriter:
    """Rewrites the chosen ops, and settles how the others are called."""

    def __init__(self, chosen: dict[Scope, _Chosen], barriers_hold: bool, places: Places) -> None:
        self.chosen, self.barriers_hold, self.places = chosen, barriers_hold, places

    def jaxpr(self, scope: Scope, made_again: frozenset[Any]) -> Any:
        """Return the rewritten closed jaxpr.

        XLA would make the values `made_again`, which are arguments of a branch, in a fusion that reads them.
        """
        changed, rows = False, _Rows(scope, self.barriers_hold, made_again)
        for eqn, choice in self.chosen[scope]:
            if eqn.primitive is ta_zero_p:
                rows.block.rename(eqn.outvars, map(rows.block.read, eqn.invars))
                rows.zero = rows.block.read(eqn.invars[0])
                changed = True
                continue
            if choice is not None:
                rows.rewrite(eqn, choice)
                changed = True
                continue
            if inner_scopes(scope, eqn):
                new = self._with_bodies(scope, eqn, rows)
            elif eqn.primitive in CALLED or eqn.primitive in (ta_check_p, ta_empty_p):
                new = self._settled(scope, eqn, rows)
            else:
                new = eqn
                changed |= rows.materialize(eqn)
            changed |= new is not eqn
            rows.add(new)
        return rows.block.jaxpr() if changed else scope.closed

    def _with_bodies(self, scope: Scope, eqn: Equation, rows: "_Rows") -> Equation:
        """Return a loop or branches with rewritten jaxprs."""
        old = inner_scopes(scope, eqn)
        if eqn.primitive.name == "cond":
            captured = [zip(eqn.invars[1:], inner.jaxpr.invars, strict=True) for inner in old]
            made_again = [frozenset(v for x, v in pairs if rows.is_made_again(x)) for pairs in captured]
        else:
            made_again = [frozenset()] * len(old)
        new = [self.jaxpr(*each) for each in zip(old, made_again, strict=True)]
        return eqn if all(a is b.closed for a, b in zip(new, old, strict=True)) else with_bodies(eqn, new)

    def _settled(self, scope: Scope, eqn: Equation, rows: "_Rows") -> Equation:
        """Return an op as its kernel is called.

        One that raises is named with its place. If it raises or allocates in a loop, XLA must not hoist it as
        loop-invariant: it would raise in a loop of no steps.
        """
        changes: dict[str, Any] = {}
        raises = addresses_rows(eqn) and may_raise(eqn.params) and eqn.params.get("checked") != "recorded"
        if is_strict(eqn):
            changes["place"] = self.places.of(eqn)
        if scope.is_in_loop and (eqn.primitive is ta_empty_p or raises):
            changes["effect"] = True
        if eqn.primitive in ROW_OPS and is_static(eqn.invars[0].aval) and is_static(eqn.invars[1].aval):
            eqn = rows.flat(eqn)
        return eqn.replace(params=eqn.params | changes) if changes else eqn


class _Rows:
    """Puts slices in place of the ops of one jaxpr, in order.

    Reads of a buffer come before its update, in one of two ways. Each gives the buffer that is there afterwards and a
    number for the index of the update: an optimization barrier, after which the buffer is another value, or a number
    that is 0.
    """

    def __init__(self, scope: Scope, barriers_hold: bool, made_again: frozenset[Any]) -> None:
        self.scope, self.block, self.barriers_hold = scope, Block(scope.closed), barriers_hold
        self.zero: Atom | None = None
        self.made_again = set(made_again)  #: values that XLA would make again where they are read
        self.read_before: dict[Any, set[Any]] = {}  #: by buffer: the rows read before it
        self.tokens: dict[Any, Atom] = {}
        self.named: dict[Any, list[Any]] = {}  #: by value: the variables that it stands for

    def add(self, eqn: Equation) -> None:
        self.block.add(eqn)
        if eqn.primitive.name == "dynamic_update_slice" or self._is_computed_for_carry(eqn):
            self.made_again.update(eqn.outvars)

    def materialize(self, eqn: Equation) -> bool:
        """Have an operation that reads whole buffers read them after their updates. Return whether there are such.

        XLA would make an update again in the fusion that reads, of the buffer before it, and so copy that one. What
        nothing else uses may be made there alone.
        """
        found = False
        if not self.barriers_hold or not self.scope.is_in_loop:
            return found
        for x in eqn.invars:
            if self.is_made_again(x) and num_bytes(x) >= _gates.ORDERED_BYTES_OF_ALL and self._times_used(x) > 1:
                buffer, found = self.block.read(x), True
                self._pass_on(buffer, *self.block.call(slicing.barrier, [buffer], eqn))
        return found

    def _times_used(self, value: Any) -> int:
        jaxpr = self.scope.jaxpr
        return sum(v is value for operands in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars) for v in operands)

    def is_made_again(self, atom: Atom) -> bool:
        return not isinstance(found := self.block.read(atom), Literal) and found in self.made_again

    def rewrite(self, eqn: Equation, choice: Choice) -> None:
        primitive = eqn.primitive
        if primitive is ta_read_p:
            found = [self._read(eqn, choice)]
        elif primitive in ROW_OPS:
            found = self._update(eqn, choice.how)
        elif primitive is ta_check_p:
            found = self.block.call(slicing.check, self._own(eqn), eqn, drops=choice.how.drops)
        elif primitive is ta_fence_p:
            found = [self._fence(eqn)]
        else:
            (buffer,), token = self._after(eqn)
            found = self.block.call(slicing.clear, [buffer, *self._own(eqn)[1:], *token], eqn)
        for v, new in zip(eqn.outvars, found, strict=True):
            self._name(v, new)

    def flat(self, eqn: Equation) -> Equation:
        """Return a row op with the operands of its kernel: the numbers of all rows, and a mask of these."""
        params = eqn.params
        buffer, index, *rest = operands_of(eqn)
        call, mask = ROW_OPS[eqn.primitive], mask_of(eqn)
        is_known, whole = params.get("checked") == "in range", params["whole"]
        clips = whole and params["mode"] == "clip"
        how = How(
            batch_dims=params["batch_dims"],
            sizes=sizes_of(buffer.aval, params),
            window=params["window"],
            masked=mask is not None,
            drops=not is_known and not clips,
            moves=clips and not is_known,
            by_windows=whole and bool(params["window"]),
        )
        masks = [] if mask is None else [self.block.read(mask)]
        with_all = [self.block.read(buffer), *self._starts(index, len(how.sizes), eqn), *masks]
        found = self.block.call(slicing.flat, with_all, eqn, how=how)
        value = [self.block.read(x) for x in rest[: call.takes_value]]
        waits = [self.block.read(x) for x in eqn.invars[len(eqn.invars) - waits_of(eqn) :]]
        mode = "drop" if whole or how.moves else params["mode"]
        return eqn.replace(
            invars=[self.block.read(buffer), found[0], *value, *found[1:], *waits],
            params=params | {"window": (), "whole": False, "mode": mode, "settled": True},
        )

    # --- operands

    def _own(self, eqn: Equation) -> list[Atom]:
        return [self.block.read(x) for x in operands_of(eqn)]

    def _starts(self, index: Atom, axes: int, eqn: Equation) -> list[Atom]:
        """Return an index, or the columns that it is joined of."""
        columns = joined_columns(self.scope, index, axes) if axes > 1 else []
        found, shape = [self.block.read(x) for x in columns or [index]], (*index.aval.shape[:-1], 1)
        if columns and columns[0].aval.shape != shape:
            return [x for column in found for x in self.block.call(slicing.shaped, [column], eqn, shape=shape)]
        return found

    def _name(self, variable: Any, atom: Atom) -> None:
        """Have a value stand for a variable."""
        self.block.names[variable] = atom
        if not isinstance(atom, Literal):
            self.named.setdefault(atom, []).append(variable)

    def _pass_on(self, old: Atom, new: Any) -> None:
        """Rename a value to its copy behind a barrier.

        Further reads of the buffer pass barriers side by side: XLA may fuse what is not in a chain.
        """
        if not isinstance(old, Literal):
            for variable in [old, *self.named.pop(old, [])]:
                self.block.names[variable] = new

    # --- order

    def _after(self, eqn: Equation, more: Sequence[Atom] = ()) -> tuple[list[Atom], list[Atom]]:
        """Return the buffer of an op after what it waits for, and perhaps a 0 for the index of an update.

        It waits for `more` values, too, which come after the buffer as they are then.
        """
        buffer, *more = map(self.block.read, [eqn.invars[0], *more])
        before = self.read_before.get(_hashable(buffer), set())
        readers = [x for x in (*map(self.block.read, readers_of(eqn)), *more) if not isinstance(x, Literal)]
        waited = [x for x in dict.fromkeys(readers) if x not in before]
        if not waited:
            return [buffer, *more], []
        if self.barriers_hold:
            passed = self.block.call(slicing.barrier, [buffer, *waited], eqn)
            for old, new in zip([buffer, *waited], passed, strict=True):
                self._pass_on(old, new)
            self.read_before[passed[0]] = before.union(passed[1:])
            new = dict(zip(waited, passed[1:], strict=True))
            return [passed[0], *(x if isinstance(x, Literal) else new.get(x, x) for x in more)], []
        tokens = [self._token_of(r, eqn) for r in waited if 0 not in r.aval.shape]
        return [buffer, *more], self.block.call(slicing.sum_of, tokens, eqn) if tokens else []

    def _token_of(self, value: Any, eqn: Equation) -> Atom:
        if value in self.tokens:
            return self.tokens[value]
        (token,) = self.block.call(slicing.token_of, [self.zero, value], eqn)
        return token

    def _is_made_of(self, atom: Atom, buffer: Any) -> bool:
        """Return whether a value is computed from a buffer, or from another version of it."""
        found, stack = set[Any](), [atom]
        while stack:
            v = stack.pop()
            if isinstance(v, Literal) or v in found:
                continue
            if is_of_numbers(v.aval) and has_type_of(v, buffer):
                return True
            found.add(v)
            maker = self.scope.maker(v)
            stack += [] if maker is None else maker.invars
        return False

    def _is_computed_for_carry(self, eqn: Equation) -> bool:
        """Return whether a step of a loop computes all of a large array elementwise, and carries it on."""
        if self.scope.role != "body" or eqn.primitive.name not in _ELEMENTWISE:
            return False
        (v,) = eqn.outvars
        return num_bytes(v) >= _gates.ORDERED_BYTES_OF_ALL and any(v is x for x in self.scope.jaxpr.outvars)

    # --- ops

    def _read(self, eqn: Equation, choice: Choice) -> Atom:
        how, buffer = choice.how, self.block.read(eqn.invars[0])
        # XLA would make an updated one again in the fusion that reads, of the buffer before the update. It would also
        # repeat a slice of one that a step computes as a whole, and read the one before after its memory is needed.
        # A gather is never made twice.
        if self.barriers_hold and self.is_made_again(eqn.invars[0]):
            how = how._replace(is_made_again=how.ordered or choice.passes_on or not how.at_once)
        _, index, *mask = operands_of(eqn)
        zero = [self.zero] if how.by_branch else []
        operands = [*zero, buffer, *self._starts(index, len(how.sizes), eqn), *map(self.block.read, mask)]
        found = self.block.call(slicing.read, operands, eqn, how=how)
        if how.is_made_again or (how.ordered and self.barriers_hold):
            passed, row = found
            before = self.read_before.get(_hashable(buffer), set()) if not how.is_made_again else set()
            self._pass_on(buffer, passed)
            if how.ordered:
                self.read_before[passed] = before | {row}
            return row
        if how.ordered:
            row, self.tokens[row] = found
            return row
        return found[0]

    def _update(self, eqn: Equation, how: How) -> list[Atom]:
        _, index, value, *mask = operands_of(eqn)
        # What depends on rows of this buffer is made before the first of several slices is updated: XLA would make it
        # again for each. So are all rows, if nothing else waits for them.
        several = not how.at_once and self.barriers_hold and _places(eqn, how) > 1
        needs_all = several and bool(eqn.params.get("unordered"))
        made = [value] if needs_all else []
        made += [x for x in (index, value, *mask) if several and x not in made and self._is_made_of(x, eqn.invars[0])]
        (buffer, *_), token = self._after(eqn, made)
        is_made_again = self.barriers_hold and how.does_both and buffer in self.made_again
        how = how._replace(is_made_again=is_made_again and (how.ordered or not how.at_once), tokens=bool(token))
        zero = [self.zero] if how.by_branch else []
        index = [self.block.read(index)] if index in made else self._starts(index, len(how.sizes), eqn)
        rest = [self.block.read(x) for x in (value, *mask)]
        found = self.block.call(slicing.update, [*zero, buffer, *index, *rest, *token], eqn, how=how)
        if not how.at_once:
            self.made_again.add(found[0])
        return found

    def _fence(self, eqn: Equation) -> Atom:
        (buffer,), token = self._after(eqn)
        if self.barriers_hold:
            return buffer if readers_of(eqn) else self.block.call(slicing.barrier, [buffer], eqn)[0]
        (found,) = self.block.call(slicing.fence, [self.zero, buffer, *token], eqn)
        return found


def _places(eqn: Equation, how: How) -> int:
    """Return how many slices an op becomes."""
    index, shape = eqn.invars[1].aval, eqn.invars[0].aval.shape
    positions = positions_of(index, eqn.params["index_dims"])[how.batch_dims :]
    return math.prod((*shape[how.shared : how.batch_dims], *positions, *(() if how.by_windows else how.window)))


#: What may be computed again in each fusion that reads it.
_ELEMENTWISE = frozenset(("add", "add_any", "convert_element_type", "div", "max", "min", "mul", "select_n", "sub"))
