"""Accumulate sparse cotangents in place: a sum with zeros in which some rows are set.

    ct = ct + jnp.zeros_like(b).at[i].add(dx)          # the transpose of `b[i]`, and the sum with other cotangents
    # becomes
    ct = ta_add(ct, i, dx)

If the zeros are made in a branch or before an inner loop, we pass the cotangent in, and the sum comes out
(`moved_into`). The transpose of a select is two selects with zeros, and their sum is one buffer again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place.values import Guard, Left, Predicate, Selected, SparseRows, Value
from jax_tensorarray._jaxprs import registry
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._ops.add import ta_add_p
from jax_tensorarray._types import Array, Equation


def add(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Add to the rows in place.

    If a step makes all of the other operand, XLA adds in the same pass what it makes before the loop. It adds the rows
    that a `jnp.roll` moves around the end to the others in one pass, too.
    """
    a, b = operands
    for whole, some in ((a, b), (b, a)):
        if some.sparse_updates and not whole.is_given and (some.is_invariant or _is_padded(whole)):
            return Left()
    found = total(a, b)
    return Left() if found is None else [found]


def _is_padded(x: Value) -> bool:
    """Return whether a step makes an array of most of its rows, and zeros."""
    maker = _compat.maker_of(x.array)
    return x.sparse_updates is None and maker is not None and maker.primitive.name == "pad"


def total(a: Value, b: Value) -> Value | None:
    """Return the sum, None if that takes all rows."""
    if a.shape != b.shape:
        return None  # a number is added to all elements
    if a.sparse_updates is not None and b.sparse_updates is not None:
        return Value(lax.add(a.array, b.array), form=SparseRows((*a.sparse_updates, *b.sparse_updates)))
    for whole, some in ((a, b), (b, a)):
        if some.sparse_updates is not None:
            for update in some.sparse_updates:
                whole = whole.updated(update)
            return whole
    return _of_parts(a, b)


def _of_parts(a: Value, b: Value) -> Value | None:
    """Return the sum of the selected part of a buffer and the rest of it, one of them updated."""
    p, q = a.form, b.form
    if not isinstance(p, Selected) or not isinstance(q, Selected):
        return None
    if p.updates:
        p, q = q, p
    if p.updates or not p.active.is_opposite(q.active):
        return None
    whole = _either(p.active, p.whole, q.whole)
    if whole is None:
        return None
    for update in q.updates:
        whole = whole.updated(update, q.active)
        if not update.is_zero:  # the others had zeros there, and are not selected
            whole = whole.updated(update._replace(primitive=ta_add_p), p.active)
    return whole


def _either(active: Predicate, yes: Value, no: Value) -> Value | None:
    """Return the buffer that both are, with the derivative of the one or the other. None if they are two buffers.

    `jax.vmap` gives each branch of a `lax.cond` the operands with derivatives for the examples that take this branch.
    """
    if yes is no:
        return yes
    buffer, has_derivative = _guarded(yes, active)
    other, has_own = _guarded(no, active)
    if buffer is not other or has_derivative is None or has_own is None:
        return None
    return buffer.guarded(Predicate(lax.select(active.mask, has_derivative, has_own)))


def _guarded(x: Value, like: Predicate) -> tuple[Value, Array | None]:
    """Return the buffer in guards, and which examples have a derivative, None if these are of another batch."""
    has_derivative: Array | None = lax.full_like(like.mask, True)
    while isinstance(x.change, Guard) and x.before is not None:
        own = x.change.active.mask
        has_derivative = None if has_derivative is None or own.shape != like.mask.shape else has_derivative & own
        x = x.before
    return x, has_derivative


# --- sums that are done inside -----------------------------------------------------------------------------------


class Sum(NamedTuple):
    """A result `number` of an equation that is used only once, to be added to `other`."""

    number: int
    other: Any
    eqn: Equation


@_compat.cached
def moved_into(jaxpr: Jaxpr) -> dict[int, list[Sum]]:
    """Return the sums that can be moved into control flow, by the `id` of its equation.

    Each adds a result of the equation to a value that exists before it.
    """
    uses, found = Uses(jaxpr), dict[int, list[Sum]]()
    made = {v: k for k, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    for place, eqn in enumerate(jaxpr.eqns):
        for number, v in enumerate(eqn.outvars):
            of = uses.of(v)[0].eqn if takes_sums(eqn) and len(uses.of(v)) == 1 else None
            if of is None or of.primitive.name != "add_any":
                continue
            other = next(w for w in of.invars if w is not v)
            if isinstance(other, jex.Literal) or made.get(other, -1) >= place:
                continue
            if eqn.primitive.name != "scan" or _is_sum(eqn, number):
                found.setdefault(id(eqn), []).append(Sum(number, other, of))
                made[of.outvars[0]] = place
    return found


def takes_sums(eqn: Equation) -> bool:
    """Return whether an addition to a result of an equation can be done inside of the equation."""
    return eqn.primitive.name == "scan" or registry.entry_of(eqn).kind in ("checkpoint", "branches")


def _is_sum(eqn: Equation, number: int) -> bool:
    """Return whether a scan does nothing with a carry except adding to it."""
    [loop] = registry.ENTRIES["scan"].bodies(eqn.params)
    if number >= loop.num_carry:
        return False
    uses = Uses(loop.jaxpr)
    start, v = loop.split(uses.jaxpr.invars)[1][number], uses.jaxpr.outvars[number]
    if len(uses.of(start)) != 1:
        return False

    def reaches(v: Any) -> bool:
        if v is start:
            return True
        maker = uses.maker(v)
        if maker is None or maker.primitive.name != "add_any" or len(uses.of(v)) != 1:
            return False
        return any(map(reaches, maker.invars))

    return reaches(v)


RULES = {"add_any": add, "add": add}
