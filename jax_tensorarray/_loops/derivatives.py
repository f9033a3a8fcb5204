"""The derivatives of `ta_while`. The tangents are a loop of their own, which is linear and whose trip count is known.

So every loop with `max_steps` can be transposed: the loop of the tangents is a `ta_count`, which reads the residuals of
each step from tapes, or a `ta_replay`, which finds the steps again. Without `max_steps` primals and tangents are one
loop, in forward strategy only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_tensorarray import _compat
from jax_tensorarray._loops import jaxprs, rules
from jax_tensorarray._loops.count import linearized_loop, moving, zero_tangents
from jax_tensorarray._loops.jaxprs import chosen, spread
from jax_tensorarray._loops.linearize import linearize
from jax_tensorarray._loops.replay import Replay, replay
from jax_tensorarray._loops.tapes import Tape, avals_of, largest, record, tangent_tapes, tapes_for
from jax_tensorarray._loops.while_ import counting, needs_max_steps, results, split, ta_while_p, taped, while_
from jax_tensorarray._ops.primitive import is_zero

Array = Any


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
    strategy: Any,
    tapes: Sequence[Tape],
    counts: bool,
) -> Any:
    cond_consts, consts, carry = split(primals, cond_nconsts, body_nconsts)
    _, const_dots, carry_dots = split(tangents, cond_nconsts, body_nconsts)
    loop = functools.partial(while_, max_steps=max_steps, source=source, lanes=lanes, strategy=strategy, counts=counts)
    first = int(lanes > 0)  # the body takes which lanes are active first
    moved_consts, moved_carry = moving(body, first, const_dots, carry_dots, len(tapes))
    if not any(moved_carry):
        outs = results(*loop(cond_consts, consts, carry, cond=cond, body=body, tapes=tapes))
        return outs, zero_tangents(outs)
    reversible = taped(max_steps)
    if not reversible:  # what `moving` finds may be too much, and then it is the reverse strategy of something
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
    elif strategy is None or strategy.tapes:
        outs, dots, steps = _taped_jvp(
            loop, cond, body, cond_consts, consts, carry, const_dots, carry_dots, moved, tapes
        )
    else:
        outs, dots, steps = _replayed_jvp(loop, cond, body, cond_consts, consts, carry, const_dots, carry_dots, moved)
    outs = results(outs, steps)
    return outs, spread(dots, [*moved_carry, *[False] * counts], zero_tangents(outs))


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
    max_steps, strategy = (loop.keywords[name] for name in ("max_steps", "strategy"))  # type: ignore[attr-defined]
    operands, n, inputs = len(carry), len(carry) + len(tapes), len(moved)
    first = inputs - n - len(consts)
    linear = linearize(body, moved[-n:], moved, [*[False] * first, *[True] * len(consts), *[False] * n])
    better = None if strategy is None else strategy.instead_of(linear, body, first + len(consts), n, max_steps)
    if better is not None:
        loop = functools.partial(loop, strategy=better)
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

    new = tapes_for(linear.taped, max_steps, strategy is not None and strategy.offload)
    types = [jax.typeof(start), *avals_of([*tapes, *new])]
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
        new=tangent_tapes(tapes, moved[inputs - len(tapes) :]),
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
    keywords = loop.keywords  # type: ignore[attr-defined]
    lanes, strategy = keywords["lanes"], keywords["strategy"]
    again = Replay(body, lanes, len(consts), tuple(moved[int(lanes > 0) :]), keywords["max_steps"])
    outs, steps, extra, strategy = strategy.forward(loop, cond, again.primal, cond_consts, consts, carry)
    dots = replay(again, strategy, steps, consts, carry, extra, const_dots, carry_dots)
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
        raise needs_max_steps(source, max_steps)
    params |= {"max_steps": max_steps, "source": source, "cond_nconsts": cond_nconsts}

    # A linear function is its derivative, at zero as well as anywhere.
    def loop(*some: Array) -> list[Array]:
        return chosen(ta_while_p.bind(*spread(some, linear, operands), **params), given)

    given = [not is_zero(ct) for ct in cts]
    zeros = [ad.instantiate_zeros(ad.Zero(x.aval)) for x in chosen(operands, linear)]
    _, pull = jax.vjp(loop, *zeros)
    return spread(pull(chosen(cts, given)), linear, [None] * len(operands))


rules.register(ta_while_p, body_of=lambda params: params["body"], jvp=_jvp)
ad.primitive_transposes[ta_while_p] = _transpose
