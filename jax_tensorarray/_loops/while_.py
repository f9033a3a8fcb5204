"""`ta_while`: a loop that ends when its data say so. It counts its steps, so that its derivatives are counted loops."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive, Var
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import mlir, xla
from jax.interpreters import partial_eval as pe

from jax_tensorarray import _compat
from jax_tensorarray._loops import jaxprs, linearize, masking, rules
from jax_tensorarray._loops.jaxprs import chosen, spread
from jax_tensorarray._loops.rules import Axis, axes, widened
from jax_tensorarray._loops.tapes import Tape, avals_of, batched_tapes, make
from jax_tensorarray._ops.primitive import to_front, type_like

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
    strategy: Any = None,
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
        strategy=strategy,
        tapes=tuple(tapes),
        counts=counts,
    )
    return (outs[:-1], outs[-1]) if counts else (outs, None)


def split(operands: Sequence[Any], cond_nconsts: int, body_nconsts: int) -> tuple[Any, Any, Any]:
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


def needs_max_steps(source: str, max_steps: int | None) -> ValueError:
    few = "" if max_steps is None else f" of at most {jnp.iinfo(counting(0)).max}, not {max_steps}"
    return ValueError(
        f"the loop at {source} is differentiated in reverse, so it needs max_steps{few}, the largest number of steps "
        "it may take: while_loop(cond_fun, body_fun, init_val, max_steps=...). Memory is only used for the steps "
        "taken. (jax.jvp and jax.jacfwd need no max_steps.)"
    )


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
    strategy: Any,
    tapes: Sequence[Tape],
    counts: bool,
) -> Any:
    cond_consts, body_consts, carry = split(operands, cond_nconsts, body_nconsts)
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
    cond_consts, consts, _ = split(operands, params["cond_nconsts"], params["body_nconsts"])
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
    cond_consts, consts, carry = split(unknown, params["cond_nconsts"], params["body_nconsts"])
    consts, carry = [*[False] * int(params["lanes"] > 0), *consts], [*carry, *[False] * len(params["tapes"])]

    def one_step(body: Any, flags: list[bool]) -> list[bool]:
        return _compat.known_part(body, tuple(flags))[1]

    carry = jaxprs.fixed_point(params["body"], consts, carry, one_step)
    cond, (end_is_unknown,) = _compat.known_part(params["cond"], (*cond_consts, *carry))
    if end_is_unknown:
        return None
    body, _ = _compat.known_part(params["body"], (*consts, *carry), tuple(carry))
    return _part([not x for x in unknown], [not x for x in carry], cond, body, params)


def _splits(strategy: Any) -> bool:
    """Return whether the loop means the same with fewer carries. Some strategies refer to all of them."""
    return strategy is None or strategy.tapes


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    unknown = [not t.is_known() for t in tracers]
    known = _known(unknown, params) if any(unknown) and _splits(params["strategy"]) else None
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
        known = _known(unknown, eqn.params) if _splits(eqn.params["strategy"]) else None
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
    if not _splits(params["strategy"]):
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
    strategy: Any,
    tapes: Sequence[Tape],
    counts: bool,
) -> Any:
    args = [x if d is None else to_front(x, d, axis.size) for x, d in zip(args, dims, strict=True)]
    cond_consts, consts, carry = split(args, cond_nconsts, body_nconsts)
    cond_batched, consts_batched, have = split([d is not None for d in dims], cond_nconsts, body_nconsts)
    first, have = [False] * int(lanes > 0), [*have, *[True] * len(tapes)]
    wide = jaxprs.fixed_point(body, [*first, *consts_batched], have, axis.differing)
    if strategy is not None and strategy.batches_all:
        wide = [True] * len(have)
    (own_ends,) = axis.differing(cond, [*cond_batched, *wide])
    if own_ends:
        _check_effects(cond, body)
        wide = [True] * len(have)
    carry, tapes = widened(carry, have, wide, axis.size), batched_tapes(tapes, axis.size)
    if strategy is not None:
        strategy = strategy.batched(axis, lanes, own_ends, consts_batched, consts, carry)
    types = [*map(jax.typeof, [*consts, *carry]), *avals_of(tapes)]
    body = masking.batched_body(axis, body, lanes, own_ends, [*consts_batched, *wide], wide, types)
    predicate = axis.vmap(jaxprs.function(cond), axes([*cond_batched, *wide]), 0 if own_ends else None)
    cond = jax.make_jaxpr(predicate)(*map(jax.typeof, [*cond_consts, *carry]), *avals_of(tapes))
    outs, steps = while_(
        cond_consts,
        consts,
        carry,
        cond=cond,
        body=body,
        max_steps=max_steps,
        source=source,
        lanes=lanes + own_ends,
        strategy=strategy,
        tapes=tapes,
        counts=counts,
    )
    return results(outs, steps), axes([*wide, *[own_ends] * counts])


def _check_effects(cond: Any, body: Any) -> None:
    """Raise the error of JAX's loop for effects: an example that has ended must not have any."""
    if any(str(effect) == "IO" for effect in {*cond.effects, *body.effects}):
        raise NotImplementedError("Unordered IO effects not supported in while_loop with batched predicate")


def _reached(params: dict[str, Any], flags: list[bool]) -> list[bool]:
    _, consts, carry = split(flags, params["cond_nconsts"], params["body_nconsts"])
    consts, carry = [*[False] * int(params["lanes"] > 0), *consts], [*carry, *[False] * len(params["tapes"])]
    return [*jaxprs.fixed_point(params["body"], consts, carry, jaxprs.reached), *[False] * params["counts"]]


def _masked(masked: masking.Masked, eqn: Any, operands: list[masking.Value]) -> list[masking.Value]:
    """Run a loop of ours, or of JAX, that takes no step unless `active`."""
    params, ours = eqn.params, eqn.primitive is ta_while_p
    cond = params["cond" if ours else "cond_jaxpr"]
    predicate = jaxprs.function(cond)

    def goes_on(active: Array, *args: Array) -> list[Array]:
        return [active & predicate(*args)[0]]

    cond_consts, consts, carry = split(operands, params["cond_nconsts"], params["body_nconsts"])
    outs, steps = while_(
        [masked.active, *(x.array for x in cond_consts)],
        [x.array for x in consts],
        [x.array for x in carry],
        cond=jax.make_jaxpr(goes_on)(jax.ShapeDtypeStruct((), jnp.bool_), *cond.in_avals),
        body=params["body" if ours else "body_jaxpr"],
        max_steps=params["max_steps"] if ours else None,
        source=params["source"] if ours else "an inner lax.while_loop",
        lanes=params["lanes"] if ours else 0,
        strategy=params["strategy"] if ours else None,
        tapes=params["tapes"] if ours else (),
        counts=ours and params["counts"],
    )
    return masking.results_of_loop(results(outs, steps), carry)


def results(outs: list[Array], steps: Any) -> list[Array]:
    return outs if steps is None else [*outs, steps]


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
rules.register(ta_while_p, body_of=lambda params: params["body"], batch=_batch)
pe.dce_rules[ta_while_p] = _without_unused
pe.custom_partial_eval_rules[ta_while_p] = _partial_eval
pe.partial_eval_jaxpr_custom_rules[ta_while_p] = _partial_eval_in_checkpoint
mlir.register_lowering(ta_while_p, mlir.lower_fun(_run, multiple_results=True))
jaxprs.REACHED[ta_while_p] = _reached
linearize.TAPES[ta_while_p] = lambda eqn: (
    linearize.tapes_among(eqn.outvars[:-1], eqn.params["tapes"]),
    eqn.outvars[-1],
)
masking.RULES[ta_while_p] = masking.RULES[jax_primitives.while_p] = _masked
