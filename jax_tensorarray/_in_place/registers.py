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

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place import explained, twins
from jax_tensorarray._in_place.boxes import rows_of
from jax_tensorarray._in_place.representations import Held
from jax_tensorarray._in_place.rings import Ring, Rings, longer, spread
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import is_update
from jax_tensorarray._types import Array, Equation


class Form(NamedTuple):
    """How a register is stored."""

    axis: int  #: that its rows are along
    start: tuple[int, ...]  #: the shape of its start
    place: int  #: the number of its start, which registers that move together share


class Registers:
    """A loop traced with rings as some of its carries: it carries their starts after all others."""

    def __init__(self, loop: registry.Body, forms: dict[int, Form], predicate: Any) -> None:
        self.closed, self.forms, self.evaluator = _compat.closed(loop.jaxpr), forms, Rings()
        self.consts, self.carry, self.xs = loop.split(list(self.closed.in_avals))
        shapes = {form.place: form.start for form in forms.values()}
        self.types = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes.values()]
        self.starts: list[Array] = []
        self.outs: list[Held] = []
        self.traced = self._body()
        self.predicate = None if predicate is None else self._predicate(predicate)

    def start(self) -> list[Array]:
        """Return the starts before the first step."""
        return [jnp.zeros(t.shape, t.dtype) for t in self.types]

    def end(self, carry: Sequence[Array]) -> list[Array]:
        """Return the carry with all rows in order."""
        own, starts = list(carry[: len(carry) - len(self.types)]), carry[len(carry) - len(self.types) :]
        for k, form in self.forms.items():
            ring = Ring(own[k], starts[form.place], form.axis)
            own[k] = ring.rows(0, ring.n)
        return own

    def moves(self, k: int) -> bool:
        """Return whether a carry is a ring after the step, too, with another start."""
        out = self.outs[k]
        is_ring = isinstance(out, Ring) and out.axis == self.forms[k].axis
        return is_ring and not any(out.start is start for start in self.starts)

    def why_not(self, k: int, length: int | None) -> tuple[str, dict[str, Any]]:
        """Return why a carry whose rows move is no register: a reason and its facts. The reason is empty if it is."""
        of, axes = self.carry[k], len(self.form_after(k).start)
        least = _gates.EXAMPLE_BYTES if axes else _gates.REGISTER_BYTES
        if k in self.evaluator.needed:
            return "read-as-a-whole", {"by": self.evaluator.needed[k]}
        if math.prod(of.shape[axes:]) * of.dtype.itemsize < least:
            return "small-buffer", {"least": least}
        if length is not None and length < _gates.RING_STEPS:
            return "few-steps", {"least": _gates.RING_STEPS}
        return "", {}

    def form_after(self, k: int) -> Form:
        """Return the form of a ring after the step: examples that move apart have starts of their own."""
        form = self.forms[k]
        return form._replace(start=longer(form.start, self.outs[k].start.shape))

    def placed(self, forms: dict[int, Form]) -> dict[int, Form]:
        """Return the forms with the numbers of their starts: registers that move apart get separate ones."""
        n = len(self.carry)
        after = dict(zip(self.forms, twins.numbers_of_outputs(self.traced)[n : n + len(self.forms)], strict=True))
        kinds = {k: (form.place, form.start, after[k]) for k, form in forms.items()}
        known = list(dict.fromkeys(kinds.values()))
        return {k: form._replace(place=known.index(kinds[k])) for k, form in forms.items()}

    @property
    def jaxpr(self) -> Any:
        """The body. As it is traced it returns a start for each register; this one returns each start once."""
        n, places = len(self.carry), [form.place for form in self.forms.values()]
        first = [places.index(k) for k in range(len(self.types))]

        def step(*args: Array) -> list[Array]:
            outs = jaxprs.function(self.traced)(*args)
            return [*outs[:n], *(outs[n + k] for k in first), *outs[n + len(places) :]]

        return self.traced if len(first) == len(places) else jax.make_jaxpr(step)(*self.traced.in_avals)

    def _inputs(self, carry: Sequence[Array], starts: Sequence[Array]) -> list[Held]:
        inputs: list[Held] = list(map(Value.given, carry))
        for k, form in self.forms.items():
            inputs[k] = Ring(carry[k], starts[form.place], form.axis, frozenset([k]))
        return inputs

    def _body(self) -> Any:
        def step(consts: list[Array], carry: list[Array], starts: list[Array], xs: list[Array]) -> list[Array]:
            self.starts = starts
            inputs = [*map(Value.given, consts), *self._inputs(carry, starts), *map(Value.given, xs)]
            self.outs = outs = self.evaluator.evaluate(self.closed, inputs)
            self.evaluator.eqn = None
            arrays = [
                x.array if k in self.forms and isinstance(x, Ring) else self.evaluator.array(x)
                for k, x in enumerate(outs)
            ]
            after = []
            for k, form in self.forms.items():
                start = starts[form.place]
                new = outs[k].start if isinstance(outs[k], Ring) else start
                after.append(spread(new, longer(new.shape, start.shape)))
            return [*arrays[: len(carry)], *after, *arrays[len(carry) :]]

        return jax.make_jaxpr(step)(self.consts, self.carry, self.types, self.xs)

    def _predicate(self, jaxpr: Jaxpr) -> Any:
        def goes_on(consts: list[Array], carry: list[Array], starts: list[Array]) -> list[Array]:
            outs = self.evaluator.evaluate(jaxpr, [*map(Value.given, consts), *self._inputs(carry, starts)])
            return list(map(self.evaluator.array, outs))

        consts = jaxpr.in_avals[: len(jaxpr.in_avals) - len(self.carry)]
        return jax.make_jaxpr(goes_on)(consts, self.carry, self.types)


def found_in(loop: Any, body: registry.Body, *, length: int | None = None, predicate: Any = None) -> Registers | None:
    """Return the body of the equation `loop` with its registers as rings, None if it has none.

    `length` is the number of steps, if it is known, and `predicate` that of a `while_loop`, whose examples end at
    different times, and so have starts of their own, if it has axes.
    """

    def narrowed(forms: dict[int, Form]) -> tuple[dict[int, Form], Registers | None]:
        if not forms:
            return forms, None
        tried, kept = Registers(body, forms, predicate), dict[int, Form]()
        for k in filter(tried.moves, forms):
            why, facts = tried.why_not(k, length)
            if not why:
                kept[k] = tried.form_after(k)
            elif k in tried.evaluator.shifted:
                explained.output(loop, body.jaxpr, k, "shift", "", why, **facts)
        return tried.placed(kept), tried

    is_tried = length is None or length >= _gates.RING_STEPS or explained.is_asked()
    start = () if predicate is None else predicate.out_avals[0].shape
    forms, found = jaxprs.fixed_point(_candidates(body, start) if is_tried else {}, narrowed)
    for k in forms:
        explained.output(loop, body.jaxpr, k, "shift", "a ring buffer")
    explained.add([] if found is None else found.evaluator.remarks)
    return found


def may_be_in(body: registry.Body) -> bool:
    return bool(_candidates(body))


def _candidates(body: registry.Body, start: tuple[int, ...] = ()) -> dict[int, Form]:
    """Return the forms of all carries that may be registers: those of one length share a start of that shape."""
    least = 0 if explained.is_asked() else _gates.REGISTER_BYTES
    closed = _compat.closed(body.jaxpr)
    kinds: set[tuple[tuple[int, ...], int]] = set()

    def look(eqn: Equation) -> bool:
        if eqn.primitive.name == "concatenate":
            kinds.add((eqn.outvars[0].aval.shape, int(eqn.params["dimension"])))
        elif is_update(eqn):
            shape, rows = (eqn.invars[k].aval.shape for k in (0, rows_of(eqn)))
            axes = [d for d, (n, m) in enumerate(zip(shape, rows, strict=False)) if n != m]
            if len(shape) == len(rows) and len(axes) == 1 and shape[axes[0]] <= 2 * rows[axes[0]]:
                kinds.add((shape, axes[0]))
        return False

    jaxprs.any_equation(closed, look)
    found, places = dict[int, Form](), dict[int, int]()
    for k, aval in enumerate(body.split(list(closed.in_avals))[1] if kinds else ()):
        if has_rows(aval) and aval.size * aval.dtype.itemsize >= least and not is_divided(aval):
            axes = [d for shape, d in kinds if d >= len(start) and _fits(shape, aval.shape, d)]
            if axes:
                found[k] = Form(axes[0], start, places.setdefault(aval.shape[axes[0]], len(places)))
    return found


def is_divided(aval: Any) -> bool:
    """Return whether the type of an array says how devices share it: then those made here would have to say so."""
    return any(axes is not None for axes in aval.sharding.spec)


def _fits(line: Sequence[int], shape: Sequence[int], axis: int) -> bool:
    others = [d for d in range(len(shape)) if d != axis]
    return len(line) == len(shape) and 1 < shape[axis] <= line[axis] and all(line[d] == shape[d] for d in others)
