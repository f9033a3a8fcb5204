"""Evaluates a jaxpr with what it does to rows done by row ops."""

from collections.abc import Callable, Sequence
from typing import Any

from jax_tensorarray import _compat
from jax_tensorarray._in_place import control, rows, selects, sums
from jax_tensorarray._in_place.values import Value, arrays
from jax_tensorarray._loops import bodies

Array = Any
Rule = Callable[[Any, Sequence[Value]], list[Value] | None]

#: By primitive, the rules that are asked one after the other. None: what it does stays as it is.
RULES: dict[str, list[Rule]] = {}
for family in (rows.RULES, selects.RULES, sums.RULES):
    for name, rule in family.items():
        RULES.setdefault(name, []).append(rule)


class Repair:
    """Evaluates jaxprs. Rows matter in loops, where work on all of them is done again and again."""

    def __init__(self, max_steps: int | None = None, *, in_loop: bool = False) -> None:
        self.max_steps, self.in_loop = max_steps, in_loop

    def evaluate(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        return bodies.interpret(jaxpr, inputs, self._equation, Value)

    def function(self, jaxpr: Any) -> Callable[..., list[Array]]:
        """The function of arrays that a jaxpr is, repaired."""
        closed = _compat.closed(jaxpr)
        return lambda *args: [x.array for x in self.evaluate(closed, [Value(x) for x in args])]

    def of_loop(self) -> "Repair":
        """What evaluates the body of a loop."""
        return Repair(self.max_steps, in_loop=True)

    def finds(self, jaxpr: Any) -> bool:
        """Whether there is something to repair."""
        return any(map(self._finds, _compat.opened(jaxpr).eqns))

    def _finds(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name in control.RULES:
            inner = self.of_loop() if name in control.LOOPS else self
            if name == "while" and self.max_steps is not None:
                return True
            return any(map(inner.finds, bodies.jaxprs_in(eqn.params)))
        return self.in_loop and rows.is_of_rows(eqn)

    def _equation(self, eqn: Any, operands: list[Value]) -> list[Value]:
        with _compat.at_source_of(eqn):
            results = self._repaired(eqn, operands)
            if results is None:
                results = [Value(x) for x in bodies.bind(eqn, arrays(operands))]
        return results

    def _repaired(self, eqn: Any, operands: list[Value]) -> list[Value] | None:
        name = eqn.primitive.name
        if name in control.RULES:
            within = self.in_loop and name in control.CALLS  # where a select may be all that there is
            if within or self._finds(eqn):
                return control.RULES[name](self, eqn, operands)
            return None
        if not self.in_loop:
            return None
        found = (rule(eqn, operands) for rule in RULES.get(name, ()))
        return next((results for results in found if results is not None), None)
