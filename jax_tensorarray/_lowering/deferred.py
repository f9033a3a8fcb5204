"""Indices out of range on one of several CPU devices: they are raised where no device still waits for another.

An error ends the program of its device. If there is a collective later, the other devices wait for it there, until XLA
aborts the process. So a call whose attribute `op` begins with `>` drops the access, notes the error and goes on. At the
end of `main` there is a call of `raise`. It waits for all results, and so for all collectives. The results go through a
fence after it.

A loop that does not count its steps may wait for ever for a row that was dropped. In a program with such a loop, calls
raise where they are.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._lowering.bounds import mark_those_in_range
from jax_tensorarray._lowering.equations import Atom, Block
from jax_tensorarray._lowering.record import Places, counts
from jax_tensorarray._lowering.scopes import Scope, inner_scopes, is_strict, rebuilt
from jax_tensorarray._ops.fence import ta_fence_p, ta_raise_p
from jax_tensorarray._ops.primitive import is_packed
from jax_tensorarray._types import Equation


def raise_at_end(jaxpr: Any, outside: Any, shardings: Sequence[Any]) -> Any:
    """Have the calls in a program for several devices raise at its end, if they may.

    The results are divided as `shardings` say, None where they do not.
    """
    jaxpr = mark_those_in_range(jaxpr)
    scope, places = Scope(jaxpr), Places(outside)
    ends = {k: v for k, v in enumerate(scope.jaxpr.outvars) if _can_wait(scope, v)}
    if not ends or not _any(scope, lambda _, eqn: is_strict(eqn)) or _any(scope, _may_wait):
        return jaxpr

    def note(_: Scope, eqn: Equation, block: Block) -> Equation:
        name = {"op": ">" + places.named(eqn)} if is_strict(eqn) else {}
        return eqn.replace(params=eqn.params | name) if name else eqn

    noted = rebuilt(scope, note)
    block, last = Block(noted), scope.jaxpr.eqns[-1]
    inner = _compat.opened(noted)
    block.eqns = list(inner.eqns)
    makers = {v: eqn for eqn in block.eqns for v in eqn.outvars}
    placed = {v: placing for v in ends.values() if (placing := _placing(makers[v], v)) is not None}
    results = {k: (v, shardings[k] if k < len(shardings) else None) for k, v in ends.items()}
    ready = {
        key: _divided(block, placed[key[0]].invars[0] if key[0] in placed else key[0], key[1], last)
        for key in dict.fromkeys(results.values())
    }
    nothing = _compat.new_variable(ShapedArray((), np.dtype(np.int32)))
    block.eqns.append(
        last.replace(invars=[*ready.values()], outvars=[nothing], primitive=ta_raise_p, params={}, effects=set())
    )
    after: dict[Any, Atom] = {}
    for key, x in ready.items():
        passed = _compat.new_variable(x.aval)
        params = {"waits": 1}
        block.eqns.append(
            last.replace(invars=[x, nothing], outvars=[passed], primitive=ta_fence_p, params=params, effects=set())
        )
        after[key] = passed
        if (placing := placed.get(key[0])) is not None:
            after[key] = _compat.new_variable(key[0].aval)
            block.eqns.append(placing.replace(invars=[passed], outvars=[after[key]]))
    outvars = [after[results[k]] if k in results else v for k, v in enumerate(inner.outvars)]
    return _without_unused(block, set(placed), outvars).jaxpr(outvars=outvars)


def _any(scope: Scope, test: Any) -> bool:
    """Return whether an equation of a scope, or inside of one, passes a test."""
    return any(
        test(scope, eqn) or any(_any(inner, test) for inner in inner_scopes(scope, eqn)) for eqn in scope.jaxpr.eqns
    )


def _can_wait(scope: Scope, v: Atom) -> bool:
    """Return whether a fence can hand a result on, and it is not an argument."""
    if isinstance(v, Literal) or v not in scope.makers or not isinstance(getattr(v.aval, "dtype", None), np.dtype):
        return False
    is_static = all(isinstance(n, int) for n in v.aval.shape)
    return is_static and not is_packed(v.aval.dtype)


def _divided(block: Block, value: Atom, sharding: Any, at: Equation) -> Atom:
    """Return a value that is divided as a result is: no collective has to come after this."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return value
    (result,) = block.call(_constrained, [value], at, sharding=sharding)
    return result


def _constrained(x: Any, *, sharding: Any) -> Any:
    return [jax.lax.with_sharding_constraint(x, sharding)]


def _placing(maker: Equation, v: Any) -> Equation | None:
    """Return what puts a value into another memory, of it alone, if it has just been put there."""
    number = next(k for k, out in enumerate(maker.outvars) if out is v)
    if maker.primitive.name not in _PLACING or len(maker.invars) != len(maker.outvars):
        return None
    x, count = maker.invars[number], len(maker.outvars)
    if isinstance(x, Literal) or x.aval.memory_space == v.aval.memory_space:
        return None
    own = {
        name: type(p)([p[number]]) if isinstance(p, tuple | list) and len(p) == count else p
        for name, p in maker.params.items()
    }
    return maker.replace(invars=[x], outvars=[v], params=own)


_PLACING = frozenset(("device_put", "with_memory_space_constraint"))


def _without_unused(block: Block, placed: set[Any], outvars: Sequence[Atom]) -> Block:
    """Drop what has put values into a memory, if they are put there later."""
    used = {v for eqn in block.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in outvars if not isinstance(v, Literal)}
    block.eqns = [eqn for eqn in block.eqns if not eqn.outvars or not placed.issuperset(eqn.outvars) or used & {*eqn.outvars}]
    return block


def _may_wait(scope: Scope, eqn: Equation) -> bool:
    """Return whether an equation is a loop that need not end: it counts to no number, whatever else it looks at."""
    if eqn.primitive.name != "while":
        return False
    condition = scope.condition(eqn)
    conditions = [condition.jaxpr.outvars[0]]
    for value in conditions:  # grows meanwhile
        conditions += condition.operands(value, "and")
    return not any(counts(scope, eqn, value) for value in conditions)
