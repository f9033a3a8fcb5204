"""`ta_count`: a loop whose number of steps is known before it starts, perhaps only at run time. It can be transposed.

The derivatives of every loop of the library are such loops: the trip count and the residuals are known by then.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, mlir, xla
from jax.interpreters import partial_eval as pe

from jax_tensorarray import _compat
from jax_tensorarray._loops import jaxprs, linearize, masking, rules
from jax_tensorarray._loops.jaxprs import chosen, spread
from jax_tensorarray._loops.linearize import Linearized
from jax_tensorarray._loops.rules import Axis, axes, widened
from jax_tensorarray._loops.tapes import (
    Tape,
    avals_of,
    batched_tapes,
    largest,
    make,
    play_back,
    record,
    tangent_tapes,
    tapes_for,
)
from jax_tensorarray._ops.host import is_on_host, ta_host_read, ta_host_read_p, zeros
from jax_tensorarray._ops.primitive import is_zero, to_front, zero_tangent

Array = Any

# Operands: steps, *consts, *carry. The body maps k, *consts, *carry to *carry, for k = 0, 1, ..., steps - 1 or, with
# `reverse`, for k = steps - 1, ..., 0. There are at most `max_steps` steps.
#
# The last carries may be `tapes`, which are no operands.
ta_count_p = Primitive("ta_count")
ta_count_p.multiple_results = True


def count(
    steps: Array,
    consts: Sequence[Array],
    carry: Sequence[Array],
    *,
    body: Any,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[Tape] = (),
) -> Any:
    return ta_count_p.bind(
        steps,
        *consts,
        *carry,
        body=body,
        num_consts=len(consts),
        max_steps=max_steps,
        reverse=reverse,
        tapes=tuple(tapes),
    )


def _abstract_eval(*avals: Any, body: Any, **_: Any) -> Any:
    return [a.update(weak_type=False) if hasattr(a, "weak_type") else a for a in body.out_avals], body.effects


def _run(
    steps: Array, *rest: Array, body: Any, num_consts: int, max_steps: int, reverse: bool, tapes: Sequence[Tape]
) -> Any:
    consts, carry = rest[:num_consts], [*rest[num_consts:], *make(tapes)]
    fetched = _reads_of_host(body, num_consts)

    def number(n: Array) -> Array:
        return steps - 1 - n if reverse else n

    def fetch(n: Array) -> list[Array]:
        # After the last step this fetches the row of another step, which is not used.
        return [ta_host_read(consts[place], number(n), **params) for place, params in fetched.values()]

    def step(state: Any) -> Any:
        n, rows, carry = state
        here = dict(zip(fetched, rows, strict=True))

        def equation(eqn: Any, operands: list[Array]) -> list[Array]:
            return [here[eqn.outvars[0]]] if eqn.outvars and eqn.outvars[0] in here else jaxprs.bind(eqn, operands)

        args = [number(n), *consts, *carry]
        outs = jaxprs.interpret(body, args, equation, lambda x: x) if fetched else jaxprs.function(body)(*args)
        return n + 1, fetch(n + 1), outs

    start = steps * 0  # of the type of `steps`, which may differ from device to device
    return lax.while_loop(lambda state: state[0] < steps, step, (start, fetch(start), list(carry)))[2]


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


def linearized_loop(
    linear: Linearized,
    fixed: Sequence[Array],
    tapes: Sequence[Array],
    steps: Array,
    const_tangents: Sequence[Array],
    carry_tangents: Sequence[Array],
    *,
    max_steps: int,
    reverse: bool,
    new: Sequence[Tape] = (),
) -> Any:
    """Return the tangents of the carry after all steps, from the tapes that the loop has written.

    `fixed` are the operands of the body that are the same in every step. `new` are the tangents of tapes that the loop
    itself carries.
    """
    shared = jaxprs.function(linear.shared)(*fixed)

    def step(k: Array, *rest: Array) -> list[Array]:
        tapes, rest = rest[: len(linear.taped)], rest[len(linear.taped) :]
        shared_here, tangents = rest[: len(shared)], rest[len(shared) :]
        return linear.tangents(play_back(tapes, k, linear.steps, linear.taped), shared_here, tangents)

    consts = [*tapes, *shared, *const_tangents]
    types = [*map(jax.typeof, [*consts, *carry_tangents]), *avals_of(new)]
    body = jax.make_jaxpr(step)(counter(steps), *types)
    return count(steps, consts, carry_tangents, body=body, max_steps=max_steps, reverse=reverse, tapes=new)


def moving(
    body: Any, first: int, const_tangents: Sequence[Any], carry_tangents: Sequence[Any], num_tapes: int
) -> tuple[list[bool], list[bool]]:
    """Return which consts and which carries of a body have tangents. Its `first` inputs have none."""
    consts = [not is_zero(t) for t in const_tangents]
    carry = [*(not is_zero(t) for t in carry_tangents), *[False] * num_tapes]
    return consts, jaxprs.fixed_point(body, [False] * first + consts, carry, jaxprs.reached)


def zero_tangents(outs: Sequence[Array]) -> list[Any]:
    return [zero_tangent(x) for x in outs]


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    body: Any,
    num_consts: int,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[Tape],
) -> Any:
    steps, consts, carry = primals[0], primals[1 : 1 + num_consts], primals[1 + num_consts :]
    const_dots, carry_dots = tangents[1 : 1 + num_consts], tangents[1 + num_consts :]
    moved_consts, moved_carry = moving(body, 1, const_dots, carry_dots, len(tapes))
    loop = functools.partial(count, max_steps=max_steps, reverse=reverse)
    if not any(moved_carry):
        outs = loop(steps, consts, carry, body=body, tapes=tapes)
        return outs, zero_tangents(outs)
    n, inputs = len(carry) + len(tapes), len(body.in_avals)
    linear = linearize.linearize(
        body, moved_carry, [False, *moved_consts, *moved_carry], [False, *[True] * num_consts, *[False] * n]
    )
    call = jaxprs.function(linear.jaxpr)

    def step(k: Array, *rest: Array) -> list[Array]:
        outs = call(k, *rest[: inputs - 1])
        return [*outs[:n], *record(rest[inputs - 1 :], k, outs[n:], linear.steps)]

    # The derivative of what reads or writes a tape on the host has its own tape there.
    offload = any(is_on_host(a) for a in body.in_avals)
    new = tapes_for(linear.taped, max_steps, offload)
    taped = jax.make_jaxpr(step)(*body.in_avals, *avals_of(new))
    outs = loop(steps, consts, carry, body=taped, tapes=[*tapes, *new])
    moved_operands, moved_tapes = moved_carry[: len(carry)], moved_carry[len(carry) :]
    dots = linearized_loop(
        linear,
        consts,
        outs[n:],
        steps,
        chosen(const_dots, moved_consts),
        [ad.instantiate_zeros(t) for t in chosen(carry_dots, moved_operands)],
        max_steps=max_steps,
        reverse=reverse,
        new=tangent_tapes(tapes, moved_tapes),
    )
    return outs[:n], spread(dots, moved_carry, zero_tangents(outs[:n]))


def _transpose(
    cts: Sequence[Any],
    steps: Array,
    *rest: Any,
    body: Any,
    num_consts: int,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[Tape],
) -> Any:
    consts, carry = rest[:num_consts], rest[num_consts:]
    linear_const = [ad.is_undefined_primal(c) for c in consts]
    # A known carry is zeros: its tangent came into the loop by another way. All carries are linear.
    linear_carry = [ad.is_undefined_primal(c) for c in carry]
    if all(is_zero(ct) for ct in cts):
        return [None, *(ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in rest)]
    known = [c for c, is_linear in zip(consts, linear_const, strict=True) if not is_linear]
    const_avals = [c.aval for c in chosen(consts, linear_const)]
    carry_avals = body.out_avals
    call, m = jaxprs.function(body), len(const_avals)

    def step(k: Array, *rest: Array) -> list[Array]:
        known_here, ct = rest[: len(known)], rest[len(known) :]

        # A const that is returned too has a transpose that starts from its running cotangent: reads add in place.
        def forward(consts: list[Array], carry: list[Array]) -> Any:
            given = iter(known_here)
            all_consts = [next(given) if not is_linear else None for is_linear in linear_const]
            return consts, call(k, *spread(consts, linear_const, all_consts), *carry)

        const_cts, carry_cts = jax.linear_transpose(forward, const_avals, carry_avals)((list(ct[:m]), list(ct[m:])))
        return [*const_cts, *carry_cts]

    start = [
        *map(zeros, const_avals),
        *(zeros(ct.aval) if is_zero(ct) else ct for ct in cts),
    ]
    transposed = jax.make_jaxpr(step)(counter(steps), *map(jax.typeof, known), *map(jax.typeof, start))
    outs = count(steps, known, start, body=transposed, max_steps=max_steps, reverse=not reverse)
    carry_cts = [ct if is_linear else None for ct, is_linear in zip(outs[m:], linear_carry, strict=False)]  # not tapes
    return [None, *spread(outs[:m], linear_const, [None] * num_consts), *carry_cts]


def _batch(
    axis: Axis,
    args: Sequence[Array],
    dims: Sequence[Any],
    *,
    body: Any,
    num_consts: int,
    max_steps: int,
    reverse: bool,
    tapes: Sequence[Tape],
) -> Any:
    args = [x if d is None else to_front(x, d, axis.size) for x, d in zip(args, dims, strict=True)]
    own_ends, *batched = [d is not None for d in dims]
    steps, consts, carry = args[0], args[1 : 1 + num_consts], args[1 + num_consts :]
    have = [*batched[num_consts:], *[True] * len(tapes)]
    if own_ends:
        wide = [True] * len(have)
    else:
        wide = jaxprs.fixed_point(body, [False, *batched[:num_consts]], have, axis.differing)
    carry = widened(carry, have, wide, axis.size)
    tapes = batched_tapes(tapes, axis.size)
    varying = [*batched[:num_consts], *wide]
    if own_ends:

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, carry = (k, *rest[:num_consts]), rest[num_consts:]
            return masking.step_of_active(body, k < steps, consts, carry, [False, *varying])

        batched_step = axis.vmap(step, [None, 0, *axes(varying)], 0)
        consts, steps = [steps, *consts], largest(steps)
    else:
        batched_step = axis.vmap(jaxprs.function(body), [None, *axes(varying)], axes(wide))
    types = [*map(jax.typeof, [*consts, *carry]), *avals_of(tapes)]
    traced = jax.make_jaxpr(batched_step)(counter(steps), *types)
    outs = count(steps, consts, carry, body=traced, max_steps=max_steps, reverse=reverse, tapes=tapes)
    return outs, axes(wide)


def _partial_eval_in_checkpoint(
    policy: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Apply the rule of `jax.checkpoint` for primitives without a rule, with a difference for effects.

    JAX would save all results of a loop with effects, and lose results that only a `jax.debug.callback` uses.
    """
    n = len(eqn.outvars)
    needed = [v for v, there in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    if any(unknown):
        return None, eqn, [True] * n, [True] * n, needed
    decision = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if decision is True or type(decision).__name__ == "SaveableType":
        return eqn, None, [False] * n, [False] * n, []
    return eqn, eqn, [False] * n, [True] * n, needed


def _reached(params: dict[str, Any], flags: list[bool]) -> list[bool]:
    consts, carry = flags[: 1 + params["num_consts"]], flags[1 + params["num_consts"] :]
    return jaxprs.fixed_point(params["body"], consts, [*carry, *[False] * len(params["tapes"])], jaxprs.reached)


def _masked(masked: masking.Masked, eqn: Any, operands: list[masking.Value]) -> list[masking.Value]:
    steps, *rest = operands
    outs = ta_count_p.bind(jnp.where(masked.active, steps.array, 0), *(x.array for x in rest), **eqn.params)
    return masking.results_of_loop(outs, rest[eqn.params["num_consts"] :])


_compat.lowers_its_bodies(ta_count_p)
pe.partial_eval_jaxpr_custom_rules[ta_count_p] = _partial_eval_in_checkpoint
_compat.checked_as(ta_count_p, _run)
ta_count_p.def_impl(functools.partial(xla.apply_primitive, ta_count_p))
ta_count_p.def_effectful_abstract_eval(_abstract_eval)
mlir.register_lowering(ta_count_p, mlir.lower_fun(_run, multiple_results=True))
rules.register(ta_count_p, body_of=lambda params: params["body"], jvp=_jvp, transpose=_transpose, batch=_batch)
jaxprs.REACHED[ta_count_p] = _reached
linearize.TAPES[ta_count_p] = lambda eqn: (linearize.tapes_among(eqn.outvars, eqn.params["tapes"]), eqn.invars[0])
masking.RULES[ta_count_p] = _masked
