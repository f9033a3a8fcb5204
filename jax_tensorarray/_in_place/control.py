"""Rewrite loops: what they carry, what does not depend on the step, and their bodies.

A loop carries each buffer once (`twins`), shift registers as circular buffers (`registers`), and other buffers with
permuted axes if that helps (`layouts`). Loop-invariant code is computed before the loop, if rows of the result are read
(`views.invariant`). Then the body is rewritten, and slices of `xs` become rows of the carry (`stacks`). A scan whose
buffers change places is unrolled, because XLA copies a buffer from each place in the carry to the next:

    a, b = b.at[i].set(x), a                                    # one step
    # becomes
    b, a = b.at[i].set(x), a.at[i + 1].set(y)                   # two steps, after which each is in its own place
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place import explained, layouts, patterns, registers, stacks, twins, views
from jax_tensorarray._in_place.repair import LOOPS, Repair
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.selects import select
from jax_tensorarray._in_place.values import (
    Difference,
    LastCarry,
    Left,
    Predicate,
    Value,
    as_written,
    is_weak,
    with_type,
)
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._loops import choosing
from jax_tensorarray._loops.api import run_while
from jax_tensorarray._loops.while_ import OF_JAX, OF_WHILE_LOOP
from jax_tensorarray._types import Array, Equation


def scan(repair: Repair, eqn: Equation, operands: Sequence[Value], added: dict[int, Value]) -> list[Value]:
    params = eqn.params
    [loop] = registry.ENTRIES["scan"].bodies(params)
    consts, carry, xs = loop.split(operands)
    for number in [k for k in added if carry[k].sparse_updates == ()]:
        carry[number] = added.pop(number)
    loop = loop._replace(jaxpr=refs.as_arrays(params["jaxpr"]))
    loop, carry, _, ends = _rewritten(eqn, loop, [*consts, *carry, *xs], length=params["length"])
    jaxpr = loop.jaxpr
    known = views.invariant(jaxpr, dict(zip(jaxpr.jaxpr.invars, consts, strict=False)))
    is_kept: dict[int, bool] = {}

    def step_ends(inputs: list[Value], outs: list[Value]) -> list[Value]:
        before = inputs[len(consts) : len(consts) + len(carry)]
        return [*_of_active(repair.active, before, outs[: len(carry)], is_kept), *outs[len(carry) :]]

    inner = repair.of_loop(repair.active)
    body = inner.function(jaxpr, known=known, constants=consts, ends=step_ends)
    of_consts = as_written(consts)

    def step(carry: Sequence[Array], xs: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        outs = body(*of_consts, *carry, *xs)
        return outs[: len(carry)], outs[len(carry) :]

    start = as_written([with_type(x, weak=False) if x.shape else x for x in carry])
    arrays, options, unrolled = as_written(xs), registry.scan_options(params), _permutation_order(eqn, loop)
    traced, _ = choosing.traced_scan(step, start, arrays, **options)

    def run(repaired: Any, operands: list[Array]) -> list[Array]:
        # Other scans evaluate the repaired step. To repair it for each of them would double the time with each level.
        [own] = registry.ENTRIES["scan"].bodies(repaired.params)
        of_consts, carry, xs = own.split(operands)
        passing = stacks.found_in(own, of_consts, xs)
        if passing is None and unrolled == 1:
            return choosing.bind(repaired, operands, repair.request.residuals)
        one_step = own.step(of_consts)
        if passing is not None:
            one_step = passing.step
            for number in passing.places:
                place = _compat.opened(traced).outvars.index(repaired.outvars[len(carry) + number])
                explained.output(eqn, jaxpr, place, "slice", "a part of the carry of the scan")
            carry, xs = passing.start(carry, xs, params["length"])
        by_choice = functools.partial(choosing.scan, strategy=repair.request.residuals)
        after, ys = _unrolled_scan(by_choice, one_step, carry, xs, unrolled, **options)
        return [*after, *ys] if passing is None else passing.end(after, ys)

    outs = choosing.run_scan(traced, [*start, *arrays], run)
    return [*ends(outs[: len(start)], repair.active, is_kept), *map(Value, outs[len(start) :])]


def _of_active(
    active: Array | None, before: Sequence[Value], after: Sequence[Value], is_kept: dict[int, bool]
) -> Sequence[Value]:
    """Return the carry after a step. Inactive examples keep their buffers by masked rows, if these are few.

    `is_kept` is filled in: for each buffer, whether they do.
    """
    if active is None:
        return after
    selected = []
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        is_version = new.before is not None and new.shape[: active.ndim] == active.shape
        found = select(Predicate(active), old, new) if is_version else Left()
        is_kept[k] = not isinstance(found, Left)
        selected.append(new if isinstance(found, Left) else found)
    return selected


#: Maps the last carry to values. Where the mask is false, arrays with these numbers are what they were before the loop.
Ends = Callable[[list[Array], Array | None, dict[int, bool]], list[Value]]


def _rewritten(
    eqn: Equation, loop: registry.Body, inputs: Sequence[Value], *, length: int | None = None, predicate: Any = None
) -> tuple[registry.Body, list[Value], Any, Ends]:
    """Return a loop with each buffer once in its carry, shift registers as rings, and permuted axes where they help.

    Also return its first carry, its predicate, and the function from its last carry to that of the given loop.
    """
    _, given, _ = loop.split(inputs)
    as_given = loop
    loop, places = twins.carried_once(loop, inputs)
    for k, place in enumerate(places):
        if place in places[:k] and has_rows(as_given.jaxpr.out_avals[k]):
            explained.output(eqn, as_given.jaxpr, k, "carry", "one carry with another that equals it")
    carry = [given[places.index(k)] for k in range(loop.num_carry)]
    predicate = None if predicate is None else _without_twins(predicate, places)
    moving = registers.found_in(eqn, loop, length=length, predicate=predicate)
    if moving is not None:
        carry, predicate = [*carry, *map(Value, moving.start())], moving.predicate
        loop = loop._replace(jaxpr=moving.jaxpr, num_carry=len(carry))
    permuted = layouts.found_in(eqn, loop, length=length, predicate=predicate)
    if permuted is not None:
        carry, loop = list(map(Value, permuted.start(as_written(carry)))), loop._replace(jaxpr=permuted.jaxpr)

    def ends(after: list[Array], active: Array | None, is_kept: dict[int, bool]) -> list[Value]:
        after = after if permuted is None else permuted.end(after)
        after = after if moving is None else moving.end(after)
        is_as_given = permuted is None and moving is None
        values = []
        for k, old in zip(places, given, strict=True):
            if active is not None and is_as_given and is_kept.get(k):
                value = Value(after[k], before=old, change=Difference(active), form=LastCarry(old))
            else:
                value = Value(after[k], form=LastCarry(old))
            values.append(value)
        return values

    return loop, carry, predicate, ends


def _permutation_order(eqn: Equation, loop: registry.Body) -> int:
    """Return after how many steps the buffers in a carry are back in their places, 1 if these are too many.

    This is the order of a permutation: the least common multiple of the lengths of its cycles.
    """
    uses = Uses(loop.jaxpr)
    roots = [uses.root(v) if has_rows(v.aval) else None for v in uses.jaxpr.outvars[: loop.num_carry]]
    first, after = loop.num_consts, loop.num_consts + loop.num_carry
    came_from = {k: root - first for k, root in enumerate(roots) if root is not None and first <= root < after}
    lengths = [1]
    for start in came_from:
        at, steps = came_from[start], 1
        while at != start and at in came_from and steps <= len(came_from):
            at, steps = came_from[at], steps + 1
        lengths.append(steps if at == start else 1)
    found, moved = math.lcm(*lengths), [k for k, j in came_from.items() if k != j]
    if found > 1:
        is_long = found > _gates.ROUND_STEPS
        stays = "exchange-in-while" if eqn.primitive.name == "while" else "long-round" if is_long else ""
        explained.output(eqn, loop.jaxpr, moved[0], "exchange", "" if stays else f"{found} steps in one", stays)
    return found if found <= _gates.ROUND_STEPS else 1


def _unrolled_scan(
    run: Callable[..., Any],
    step: Callable[..., Any],
    carry: list[Array],
    xs: list[Array],
    steps: int,
    *,
    length: int,
    reverse: bool,
    **options: Any,
) -> tuple[list[Array], list[Array]]:
    """Scan with `steps` calls of `step` in each step of the loop, and run the remaining ones after it."""
    if steps == 1:
        return run(step, carry, xs, length=length, reverse=reverse, **options)
    rounds, left = divmod(length, steps)
    order = range(steps)[:: -1 if reverse else 1]

    def all_steps(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        return _in_order(step, carry, xs, order)

    first = left if reverse else 0
    of_rounds = [x[first : first + rounds * steps].reshape(rounds, steps, *x.shape[1:]) for x in xs]
    carry, ys = run(all_steps, carry, of_rounds, length=rounds, reverse=reverse, **options)
    ys = [y.reshape(rounds * steps, *y.shape[2:]) for y in ys]
    if not left:
        return carry, ys
    rest = [x[:left] if reverse else x[rounds * steps :] for x in xs]
    carry, more = _in_order(step, carry, rest, range(left)[:: -1 if reverse else 1])
    pairs = zip(more, ys, strict=True) if reverse else zip(ys, more, strict=True)
    return carry, [jnp.concatenate(pair) for pair in pairs]


def _in_order(
    step: Callable[..., Any], carry: list[Array], xs: list[Array], order: Sequence[int]
) -> tuple[list[Array], list[Array]]:
    """Return the carry after those steps, and the output of each."""
    found: dict[int, list[Array]] = {}
    for k in order:
        carry, found[k] = step(carry, [x[k] for x in xs])
    return carry, [jnp.stack(column) for column in zip(*(found[k] for k in sorted(found)), strict=True)]


def while_(repair: Repair, eqn: Equation, operands: Sequence[Value], added: dict[int, Value]) -> list[Value]:
    params, a = eqn.params, eqn.params["cond_nconsts"]
    [loop] = registry.ENTRIES["while"].bodies(params)
    b = a + loop.num_consts
    loop, first, condition, ends = _rewritten(
        eqn, loop._replace(jaxpr=refs.as_arrays(loop.jaxpr)), operands[a:], predicate=params["cond_jaxpr"]
    )
    if explained.is_asked():
        _permutation_order(eqn, loop)
    inputs = as_written([with_type(x, weak=False) if x.shape else x for x in (*operands[:b], *first)])
    of_cond, of_body, carry = inputs[:a], inputs[a:b], inputs[b:]
    body, predicate = loop.jaxpr, repair.of_loop().function(condition)
    known = views.invariant(body, dict(zip(body.jaxpr.invars, operands[a:b], strict=False)))

    shape = condition.out_avals[0].shape
    around = repair.active
    if around is not None and shape[: around.ndim] != around.shape:
        around = None
    is_kept = {} if around is None else dict.fromkeys(range(len(carry)), True)

    def is_active(carry: list[Array]) -> Array:
        active = jnp.asarray(predicate(*of_cond, *carry)[0])
        return active if around is None else active & Predicate(around).over(shape)

    # A predicate may have effects, and may cost as much as the body. So it is evaluated in a step only if examples end
    # by themselves, as in JAX's loop. Ordered effects are not repeated: the loop carries the value of the predicate.
    once = bool(shape) and _compat.has_ordered_effects(condition)

    def goes_on(carry: list[Array]) -> Array:
        return jnp.any(carry[0] if once else is_active(carry))

    def next_carry(carry: list[Array]) -> list[Array]:
        if not once:
            return step(carry, is_active(carry) if shape else None)
        active, *carry = carry
        carry = step(carry, active)
        return [active & is_active(carry), *carry]

    def step(carry: list[Array], active: Array | None) -> list[Array]:
        inner = repair.of_loop(repair.active if active is None else active)
        before = [Value.given(x) for x in carry]
        constants = [Value.given(x, is_constant=True) for x in of_body]
        patterns.copy(operands[a:b], constants)
        after = inner.evaluate(body, [*constants, *before], known)
        types: list[Any] = [v.aval for v in body.jaxpr.outvars]
        after = [with_type(x, weak=is_weak(of) and not of.shape) for x, of in zip(after, types, strict=True)]
        if active is None:
            return [x.array for x in _of_active(repair.active, before, after, is_kept)]
        chosen = Predicate(active)
        outs = []
        for k, (old, new) in enumerate(zip(before, after, strict=True)):
            selected = select(chosen, old, new)
            if not isinstance(selected, Left):
                outs.append(selected.array)
                continue
            if len(old.shape) > active.ndim:
                explained.output(eqn, body, k, "select", "", selected.reason)
            outs.append(chosen.select(old.array, new.array))
        return outs

    max_steps, residuals = repair.request.max_steps, repair.request.residuals
    start = [is_active(carry), *carry] if once else carry
    if max_steps is None:
        return ends(run_while(OF_JAX, goes_on, next_carry, start, None, "auto")[once:], repair.active, is_kept)
    error = f"in_place: more than max_steps steps: a lax.while_loop takes more than {max_steps}"
    outs = run_while(OF_WHILE_LOOP, goes_on, next_carry, start, max_steps, residuals, error=error)
    return ends(outs[once:], repair.active, is_kept)


def _without_twins(predicate: Any, places: Sequence[int]) -> Any:
    """Return the predicate of a loop that carries every buffer once."""
    closed = _compat.closed(predicate)
    if len(set(places)) == len(places):
        return closed
    consts, count = list(closed.in_avals[: len(closed.in_avals) - len(places)]), len(set(places))
    carry = [closed.in_avals[len(consts) + places.index(k)] for k in range(count)]

    def goes_on(consts: list[Array], carry: list[Array]) -> list[Array]:
        return jaxprs.function(closed)(*consts, *(carry[k] for k in places))

    return jax.make_jaxpr(goes_on)(consts, carry)


RULES = {"scan": scan, "while": while_}
LOOPS.update(RULES)
