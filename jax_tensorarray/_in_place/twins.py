"""Carry once what a loop carries in several places, found by value numbering.

    new = b.at[i].set(x)
    return new, new               # XLA allocates each carry, and copies `new` from one to the other in every step
    # becomes
    return new                    # and after the loop it stands for both

Two variables with the same value number and type are equal. Two carries are twins if they begin equal, and if a step
in which all twins are equal leaves them equal: a greatest fixed point, by partition refinement. Equal values have equal
derivatives, because they are made in the same way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import FILLS
from jax_tensorarray._types import Array, Equation


def carried_once(loop: registry.Body, inputs: Sequence[Value]) -> tuple[registry.Body, list[int]]:
    """Return a loop that carries every buffer once, and for each carry of the given loop its number in the new one."""
    numbers = _Numbers()
    start = [numbers.of_array(x.array if x.literal is None else x.literal) for x in inputs]
    places = _places(loop, start, numbers)
    kept = sorted(set(places))
    if len(kept) == len(places):
        return loop, places
    first, of_step = loop.num_consts, numbers.of_step(loop, start, places)

    def step(*args: Array) -> list[Array]:
        carry = dict(zip(kept, args[first:], strict=False))
        everything = [*args[:first], *(carry[k] for k in places), *args[first + len(kept) :]]
        outs = _Once(numbers).evaluate(loop.jaxpr, of_step, everything)
        return [*(outs[k] for k in kept), *outs[loop.num_carry :]]

    types = list(loop.jaxpr.in_avals)
    jaxpr = jax.make_jaxpr(step)(*types[:first], *(types[first + k] for k in kept), *types[first + loop.num_carry :])
    return loop._replace(jaxpr=jaxpr, num_carry=len(kept)), [kept.index(k) for k in places]


def equal_operands(arrays: Sequence[Array]) -> list[int]:
    """Return for each operand of an equation the place of the first one that equals it."""
    numbers = _Numbers()
    # A token has no axes, not even none.
    return _firsts(
        [(numbers.of_array(x), jax.typeof(x)) if getattr(x, "ndim", 0) else (id(x), k) for k, x in enumerate(arrays)]
    )


def numbers_of_outputs(jaxpr: Jaxpr) -> list[int]:
    """Return a number for each output of a jaxpr, such that those of one number are equal."""
    numbers = _Numbers()
    return numbers.outputs(jaxpr, [numbers.number(object()) for _ in jaxpr.in_avals])


def has_twins(loop: registry.Body, operands: Sequence[Any]) -> bool:
    """Return whether a loop, whose operands are these variables, carries a buffer more than once."""
    numbers = _Numbers()
    start = [numbers.of_array(v.val) if isinstance(v, jex.Literal) else numbers.number(id(v)) for v in operands]
    places = _places(loop, start, numbers)
    return len(set(places)) < len(places)


def _places(loop: registry.Body, start: Sequence[int], numbers: "_Numbers") -> list[int]:
    """Return for each carry the first of its twins, which may be itself: itself for all if no buffer has a twin."""
    _, carry, _ = loop.split(list(zip(start, _compat.opened(loop.jaxpr).invars, strict=True)))
    buffers = [k for k, (_, v) in enumerate(carry) if has_rows(v.aval)]
    if len({carry[k][0] for k in buffers}) < len(buffers):
        first = numbers.twins(loop, start).first
        if any(first[k] != k for k in buffers):
            return first
    return list(range(len(carry)))


class _Step(NamedTuple):
    """A step of a loop, in numbers."""

    first: list[int]  #: for each carry, the first one that equals it in every step
    before: list[int]  #: the inputs
    after: list[int]  #: the outputs


class _Numbers(jaxprs.ValueNumbers):
    """Numbers values such that those of one number, and of one type, are equal."""

    def of_array(self, x: Any) -> int:
        maker = _compat.maker_of(x)
        if maker is not None and maker.primitive.name == "copy":
            return self.of_array(*_compat.operands_of(maker))
        if maker is not None and maker.primitive.name in FILLS:
            return self._made(maker, [self.of_array(y) for y in _compat.operands_of(maker)], jax.typeof(x))
        if isinstance(x, jax.Array | jax.core.Tracer | jax.Ref) or np.ndim(x):
            return self.number("array", id(x))
        return self.number("number", type(x), np.asarray(x).dtype, np.asarray(x).tobytes())

    def _made(self, eqn: Equation, operands: Sequence[int], *result: Any) -> int:
        params = [(name, type(x), str(x) if isinstance(x, float) else x) for name, x in sorted(eqn.params.items())]
        return self.number(eqn.primitive, *params, *operands, *result)

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
        return jaxprs.interpret(_compat.closed(jaxpr), inputs, self.results, self.of_array)

    def results(self, eqn: Equation, operands: Sequence[int]) -> list[int]:
        kind, bodies = (entry := registry.entry_of(eqn)).kind, entry.bodies(eqn.params)
        if kind in ("inlined", "checkpoint") and bodies:
            return self.outputs(bodies[0].jaxpr, operands)
        if kind == "branches":
            index, *rest = operands
            each = zip(*(self.outputs(body.jaxpr, rest) for body in bodies), strict=True)
            return [self.number("one of", index, *cases) for cases in each]
        if eqn.primitive.name in ("scan", "while"):
            return self._of_loop(bodies[0], bodies[0].inputs(operands, -1))
        if eqn.primitive.name == "copy":
            return list(operands)
        if eqn.effects or eqn.primitive.name == "rng_uniform":
            return [self.number(object()) for _ in eqn.outvars]
        return [self._made(eqn, operands, v.aval, k) for k, v in enumerate(eqn.outvars)]

    def _of_loop(self, loop: registry.Body, inputs: Sequence[int]) -> list[int]:
        step, end, (_, carry, _) = self.twins(loop, inputs), object(), loop.split(inputs)
        before, n = loop.split(step.before)[1], loop.num_carry
        # If a step leaves a carry as it is, so does the loop.
        after = [
            start if old == new else self.number(end, first)
            for start, old, new, first in zip(carry, before, step.after, step.first, strict=False)
        ]
        return [*after, *(self.number(end, "stacked", number) for number in step.after[n:])]

    def of_step(self, loop: registry.Body, inputs: Sequence[int], first: Sequence[int]) -> list[int]:
        """Return the numbers of the inputs of a step in which each carry equals the given one."""
        (consts, _, xs), step = loop.split(inputs), object()
        return [*consts, *(self.number(step, k) for k in first), *(self.number(step, "slice", number) for number in xs)]

    def twins(self, loop: registry.Body, inputs: Sequence[int]) -> _Step:
        """Partition the carries that begin equal until every step keeps each class equal."""
        _, numbers, _ = loop.split(inputs)
        _, carry, _ = loop.split(_compat.opened(loop.jaxpr).invars)
        first = _firsts([(number, v.aval) for number, v in zip(numbers, carry, strict=True)])

        def step(first: list[int]) -> tuple[list[int], _Step]:
            before = self.of_step(loop, inputs, first)
            after = self.outputs(loop.jaxpr, before)
            return _firsts(list(zip(first, after, strict=False))), _Step(first, before, after)

        return jaxprs.fixed_point(first, step)[1]


def _firsts(values: Sequence[Any]) -> list[int]:
    """Return for each value the place of the first one that equals it."""
    return [values.index(x) for x in values]


class _Once:
    """Evaluates a jaxpr in pairs of a number and an array, and computes every value once."""

    def __init__(self, numbers: _Numbers) -> None:
        self.numbers, self.made = numbers, dict[Any, Array]()

    def evaluate(self, jaxpr: Jaxpr, numbers: Sequence[int], arrays: Sequence[Array]) -> list[Array]:
        pairs = jaxprs.interpret(jaxpr, list(zip(numbers, arrays, strict=True)), self.equation, self.known)
        return [x for _, x in pairs]

    def known(self, x: Array) -> tuple[int, Array]:
        return self.numbers.of_array(x), x

    def equation(self, eqn: Equation, operands: list[tuple[int, Array]]) -> list[tuple[int, Array]]:
        inner = registry.inlined(eqn)
        if inner is not None:
            return jaxprs.interpret(inner, operands, self.equation, self.known)
        numbers = self.numbers.results(eqn, [number for number, _ in operands])
        keys = list(zip(numbers, (v.aval for v in eqn.outvars), strict=True))
        if eqn.effects or not all(key in self.made for key in keys):
            self.made.update(zip(keys, self._bound(eqn, operands, keys), strict=True))
        return [(number, self.made[number, aval]) for number, aval in keys]

    def _bound(self, eqn: Equation, operands: list[tuple[int, Array]], keys: list[Any]) -> Sequence[Array]:
        entry = registry.entry_of(eqn)
        if entry.kind in ("branches", "checkpoint"):
            index, own = jaxprs.partition(operands, [entry.kind == "branches" and k == 0 for k in range(len(operands))])
            found = None if index else _compat.checkpoint_of(eqn.params)
            says_of_each = found is not None and not isinstance(found[2], bool)  # which operands may be computed again
            given = list(range(len(own))) if says_of_each else _firsts([(n, jax.typeof(x)) for n, x in own])
            change = _Kept(self.numbers, [n for n, _ in own], _places_among(given), sorted(set(_firsts(keys))))
            if len(set(given)) < len(given) or len(change.kept) < len(keys):
                outs = entry.rebuild(eqn, [x for _, x in (*index, *(own[k] for k in sorted(set(given))))], change)
                if outs is not None:
                    return [outs[k] for k in _places_among(_firsts(keys))]
        return jaxprs.bind(eqn, [x for _, x in operands])


def _places_among(firsts: Sequence[int]) -> list[int]:
    """Return for each value its place if only the first ones are kept."""
    kept = sorted(set(firsts))
    return [kept.index(k) for k in firsts]


class _Kept(registry.Change):
    """Rebuilds an equation without duplicate operands or results."""

    def __init__(
        self, numbers: _Numbers, of_operands: Sequence[int], places: Sequence[int], kept: Sequence[int]
    ) -> None:
        self.numbers, self.of_operands, self.places, self.kept = numbers, of_operands, places, kept

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        operands = [args[k] for k in self.places]
        outs = _Once(self.numbers).evaluate(_compat.closed(jaxpr), self.of_operands, operands)
        return [outs[k] for k in self.kept]
