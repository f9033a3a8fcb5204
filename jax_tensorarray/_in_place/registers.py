"""Keep shift registers in place, as circular buffers.

    b = jnp.concatenate([b[1:], x[None]])                            # every step moves all rows
    y = b[k]
    # becomes
    b, start = ta_write(b, start, x), (start + 1) % n                # the carry has `start`, too
    y = ta_read(b, (start + k) % n)

After the loop the rows are put in order, once. A greatest fixed point finds the registers: it begins with all
candidates, and drops those whose rows a step needs in order, since this takes as long as moving them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _contexts, _gates
from jax_tensorarray._in_place import explained, twins
from jax_tensorarray._in_place.representations import Held
from jax_tensorarray._in_place.rings import Ring, Rings, longer, spread
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import is_update
from jax_tensorarray._types import Equation

Array = jax.Array


class Registers(NamedTuple):
    """A loop whose registers are rings. Its body takes and returns their starts after the other carries."""

    jaxpr: Jaxpr
    predicate: Any  #: of a `while_loop`, which takes the starts, too
    axes: dict[int, int]  #: for each carry that is a register, the axis that its rows are along
    places: dict[int, int]  #: and the number of its start, which registers that move together share
    shapes: list[tuple[int, ...]]  #: of the starts

    def start(self) -> list[Array]:
        """Return the starts before the first step."""
        return [jnp.zeros(shape, jnp.int32) for shape in self.shapes]

    def end(self, carry: Sequence[Array]) -> list[Array]:
        """Return the carry with all rows in order."""
        own, starts = list(carry[: len(carry) - len(self.shapes)]), carry[len(carry) - len(self.shapes) :]
        for k, axis in self.axes.items():
            ring = Ring(own[k], starts[self.places[k]], axis)
            own[k] = ring.rows(0, ring.n)
        return own


def found_in(loop: Any, body: registry.Body, *, length: int | None = None, predicate: Any = None) -> Registers | None:
    """Return the body of the equation `loop` with its registers as rings, None if it has none.

    `length` is the number of steps, if it is known, and `predicate` that of a `while_loop`, whose examples end at
    different times, and so have starts of their own, if it has axes.
    """
    axes = _candidates(body) if length is None or length >= _gates.RING_STEPS else {}
    shapes = dict.fromkeys(axes, () if predicate is None else predicate.out_avals[0].shape)
    places = dict.fromkeys(axes, 0)
    say_why(loop, body)
    while axes:
        tried = _RegisterTrial(body, axes, shapes, places)
        jaxpr = tried.body()
        new_predicate = None if predicate is None else tried.predicate(predicate)
        wider = {k: longer(shapes[k], tried.outs[k].start.shape) for k in axes if tried.is_register(k)}
        kept = {k: axes[k] for k, shape in wider.items() if tried.is_worth(k, len(shape))}
        wider, together = {k: wider[k] for k in kept}, tried.move_together(jaxpr)
        if kept == axes and wider == shapes and together == tried.places:
            for k in axes:
                explained.output(loop, body.jaxpr, k, "shift", "a ring buffer")
            return Registers(tried.with_starts_once(jaxpr), new_predicate, axes, tried.places, tried.shapes)
        axes, shapes, places = kept, wider, {k: together[k] for k in kept}
    return None


def say_why(loop: Any, body: registry.Body) -> None:
    """Say of each carry of a loop whose rows move why it is not a ring."""
    if _contexts.listening.value is None:
        return
    axes, length, predicate = _candidates(body, least=0), loop.params.get("length"), loop.params.get("cond_jaxpr")
    shape = () if predicate is None else predicate.out_avals[0].shape
    tried = _RegisterTrial(body, axes, dict.fromkeys(axes, shape), dict.fromkeys(axes, 0))
    tried.body()
    for k in (k for k in axes if tried.moves(k) and k in tried.evaluator.shifted):
        reason, facts = "", dict[str, Any]()
        if k in tried.evaluator.needed:
            reason, facts = "read-as-a-whole", {"by": tried.evaluator.needed[k]}
        elif tried.carry[k].size * tried.carry[k].dtype.itemsize < _gates.REGISTER_BYTES:
            reason, facts = "small-buffer", {"least": _gates.REGISTER_BYTES}
        elif not tried.is_worth(k, len(longer(shape, tried.outs[k].start.shape))):
            reason, facts = "small-buffer", {"least": _gates.REGISTER_BYTES_OF_EXAMPLE}
        elif length is not None and length < _gates.RING_STEPS:
            reason, facts = "few-steps", {"least": _gates.RING_STEPS}
        if reason:
            explained.output(loop, body.jaxpr, k, "shift", "", reason, **facts)


def may_be_in(body: registry.Body) -> bool:
    return bool(_candidates(body))


def _candidates(body: registry.Body, least: float | None = None) -> dict[int, int]:
    """Return for each carry that may be a register of `least` bytes or more the axis that its rows are along."""
    least = _gates.REGISTER_BYTES if least is None else least
    closed = _compat.closed(body.jaxpr)
    kinds: set[tuple[tuple[int, ...], int]] = set()

    def look(eqn: Equation) -> bool:
        if eqn.primitive.name == "concatenate":
            kinds.add((eqn.outvars[0].aval.shape, int(eqn.params["dimension"])))
        elif is_update(eqn):
            shape, rows = eqn.invars[0].aval.shape, eqn.invars[-1 if "scatter" in eqn.primitive.name else 1].aval.shape
            axes = [d for d, (n, m) in enumerate(zip(shape, rows, strict=False)) if n != m]
            if len(shape) == len(rows) and len(axes) == 1 and shape[axes[0]] <= 2 * rows[axes[0]]:
                kinds.add((shape, axes[0]))
        return False

    jaxprs.any_equation(closed, look)
    found = {}
    for k, aval in enumerate(body.split(list(closed.in_avals))[1] if kinds else ()):
        if has_rows(aval) and aval.size * aval.dtype.itemsize >= least and not is_divided(aval):
            fit = [d for shape, d in kinds if len(shape) == aval.ndim and _fits(shape, aval.shape, d)]
            found.update(dict.fromkeys([k], fit[0]) if fit else {})
    return found


def is_divided(aval: Any) -> bool:
    """Return whether the type of an array says how devices share it: then those made here would have to say so."""
    return any(axes is not None for axes in aval.sharding.spec)


def _fits(line: Sequence[int], shape: Sequence[int], axis: int) -> bool:
    others = [d for d in range(len(shape)) if d != axis]
    return 1 < shape[axis] <= line[axis] and all(line[d] == shape[d] for d in others)


class _RegisterTrial:
    """A loop traced with rings as some of its carries."""

    def __init__(
        self,
        loop: registry.Body,
        axes: dict[int, int],
        shapes: dict[int, tuple[int, ...]],
        places: dict[int, int],
    ) -> None:
        self.closed, self.axes, self.evaluator = _compat.closed(loop.jaxpr), axes, Rings()
        self.consts, self.carry, self.xs = loop.split(list(self.closed.in_avals))
        # Those of one place share a start if they have as many rows.
        kinds = {k: (places[k], shapes[k], self.carry[k].shape[axis]) for k, axis in axes.items()}
        known = list(dict.fromkeys(kinds.values()))
        self.places, self.shapes = {k: known.index(kind) for k, kind in kinds.items()}, [kind[1] for kind in known]
        self.types = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in self.shapes]
        self.starts: list[Array] = []
        self.outs: list[Held] = []

    def move_together(self, jaxpr: Jaxpr) -> dict[int, int]:
        """Return for each register the number of its start: registers that move apart get separate ones."""
        n = len(self.carry)
        after = dict(zip(self.axes, twins.numbers_of_outputs(jaxpr)[n : n + len(self.axes)], strict=True))
        kinds = {k: (self.places[k], after[k]) for k in self.axes}
        known = list(dict.fromkeys(kinds.values()))
        return {k: known.index(kind) for k, kind in kinds.items()}

    def with_starts_once(self, jaxpr: Jaxpr) -> Any:
        """Turn a body that returns a start for each register into one that returns each start once."""
        n = len(self.carry)
        first = [list(self.places.values()).index(k) for k in range(len(self.shapes))]

        def step(*args: Array) -> list[Array]:
            outs = jaxprs.function(jaxpr)(*args)
            return [*outs[:n], *(outs[n + k] for k in first), *outs[n + len(self.axes) :]]

        return jaxpr if len(first) == len(self.axes) else jax.make_jaxpr(step)(*jaxpr.in_avals)

    def is_register(self, k: int) -> bool:
        """Return whether the rows of a carry move, and nothing needs most of them in order."""
        return self.moves(k) and k not in self.evaluator.needed

    def moves(self, k: int) -> bool:
        out = self.outs[k]
        is_ring = isinstance(out, Ring) and out.axis == self.axes[k]
        return is_ring and not any(out.start is start for start in self.starts)

    def is_worth(self, k: int, axes: int) -> bool:
        """Return whether a register is large enough, given how many axes its start has."""
        of = self.carry[k]
        return not axes or math.prod(of.shape[axes:]) * of.dtype.itemsize >= _gates.REGISTER_BYTES_OF_EXAMPLE

    def inputs(self, carry: Sequence[Array], starts: Sequence[Array]) -> list[Held]:
        inputs: list[Held] = list(map(Value.given, carry))
        for k, axis in self.axes.items():
            inputs[k] = Ring(carry[k], starts[self.places[k]], axis, frozenset([k]))
        return inputs

    def body(self) -> Any:
        def step(consts: list[Array], carry: list[Array], starts: list[Array], xs: list[Array]) -> list[Array]:
            self.starts = starts
            inputs = [*map(Value.given, consts), *self.inputs(carry, starts), *map(Value.given, xs)]
            self.outs = outs = self.evaluator.evaluate(self.closed, inputs)
            self.evaluator.eqn = None
            arrays = [
                x.array if k in self.axes and isinstance(x, Ring) else self.evaluator.array(x)
                for k, x in enumerate(outs)
            ]
            after = []
            for k in self.axes:
                start = starts[self.places[k]]
                new = outs[k].start if isinstance(outs[k], Ring) else start
                after.append(spread(new, longer(new.shape, start.shape)))
            return [*arrays[: len(carry)], *after, *arrays[len(carry) :]]

        return jax.make_jaxpr(step)(self.consts, self.carry, self.types, self.xs)

    def predicate(self, jaxpr: Jaxpr) -> Any:
        def goes_on(consts: list[Array], carry: list[Array], starts: list[Array]) -> list[Array]:
            outs = self.evaluator.evaluate(jaxpr, [*map(Value.given, consts), *self.inputs(carry, starts)])
            return list(map(self.evaluator.array, outs))

        consts = jaxpr.in_avals[: len(jaxpr.in_avals) - len(self.carry)]
        return jax.make_jaxpr(goes_on)(consts, self.carry, self.types)
