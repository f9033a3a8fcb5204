"""Which operation updates a value in place, or gets it as its buffer: also inside loops and functions."""

from collections.abc import Callable, Collection

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import PREFIX, UPDATING, aliased, is_ours, target
from jax_tensorarray._lowering.mlir import Operation, Value, entry, everything_in, terminator

Relation = Callable[[Operation], Collection[int]]


class Ownership:
    """Answers what happens to an operand of an operation inside it, through loops and calls."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.functions = functions
        self._owned: dict[str, set[int]] = {}
        self._held: dict[str, set[int]] = {}
        self._held_in_loop: dict[Operation, set[int]] = {}
        self._invariants: dict[Operation, set[int]] = {}

    def owned(self, op: Operation) -> Collection[int]:
        """Return which operands `op`, or an operation inside it, updates in place."""
        if target(op) in UPDATING or op.name == "stablehlo.dynamic_update_slice":
            return (0,)
        if op.name == "stablehlo.while":
            same = self.invariants(op)
            return [k for k in range(len(op.operands)) if k not in same]
        if op.name == "func.call":
            return self._arguments(self._owned, self.owned, op)
        return [operand for operand, _ in aliased(op)]

    def held(self, op: Operation) -> Collection[int]:
        """Return which operands `op`, or a call of ours inside it, gets as its buffers."""
        if op.name == "stablehlo.while":
            if op not in self._held_in_loop:
                body = op.regions[1].blocks[0]
                values = self._values(body, self.held)
                self._held_in_loop[op] = {k for k, argument in enumerate(body.arguments) if argument in values}
            return self._held_in_loop[op]
        if op.name == "func.call":
            return self._arguments(self._held, self.held, op)
        return (0,) if is_ours(op) and target(op) != PREFIX + "check" and len(op.operands) else ()

    def invariants(self, loop: Operation) -> set[int]:
        """Return the positions of the loop-carried values that the body returns unchanged."""
        if loop not in self._invariants:
            body = loop.regions[1].blocks[0]
            pairs = zip(body.arguments, terminator(body).operands, strict=True)
            self._invariants[loop] = {k for k, (argument, value) in enumerate(pairs) if argument == value}
        return self._invariants[loop]

    def _arguments(self, known: dict[str, set[int]], relation: Relation, call: Operation) -> set[int]:
        name = call.attributes["callee"].value
        if name not in known:
            block = entry(self.functions[name])
            values = self._values(block, relation)
            known[name] = {k for k, argument in enumerate(block.arguments) if argument in values}
        return known[name]

    @staticmethod
    def _values(block: ir.Block, relation: Relation) -> set[Value]:
        return {op.operands[number] for op in everything_in(block) for number in relation(op)}
