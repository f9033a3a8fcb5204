"""Which results of a jaxpr may have a derivative with respect to some of its inputs."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import registry


def reached(jaxpr: Any, flags: Sequence[bool]) -> list[bool]:
    """Return which outputs may depend on a flagged input by a path that a derivative takes.

    Such a path consists of floats and complex numbers, without `stop_gradient`. It is followed into control flow only
    as far as JAX does: an output that is wrongly taken to depend on an input may be a `custom_vjp` without such a
    derivative.
    """
    inner = _compat.opened(jaxpr)
    marked = {id(v) for v, flag in zip(inner.invars, flags, strict=True) if flag}

    def counts(v: Any) -> bool:
        return jnp.issubdtype(getattr(v.aval, "dtype", jnp.float32), jnp.inexact)

    for eqn in inner.eqns:
        operands = [id(v) in marked for v in eqn.invars]
        if any(operands):
            results = zip(eqn.outvars, _reached_results(eqn, operands), strict=True)
            marked |= {id(v) for v, flag in results if flag and counts(v)}
    return [id(v) in marked for v in inner.outvars]


def _reached_results(eqn: Any, flags: list[bool]) -> list[bool]:
    """Return which results of an equation may depend on a flagged operand."""
    if eqn.primitive is jax_primitives.stop_gradient_p:
        return [False] * len(eqn.outvars)
    entry = registry.entry_of(eqn)
    if entry is None or entry.has_rules or entry.is_divided:
        return [True] * len(eqn.outvars)
    of_bodies = (_reached_outputs(body, flags) for body in entry.bodies(eqn.params))
    found = [any(some) for some in zip(*of_bodies, strict=True)]
    return [*found, *[False] * (len(eqn.outvars) - len(found))]


def _reached_outputs(body: registry.Body, flags: list[bool]) -> list[bool]:
    """Return which outputs of a body may depend on a flagged operand of its equation."""
    consts, carry, xs = body.split(body.inputs(flags, False))
    while True:
        outs = reached(body.jaxpr, [*consts, *carry, *xs])
        wider = [a or b for a, b in zip(carry, outs, strict=False)]
        if wider == carry:
            return [*carry, *outs[len(carry) :]]
        carry = wider
