"""A scan of JAX that chooses its residuals when it is differentiated.

    carry, ys = lax.scan(f, carry, xs)
    # becomes, if it is differentiated and the strategy is better than JAX's stacked residuals
    carry, ys = while_loop(k < length, f by rows, (0, carry, empty), residuals=strategy)

Until then it is the same scan. If a step reads a whole buffer and writes rows of it, JAX would store the buffer for
every step. Then the scan becomes a loop that undoes its steps or starts from checkpoints. JAX would also store every
large index. If cheap operations can recompute most residuals from smaller values, the scan becomes a loop with a tape
of those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad

from jax_tensorarray import _compat, _contexts, _gates
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.custom_jvp import OfCall, with_rule
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._loops.as_while import scan_as_while
from jax_tensorarray._loops.derivatives import nonzero_tangents, replayed_jvp, taped_jvp
from jax_tensorarray._loops.linearize import linearize
from jax_tensorarray._loops.strategy import Strategy, Tape
from jax_tensorarray._loops.while_ import Loop, WhileOptions
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.guard import ta_guard_p
from jax_tensorarray._ops.primitive import ROW_OPS, zero_tangent
from jax_tensorarray._types import Array, Equation, bytes_of


def bind(eqn: Equation, operands: Sequence[Array], strategy: Strategy) -> list[Array]:
    """Run a scan of JAX that chooses its residuals by a strategy when it is differentiated."""
    if _contexts.repairs_first.value is not None and any(map(_compat.is_differentiated, operands)):
        return jaxprs.bind(eqn, operands)
    return _bind(eqn, operands, strategy)


def _bind(eqn: Equation, operands: Sequence[Array], strategy: Strategy) -> list[Array]:
    if not has_choice(eqn.params, list(map(jax.typeof, operands)), strategy):
        return jaxprs.bind(eqn, operands)
    return with_rule(jax.make_jaxpr(lambda *xs: jaxprs.bind(eqn, xs))(*operands), operands, _ByStrategy(strategy))


@dataclass(frozen=True)
class _ByStrategy(OfCall):
    """The derivative of a scan by a strategy. `jax.vmap` and others may add equations around the scan."""

    strategy: Strategy

    def jvp(self, call: Any, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        inner = _compat.opened(call)
        if not chooses(inner) or [*inner.eqns[0].invars, *inner.eqns[0].outvars] != [*inner.invars, *inner.outvars]:
            return super().jvp(call, primals, tangents)
        with jaxprs.with_types_of(inner.eqns[0]):
            pairs = zip(primals, tangents, strict=True)
            dots = [zero_tangent(x) if isinstance(t, SymbolicZero) else t for x, t in pairs]
            results = _by_strategy(inner.eqns[0].params, primals, dots, self.strategy)
        if results is not None:
            return results
        return jaxprs.jvp_with_zeros(jaxprs.function(call), primals, tangents)

    def evaluate(self, call: Any, args: Sequence[Array]) -> list[Array]:
        def equation(eqn: Equation, operands: Sequence[Array]) -> list[Array]:
            if isinstance(eqn.params.get("rule"), _ByStrategy):
                return with_rule(eqn.params["call_jaxpr"], operands, self)
            is_scan = eqn.primitive is jax_primitives.scan_p
            return _bind(eqn, operands, self.strategy) if is_scan else jaxprs.bind(eqn, operands)

        return jaxprs.interpret(call, args, equation)


def chooses(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr is one from `bind`: nothing but a scan."""
    return [eqn.primitive for eqn in jaxpr.eqns] == [jax_primitives.scan_p]


def scan(f: Callable[[Any, Any], Any], init: Any, xs: Any, *, strategy: Strategy, **options: Any) -> tuple[Any, Any]:
    """Run `jax.lax.scan`, which chooses its residuals by a strategy when it is differentiated."""
    jaxpr, shape = traced_scan(f, init, xs, **options)
    outs = run_scan(jaxpr, jax.tree.leaves((init, xs)), lambda eqn, operands: bind(eqn, operands, strategy))
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def traced_scan(f: Callable[[Any, Any], Any], init: Any, xs: Any, **options: Any) -> tuple[Any, Any]:
    """Return the jaxpr of `jax.lax.scan`, and the types of its results."""
    return jax.make_jaxpr(lambda init, xs: lax.scan(f, init, xs, **options), return_shape=True)(init, xs)


def run_scan(jaxpr: Jaxpr, args: Sequence[Array], run: Callable[[Any, list[Array]], list[Array]]) -> list[Array]:
    """Run a traced scan, with `run` for its equation."""

    def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
        if eqn.primitive is not jax_primitives.scan_p:
            return jaxprs.bind(eqn, operands)
        with eqn.ctx.manager:
            return run(eqn, operands)

    return jaxprs.interpret(jaxpr, args, equation)


def _zeros(primals: Sequence[Array]) -> list[Any]:
    return [zero_tangent(x) for x in primals]


def has_choice(params: dict[str, Any], operands: Sequence[Any], strategy: Strategy) -> bool:
    """Return whether a scan, with operands of these types, may need another strategy than a tape."""
    [loop] = registry.ENTRIES["scan"].bodies(params)
    types = [*operands, *loop.jaxpr.in_avals, *loop.jaxpr.out_avals]
    if loop.jaxpr.effects or not all(isinstance(n, int) for t in types for n in getattr(t, "shape", (None,))):
        return False
    if any(map(_compat.varying_axes, operands)):
        return False
    if jaxprs.any_equation(loop.jaxpr, lambda inner: not _compat.has_linearization(inner)):
        return False

    def keeps_much() -> bool:
        uses = Uses(loop.jaxpr)
        return any(map(_has_large_index, uses.jaxpr.eqns)) or any(
            _is_read_whole(uses, v) for v in loop.split(uses.jaxpr.invars)[1]
        )

    return strategy.has_choice(keeps_much)


def _has_large_index(eqn: Equation) -> bool:
    """Return whether a derivative of a row op needs an index of more than 1 kB."""
    if eqn.primitive not in ROW_OPS:
        return False
    buffer, index = (v.aval for v in eqn.invars[:2])
    return jnp.issubdtype(buffer.dtype, jnp.inexact) and bytes_of([index]) > _gates.LOGGED_BYTES


def _is_read_whole(uses: Uses, v: Any) -> bool:
    """Return whether a jaxpr updates rows of an input, and reads as much as a whole version of it.

    The reads of all its versions are added: a step may read the cache of one layer after the other. An equation with
    row ops in its jaxprs counts as an update and as a read of all.
    """
    if not jnp.issubdtype(v.aval.dtype, jnp.inexact) or bytes_of([v.aval]) <= _gates.LOGGED_BYTES:
        return False
    versions, is_updated, unread = [v], False, _gates.READ_SHARE * bytes_of([v.aval])
    for version in versions:
        for eqn, operand in uses.of(version):
            if eqn is None:
                continue
            if eqn.primitive in ROW_OPS and operand == 0:
                newer = eqn.outvars[:1] if ROW_OPS[eqn.primitive].in_place else []
                is_updated |= bool(newer)
                if not newer:
                    unread -= bytes_of([eqn.outvars[0].aval])
            elif eqn.primitive is ta_guard_p:
                newer = eqn.outvars
            else:
                unread = 0
                has_updates = any(map(jaxprs.has_row_ops, jaxprs.jaxprs_in(eqn.params)))
                newer = [x for x in eqn.outvars if x.aval.shape == v.aval.shape] if has_updates else []
                is_updated |= has_updates
            versions += [x for x in newer if x not in versions]
    return is_updated and unread <= 0


def _by_strategy(
    params: dict[str, Any], primals: Sequence[Array], tangents: Sequence[Any], strategy: Strategy
) -> tuple[list[Array], list[Any]] | None:
    """Return the results of a scan and their tangents, or None if JAX should run it."""
    [parts] = registry.ENTRIES["scan"].bodies(params)
    length, num_carry, number = params["length"], parts.num_carry, jnp.int32(0)
    consts, init, xs = parts.split(primals)
    of_consts, of_init, of_xs = parts.split(tangents)
    outs = list(_compat.opened(params["jaxpr"]).outvars)[num_carry:]
    ys = [ta_empty(length, v.aval.shape, v.aval.dtype) for v in outs]
    cond, body = scan_as_while(params["jaxpr"], len(consts), num_carry, length, params["reverse"])
    dots = nonzero_tangents(body, [*of_consts, *of_xs], [zero_tangent(number), *of_init, *_zeros(ys)])
    nonzero = tuple(dots.nonzero_consts), tuple(dots.nonzero_carry)
    better: Strategy | None = strategy
    if strategy.tapes:
        better = _better(body, *nonzero, length, strategy)
        if better is None and linearize(body, *nonzero).recomputes_most:
            better = Tape()
    if better is None or _logs(body, (*dots.nonzero_consts, *dots.nonzero_carry)):
        return None
    options = WhileOptions(length, "a scan", strategy=better)
    loop = Loop([], [*consts, *xs], [number, *init, *ys], cond, body, options)
    after, _, tangents_after = (taped_jvp if better.tapes else replayed_jvp)(loop, dots)
    return after[1:], merge(tangents_after, dots.nonzero_carry, _zeros(after))[1:]


@_compat.cached
def _better(
    body: Any, nonzero_consts: Sequence[bool], nonzero_carry: Sequence[bool], length: int, strategy: Strategy
) -> Strategy | None:
    return strategy.instead_of(linearize(body, nonzero_consts, nonzero_carry), body, length)


@_compat.cached
def _logs(body: Any, nonzero: Sequence[bool]) -> bool:
    """Return whether a `custom_vjp` in a step logs a value in reverse mode: JAX stacks these logs, our loops do not.

    We differentiate the step in the flagged inputs.
    """
    if not jaxprs.any_equation(body, lambda eqn: eqn.primitive is jax_primitives.custom_vjp_call_p):
        return False

    def log(*args: Array) -> Any:
        def step(*some: Array) -> list[Array]:
            return jaxprs.function(body)(*merge(some, nonzero, args))

        outs, pull = jax.vjp(step, *flagged(args, nonzero))
        return _compat.log_of(pull, [ad.instantiate_zeros(zero_tangent(x)) for x in outs])

    try:
        return bool(jax.eval_shape(log, *body.in_avals))
    except ValueError:  # the step has no reverse mode
        return False
