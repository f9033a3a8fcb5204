"""Find the row ops that need no order: what is read of a buffer is for its next update only, or there is none.

XLA cannot read after an update what the update is made of. So nothing has to be put between the two, neither a barrier
nor a branch, and XLA may fuse them.
"""

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import PREFIX, UNORDERED, UPDATING, index_and_size, is_ours, may_raise, target
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    callee,
    callers_of,
    entry,
    everything_in,
    is_inside,
    operation,
    terminator,
    walk,
)
from jax_tensorarray._lowering.ownership import Ownership

#: Operations that XLA for CPUs runs once, however many others use the result: it repeats what it takes to be cheap,
#: even a sine. Quotients, powers and products are not here, as XLA may turn them into cheap operations.
_MADE_ONCE = frozenset(
    f"stablehlo.{name}"
    for name in (
        *("cbrt", "exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "rsqrt", "sqrt", "tanh"),
        *("reduce", "reduce_window", "sort"),
    )
)


def mark_unordered(functions: dict[str, Operation], platform: str | None, barriers_hold: bool) -> None:
    """Mark every read and every update that needs no order.

    On a CPU a row needs none either if everything that is made of it, apart from the update, goes through an operation
    that XLA runs once, before the update: XLA repeats a read only in a fusion with cheap operations.
    """
    uses = Uses(functions, _MADE_ONCE if platform == "cpu" else frozenset(), barriers_hold=barriers_hold)
    for function in functions.values():
        for op in walk(function):
            is_read = target(op) == PREFIX + "read" and uses.is_for_update(op)
            if is_read or (target(op) in UPDATING and uses.is_for_itself(op.operands[0], op.block)):
                op.attributes[UNORDERED] = ir.UnitAttr.get()


class Uses:
    """Answers who uses the buffers of a module."""

    def __init__(
        self, functions: dict[str, Operation], made_once: frozenset[str] = frozenset(), *, barriers_hold: bool = False
    ) -> None:
        self.ownership, self.callers = Ownership(functions), callers_of(functions)
        self.made_once, self.barriers_hold = made_once, barriers_hold
        self.updated: dict[Operation, set[Value]] = {}  # by the last operation of a block
        self.for_itself: dict[tuple[Value, Operation], bool] = {}  # by buffer, and the last operation of the block

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
            return value.arg_number in self.ownership.invariants(owner)
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
            owned = self.ownership.owned
            self.updated[key] = {op.operands[number] for op in everything_in(block) for number in owned(op)}
        return self.updated[key]

    def is_for_update(self, read: Operation) -> bool:
        """Return whether a row is read for the next update of the buffer only, or the buffer is never updated."""
        buffer = read.operands[0]
        return self.is_for_itself(buffer, read.block) or self.is_never_updated(buffer, read.block)

    def is_for_itself(self, buffer: Value, block: ir.Block) -> bool:
        """Return whether all that is read of a version of a buffer is for the one update that follows."""
        key = buffer, terminator(block)
        if key not in self.for_itself:
            self.for_itself[key] = False
            owners = [(op, number) for op, number in _users(buffer) if number in self.ownership.owned(op)]
            self.for_itself[key] = len(owners) == 1 and self._is_for(*owners[0], block)
        return self.for_itself[key]

    def _is_for(self, op: Operation, number: int, block: ir.Block) -> bool:
        if op.block != block or (target(op) in UPDATING and len(op.results) > 1):
            return False  # "swap" gives the old row to others
        buffer, inside = op.operands[number], operation(block.owner)
        if inside.name not in ("func.func", "stablehlo.while", "stablehlo.case") or not self._reach_only(buffer, op):
            return False
        if target(op) in UPDATING and not all(self._goes_on(*use) for use in _users(op.results[0])):
            return False  # XLA would fuse the update with what takes all of the buffer, into an array of its own
        if inside.name == "stablehlo.case" and not is_inside(buffer, inside):
            return True  # XLA fuses nothing of a branch with what is outside of it
        if not isinstance(buffer, ir.BlockArgument):
            # Where no barrier holds, XLA would make this version again in each other fusion that reads it.
            is_updated = target(operation(buffer.owner)) in UPDATING and not self.barriers_hold
            is_updated &= len(_users(buffer)) > 1
            return self._is_left_alone(buffer) and not is_updated
        if buffer.owner != block:
            return False
        calls = () if inside.name != "func.func" else self.callers[inside.attributes["sym_name"].value]
        return all(self.is_for_itself(call.operands[buffer.arg_number], call.block) for call in calls)

    def _goes_on(self, op: Operation, number: int) -> bool:
        """Return whether a version of a buffer leaves the block there, or is updated."""
        return not op.results or number in self.ownership.owned(op)

    def _is_left_alone(self, result: Value) -> bool:
        """Return whether a function that made this version reads nothing of it."""
        if (name := callee(operation(result.owner))) is None:
            return True
        made = terminator(entry(self.ownership.functions[name])).operands[ir.OpResult(result).result_number]
        return len(list(made.uses)) == 1 and (isinstance(made, ir.BlockArgument) or self._is_left_alone(made))

    def _reach_only(self, buffer: Value, update: Operation) -> bool:
        """Return whether all that is made of a buffer in the block of `update` is for `update`, or made before it."""
        stack, found, block = [buffer], set(), update.block
        while stack:
            value = stack.pop()
            for op, _ in _users(value):
                if value != buffer and is_ours(op) and may_raise(op) and index_and_size(op)[0] == value:
                    return False  # it is recorded whether this index is in range
                outer = _in_block(op, block)
                if outer is None:
                    continue  # another branch has it, or what is outside of this one
                if not outer.results:  # it leaves the block
                    return False
                if outer != update and outer not in found:
                    found.add(outer)
                    if outer.name in self.made_once and not _is_sum_of_few(outer) and self._reaches(outer, update):
                        continue
                    same = self.ownership.invariants(outer) if outer.name == "stablehlo.while" else ()
                    stack.extend(x for k, x in enumerate(outer.results) if k not in same or outer.operands[k] == value)
        return True

    def _reaches(self, op: Operation, update: Operation) -> bool:
        """Return whether `update` is made of a result of `op`."""
        stack, found = [op], {op}
        while stack:
            for result in stack.pop().results:
                for user in [_in_block(user, update.block) for user, _ in _users(result)]:
                    if user == update:
                        return True
                    if user not in found:
                        found.add(user)
                        stack.append(user)
        return False


def _is_sum_of_few(op: Operation) -> bool:
    """Return whether an operation reduces rows that are read, or joined: a few become sums of slices in XLA.

    One along axes of size 1 becomes no operation at all.
    """
    if op.name != "stablehlo.reduce":
        return False
    value = op.operands[0]
    if all(value.type.shape[k] == 1 for k in op.attributes["dimensions"]):
        return True
    while not isinstance(value, ir.BlockArgument):
        producer = operation(value.owner)
        if producer.name not in ("stablehlo.reshape", "stablehlo.transpose"):
            return producer.name == "stablehlo.concatenate" or is_ours(producer)
        value = producer.operands[0]
    return False


def _users(value: Value) -> list[tuple[Operation, int]]:
    """Return the operations that use a value, and the number of the operand that it is."""
    return [(operation(use.owner), use.operand_number) for use in value.uses]


def _in_block(op: Operation, block: ir.Block) -> Operation | None:
    """Return the operation of a block that `op` is, or is inside of."""
    while op.block != block:
        if op.name == "func.func":
            return None
        op = operation(op.block.owner)
    return op
