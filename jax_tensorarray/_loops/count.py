"""`ta_count`: a loop whose number of steps is known before it starts, perhaps only at run time. It can be transposed.

The derivative of a loop that stored a tape is such a loop: the trip count and the residuals are known by then. The
derivative of a loop without a tape is a `ta_replay`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.axis import Axis, axes
from jax_tensorarray._jaxprs.jaxprs import flagged, merge, partition
from jax_tensorarray._jaxprs.registry import reached
from jax_tensorarray._loops import linearize, masking, rules
from jax_tensorarray._loops.host import is_on_host, ta_host_read, ta_host_read_p, zeros
from jax_tensorarray._loops.linearize import Linearized
from jax_tensorarray._loops.rules import Pruned, with_batch_axis
from jax_tensorarray._loops.tapes import (
    TapeType,
    avals_of,
    batched_tapes,
    largest,
    make,
    play_back,
    record,
    tangent_tapes,
    tapes_for,
)
from jax_tensorarray._ops.primitive import is_zero, zero_tangent
from jax_tensorarray._types import Equation

Array = jax.Array

# Operands: steps, *consts, *carry. The body maps k, *consts, *carry to *carry, for k = 0, 1, ..., steps - 1 or, with
# `reverse`, for k = steps - 1, ..., 0. There are at most `max_steps` steps.
#
# The last carries may be `tapes`, which are not operands.
ta_count_p = Primitive("ta_count")


@dataclass(frozen=True)
class CountOptions:
    """The parameters of a counted loop besides its body."""

    num_consts: int
    max_steps: int
    reverse: bool
    tapes: tuple[TapeType, ...] = ()

    def split(self, operands: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return what belongs to the number of steps, to the consts, and to the carry without tapes."""
        steps, *rest = operands
        return steps, rest[: self.num_consts], rest[self.num_consts :]


def count(
    steps: Array,
    consts: Sequence[Array],
    carry: Sequence[Array],
    *,
    body: Any,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[TapeType] = (),
) -> list[Array]:
    """Return the carry after the loop."""
    options = CountOptions(len(consts), max_steps, reverse, tuple(tapes))
    outs: list[Array] = ta_count_p.bind(steps, *consts, *carry, body=body, options=options)
    return outs


def _abstract_eval(*avals: Any, body: Any, options: CountOptions) -> Any:
    return [a.update(weak_type=False) if hasattr(a, "weak_type") else a for a in body.out_avals], body.effects


def _run(*operands: Array, body: Any, options: CountOptions) -> Any:
    steps, consts, carry = options.split(operands)
    carry += make(options.tapes)
    fetched = _reads_of_host(body, options.num_consts)

    def number(n: Array) -> Array:
        return steps - 1 - n if options.reverse else n

    def fetch(n: Array) -> list[Array]:
        # After the last step this fetches the row of another step, which is not used.
        return [ta_host_read(consts[place], number(n), **params) for place, params in fetched.values()]

    def step(state: Any) -> Any:
        n, rows, carry = state
        here = dict(zip(fetched, rows, strict=True))

        def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
            return [here[eqn.outvars[0]]] if eqn.outvars and eqn.outvars[0] in here else jaxprs.bind(eqn, operands)

        args = [number(n), *consts, *carry]
        outs = jaxprs.interpret(body, args, equation) if fetched else jaxprs.function(body)(*args)
        return n + 1, fetch(n + 1), outs

    start = steps * 0  # of the type of `steps`, which may differ from device to device
    return lax.while_loop(lambda state: state[0] < steps, step, (start, fetch(start), carry))[2]


def _reads_of_host(body: Any, num_consts: int) -> dict[Any, tuple[int, dict[str, Any]]]:
    """Map each row that a body reads from a tape on the host to the number of the tape's const and the parameters.

    The rows are sent one step before they are needed.
    """
    inner = _compat.opened(body)
    step, *consts = inner.invars[: 1 + num_consts]
    return {
        eqn.outvars[0]: (consts.index(eqn.invars[0]), eqn.params)
        for eqn in inner.eqns
        if eqn.primitive is ta_host_read_p and eqn.invars[0] in consts and eqn.invars[1] is step
    }


def counter(steps: Array) -> Any:
    """Return the type of the number of a step."""
    return jax.typeof(steps).update(weak_type=False)


class Tangents(NamedTuple):
    """The tangents of the consts and of the carry of a loop, and which of them become nonzero."""

    of_consts: Sequence[Any]
    of_carry: Sequence[Any]
    nonzero_consts: list[bool]
    nonzero_carry: list[bool]  #: of the tapes too, after any number of steps

    def instantiated(self) -> tuple[list[Array], list[Array]]:
        """Return the nonzero tangents of the consts and of the carry, as arrays."""
        operands = self.nonzero_carry[: len(self.of_carry)]
        carry = [ad.instantiate_zeros(t) for t in flagged(self.of_carry, operands)]
        return flagged(self.of_consts, self.nonzero_consts), carry


def nonzero_tangents(
    body: Any,
    of_consts: Sequence[Any],
    of_carry: Sequence[Any],
    one_step: Callable[[Any, list[bool]], list[bool]] = reached,
) -> Tangents:
    """Find which tangents are nonzero. `one_step` says which outputs of the body have tangents."""
    consts = [not is_zero(t) for t in of_consts]
    carry = [not is_zero(t) for t in of_carry]
    carry += [False] * (len(body.out_avals) - len(carry))  # tapes
    leading = [False] * (len(body.in_avals) - len(consts) - len(carry))
    nonzero_carry = jaxprs.after_any_steps(carry, lambda carry: one_step(body, [*leading, *consts, *carry]))
    return Tangents(of_consts, of_carry, consts, nonzero_carry)


def zero_tangents(outs: Sequence[Array]) -> list[Any]:
    return [zero_tangent(x) for x in outs]


def step_and_record(
    linear: Linearized, k: Array, inputs: Sequence[Array], tapes: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """Return what a linearized body returns, and the tapes with the residuals of step `k`."""
    outs = jaxprs.function(linear.jaxpr)(*inputs)
    return outs[: linear.num_outs], record(tapes, k, outs[linear.num_outs :], linear.steps)


def linearized_loop(
    linear: Linearized,
    consts: Sequence[Array],
    recorded: Sequence[Array],
    steps: Array,
    tangents: Tangents,
    *,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[TapeType],
) -> list[Array]:
    """Return the tangents of the carry after all steps, from the tapes that the loop has recorded.

    The loop has these `consts`, and carries `tapes` of its own.
    """
    shared = jaxprs.function(linear.shared)(*consts)
    const_tangents, carry_tangents = tangents.instantiated()
    new = tangent_tapes(tapes, tangents.nonzero_carry[len(tangents.of_carry) :])

    def step(k: Array, *rest: Array) -> list[Array]:
        recorded, rest = rest[: len(linear.taped)], rest[len(linear.taped) :]
        shared_here, dots = rest[: len(shared)], rest[len(shared) :]
        return linear.tangents(play_back(recorded, k, linear.steps, linear.taped), shared_here, dots)

    operands = [*recorded, *shared, *const_tangents]
    types = [*map(jax.typeof, [*operands, *carry_tangents]), *avals_of(new)]
    body = jax.make_jaxpr(step)(counter(steps), *types)
    return count(steps, operands, carry_tangents, body=body, max_steps=max_steps, reverse=reverse, tapes=new)


#: Other ways than a tape, which `choosing` adds. Each maps a linearized body, the operands, the tangents, the body and
#: the options of a loop to the results and the tangents of those that have some, or to None if the tape is better.
CHOICES: list[Callable[..., tuple[list[Array], list[Array]] | None]] = []


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, body: Any, options: CountOptions) -> Any:
    steps, consts, carry = options.split(primals)
    _, of_consts, of_carry = options.split(tangents)
    nonzero = nonzero_tangents(body, of_consts, of_carry)
    max_steps, reverse, tapes = options.max_steps, options.reverse, options.tapes
    if not any(nonzero.nonzero_carry):
        outs = count(steps, consts, carry, body=body, max_steps=max_steps, reverse=reverse, tapes=tapes)
        return outs, zero_tangents(outs)
    linear, inputs = linearize.linearize(body, nonzero.nonzero_consts, nonzero.nonzero_carry), len(body.in_avals)
    for choose in CHOICES:
        better = choose(linear, primals, nonzero, body, options)
        if better is not None:
            outs, dots = better
            return outs, merge(dots, nonzero.nonzero_carry, zero_tangents(outs))

    def step(*args: Array) -> list[Array]:
        outs, new = step_and_record(linear, args[0], args[:inputs], args[inputs:])
        return [*outs, *new]

    # The derivative of what reads or writes a tape on the host has its own tape there.
    new = tapes_for(linear.taped, max_steps, any(is_on_host(a) for a in body.in_avals))
    taped = jax.make_jaxpr(step)(*body.in_avals, *avals_of(new))
    outs = count(steps, consts, carry, body=taped, max_steps=max_steps, reverse=reverse, tapes=[*tapes, *new])
    outs, recorded = outs[: linear.num_outs], outs[linear.num_outs :]
    dots = linearized_loop(linear, consts, recorded, steps, nonzero, max_steps=max_steps, reverse=reverse, tapes=tapes)
    return outs, merge(dots, nonzero.nonzero_carry, zero_tangents(outs))


def _pruned_for(used: Sequence[bool], num_operands: int, body: Any, options: CountOptions) -> Pruned:
    """Return the loop of the carries that the flagged ones depend on."""
    live = jaxprs.read_for(body, used)
    consts, carry = live[1 : 1 + options.num_consts], live[1 + options.num_consts :]
    body, _ = jaxprs.part_of(body, tuple(carry), (True, *consts, *carry))
    n = len(carry) - len(options.tapes)
    fewer = replace(options, num_consts=sum(consts), tapes=tuple(flagged(options.tapes, carry[n:])))
    return Pruned([True, *consts, *carry[:n]], carry, {"body": body, "options": fewer}, body.effects)


def _transpose(cts: Sequence[Any], *operands: Any, body: Any, options: CountOptions) -> Any:
    steps, consts, _ = options.split(operands)
    # A known carry is zeros: its tangent came into the loop by another way. All carries are linear.
    _, linear_consts, linear_carry = options.split([ad.is_undefined_primal(x) for x in operands])
    linear, known = partition(consts, linear_consts)
    types = [x.aval for x in linear]
    call, m = jaxprs.function(body), len(linear)

    def step(k: Array, *rest: Array) -> list[Array]:
        known_here, ct = rest[: len(known)], rest[len(known) :]

        # A const that is returned too has a transpose that starts from its running cotangent: reads add in place.
        def forward(consts: list[Array], carry: list[Array]) -> Any:
            others = iter(known_here)
            return consts, call(k, *merge(consts, linear_consts, [x or next(others) for x in linear_consts]), *carry)

        const_cts, carry_cts = jax.linear_transpose(forward, types, body.out_avals)((list(ct[:m]), list(ct[m:])))
        return [*const_cts, *carry_cts]

    start = [*map(zeros, types), *(zeros(ct.aval) if is_zero(ct) else ct for ct in cts)]
    transposed = jax.make_jaxpr(step)(counter(steps), *map(jax.typeof, known), *map(jax.typeof, start))
    outs = count(steps, known, start, body=transposed, max_steps=options.max_steps, reverse=not options.reverse)
    carry_cts = [ct if is_linear else None for ct, is_linear in zip(outs[m:], linear_carry, strict=False)]  # not tapes
    return [None, *merge(outs[:m], linear_consts, [None] * len(consts)), *carry_cts]


def _batch(axis: Axis, args: Sequence[Array], batched: Sequence[bool], *, body: Any, options: CountOptions) -> Any:
    steps, consts, carry = options.split(args)
    steps_batched, consts_batched, init_batched = options.split(batched)
    init_batched += [False] * len(options.tapes)
    if steps_batched:
        carry_batched = [True] * len(init_batched)
    else:
        of_consts = [False, *consts_batched]
        carry_batched = jaxprs.after_any_steps(
            init_batched, lambda carry: axis.batched_outputs(body, [*of_consts, *carry])
        )
    carry = with_batch_axis(carry, init_batched, carry_batched, axis.size)
    tapes = batched_tapes(options.tapes, carry_batched[len(carry) :], axis.size)
    of_operands = [*consts_batched, *carry_batched]
    if steps_batched:

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, carry = (k, *rest[: options.num_consts]), rest[options.num_consts :]
            return masking.step_of_active(body, k < steps, consts, carry, [False, *of_operands])

        batched_step = axis.vmap(step, [None, 0, *axes(of_operands)], 0)
        consts, steps = [steps, *consts], largest(steps)
    else:
        batched_step = axis.vmap(jaxprs.function(body), [None, *axes(of_operands)], axes(carry_batched))
    types = [*map(jax.typeof, [*consts, *carry]), *avals_of(tapes)]
    traced = jax.make_jaxpr(batched_step)(counter(steps), *types)
    max_steps, reverse = options.max_steps, options.reverse
    return count(steps, consts, carry, body=traced, max_steps=max_steps, reverse=reverse, tapes=tapes), carry_batched


def _bodies(params: dict[str, Any]) -> list[registry.Body]:
    body = params["body"]  # it takes the number of a step; the operand is the number of steps
    return [registry.Body(body, 0, 0, 1 + params["options"].num_consts, len(body.out_avals))]


def _masked(masked: masking.Masker, eqn: Equation, operands: list[masking.MaskedValue]) -> list[masking.MaskedValue]:
    steps, *rest = operands
    outs = ta_count_p.bind(jnp.where(masked.active, steps.array, 0), *(x.array for x in rest), **eqn.params)
    return masking.results_of_loop(outs, eqn.params["options"].split(operands)[2])


rules.register(
    ta_count_p,
    run=_run,
    abstract_eval=_abstract_eval,
    bodies=_bodies,
    pruned_for=_pruned_for,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
    tapes=lambda eqn: (linearize.tapes_among(eqn.outvars, eqn.params["options"].tapes), eqn.invars[0]),
    mask=_masked,
)
