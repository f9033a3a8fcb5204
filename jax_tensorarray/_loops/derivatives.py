"""The derivatives of `ta_while`: the tangents become a second loop, which is linear and has a known trip count.

    while cond(y): y = f(y)
    # becomes, with the tangents `dy` and the residuals `r` of each step
    while cond(y): y, r = f_linearized(y); tape = ta_write(tape, k, r); k += 1
    for i in range(k): dy = linear(ta_read(tape, i), dy)

So JAX can transpose every loop with `max_steps`. The loop of the tangents is a counted loop, which reads the residuals
of each step from tapes, or a `ta_replay`, which reconstructs the steps. Without `max_steps`, primals and tangents are
one loop, in forward mode only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters import ad

from jax_tensorarray import _compat, _gates
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.jaxprs import flagged, merge, partition
from jax_tensorarray._jaxprs.registry import reached
from jax_tensorarray._loops import replay
from jax_tensorarray._loops.as_while import count_as_while
from jax_tensorarray._loops.auto import Auto
from jax_tensorarray._loops.host import is_on_host, zeros
from jax_tensorarray._loops.linearize import Linearized, linearize
from jax_tensorarray._loops.recording import recorded
from jax_tensorarray._loops.replay import Replay
from jax_tensorarray._loops.tapes import avals_of, largest, make, play_back, tangent_tapes
from jax_tensorarray._loops.while_ import (
    Loop,
    WhileOptions,
    count,
    counter,
    needs_max_steps,
    results,
    ta_while_p,
    taped,
)
from jax_tensorarray._ops.primitive import is_zero, zero_tangent
from jax_tensorarray._types import Array, Equation, bytes_of


class Tangents(NamedTuple):
    """The tangents of the consts and of the carry of a loop, and which are nonzero after any number of steps."""

    of_consts: Sequence[Any]
    of_carry: Sequence[Any]
    nonzero_consts: list[bool]
    nonzero_carry: list[bool]  #: also of the tapes

    def instantiated(self) -> tuple[list[Array], list[Array]]:
        """Return the nonzero tangents of the consts and of the carry, as arrays."""
        operands = self.nonzero_carry[: len(self.of_carry)]
        carry = [ad.instantiate_zeros(t) for t in flagged(self.of_carry, operands)]
        return flagged(self.of_consts, self.nonzero_consts), carry

    def after(self, zero: Any) -> "Tangents":
        """Return the tangents of a loop with one more const and carry in front, with the tangent `zero`."""
        consts, carry = [False, *self.nonzero_consts], [False, *self.nonzero_carry]
        return Tangents([zero, *self.of_consts], [zero, *self.of_carry], consts, carry)


def nonzero_tangents(
    body: Any,
    of_consts: Sequence[Any],
    of_carry: Sequence[Any],
    one_step: Callable[[Any, list[bool]], list[bool]] = reached,
) -> Tangents:
    """Find which tangents are nonzero. `one_step` returns which outputs of the body have tangents."""
    consts = [not is_zero(t) for t in of_consts]
    carry = [not is_zero(t) for t in of_carry]
    carry += [False] * (len(body.out_avals) - len(carry))  # tapes
    leading = [False] * (len(body.in_avals) - len(consts) - len(carry))
    nonzero_carry = jaxprs.after_any_steps(carry, lambda carry: one_step(body, [*leading, *consts, *carry]))
    return Tangents(of_consts, of_carry, consts, nonzero_carry)


def zero_tangents(outs: Sequence[Array]) -> list[Any]:
    return [zero_tangent(x) for x in outs]


def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, cond: Any, body: Any, options: WhileOptions) -> Any:
    loop = Loop(*options.split(primals), cond, body, options)
    _, of_consts, of_carry = options.split(tangents)
    nonzero = nonzero_tangents(body, of_consts, of_carry)
    if not any(nonzero.nonzero_carry):
        if not options.is_counted and any(map(_compat.has_callbacks, (cond, body))):
            # Like JAX: under `jax.linearize`, the effects happen again for the tangents.
            const_dots, _ = nonzero.instantiated()
            body = jaxprs.with_more_consts(
                body, len(options.leading) + len(loop.body_consts), tuple(map(jax.typeof, const_dots))
            )
            loop = loop._replace(body=body, body_consts=[*loop.body_consts, *const_dots])
        outs = results(*loop.run())
        return outs, zero_tangents(outs)
    if not taped(options.max_steps):
        # `reached` may flag too many, and then reverse mode would reach a loop that has none.
        nonzero = nonzero_tangents(body, of_consts, of_carry, jaxprs.nonzero_outputs)
        outs, steps, dots = _joint_jvp(loop, nonzero)
    elif options.strategy.tapes:
        outs, steps, dots = taped_jvp(loop, nonzero)
    else:
        outs, steps, dots = replayed_jvp(loop, nonzero)
    outs = results(outs, steps)
    return outs, merge(dots, [*nonzero.nonzero_carry, *[False] * options.returns_steps], zero_tangents(outs))


#: The carry after a loop, the number of steps, and the nonzero tangents of the carry.
_Results = tuple[list[Array], Any, list[Array]]


def taped_jvp(loop: Loop, tangents: Tangents) -> _Results:
    """Run two loops. The second is linear in the tangents, so every loop can be transposed."""
    body, options = loop.body, loop.options
    linear = linearize(body, tangents.nonzero_consts, tangents.nonzero_carry)
    better = _better_than_taped(loop, linear, tangents)
    if better is not None:
        return better
    # If a loop reads or writes tapes on the host, the tape of its derivative is there, too.
    offload = options.strategy.offload or (options.is_counted and any(map(is_on_host, body.in_avals)))
    outs, steps, taken, tapes = recorded(loop, linear.jaxpr, linear.num_outs, linear.steps, offload=offload)
    dots = _linearized_loop(linear, loop, tapes, largest(taken if steps is None else steps), tangents)
    return outs, steps, dots


def _better_than_taped(loop: Loop, linear: Linearized, tangents: Tangents) -> _Results | None:
    """Return the results of `taped_jvp` by a strategy that is better than a tape, or None."""
    is_counted, strategy = loop.options.is_counted, loop.options.strategy
    if is_counted:
        is_large = any(bytes_of([t]) > _gates.LOGGED_BYTES for t in linear.taped)
        if not is_large or any(map(is_on_host, loop.body.in_avals)):
            return None
        loop, tangents, strategy = count_as_while(loop), tangents.after(zero_tangent(loop.cond_consts[0])), Auto()
        linear = linearize(loop.body, tangents.nonzero_consts, tangents.nonzero_carry)
    better = strategy.instead_of(linear, loop.body, loop.options.room)
    if better is None:
        return None
    outs, steps, dots = replayed_jvp(loop._replace(options=replace(loop.options, strategy=better)), tangents)
    return (outs[1:], None, dots) if is_counted else (outs, steps, dots)


def _linearized_loop(
    linear: Linearized, loop: Loop, recorded: Sequence[Array], steps: Array, tangents: Tangents
) -> list[Array]:
    """Return the tangents of the carry after all steps, from the recorded tapes."""
    options, shared = loop.options, jaxprs.function(linear.shared)(*loop.body_consts)
    const_tangents, carry_tangents = tangents.instantiated()
    new = tangent_tapes(options.tapes, tangents.nonzero_carry[len(tangents.of_carry) :])

    def step(k: Array, *rest: Array) -> list[Array]:
        recorded, rest = rest[: len(linear.taped)], rest[len(linear.taped) :]
        shared_here, dots = rest[: len(shared)], rest[len(shared) :]
        return linear.tangents(play_back(recorded, k, linear.steps, linear.taped), shared_here, dots)

    operands = [*recorded, *shared, *const_tangents]
    types = [*map(jax.typeof, [*operands, *carry_tangents]), *avals_of(new)]
    body = jax.make_jaxpr(step)(counter(steps), *types)
    return count(steps, operands, carry_tangents, body=body, max_steps=options.room, reverse=options.reverse, tapes=new)


def replayed_jvp(loop: Loop, tangents: Tangents) -> _Results:
    """Run a loop without a tape. Its derivative replays the steps."""
    options, nonzero = loop.options, (*tangents.nonzero_consts, *tangents.nonzero_carry)
    const_dots, carry_dots = tangents.instantiated()
    if options.tapes:  # those of another derivative
        n, tapes, options = len(loop.carry), options.tapes, replace(options, tapes=())
        loop = loop._replace(carry=[*loop.carry, *make(tapes)], options=options)
        carry_dots += make(tangent_tapes(tapes, tangents.nonzero_carry[n:]))
    again = Replay(loop.body, options.batch_dims, len(loop.body_consts), nonzero, options.room)
    outs, steps, extra, strategy = options.strategy.forward(loop._replace(body=again.primal), again)
    operands = [steps, *loop.body_consts, *loop.carry, *extra, *const_dots, *carry_dots]
    dots = replay.bind(operands, again, strategy)
    return outs, steps, dots


def _joint_jvp(loop: Loop, tangents: Tangents) -> _Results:
    """Run one loop of primals and tangents. It has no tape, whose length would have no bound."""
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
    # If no step changes a carry, its tangent is that from before the loop, which has a transpose.
    same = flagged(_unchanged(loop.body, n), tangents.nonzero_carry)
    dots = [old if is_same else new for old, is_same, new in zip(carry_dots, same, outs[n:], strict=True)]
    return outs[:n], steps, dots


def _unchanged(body: Any, num_carry: int) -> list[bool]:
    """Return which carries the body returns unchanged."""
    inner = _compat.opened(body)
    return [v is w for v, w in zip(inner.invars[len(inner.invars) - num_carry :], inner.outvars, strict=True)]


def transpose(cts: Sequence[Any], *operands: Any, cond: Any, body: Any, options: WhileOptions) -> Any:
    """Transpose a loop that is linear in some operands."""
    if options.is_counted:
        return _transpose_of_count(cts, options, operands, body)
    linear = [ad.is_undefined_primal(x) for x in operands]
    if not taped(options.max_steps):
        raise needs_max_steps(options)

    # A linear function is its derivative at any point, also at zero.
    def loop(*some: Array) -> list[Array]:
        return flagged(ta_while_p.bind(*merge(some, linear, operands), cond=cond, body=body, options=options), has_ct)

    has_ct = [not is_zero(ct) for ct in cts]
    zeros = [ad.instantiate_zeros(ad.Zero(x.aval)) for x in flagged(operands, linear)]
    _, pull = jax.vjp(loop, *zeros)
    return merge(pull(flagged(cts, has_ct)), linear, [None] * len(operands))


def _transpose_of_count(cts: Sequence[Any], options: WhileOptions, operands: Sequence[Any], body: Any) -> list[Any]:
    """Transpose a counted loop: run the transposes of its steps in the opposite order."""
    (steps,), consts, _ = options.split(operands)
    # All carries are linear. One that is no undefined primal is zeros, and its tangent is another operand.
    _, linear_consts, linear_carry = options.split([ad.is_undefined_primal(x) for x in operands])
    linear, others = partition(consts, linear_consts)
    types = [x.aval for x in linear]
    call = _without_guards(body, [False, *linear_consts, *[True] * len(body.out_avals)])
    m, num_others = len(linear), len(others)

    def step(k: Array, *rest: Array) -> list[Array]:
        others, ct = rest[:num_others], rest[num_others:]

        # The step returns its consts, so that the transpose starts from their running cotangents: reads add in place.
        def forward(consts: list[Array], carry: list[Array]) -> Any:
            values = iter(others)
            return consts, call(k, *merge(consts, linear_consts, [x or next(values) for x in linear_consts]), *carry)

        const_cts, carry_cts = jax.linear_transpose(forward, types, body.out_avals)((list(ct[:m]), list(ct[m:])))
        return [*const_cts, *carry_cts]

    start = [*map(zeros, types), *(zeros(ct.aval) if is_zero(ct) else ct for ct in cts)]
    transposed = jax.make_jaxpr(step)(counter(steps), *map(jax.typeof, others), *map(jax.typeof, start))
    outs = count(steps, others, start, body=transposed, max_steps=options.room, reverse=not options.reverse)
    carry_cts = [ct if is_linear else None for ct, is_linear in zip(outs[m:], linear_carry, strict=False)]  # not tapes
    return [None, *merge(outs[:m], linear_consts, [None] * len(consts)), *carry_cts]


def _without_guards(body: Any, linear: Sequence[bool]) -> Callable[..., list[Array]]:
    """Return a step as a function without each `stop_gradient` of a value that depends on the linear inputs.

    JAX applies `stop_gradient` to the operands of a batched conditional, but has no transpose of it. In a linear
    function it is the identity. A `stop_gradient` of any other value stays, for derivatives of the transpose.
    """
    inner = _compat.opened(body)
    dependent = set(flagged(inner.invars, linear))
    for eqn in inner.eqns:
        if any(not isinstance(v, Literal) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)

    def equation(eqn: Equation, operands: list[Array]) -> Sequence[Array]:
        is_guard = eqn.primitive.name == "stop_gradient" and eqn.outvars[0] in dependent
        return operands if is_guard else jaxprs.bind(eqn, operands)

    return lambda *args: jaxprs.interpret(body, args, equation)
