"""`ta_while`: a loop that ends when its data say so. It counts its steps, so that its derivatives are counted loops."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, mlir, xla
from jax.interpreters import partial_eval as pe

from jax_tensorarray import _compat
from jax_tensorarray._loops import jaxprs, masking, rules
from jax_tensorarray._loops.count import (
    Tape,
    abstract,
    batched_tapes,
    largest,
    linearized_loop,
    make,
    moving,
    record,
    tangents_of,
    tape,
    widened,
    zero_tangents,
)
from jax_tensorarray._loops.jaxprs import chosen, spread
from jax_tensorarray._loops.linearize import linearize
from jax_tensorarray._loops.rules import Axis, axes
from jax_tensorarray._ops.primitive import is_zero, to_front, type_like

Array = Any

# Operands: *cond_consts, *body_consts, *carry. Results: *carry and, if the loop `counts`, steps. `cond` maps
# *cond_consts, *carry to a bool, and `body` *body_consts, *carry to *carry. The loop ends after `max_steps`, if that is
# not None. The last carries may be `tapes`, as of `ta_count`.
#
# Under vmap every example has its own end. Then there are `lanes` axes of examples: `cond` gives, and steps has, an
# element for each, the body takes first which of them are active, and the loop goes on while any is.
#
# Steps are counted as `counting` says, and a count that its dtype cannot hold stays at the largest that it can.
ta_while_p = Primitive("ta_while")
ta_while_p.multiple_results = True


def while_(
    cond_consts: Sequence[Array],
    body_consts: Sequence[Array],
    carry: Sequence[Array],
    *,
    cond: Any,
    body: Any,
    max_steps: int | None,
    source: str,
    lanes: int = 0,
    mode: Any = None,
    tapes: Sequence[Tape] = (),
    counts: bool = True,
) -> tuple[list[Array], Any]:
    """Run the loop. Return the carry after it, and the number of steps taken, or None if it is not counted."""
    operands = [*cond_consts, *body_consts, *carry]
    # Refs have no derivatives of a kind to be recorded: a loop that holds some is JAX's own.
    loop = ta_while_p.bind if all(isinstance(jax.typeof(x), ShapedArray) for x in operands) else _run
    outs = loop(
        *operands,
        cond=cond,
        body=body,
        cond_nconsts=len(cond_consts),
        body_nconsts=len(body_consts),
        max_steps=max_steps,
        source=source,
        lanes=lanes,
        mode=mode,
        tapes=tuple(tapes),
        counts=counts,
    )
    return (outs[:-1], outs[-1]) if counts else (outs, None)


def _split(operands: Sequence[Any], cond_nconsts: int, body_nconsts: int) -> tuple[Any, Any, Any]:
    n = cond_nconsts + body_nconsts
    return operands[:cond_nconsts], operands[cond_nconsts:n], operands[n:]


def counting(max_steps: int | None) -> Any:
    """Return the dtype in which steps are counted: int32 if it can hold `max_steps`, else the widest that JAX has."""
    narrow = max_steps is not None and max_steps <= jnp.iinfo(jnp.int32).max
    return jnp.dtype(jnp.int32) if narrow else jax.dtypes.canonicalize_dtype(jnp.int64)


def bounded(max_steps: int | None) -> bool:
    """Return whether there is a `max_steps` that the loop can count to."""
    return max_steps is not None and max_steps <= jnp.iinfo(counting(max_steps)).max


def taped(max_steps: int | None) -> bool:
    """Return whether there is a `max_steps` for which a tape may have room."""
    return bounded(max_steps) and counting(max_steps) != jnp.int64


def _abstract_eval(*avals: Any, cond: Any, body: Any, max_steps: int | None, counts: bool, **_: Any) -> Any:
    (active,) = cond.out_avals
    steps = [type_like(active, active.shape, range(active.ndim), counting(max_steps))] if counts else []
    return [*body.out_avals, *steps], {*cond.effects, *body.effects}


def _run(
    *operands: Array,
    cond: Any,
    body: Any,
    cond_nconsts: int,
    body_nconsts: int,
    max_steps: int | None,
    source: str,
    lanes: int,
    mode: Any,
    tapes: Sequence[Tape],
    counts: bool,
) -> Any:
    cond_consts, body_consts, carry = _split(operands, cond_nconsts, body_nconsts)
    carry = [*carry, *make(tapes)]
    predicate, call = jaxprs.function(cond), jaxprs.function(body)

    def goes_on(carry: Sequence[Array]) -> Array:
        (active,) = predicate(*cond_consts, *carry)
        return active

    if not counts and (not lanes or _is_cheap(cond)):  # as JAX's own loop

        def step_of_all(carry: Sequence[Array]) -> list[Array]:
            return call(*([goes_on(carry)] if lanes else []), *body_consts, *carry)

        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)) if lanes else goes_on(carry), step_of_all, carry)
    dtype, limited = counting(max_steps), bounded(max_steps)

    def more(k: Array, carry: Sequence[Array]) -> Array:
        return goes_on(carry) & (k < max_steps) if limited else goes_on(carry)

    def after(k: Array, taken: Any = 1) -> Array:
        return k + taken if limited else lax.select(k < jnp.iinfo(dtype).max, k + taken, k)

    start = jnp.zeros((), dtype)
    if not lanes:
        steps, outs = lax.while_loop(
            lambda state: more(*state),
            lambda state: (after(state[0]), call(*body_consts, *state[1])),
            (start, carry),
        )
        return [*outs, steps]

    def step(state: Any) -> Any:
        k, active, taken, carry = state
        carry = call(active, *body_consts, *carry)
        k, taken = after(k), after(taken, active.astype(dtype))
        return k, active & more(k, carry), taken, carry

    active = more(start, carry)
    state = (start, active, jnp.zeros(active.shape, dtype), carry)
    _, _, taken, outs = lax.while_loop(lambda state: jnp.any(state[1]), step, state)
    return [*outs, taken] if counts else outs


def _is_cheap(cond: Any) -> bool:
    """Return whether a condition may be evaluated twice a step, as JAX's own loop does for a batched condition."""
    return not cond.effects and not jaxprs.has_row_ops(cond)


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    cond: Any,
    body: Any,
    cond_nconsts: int,
    body_nconsts: int,
    max_steps: int | None,
    source: str,
    lanes: int,
    mode: Any,
    tapes: Sequence[Tape],
    counts: bool,
) -> Any:
    cond_consts, consts, carry = _split(primals, cond_nconsts, body_nconsts)
    _, const_dots, carry_dots = _split(tangents, cond_nconsts, body_nconsts)
    loop = functools.partial(while_, max_steps=max_steps, source=source, lanes=lanes, mode=mode, counts=counts)
    first = int(lanes > 0)  # the body takes which lanes are active first
    moved_consts, moved_carry = moving(body, first, const_dots, carry_dots, len(tapes))
    if not any(moved_carry):
        results = _results(*loop(cond_consts, consts, carry, cond=cond, body=body, tapes=tapes))
        return results, zero_tangents(results)
    reversible = taped(max_steps)
    if not reversible:  # what `moving` finds may be too much, and then it is the reverse mode of something
        have = [not is_zero(t) for t in carry_dots]
        moved_carry = jaxprs.fixed_point(body, [*[False] * first, *moved_consts], have, jaxprs.moved)
    given = [ad.instantiate_zeros(t) if moves else t for t, moves in zip(carry_dots, moved_carry, strict=False)]
    const_dots, carry_dots = chosen(const_dots, moved_consts), chosen(given, moved_carry[: len(carry)])
    moved = [*[False] * first, *moved_consts, *moved_carry]
    if not reversible:
        outs, dots, steps = _joint_jvp(loop, cond, body, cond_consts, consts, carry, const_dots, carry_dots, moved)
        # The tangent of what no step changes comes from before the loop: so it has a transpose.
        same = chosen(_unchanged(body, len(carry)), moved_carry)
        dots = [before if is_same else dot for before, is_same, dot in zip(carry_dots, same, dots, strict=True)]
    elif mode is None or mode.tapes:
        outs, dots, steps = _taped_jvp(
            loop, cond, body, cond_consts, consts, carry, const_dots, carry_dots, moved, tapes
        )
    else:
        outs, dots, steps = _replayed_jvp(loop, cond, body, cond_consts, consts, carry, const_dots, carry_dots, moved)
    results = _results(outs, steps)
    return results, spread(dots, [*moved_carry, *[False] * counts], zero_tangents(results))


def _results(outs: list[Array], steps: Any) -> list[Array]:
    return outs if steps is None else [*outs, steps]


def _taped_jvp(
    loop: Callable[..., Any],
    cond: Any,
    body: Any,
    cond_consts: Sequence[Array],
    consts: Sequence[Array],
    carry: Sequence[Array],
    const_dots: Sequence[Array],
    carry_dots: Sequence[Array],
    moved: Sequence[bool],
    tapes: Sequence[Tape],
) -> tuple[list[Array], list[Array], Array]:
    """Run two loops. The second is linear in the tangents, so every loop can be transposed."""
    max_steps, mode = (loop.keywords[name] for name in ("max_steps", "mode"))  # type: ignore[attr-defined]
    operands, n, inputs = len(carry), len(carry) + len(tapes), len(moved)
    first = inputs - n - len(consts)
    linear = linearize(body, moved[-n:], moved, [*[False] * first, *[True] * len(consts), *[False] * n])
    if mode is not None and (better := mode.instead_of(linear, body, first + len(consts), n, max_steps)) is not None:
        loop = functools.partial(loop, mode=better)
        return _replayed_jvp(loop, cond, body, cond_consts, consts, carry, const_dots, carry_dots, moved)
    call, predicate = jaxprs.function(linear.jaxpr), jaxprs.function(cond)
    before = inputs - len(tapes)  # the counter comes between the carry and the tapes

    def goes_on(*args: Array) -> list[Array]:
        some = args[: len(cond_consts) + operands]
        return predicate(*some, *args[len(some) + 1 : len(some) + 1 + len(tapes)])

    start = jnp.zeros((), counting(max_steps))

    def step(*args: Array) -> list[Array]:
        k, new = args[before], args[inputs + 1 :]
        outs = call(*args[:before], *args[before + 1 : inputs + 1])
        return [*outs[:operands], k + 1, *outs[operands:n], *record(new, k, outs[n:], linear.steps)]

    new = tape(linear.taped, max_steps, mode is not None and mode.offload)
    types = [jax.typeof(start), *abstract([*tapes, *new])]
    cond_types, body_types = list(cond.in_avals), list(body.in_avals)
    taped_cond = jax.make_jaxpr(goes_on)(*cond_types[: len(cond_types) - len(tapes)], *types)
    taped_body = jax.make_jaxpr(step)(*body_types[:before], *types)
    outs, steps = loop(cond_consts, consts, [*carry, start], cond=taped_cond, body=taped_body, tapes=[*tapes, *new])
    outs = [*outs[:operands], *outs[operands + 1 :]]
    dots = linearized_loop(
        linear,
        consts,
        outs[n:],
        largest(steps),
        const_dots,
        carry_dots,
        max_steps=max_steps,
        reverse=False,
        new=tangents_of(tapes, moved[inputs - len(tapes) :]),
    )
    return outs[:n], dots, steps


def _replayed_jvp(
    loop: Callable[..., Any],
    cond: Any,
    body: Any,
    cond_consts: Sequence[Array],
    consts: Sequence[Array],
    carry: Sequence[Array],
    const_dots: Sequence[Array],
    carry_dots: Sequence[Array],
    moved: Sequence[bool],
) -> tuple[list[Array], list[Array], Array]:
    """Run a loop that keeps no tape, and one that finds its steps again."""
    from jax_tensorarray._loops.replay import Replay, replay

    keywords = loop.keywords  # type: ignore[attr-defined]
    lanes, mode = keywords["lanes"], keywords["mode"]
    again = Replay(body, lanes, len(consts), tuple(moved[int(lanes > 0) :]), keywords["max_steps"])
    outs, steps, extra, mode = mode.forward(loop, cond, again.primal, cond_consts, consts, carry)
    dots = replay(again, mode, steps, consts, carry, extra, const_dots, carry_dots)
    return outs, dots, steps


def _joint_jvp(
    loop: Callable[..., Any],
    cond: Any,
    body: Any,
    cond_consts: Sequence[Array],
    consts: Sequence[Array],
    carry: Sequence[Array],
    const_dots: Sequence[Array],
    carry_dots: Sequence[Array],
    moved: Sequence[bool],
) -> tuple[list[Array], list[Array], Array]:
    """Run one loop of primals and tangents. It keeps no tape, since the length of a tape would have no bound."""
    predicate, n = jaxprs.function(cond), len(carry)
    types = [*map(jax.typeof, [*carry, *carry_dots])]
    joint_cond = jax.make_jaxpr(lambda *args: predicate(*args[: len(cond_consts) + n]))(
        *cond.in_avals[: len(cond_consts)], *types
    )
    joint_body = jaxprs.joint_jvp(body, len(consts), n, moved)
    outs, steps = loop(cond_consts, [*consts, *const_dots], [*carry, *carry_dots], cond=joint_cond, body=joint_body)
    return outs[:n], outs[n:], steps


def _unchanged(body: Any, num_carry: int) -> list[bool]:
    """Return which carries the body returns as it took them."""
    inner = _compat.opened(body)
    return [v is w for v, w in zip(inner.invars[len(inner.invars) - num_carry :], inner.outvars, strict=True)]


def _transpose(
    cts: Sequence[Any], *operands: Any, max_steps: int | None, source: str, cond_nconsts: int, **params: Any
) -> Any:
    """Transpose a loop that is linear in some operands. Derivatives of a loop with max_steps are other loops."""
    linear = [ad.is_undefined_primal(x) for x in operands]
    if all(is_zero(ct) for ct in cts):
        return [ad.Zero(x.aval) if is_linear else None for x, is_linear in zip(operands, linear, strict=True)]
    if not taped(max_steps):
        raise _needs_max_steps(source, max_steps)
    params |= {"max_steps": max_steps, "source": source, "cond_nconsts": cond_nconsts}

    # A linear function is its derivative, at zero as well as anywhere.
    def loop(*some: Array) -> list[Array]:
        return chosen(ta_while_p.bind(*spread(some, linear, operands), **params), given)

    given = [not is_zero(ct) for ct in cts]
    zeros = [ad.instantiate_zeros(ad.Zero(x.aval)) for x in chosen(operands, linear)]
    _, pull = jax.vjp(loop, *zeros)
    return spread(pull(chosen(cts, given)), linear, [None] * len(operands))


def _needs_max_steps(source: str, max_steps: int | None) -> ValueError:
    few = "" if max_steps is None else f" of at most {jnp.iinfo(counting(0)).max}, not {max_steps}"
    return ValueError(
        f"the loop at {source} is differentiated in reverse, so it needs max_steps{few}, the largest number of steps "
        "it may take: while_loop(cond_fun, body_fun, init_val, max_steps=...). Memory is only used for the steps "
        "taken. (jax.jvp and jax.jacfwd need no max_steps.)"
    )


# Part of a loop is unknown only where its tangents are put off, for reverse mode or jax.linearize. With max_steps the
# tangents are a loop of their own by then. Without max_steps the loop runs again, with the tangents; it has no
# transpose, but perhaps none is needed. As for JAX's own loop, the known results come from a loop of the known carries.


class _Part(NamedTuple):
    """A loop with fewer operands and results: which ones it has, and its parameters."""

    operands: list[bool]
    results: list[bool]
    params: dict[str, Any]


def _part(operands: Sequence[bool], carry: Sequence[bool], cond: Any, body: Any, params: dict[str, Any]) -> _Part:
    """Return the loop of the carries flagged in `carry`, which has the tapes last, and of the consts in `operands`."""
    cond_consts, consts, _ = _split(operands, params["cond_nconsts"], params["body_nconsts"])
    n = len(carry) - len(params["tapes"])
    fewer = {
        "cond": cond,
        "body": body,
        "cond_nconsts": sum(cond_consts),
        "body_nconsts": sum(consts),
        "tapes": tuple(chosen(params["tapes"], carry[n:])),
    }
    return _Part([*cond_consts, *consts, *carry[:n]], [*carry, *[True] * params["counts"]], params | fewer)


def _known(unknown: Sequence[bool], params: dict[str, Any]) -> _Part | None:
    """Return the loop of what does not depend on unknown operands; None if its end does."""
    cond_consts, consts, carry = _split(unknown, params["cond_nconsts"], params["body_nconsts"])
    consts, carry = [*[False] * int(params["lanes"] > 0), *consts], [*carry, *[False] * len(params["tapes"])]

    def one_step(body: Any, flags: list[bool]) -> list[bool]:
        return _compat.known_part(body, tuple(flags))[1]

    carry = jaxprs.fixed_point(params["body"], consts, carry, one_step)
    cond, (end_is_unknown,) = _compat.known_part(params["cond"], (*cond_consts, *carry))
    if end_is_unknown:
        return None
    body, _ = _compat.known_part(params["body"], (*consts, *carry), tuple(carry))
    return _part([not x for x in unknown], [not x for x in carry], cond, body, params)


def _splits(mode: Any) -> bool:
    """Return whether the loop means the same with fewer carries. Some modes refer to all of them."""
    return mode is None or mode.tapes


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    unknown = [not t.is_known() for t in tracers]
    known = _known(unknown, params) if any(unknown) and _splits(params["mode"]) else None
    # With all operands known this runs the loop.
    outs = trace.default_process_primitive(ta_while_p, tracers, params)
    if known is None:
        return outs
    found = ta_while_p.bind(*(t.pval.get_known() for t in chosen(tracers, known.operands)), **known.params)
    return spread(found, known.results, outs)


def _partial_eval_in_checkpoint(
    policy: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Apply the rule of `jax.checkpoint` for primitives without a rule, but split off what is known."""
    n = len(eqn.outvars)
    needed = [v for v, there in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    if any(unknown):
        known = _known(unknown, eqn.params) if _splits(eqn.params["mode"]) else None
        if known is None:
            return None, eqn, [True] * n, [True] * n, needed
        return _equation_of(eqn, known), eqn, [not there for there in known.results], [True] * n, needed
    decision = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if decision is True or type(decision).__name__ == "SaveableType":
        return eqn, None, [False] * n, [False] * n, []
    return eqn, eqn, [False] * n, [True] * n, needed


def _equation_of(eqn: Any, part: _Part) -> Any:
    return eqn.replace(
        invars=chosen(eqn.invars, part.operands),
        outvars=chosen(eqn.outvars, part.results),
        params=part.params,
        effects={*part.params["cond"].effects, *part.params["body"].effects},
    )


def _without_unused(used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    """Remove the carries that nobody needs. Return which operands are left, and the equation."""
    eqn = args[-1]  # before it comes, in 0.12, which operands are live
    params, n = eqn.params, len(eqn.invars)
    if not any(used) and not eqn.effects:
        return [False] * n, None
    if not _splits(params["mode"]):
        return [True] * n, eqn
    a, m, tapes, first = params["cond_nconsts"], params["body_nconsts"], params["tapes"], int(params["lanes"] > 0)
    _, read = _live(params["cond"], (True,))
    carry = [x or y for x, y in zip(used[: len(read) - a], read[a:], strict=True)]
    while True:
        _, live = _live(params["body"], tuple(carry))
        wider = [x or y for x, y in zip(carry, live[first + m :], strict=True)]
        if wider == carry:
            break
        carry = wider
    operands = [*read[:a], *live[first : first + m], *carry[: len(carry) - len(tapes)]]
    cond, _ = _live(params["cond"], (True,), (*read[:a], *carry))
    body, _ = _live(params["body"], tuple(carry), (*[True] * first, *live[first : first + m], *carry))
    part = _part(operands, carry, cond, body, params)
    return part.operands, _equation_of(eqn, part)


@_compat.cached
def _live(jaxpr: Any, outputs: Sequence[bool], inputs: Any = False) -> tuple[Any, list[bool]]:
    """Return the jaxpr of the flagged outputs, and which inputs it has.

    It has the inputs flagged in `inputs` even if it does not read them.
    """
    part, live = pe.dce_jaxpr(_compat.opened(jaxpr), list(outputs), inputs if inputs is False else list(inputs))
    names = ("invars", "outvars", "eqns", "effects", "debug_info")
    return _compat.replaced(jaxpr, **{name: getattr(part, name) for name in names}), live


def _batch(
    axis: Axis,
    args: Sequence[Array],
    dims: Sequence[Any],
    *,
    cond: Any,
    body: Any,
    cond_nconsts: int,
    body_nconsts: int,
    max_steps: int | None,
    source: str,
    lanes: int,
    mode: Any,
    tapes: Sequence[Tape],
    counts: bool,
) -> Any:
    args = [x if d is None else to_front(x, d, axis.size) for x, d in zip(args, dims, strict=True)]
    cond_consts, consts, carry = _split(args, cond_nconsts, body_nconsts)
    cond_batched, consts_batched, have = _split([d is not None for d in dims], cond_nconsts, body_nconsts)
    first, have = [False] * int(lanes > 0), [*have, *[True] * len(tapes)]
    wide = jaxprs.fixed_point(body, [*first, *consts_batched], have, axis.differing)
    if mode is not None and mode.batches_all:
        wide = [True] * len(have)
    (own_ends,) = axis.differing(cond, [*cond_batched, *wide])
    if own_ends:
        _check_effects(cond, body)
        wide = [True] * len(have)
    carry, tapes = widened(carry, have, wide, axis.size), batched_tapes(tapes, axis.size)
    if mode is not None:
        mode = mode.batched(axis, lanes, own_ends, consts_batched, consts, carry)
    types = [*map(jax.typeof, [*consts, *carry]), *abstract(tapes)]
    body = masking.batched_body(axis, body, lanes, own_ends, [*consts_batched, *wide], wide, types)
    predicate = axis.vmap(jaxprs.function(cond), axes([*cond_batched, *wide]), 0 if own_ends else None)
    cond = jax.make_jaxpr(predicate)(*map(jax.typeof, [*cond_consts, *carry]), *abstract(tapes))
    outs, steps = while_(
        cond_consts,
        consts,
        carry,
        cond=cond,
        body=body,
        max_steps=max_steps,
        source=source,
        lanes=lanes + own_ends,
        mode=mode,
        tapes=tapes,
        counts=counts,
    )
    return _results(outs, steps), axes([*wide, *[own_ends] * counts])


def _check_effects(cond: Any, body: Any) -> None:
    """Raise the error of JAX's loop for effects: an example that has ended must not have any."""
    if any(str(effect) == "IO" for effect in {*cond.effects, *body.effects}):
        raise NotImplementedError("Unordered IO effects not supported in while_loop with batched predicate")


def _run_checked(*operands: Array, lanes: int, **params: Any) -> Any:
    if lanes:
        raise ValueError(
            f"the loop at {params['source']} is under checkify-of-vmap-of-while, where examples that have ended would "
            "be checked too. As for JAX's own loop, write vmap-of-checkify-of-while"
        )
    return _run(*operands, lanes=lanes, **params)


_compat.lowers_its_bodies(ta_while_p)
_compat.checked_as(ta_while_p, _run_checked)
ta_while_p.def_impl(functools.partial(xla.apply_primitive, ta_while_p))
ta_while_p.def_effectful_abstract_eval(_abstract_eval)
rules.register(ta_while_p, body_of=lambda params: params["body"], jvp=_jvp, batch=_batch)
ad.primitive_transposes[ta_while_p] = _transpose
pe.dce_rules[ta_while_p] = _without_unused
pe.custom_partial_eval_rules[ta_while_p] = _partial_eval
pe.partial_eval_jaxpr_custom_rules[ta_while_p] = _partial_eval_in_checkpoint
mlir.register_lowering(ta_while_p, mlir.lower_fun(_run, multiple_results=True))
