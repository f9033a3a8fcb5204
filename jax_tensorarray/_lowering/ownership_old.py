"""Which operation updates a value in place, or gets it as its buffer: also inside loops and functions."""

from typing import Any

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import PREFIX, UPDATING, aliased, is_ours, target
from jax_tensorarray._lowering.mlir import Operation, Value, entry, nested_operands, operation, terminator


class Ownership:
    """Answers what happens to an operand of an operation inside it, through loops and calls."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.functions = functions
        self._owned: dict[str, list[bool]] = {}
        self._held: dict[str, list[bool]] = {}
        self._held_in_loop: dict[Operation, set[int]] = {}
        self._invariants: dict[Operation, set[int]] = {}

    def owns(self, op: Operation, number: int) -> bool:
        """Return whether `op`, or an operation inside it, updates the operand in place."""
        if target(op) in UPDATING or op.name == "stablehlo.dynamic_update_slice":
            return number == 0
        if op.name == "stablehlo.while":
            return number not in self.invariants(op)
        if op.name == "func.call":
            return self._argument(self._owned, self.owns, op, number)
        return any(operand == number for operand, _ in aliased(op))

    def holds(self, op: Operation, number: int) -> bool:
        """Return whether `op`, or a call of ours inside it, gets the operand as its buffer."""
        if op.name == "stablehlo.while":
            if op not in self._held_in_loop:
                body = op.regions[1].blocks[0]
                values = self._values(body, self.holds)
                self._held_in_loop[op] = {k for k, argument in enumerate(body.arguments) if argument in values}
            return number in self._held_in_loop[op]
        if op.name == "func.call":
            return self._argument(self._held, self.holds, op, number)
        return number == 0 and is_ours(op) and target(op) != PREFIX + "check"

    def invariants(self, loop: Operation) -> set[int]:
        """Return the positions of the loop-carried values that the body returns unchanged."""
        if loop not in self._invariants:
            body = loop.regions[1].blocks[0]
            pairs = zip(body.arguments, terminator(body).operands, strict=True)
            self._invariants[loop] = {k for k, (argument, value) in enumerate(pairs) if argument == value}
        return self._invariants[loop]

    def _argument(self, known: dict[str, list[bool]], relation: Any, call: Operation, number: int) -> bool:
        name = call.attributes["callee"].value
        if name not in known:
            block = entry(self.functions[name])
            values = self._values(block, relation)
            known[name] = [argument in values for argument in block.arguments]
        return known[name][number]

    @staticmethod
    def _values(block: ir.Block, relation: Any) -> set[Value]:
        return {
            value
            for op in map(operation, block.operations)
            for user, number, value in nested_operands(op)
            if relation(user, number)
        }
