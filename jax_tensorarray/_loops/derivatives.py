"""The derivatives of `ta_while`: the tangents are a linear loop of their own, whose trip count is known by then.

So every loop with `max_steps` can be transposed: the loop of the tangents is a `ta_count`, which reads the residuals of
each step from tapes, or a `ta_replay`, which reconstructs the steps. Without `max_steps` primals and tangents are one
loop, in forward mode only.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.interpreters import ad

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._loops import replay, rules
from jax_tensorarray._loops.count import Tangents, linearized_loop, nonzero_tangents, zero_tangents
from jax_tensorarray._loops.linearize import linearize
from jax_tensorarray._loops.recording import recorded
from jax_tensorarray._loops.replay import Replay
from jax_tensorarray._loops.tapes import largest, make, tangent_tapes
from jax_tensorarray._loops.while_ import Loop, WhileOptions, needs_max_steps, results, ta_while_p, taped
from jax_tensorarray._ops.primitive import is_zero, nonzero_transpose

Array = jax.Array


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, cond: Any, body: Any, options: WhileOptions) -> Any:
    loop = Loop(*options.split(primals), cond, body, options)
    _, of_consts, of_carry = options.split(tangents)
    nonzero = nonzero_tangents(body, of_consts, of_carry)
    if not any(nonzero.nonzero_carry):
        if any(map(_compat.has_callbacks, (cond, body))):
            # As JAX does: if this is linearized, the effects happen again for the tangents.
            const_dots, _ = nonzero.instantiated()
            body = jaxprs.with_more_consts(
                body, len(options.leading) + len(loop.body_consts), tuple(map(jax.typeof, const_dots))
            )
            loop = loop._replace(body=body, body_consts=[*loop.body_consts, *const_dots])
        outs = results(*loop.run())
        return outs, zero_tangents(outs)
    if not taped(options.max_steps):
        # `reached` may flag too many. Then this would be the reverse mode of a loop that has none.
        nonzero = nonzero_tangents(body, of_consts, of_carry, jaxprs.nonzero_outputs)
        outs, steps, dots = _joint_jvp(loop, nonzero)
    elif options.strategy.tapes:
        outs, steps, dots = taped_jvp(loop, nonzero)
    else:
        outs, steps, dots = replayed_jvp(loop, nonzero)
    outs = results(outs, steps)
    return outs, merge(dots, [*nonzero.nonzero_carry, *[False] * options.counts], zero_tangents(outs))


#: The carry after a loop, the number of steps, and the nonzero tangents of the carry.
_Results = tuple[list[Array], Any, list[Array]]


def taped_jvp(loop: Loop, tangents: Tangents) -> _Results:
    """Run two loops. The second is linear in the tangents, so every loop can be transposed."""
    body, options, tapes, strategy = loop.body, loop.options, loop.options.tapes, loop.options.strategy
    max_steps: int = options.max_steps  # type: ignore[assignment]
    linear = linearize(body, tangents.nonzero_consts, tangents.nonzero_carry)
    better = strategy.instead_of(linear, body, max_steps)
    if better is not None:
        return replayed_jvp(loop._replace(options=replace(options, strategy=better)), tangents)
    outs, steps, _, tapes_made = recorded(loop, linear.jaxpr, linear.num_outs, linear.steps, offload=strategy.offload)
    dots = linearized_loop(
        linear,
        loop.body_consts,
        tapes_made,
        largest(steps),
        tangents,
        max_steps=max_steps,
        reverse=False,
        tapes=tapes,
    )
    return outs, steps, dots


def replayed_jvp(loop: Loop, tangents: Tangents) -> _Results:
    """Run a loop without a tape; its derivative replays the steps."""
    options, nonzero = loop.options, (*tangents.nonzero_consts, *tangents.nonzero_carry)
    max_steps: int = options.max_steps  # type: ignore[assignment]
    const_dots, carry_dots = tangents.instantiated()
    if options.tapes:  # these have been recorded for another derivative
        n, tapes, options = len(loop.carry), options.tapes, replace(options, tapes=())
        loop = loop._replace(carry=[*loop.carry, *make(tapes)], options=options)
        carry_dots += make(tangent_tapes(tapes, tangents.nonzero_carry[n:]))
    again = Replay(loop.body, options.batch_dims, len(loop.body_consts), nonzero, max_steps)
    outs, steps, extra, strategy = options.strategy.forward(loop._replace(body=again.primal), again)
    operands = [steps, *loop.body_consts, *loop.carry, *extra, *const_dots, *carry_dots]
    dots = replay.bind(operands, again, strategy)
    return outs, steps, dots


def _joint_jvp(loop: Loop, tangents: Tangents) -> _Results:
    """Run one loop of primals and tangents. It keeps no tape, since the length of a tape would have no bound."""
    predicate, n, num_cond_consts = jaxprs.function(loop.cond), len(loop.carry), len(loop.cond_consts)
    const_dots, carry_dots = tangents.instantiated()
    carry = [*loop.carry, *carry_dots]
    joint_cond = jax.make_jaxpr(lambda *args: predicate(*args[: num_cond_consts + n]))(
        *loop.cond.in_avals[:num_cond_consts], *map(jax.typeof, carry)
    )
    joint_body = jaxprs.joint_jvp(loop.body, tangents.nonzero_consts, tangents.nonzero_carry)
    outs, steps = Loop(
        loop.cond_consts, [*loop.body_consts, *const_dots], carry, joint_cond, joint_body, loop.options
    ).run()
    # The tangent of what no step changes comes from before the loop: so it has a transpose.
    same = flagged(_unchanged(loop.body, n), tangents.nonzero_carry)
    dots = [old if is_same else new for old, is_same, new in zip(carry_dots, same, outs[n:], strict=True)]
    return outs[:n], steps, dots


def _unchanged(body: Any, num_carry: int) -> list[bool]:
    """Return which carries the body returns as it took them."""
    inner = _compat.opened(body)
    return [v is w for v, w in zip(inner.invars[len(inner.invars) - num_carry :], inner.outvars, strict=True)]


def _transpose(cts: Sequence[Any], *operands: Any, cond: Any, body: Any, options: WhileOptions) -> Any:
    """Transpose a loop that is linear in some operands. Derivatives of a loop with max_steps are other loops."""
    linear = [ad.is_undefined_primal(x) for x in operands]
    if not taped(options.max_steps):
        raise needs_max_steps(options)

    # A linear function is its derivative, at zero as well as anywhere.
    def loop(*some: Array) -> list[Array]:
        return flagged(ta_while_p.bind(*merge(some, linear, operands), cond=cond, body=body, options=options), given)

    given = [not is_zero(ct) for ct in cts]
    zeros = [ad.instantiate_zeros(ad.Zero(x.aval)) for x in flagged(operands, linear)]
    _, pull = jax.vjp(loop, *zeros)
    return merge(pull(flagged(cts, given)), linear, [None] * len(operands))


rules.differentiate(ta_while_p, _jvp)
ad.primitive_transposes[ta_while_p] = nonzero_transpose(_transpose)
