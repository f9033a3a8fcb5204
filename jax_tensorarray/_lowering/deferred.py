"""Defer errors in a program for several CPU devices to its end, where no device waits for another.

    b = ta_write(b, i, x)                        b = ta_write(b, i, x, deferred)
                                                 e = ta_raise(b)
    return b                                     return ta_fence(b, e)

An error ends the program of its device. At a later collective, the other devices wait for it until XLA aborts the
process. So a call whose parameter `op` begins with `>` drops the access, stores the error and continues. A `ta_raise`
at the end of the program raises the error. It waits for all results, and so for all collectives. The results then pass
a fence that waits for the `ta_raise`.

A loop that does not count its steps may wait forever for a row that was dropped. In a program with such a loop, calls
raise at once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AxisType, Sharding

from jax_tensorarray import _compat
from jax_tensorarray._lowering.equations import Atom, Block, equation_at, is_of_numbers, is_static
from jax_tensorarray._lowering.record import counts
from jax_tensorarray._lowering.scopes import Scope, all_equations, is_strict, rebuilt
from jax_tensorarray._lowering.source_lines import SourceLines
from jax_tensorarray._ops.fence import ta_fence_p, ta_raise_p
from jax_tensorarray._ops.primitive import is_packed
from jax_tensorarray._types import Equation


def raise_at_end(jaxpr: Any, shardings: Sequence[Any] | None, outside: Any) -> Any:
    """Defer the errors of calls to the end of a program, if its loops count their steps.

    `shardings` are those of the results, as far as JAX knows them.
    """
    program, lines = Scope(jaxpr), SourceLines(outside)
    everything = list(all_equations(program))
    results = [v for v in dict.fromkeys(_variables(program.jaxpr.outvars)) if program.maker(v) and _can_be_fenced(v)]
    raising = any(is_strict(eqn) for _, eqn in everything)
    if not raising or not results or any(_may_never_end(scope, eqn) for scope, eqn in everything):
        return jaxpr
    named = rebuilt(program, lambda _, eqn, __: _named(eqn, lines))
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
    block.eqns.append(equation_at(last, ta_raise_p, [*ready.values()], nothing, effect=True))
    after: dict[Any, Atom] = {}
    for (v, sharding), x in ready.items():
        fenced = _compat.new_variable(x.aval)
        block.eqns.append(equation_at(last, ta_fence_p, [x, nothing], fenced, waits=1))
        if v in placing:
            placed = _compat.new_variable(v.aval)
            block.eqns.append(placing[v].replace(invars=[fenced], outvars=[placed]))
            fenced = placed
        after[v, sharding] = fenced
    outvars = _compat.opened(named).outvars
    return block.jaxpr(outvars=[after[ends[k]] if k in ends else v for k, v in enumerate(outvars)])


_NOTHING = jax.core.ShapedArray((), np.dtype(np.int32))


def _variables(atoms: Sequence[Atom]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def _named(eqn: Equation, lines: SourceLines) -> Equation:
    if not is_strict(eqn):
        return eqn
    return eqn.replace(params=eqn.params | {"place": lines.of(eqn), "deferred": True})


def _may_never_end(scope: Scope, eqn: Equation) -> bool:
    """Return whether `eqn` is a loop that may not end: no part of its condition counts to a number."""
    if eqn.primitive.name != "while":
        return False
    condition = scope.condition(eqn)
    conditions = [condition.jaxpr.outvars[0]]
    for predicate in conditions:  # grows meanwhile
        conditions += condition.operands(predicate, "and")
    return not any(counts(scope, eqn, predicate) for predicate in conditions)


def _divided(block: Block, value: Atom, sharding: Any, at: Equation) -> Atom:
    """Give a value the sharding of the result, so no collective follows."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, Sharding) or AxisType.Explicit in getattr(mesh, "axis_types", ()):
        return value
    (divided,) = block.call(_constrained, [value], at, sharding=sharding)
    return divided


def _constrained(x: Any, *, sharding: Any) -> list[Any]:
    return [jax.lax.with_sharding_constraint(x, sharding)]


def _is_placing(eqn: Equation) -> bool:
    """Return whether an equation moves one value to another memory."""
    return eqn.primitive.name == "device_put" and len(eqn.invars) == 1


def _can_be_fenced(v: Any) -> bool:
    """Return whether a fence can return a value."""
    aval = v.aval
    return is_of_numbers(aval) and is_static(aval) and not is_packed(aval.dtype)
