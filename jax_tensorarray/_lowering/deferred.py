"""Defer errors in a program for several CPU devices to its end, where no device waits for another.

    b = ta_write(b, i, x)                        b = ta_write(b, i, x, deferred)
                                                 e = ta_raise(b)
    return b                                     return ta_fence(b, e)

An error ends the program of its device. If there is a collective later, the other devices wait for it there, until XLA
aborts the process. So a call whose parameter `op` begins with `>` drops the access, notes the error and goes on. A
`ta_raise` at the end of the program raises it. The `ta_raise` waits for all results, and so for all collectives. The
results then pass a fence that waits for the `ta_raise`.

A loop that does not count its steps may wait for ever for a row that was dropped. In a program with such a loop, calls
raise where they are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AxisType, Sharding

from jax_tensorarray import _compat
from jax_tensorarray._lowering.equations import Block, is_of_numbers, is_static
from jax_tensorarray._lowering.places import Places
from jax_tensorarray._lowering.record import counts
from jax_tensorarray._lowering.scopes import Atom, Scope, inner_scopes, is_strict, rebuilt
from jax_tensorarray._ops.fence import ta_fence_p, ta_raise_p
from jax_tensorarray._ops.primitive import is_packed
from jax_tensorarray._types import Equation


def raise_at_end(jaxpr: Any, shardings: Sequence[Any] | None, outside: Any) -> Any:
    """Have the calls in a program for several devices raise at its end, if they may.

    `shardings` say how the results are divided, as far as JAX knows.
    """
    program, places = Scope(jaxpr), Places(outside)
    everything = list(_everything(program))
    results = [v for v in dict.fromkeys(_variables(program.jaxpr.outvars)) if program.maker(v) and _can_be_fenced(v)]
    raising = any(is_strict(eqn) for _, eqn in everything)
    if not raising or not results or any(_may_never_end(scope, eqn) for scope, eqn in everything):
        return jaxpr
    named = rebuilt(program, lambda _, eqn, __: _named(eqn, places))
    block = Block(named)
    block.eqns = list(_compat.opened(named).eqns)
    last, maker = block.eqns[-1], Scope(named).maker
    shardings_of_all = shardings or [None] * len(program.jaxpr.outvars)
    outs = [(k, v) for k, v in enumerate(program.jaxpr.outvars) if not isinstance(v, Literal)]
    ends = {k: (v, shardings_of_all[k]) for k, v in outs if v in results}
    placing = {v: maker(v) for v in results if _is_placing(maker(v))}
    ready = {
        (v, sharding): _divided(block, placing[v].invars[0] if v in placing else v, sharding, last)
        for v, sharding in dict.fromkeys(ends.values())
    }
    nothing = _compat.new_variable(_NOTHING)
    block.eqns.append(_equation(last, ta_raise_p, [*ready.values()], nothing, effect=True))
    after: dict[Any, Atom] = {}
    for (v, sharding), x in ready.items():
        fenced = _compat.new_variable(x.aval)
        block.eqns.append(_equation(last, ta_fence_p, [x, nothing], fenced, waits=1))
        if v in placing:
            placed = _compat.new_variable(v.aval)
            block.eqns.append(placing[v].replace(invars=[fenced], outvars=[placed]))
            fenced = placed
        after[v, sharding] = fenced
    outvars = _compat.opened(named).outvars
    return block.jaxpr(outvars=[after[ends[k]] if k in ends else v for k, v in enumerate(outvars)])


_NOTHING = jax.core.ShapedArray((), np.dtype(np.int32))


def _everything(scope: Scope) -> Iterator[tuple[Scope, Equation]]:
    for eqn in scope.jaxpr.eqns:
        yield scope, eqn
        for inner in inner_scopes(scope, eqn):
            yield from _everything(inner)


def _variables(atoms: Sequence[Atom]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _named(eqn: Equation, places: Places) -> Equation:
    if not is_strict(eqn):
        return eqn
    return eqn.replace(params=eqn.params | {"place": places.of(eqn), "deferred": True})


def _equation(at: Equation, primitive: Any, operands: Sequence[Atom], result: Any, **params: Any) -> Equation:
    """Return an equation with the place of another one in the source."""
    return at.replace(primitive=primitive, params=params, invars=list(operands), outvars=[result], effects=set())


def _may_never_end(scope: Scope, eqn: Equation) -> bool:
    """Return whether `eqn` is a loop that need not end: its condition counts to no number."""
    if eqn.primitive.name != "while":
        return False
    condition = scope.condition(eqn)
    conditions = [condition.jaxpr.outvars[0]]
    for predicate in conditions:  # grows meanwhile
        conditions += condition.operands(predicate, "and")
    return not any(counts(scope, eqn, predicate) for predicate in conditions)


def _divided(block: Block, value: Atom, sharding: Any, at: Equation) -> Atom:
    """Return a value with the sharding of the result, so that no collective comes after it."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, Sharding) or AxisType.Explicit in getattr(mesh, "axis_types", ()):
        return value
    (divided,) = block.call(_constrained, [value], at, sharding=sharding)
    return divided


def _constrained(x: Any, *, sharding: Any) -> list[Any]:
    return [jax.lax.with_sharding_constraint(x, sharding)]


def _is_placing(eqn: Equation) -> bool:
    """Return whether an equation puts one value into another memory."""
    return eqn.primitive.name == "device_put" and len(eqn.invars) == 1


def _can_be_fenced(v: Any) -> bool:
    """Return whether a fence can hand a value on."""
    aval = v.aval
    return is_of_numbers(aval) and is_static(aval) and not is_packed(aval.dtype)
