"""Read the StableHLO that JAX lowers to: where things are, and what a value is."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.interpreters.mlir import ir

from jax_tensorarray._compat import hlo

# The types of the bindings differ from version to version.
Operation = Any
Value = Any


def operation(op: Any) -> Operation:
    return getattr(op, "operation", op)


def callee(op: Operation) -> str | None:
    """Return the name of the function that `op` calls, if it is a call."""
    name: str | None = op.attributes["callee"].value if op.name == "func.call" else None
    return name


def callers_of(functions: dict[str, Operation]) -> dict[str, list[Operation]]:
    """Return the calls of every function."""
    callers: dict[str, list[Operation]] = {name: [] for name in functions}
    for function in functions.values():
        for op in walk(function):
            if (name := callee(op)) is not None:
                callers[name].append(op)
    return callers


def entry(function: Operation) -> ir.Block:
    return function.regions[0].blocks[0]


def terminator(block: ir.Block) -> Operation:
    return operation(block.operations[len(block.operations) - 1])


#: Names of operations that were found to have no regions. Most have none, and asking each operation is slow.
_leaves: set[str] = set()


def is_leaf(op: Operation) -> bool:
    """Return whether there is nothing inside `op`."""
    name = op.name
    if name in _leaves:
        return True
    if len(op.regions):
        return False
    _leaves.add(name)
    return True


def blocks(op: Operation) -> Iterator[ir.Block]:
    """Yield every block inside `op`, innermost last."""
    for region in op.regions:
        for block in region.blocks:
            yield block
            for inner in map(operation, block.operations):
                if not is_leaf(inner):
                    yield from blocks(inner)


def directly_in(op: Operation) -> Iterator[Operation]:
    """Yield the operations of the blocks of `op`, without what is inside these."""
    for region in op.regions:
        for block in region.blocks:
            yield from map(operation, block.operations)


def walk(op: Operation) -> list[Operation]:
    """Return every operation inside `op`.

    MLIR's own walk takes a quarter of the time of iterating over blocks, which is half of what the passes do.
    """
    if is_leaf(op):
        return []
    found: list[Operation] = []

    def visit(inner: Operation) -> ir.WalkResult:
        found.append(inner)
        return ir.WalkResult.ADVANCE

    op.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found[1:]


def everything_in(block: ir.Block) -> Iterator[Operation]:
    """Yield the operations of a block, and those inside them."""
    for op in map(operation, block.operations):
        yield op
        yield from walk(op)


def loops_of(op: Operation) -> Iterator[Operation]:
    """Yield the loops in `op` that are in no other."""
    for inner in directly_in(op):
        if inner.name == "stablehlo.while":
            yield inner
        elif not is_leaf(inner):
            yield from loops_of(inner)


def functions_in_loops(functions: dict[str, Operation]) -> set[str]:
    """Return the names of the functions that a loop calls, directly or through other functions."""
    stack = [loop for function in functions.values() for loop in loops_of(function)]
    called: set[str] = set()
    while stack:
        for op in walk(stack.pop()):
            if (name := callee(op)) is not None and name not in called:
                called.add(name)
                stack.append(functions[name])
    return called


def is_in_loop(op: Operation, functions_in_loops: set[str]) -> bool:
    """Return whether `op` is in a loop, or in one of those functions."""
    while op.name != "func.func":
        op = operation(op.block.owner)
        if op.name == "stablehlo.while":
            return True
    return op.attributes["sym_name"].value in functions_in_loops


class LoopsAround:
    """Counts the loops around an operation, also those that call its function."""

    def __init__(self, functions: Mapping[str, Operation]) -> None:
        self.callers = callers_of(dict(functions))
        self.known: dict[str, int] = {}

    def __call__(self, op: Operation) -> int:
        loops = 0
        while op.name != "func.func":
            op = operation(op.block.owner)
            loops += op.name == "stablehlo.while"
        name = op.attributes["sym_name"].value
        if name not in self.known:
            self.known[name] = max(map(self, self.callers[name]), default=0)
        return loops + self.known[name]


def added_by_step(carried: Value, after: Value, functions: Mapping[str, Operation]) -> int | None:
    """Return the constant that a step of a loop adds to a number that it carries, or None if it does anything else.

    Calls of the given functions are followed.
    """
    calls, added = [], 0
    while not isinstance(after, ir.BlockArgument):
        op = operation(after.owner)
        if (name := callee(op)) is not None and name in functions:
            calls.append(op)
            after = terminator(entry(functions[name])).operands[ir.OpResult(after).result_number]
        elif op.name == "stablehlo.add" and (by := constant(op.operands[1])) is not None:
            after, added = op.operands[0], added + by  # several if a step of the loop is several of the program
        else:
            return None
    for call in reversed(calls):
        if not isinstance(after, ir.BlockArgument) or operation(after.owner.owner).name != "func.func":
            return None
        after = call.operands[after.arg_number]
    return added if after == carried else None


def nested_operands(op: Operation) -> Iterator[tuple[Operation, int, Value]]:
    """Yield each (operation, operand number, value) of `op` and of everything in its regions."""
    for user in (op, *walk(op)):
        for number, value in enumerate(user.operands):
            yield user, number, value


def is_inside(value: Value, op: Operation) -> bool:
    """Return whether `value` is made in a block of `op`, or deeper."""
    block = value.owner if isinstance(value, ir.BlockArgument) else operation(value.owner).block
    while True:
        parent = operation(block.owner)
        if parent == op:
            return True
        if parent.name in ("func.func", "builtin.module"):
            return False
        block = parent.block


def num_bytes(value: Value) -> float:
    """Return the size of a ranked tensor in bytes, and infinity for anything else."""
    if not isinstance(value.type, ir.RankedTensorType) or not value.type.has_static_shape:
        return math.inf
    element: Any = value.type.element_type
    part: Any = element.element_type if isinstance(element, ir.ComplexType) else element
    bits = getattr(part, "width", 8) * (1 if part is element else 2)
    return math.prod(value.type.shape) * max(bits, 8) / 8


# --- values ----------------------------------------------------------------------------------------------------


def constant(value: Value) -> int | None:
    """Return the number that all elements of an integer array are, if the program says so."""
    if isinstance(value, ir.BlockArgument):
        return None
    producer = operation(value.owner)
    if producer.name == "stablehlo.broadcast_in_dim":
        return constant(producer.operands[0])
    if producer.name != "stablehlo.constant" or not isinstance(value.type.element_type, ir.IntegerType):
        return None
    elements = ir.DenseElementsAttr(producer.attributes["value"])
    return int(ir.IntegerAttr(elements.get_splat_value()).value) if elements.is_splat else None


def shared_scalar(value: Value) -> Value | None:
    """Return the scalar that all elements of an array are, if the program makes it of one."""
    if not value.type.rank:
        return value
    producer = None if isinstance(value, ir.BlockArgument) else operation(value.owner)
    if producer is None or producer.name not in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        return None
    return shared_scalar(producer.operands[0])


def direction_of(comparison: Operation) -> str:
    """Return the direction of a comparison: "LT", "EQ" and so on."""
    name: str = hlo.ComparisonDirectionAttr(comparison.attributes["comparison_direction"]).value
    return name


def operands_of(value: Value, name: str, direction: str = "") -> list[Value]:
    """Return the operands of the operation that makes a value, or nothing if it is another operation or direction."""
    op = None if isinstance(value, ir.BlockArgument) else operation(value.owner)
    if op is None or op.name != f"stablehlo.{name}" or (direction and direction_of(op) != direction):
        return []
    return list(op.operands)


def joined_columns(value: Value, count: int) -> list[Value]:
    """Return the `count` arrays of one column each that an array is joined of along its last axis, or nothing."""
    joined = operands_of(value, "concatenate")
    is_last = joined and operation(value.owner).attributes["dimension"].value == value.type.rank - 1
    return joined if is_last and [x.type.shape[-1] for x in joined] == [1] * count else []
