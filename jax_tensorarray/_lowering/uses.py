"""Find the row ops that need no order: what is read of a buffer is for its next update only, or there is none.

XLA cannot read behind an update what the update is made of. So nothing has to be put between the two, neither a barrier
nor a branch, and XLA may fuse them.
"""

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import PREFIX, UNORDERED, UPDATING, index_and_size, is_ours, may_raise, target
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    callers_of,
    is_inside,
    nested_operands,
    operation,
    terminator,
    walk,
)
from jax_tensorarray._lowering.ownership import Module


def mark_unordered(functions: dict[str, Operation]) -> None:
    """Mark every read and every update that needs no order."""
    uses = Uses(functions)
    for function in functions.values():
        for op in walk(function):
            is_read = target(op) == PREFIX + "read"
            if (is_read and uses.is_for_update(op)) or (target(op) in UPDATING and uses.is_for_itself(op)):
                op.attributes[UNORDERED] = ir.UnitAttr.get()


class Uses:
    """Answers who uses the buffers of a module."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.module, self.callers = Module(functions), callers_of(functions)
        self.updated: dict[Operation, set[Value]] = {}  # by the last operation of a block
        self.for_itself: dict[Operation, bool] = {}

    def is_never_updated(self, value: Value, block: ir.Block) -> bool:
        """Return whether nothing updates `value` after it has been read in `block`."""
        if self.is_updated_in(value, block):
            return False
        if not isinstance(value, ir.BlockArgument):
            inside = operation(block.owner)
            if inside.name == "func.func":  # its callers may update what it returns
                return value not in terminator(block).operands
            return is_inside(value, inside)
        owner = operation(value.owner.owner)
        if owner.name == "stablehlo.while":
            return value.arg_number in self.module.invariants(owner)
        if owner.name == "func.func":
            callers = self.callers[owner.attributes["sym_name"].value]
            return all(self.is_never_updated(call.operands[value.arg_number], call.block) for call in callers)
        return False

    def is_updated_in(self, value: Value, block: ir.Block) -> bool:
        """Return whether an operation of a block updates `value`, in the block or inside that operation."""
        return value in self._updated_in(block)

    def _updated_in(self, block: ir.Block) -> set[Value]:
        """Return the values that operations of a block update, in the block or inside these operations."""
        key = terminator(block)
        if key not in self.updated:
            uses = (use for op in block.operations for use in nested_operands(operation(op)))
            self.updated[key] = {value for user, number, value in uses if self.module.owns(user, number)}
        return self.updated[key]

    def is_for_update(self, read: Operation) -> bool:
        """Return whether a row is read for the next update of the buffer only, or the buffer is never updated."""
        uses = ((operation(use.owner), use.operand_number) for use in read.operands[0].uses)
        updates = [op for op, number in uses if self.module.owns(op, number)]
        if len(updates) == 1 and updates[0].block == read.block:
            return self.is_for_itself(updates[0])
        return self.is_never_updated(read.operands[0], read.block)

    def is_for_itself(self, update: Operation) -> bool:
        """Return whether all that is read of a buffer in a step of a loop is for the one update there."""
        if update not in self.for_itself:
            self.for_itself[update] = target(update) in UPDATING and self._uses_alone(update, 0, 0)
        return self.for_itself[update]

    def _uses_alone(self, op: Operation, number: int, result: int) -> bool:
        """Return whether what a step reads of an operand is for `op` only, whose result is the operand of the next."""
        buffer, block = op.operands[number], op.block
        end, uses = terminator(block), list(op.results[result].uses)
        if len(op.results) > 1 and target(op) in UPDATING:
            return False  # "swap" gives the old row to others
        if not isinstance(buffer, ir.BlockArgument) or buffer.owner != block or len(uses) != 1:
            return False
        if operation(uses[0].owner) != end or not self._reach_only(buffer, op):
            return False
        inside = operation(block.owner)
        if inside.name != "func.func":
            return inside.name == "stablehlo.while"
        calls = self.callers[inside.attributes["sym_name"].value]
        return bool(calls) and all(self._uses_alone(call, buffer.arg_number, uses[0].operand_number) for call in calls)

    def _reach_only(self, buffer: Value, update: Operation) -> bool:
        """Return whether all that is made of a buffer in the block of `update` is for `update`."""
        stack, found, block = [buffer], set(), update.block
        while stack:
            value = stack.pop()
            for use in value.uses:
                op = operation(use.owner)
                if value != buffer and is_ours(op) and may_raise(op) and index_and_size(op)[0] == value:
                    return False  # it is recorded whether this index is in range
                while op.block != block:
                    op = operation(op.block.owner)
                if not op.results:  # it leaves the block
                    return False
                if op != update and op not in found:
                    found.add(op)
                    same = self.module.invariants(op) if op.name == "stablehlo.while" else ()
                    stack.extend(x for k, x in enumerate(op.results) if k not in same or op.operands[k] == value)
        return True
