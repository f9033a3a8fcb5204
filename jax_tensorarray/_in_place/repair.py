"""Evaluate a jaxpr with row ops in place of its operations on rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_tensorarray import _compat
from jax_tensorarray._in_place import calls, control, refs, rows, selects, sums, views
from jax_tensorarray._in_place.values import Value, arrays, as_written, with_type
from jax_tensorarray._loops import jaxprs

Array = Any
Rule = Callable[[Any, Sequence[Value]], list[Value] | None]

#: Rules of primitives that run jaxprs, and the ones among them that can perform sums of their results inside.
RUNS = {**calls.RULES, **control.RULES}
ADDS = {**calls.ADDING, **control.ADDING}

#: By primitive, the rules to try, in this order. If each returns None, the equation stays as it is.
RULES: dict[str, list[Rule]] = {}
for family in (rows.RULES, selects.RULES, sums.RULES):
    for name, rule in family.items():
        RULES.setdefault(name, []).append(rule)


def has_loops(jaxpr: Any) -> bool:
    """Return whether there is a loop in a jaxpr, repaired or not."""
    return jaxprs.any_equation(jaxpr, lambda eqn: eqn.primitive.name in _ALL_LOOPS)


_ALL_LOOPS = (*control.LOOPS, "ta_while", "ta_count", "ta_replay")


class Repair:
    """An evaluator of jaxprs. Rows matter in loops, where work on all of them is repeated in every step."""

    def __init__(self, max_steps: int | None = None, *, in_loop: bool = False) -> None:
        self.max_steps, self.in_loop = max_steps, in_loop

    def evaluate(self, jaxpr: Any, inputs: Sequence[Value], known: Mapping[Any, Value] | None = None) -> list[Value]:
        """Return the outputs, given the inputs and perhaps what is known of other variables."""
        inner = _compat.opened(jaxpr)
        values = dict(zip(inner.constvars, map(Value.given, jaxpr.consts), strict=True))
        values.update(zip(inner.invars, inputs, strict=True))
        values.update(known or {})
        moved = sums.moved_into(inner) if self.in_loop else {}
        viewed = views.viewed(inner) if self.in_loop else set()

        def read(v: Any) -> Value:
            return Value.of_literal(v) if isinstance(v, jex.Literal) else values[v]

        for eqn in inner.eqns:
            if eqn.outvars and all(v in values for v in eqn.outvars):
                continue  # known, or a sum that is done inside of another equation
            added = {s.number: read(s.other) for s in moved.get(id(eqn), ())}
            is_viewed = any(v in viewed for v in eqn.outvars)
            results, done = self._equation(eqn, [read(v) for v in eqn.invars], added, is_viewed)
            values.update(zip(eqn.outvars, results, strict=True))
            values.update((s.eqn.outvars[0], results[s.number]) for s in moved.get(id(eqn), ()) if s.number in done)
        return [read(v) for v in inner.outvars]

    def function(
        self,
        jaxpr: Any,
        added: Mapping[int, Value] | None = None,
        *,
        is_whole: bool = False,
        known: Mapping[Any, Value] | None = None,
    ) -> Callable[..., list[Array]]:
        """Return a repaired jaxpr as a function of arrays, with `added` added to some of its results.

        Unless it is a whole program, arrays among the results are not of weak types: versions of a buffer have one.
        """
        closed = refs.as_arrays(_compat.closed(jaxpr))

        def f(*args: Array) -> list[Array]:
            outs = self.evaluate(closed, [Value.given(x) for x in args], known)
            for number, value in (added or {}).items():
                found = sums.total(outs[number], value)
                outs[number] = Value(lax.add(*arrays([outs[number], value]))) if found is None else found
            types = [v.aval for v in closed.jaxpr.outvars]
            return [
                with_type(x, weak=of.weak_type and (is_whole or not of.shape)).array
                for x, of in zip(outs, types, strict=True)
            ]

        return f

    def adding(self, jaxpr: Any, added: Mapping[int, Value]) -> Callable[..., list[Array]]:
        """Return the same function with the values to add as further arguments, after its operands."""

        def f(*args: Array) -> list[Array]:
            split = len(args) - len(added)
            more = dict(zip(added, map(Value, args[split:]), strict=True))
            return self.function(jaxpr, more)(*args[:split])

        return f

    def call(self, f: Callable[..., Any], *args: Any) -> Any:
        """Call a function, repaired."""
        jaxpr, out = jax.make_jaxpr(f, return_shape=True)(*args)
        outs = self.function(jaxpr, is_whole=True)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    def loop(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Return the results of a loop, repaired."""
        if eqn.primitive.name == "scan":
            return control.scan(self, eqn, operands, {})
        return control.while_(self, eqn, operands)

    def of_loop(self) -> "Repair":
        """Return the evaluator for the body of a loop."""
        return Repair(self.max_steps, in_loop=True)

    def finds(self, jaxpr: Any) -> bool:
        """Return whether there is something to repair in a jaxpr."""
        return any(map(self.finds_in, _compat.opened(jaxpr).eqns))

    def finds_in(self, eqn: Any) -> bool:
        """Return whether there is something to repair in an equation."""
        name = eqn.primitive.name
        if _has_symbolic_shapes(eqn):
            return False
        if name in RUNS:
            inner = self.of_loop() if name in control.LOOPS else self
            if name == "while" and self.max_steps is not None:
                return True
            if name in calls.OF_RULES and any(map(jaxprs.has_row_ops, jaxprs.jaxprs_in(eqn.params))):
                return True  # repaired before, except for its rules
            return any(map(inner.finds, jaxprs.jaxprs_in(eqn.params)))
        return self.in_loop and rows.is_of_rows(eqn)

    def _equation(
        self, eqn: Any, operands: list[Value], added: dict[int, Value], is_viewed: bool
    ) -> tuple[list[Value], Iterable[int]]:
        """Return the results, and the numbers of the results that already contain their sums."""
        with _compat.at_source_of(eqn):
            results = self._repaired(eqn, operands, added)
            if results is not None:
                return results, added if eqn.primitive.name in ADDS else ()
            if is_viewed and (results := views.view(eqn, operands)) is not None:
                return results, ()
            made = [Value(x) for x in jaxprs.bind(eqn, as_written(operands))]
            for value in made:
                value.is_new = eqn.primitive.name in _MAKING_ALL
            return made, ()

    def _repaired(self, eqn: Any, operands: list[Value], added: dict[int, Value]) -> list[Value] | None:
        name = eqn.primitive.name
        if name in RUNS:
            if self.in_loop and name in calls.INLINED:  # it may contain nothing but a select
                return RUNS[name](self, eqn, operands)
            if not self.finds_in(eqn):
                return None
            if name in ADDS:
                return ADDS[name](self, eqn, operands, added)
            return RUNS[name](self, eqn, operands)
        if not self.in_loop or _has_symbolic_shapes(eqn):
            return None
        for rule in RULES.get(name, ()):
            results = rule(eqn, operands)
            if results is not None:
                return results
        return None


#: Primitives that make each element of an array from other ones.
_MAKING_ALL = frozenset(("concatenate", "gather", "rev", "sort"))


def _has_symbolic_shapes(eqn: Any) -> bool:
    """Return whether a size is not known before `jax.export` has stored the program: how large is then a buffer?"""
    shapes = (getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
    return not all(isinstance(size, int) for shape in shapes for size in shape)
