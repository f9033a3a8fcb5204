"""Give all ops on one buffer the same form: all are slices or all are calls, in loops and again outside of loops.

    row = dynamic_slice(b, i)         row = ta_read(b, i)
    b = ta_swap(b, j, x)              b = ta_swap(b, j, x)      # a call, so the read is also one

A call demands a layout. After a barrier XLA may choose another one for a slice, and it copies the buffer to convert it.
The buffers are the classes of a union-find over the values that may be one buffer.

Without an agreement, a loop that reads and writes one row of a buffer of 1 MB, and swaps 20 others by a call, copies
the buffer twice per step. A step takes 145 us instead of 4 (jax 0.12), and 164 instead of 3 (jax 0.10.2; 29 November
2026). The agreement changes two programs of `benchmarks.harm`: both have as many copies and take as long without it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jax_tensorarray._lowering.aliases import aliased
from jax_tensorarray._lowering.choice import Rewrite
from jax_tensorarray._lowering.equations import hashable
from jax_tensorarray._lowering.ownership import has_buffer, updates
from jax_tensorarray._lowering.scopes import Scope, inner_scopes
from jax_tensorarray._ops.primitive import is_packed
from jax_tensorarray._types import Equation
from jax_tensorarray._union_find import UnionFind

#: The equations of a jaxpr, and how each is rewritten: None if it stays.
Rewrites = Sequence[tuple[Equation, Rewrite | None]]


def agreed(chosen: Mapping[Scope, Rewrites]) -> dict[Scope, Rewrites]:
    """Drop each rewrite whose buffer is also passed to a call: in loops, and again outside of loops."""
    buffers: UnionFind[tuple[Scope, Any]] = UnionFind()
    for scope in chosen:
        for eqn in scope.jaxpr.eqns:
            for (a, one), (b, other) in _same_buffer(scope, eqn):
                if not isinstance(one, Literal) and not isinstance(other, Literal) and _may_be_buffer(one.aval):
                    buffers.join((a, one), (b, other))

    def buffer_of(scope: Scope, eqn: Equation) -> tuple[Any, bool]:
        return buffers.find((scope, hashable(eqn.invars[0]))), scope.is_in_loop

    called = {
        buffer_of(scope, eqn)
        for scope, rewrites in chosen.items()
        for eqn, rewrite in rewrites
        if rewrite is None and has_buffer(eqn) and not is_packed(eqn.invars[0].aval.dtype)
    }

    def rewrite_of(scope: Scope, eqn: Equation, rewrite: Rewrite | None) -> Rewrite | None:
        return None if rewrite is not None and rewrite.passes_on and buffer_of(scope, eqn) in called else rewrite

    return {
        scope: [(eqn, rewrite_of(scope, eqn, rewrite)) for eqn, rewrite in rewrites]
        for scope, rewrites in chosen.items()
    }


def _may_be_buffer(aval: Any) -> bool:
    """Return whether a type has axes. A token has no shape."""
    return bool(getattr(aval, "ndim", 0))


_ScopedValue = tuple[Scope, Any]  #: a value, and the scope in which it has that name


def _same_buffer(scope: Scope, eqn: Equation) -> Iterator[tuple[_ScopedValue, _ScopedValue]]:
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
    elif name in ("jit", "shard_map"):
        for inner in inner_scopes(scope, eqn):
            yield from pairs(scope, eqn.invars, inner, inner.jaxpr.invars)
            yield from pairs(scope, eqn.outvars, inner, inner.jaxpr.outvars)
    else:
        for operand, result in aliased(eqn):
            yield (scope, eqn.invars[operand]), (scope, eqn.outvars[result])
