"""Reading the StableHLO that JAX lowers to: where things are, and what happens to a value inside an operation."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters.mlir import dense_int_array, ir

from jax_tensorarray._compat import hlo

PREFIX = "jax_tensorarray_"


class Call(NamedTuple):
    """The operands and results of a call of ours, without the readers that may follow (see `partition`)."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    combine: Callable[[Any, Any], Any] | None  #: makes the new row of the old one and the value, for `slices`

    @property
    def in_place(self) -> bool:
        """Whether the first operand is updated, and is the first result."""
        return self.operands[:1] == self.results[:1] == ("buffer",)


#: Our calls by name. Every op declares its own.
CALLS: dict[str, Call] = {}

#: The targets of the calls that update their first operand in place.
IN_PLACE: set[str] = set()


def declare(
    name: str,
    operands: tuple[str, ...],
    results: tuple[str, ...],
    combine: Callable[[Any, Any], Any] | None = None,
) -> Call:
    """Declare the operands and results of a call, and how it combines two rows if it does."""
    CALLS[name] = call = Call(operands, results, combine)
    if call.in_place:
        IN_PLACE.add(PREFIX + name)
    return call


declare("fence", ("buffer",), ("buffer",))

# The types of the bindings differ from version to version.
Operation = Any
Value = Any


#: Attribute of a module into which one of our calls has been lowered.
MARK = "jax_tensorarray.lowered"


#: What a row op may be asked to lower to, see `slices`.
LOWERINGS = ("auto", "ffi", "xla")

#: Attribute of a call that was asked for with another `lowering` than "auto".
LOWERING = "jax_tensorarray.lowering"

#: Attribute of an op whose index is checked elsewhere, so that it does not raise itself; see `record`.
CHECKED = "jax_tensorarray.checked"

#: Attribute of an op whose index is in range, see `bounds`.
IN_RANGE = "jax_tensorarray.in_range"

#: Platforms that call no kernels. Row ops become operations of XLA's own there, see `fallback`.
WITHOUT_KERNELS = frozenset({"tpu"})

#: Attribute of a call that stands for a function of XLA's own operations: its name.
FALLBACK = "jax_tensorarray.fallback"

#: Attribute of a loop or a function whose last argument is a 0 that XLA cannot know to be one.
UNKNOWN = "jax_tensorarray.unknown"

#: The name under which a loop of this library reads and writes its tapes. Each step writes a row of a tape and never
#: reads it, or the other way round, and the number of the row is the number of the step.
TAPE = "tape"

#: Attribute of a call that holds the attributes of its kernel.
CONFIG = "mhlo.backend_config"


def mark(module: ir.Module) -> None:
    """Mark `module` for the pass, which need not look through the others."""
    module.operation.attributes[MARK] = ir.UnitAttr.get(module.context)


def operation(op: Any) -> Operation:
    return getattr(op, "operation", op)


def config(call: Operation) -> Any:
    """Return the attributes with which a kernel is called."""
    return call.attributes[CONFIG]


def target(op: Operation) -> str:
    return op.attributes["call_target_name"].value if op.name == "stablehlo.custom_call" else ""


def is_ours(op: Operation) -> bool:
    """Return whether `op` is a call of one of our kernels."""
    return target(op).startswith(PREFIX)


def addresses_rows(op: Operation) -> bool:
    """Return whether `op` is a call of ours with an index that has to be in range."""
    return is_ours(op) and CONFIG in op.attributes and "strict" in config(op)


def index_and_size(op: Operation) -> tuple[Value, int | None]:
    """Return the index of such a call, and the number of rows unless the program computes it."""
    if target(op) == PREFIX + "check":
        return op.operands[0], constant(op.operands[1])
    return op.operands[1], math.prod(index_sizes(op))


def index_sizes(op: Operation) -> list[int]:
    """Return the sizes of the axes along which the index of a row op counts rows: one, unless `index_dims` is set."""
    attributes: Any = config(op)
    batch_dims = attributes["batch_dims"].value
    index_dims = attributes["index_dims"].value if "index_dims" in attributes else 1
    sizes: list[int] = op.operands[0].type.shape[batch_dims : batch_dims + index_dims]
    return sizes


def may_raise(op: Operation) -> bool:
    """Return whether such a call raises if its index is out of range, and the index may be so."""
    return config(op)["strict"].value and IN_RANGE not in op.attributes


def callee(op: Operation) -> str | None:
    """Return the name of the function that `op` calls, if it is a call."""
    name: str | None = op.attributes["callee"].value if op.name == "func.call" else None
    return name


def lowering_of(op: Operation, default: str) -> str:
    """Return the `lowering` of a call of ours, which says what it may become (see `slices`)."""
    name: str = op.attributes[LOWERING].value if LOWERING in op.attributes else default
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


def walk(op: Operation) -> Iterator[Operation]:
    """Yield every operation inside `op`."""
    for inner in directly_in(op):
        yield inner
        if not is_leaf(inner):
            yield from walk(inner)


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


def unknown_at(op: Operation) -> Value | None:
    """Return a number that is 0 while nothing is wrong, and that XLA cannot know, if there is one at `op`."""
    while op.name != "func.func":
        block = op.block
        op = operation(block.owner)
        if UNKNOWN in op.attributes:
            last: Value = block.arguments[len(block.arguments) - 1]
            return last
    return None


def added_by_step(carried: Value, behind: Value, functions: Mapping[str, Operation]) -> int | None:
    """Return the constant that a step of a loop adds to a number that it carries, or None if it does anything else.

    Calls of the given functions are followed.
    """
    calls, added = [], 0
    while not isinstance(behind, ir.BlockArgument):
        op = operation(behind.owner)
        if (name := callee(op)) is not None and name in functions:
            calls.append(op)
            behind = terminator(entry(functions[name])).operands[ir.OpResult(behind).result_number]
        elif op.name == "stablehlo.add" and not added and (by := constant(op.operands[1])) is not None:
            behind, added = op.operands[0], by
        else:
            return None
    for call in reversed(calls):
        if not isinstance(behind, ir.BlockArgument) or operation(behind.owner.owner).name != "func.func":
            return None
        behind = call.operands[behind.arg_number]
    return added if behind == carried else None


def nested_operands(op: Operation) -> Iterator[tuple[Operation, int, Value]]:
    """Yield each (operation, operand number, value) of `op` and of everything in its regions."""
    for number, value in enumerate(op.operands):
        yield op, number, value
    if not is_leaf(op):
        for inner in directly_in(op):
            yield from nested_operands(inner)


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


def layouts(values: Sequence[Value]) -> list[ir.Attribute]:
    """Return row-major layouts, in which our calls take and return arrays."""
    ranks = [value.type.rank for value in values]
    return [ir.DenseIntElementsAttr.get(np.arange(rank - 1, -1, -1), type=ir.IndexType.get()) for rank in ranks]


_FIRST_TO_ONLY = "output_tuple_indices = [], operand_index = 0, operand_tuple_indices = []"


def custom_call(
    name: str, operands: Sequence[Value], result: ir.Type, config: Mapping[str, ir.Attribute], *, in_place: bool = False
) -> Value:
    """Call one of our kernels and return its result, which may be its first operand updated in place."""
    alias = ir.Attribute.parse(f"#stablehlo.output_operand_alias<{_FIRST_TO_ONLY}>")
    # As `jax.ffi` makes them: the attributes of the kernel are no string, and stay beside.
    call = ir.Operation.create(
        "stablehlo.custom_call",
        [result],
        operands,
        {
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
            "backend_config": ir.StringAttr.get(""),
            CONFIG: ir.DictAttr.get(dict(config)),
            "call_target_name": ir.StringAttr.get(PREFIX + name),
            "has_side_effect": ir.BoolAttr.get(False),
            "operand_layouts": ir.ArrayAttr.get(layouts(operands)),
            "output_operand_aliases": ir.ArrayAttr.get([alias] if in_place else []),
        },
    )
    call.attributes["result_layouts"] = ir.ArrayAttr.get(layouts(call.results))
    return call.results[0]


# --- values ----------------------------------------------------------------------------------------------------

INT32_MAX = 2**31 - 1


def tensor(shape: Sequence[int], element: ir.Type) -> ir.RankedTensorType:
    """Return the type of an array."""
    return ir.RankedTensorType.get(shape, element)


def integer(bits: int) -> ir.RankedTensorType:
    """Return the type of a signed integer."""
    return tensor([], ir.IntegerType.get_signless(bits))


def splat(type_: Any, value: int) -> Value:
    """Make a constant tensor in which all elements are that number."""
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        part = splat(tensor(type_.shape, element.element_type), value)
        return hlo.complex(part, splat(part.type, 0))
    is_integer = isinstance(element, ir.IntegerType)
    number = ir.IntegerAttr.get(element, value) if is_integer else ir.FloatAttr.get(element, float(value))
    return hlo.constant(ir.DenseElementsAttr.get_splat(type_, number))


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


class Window(NamedTuple):
    """An index `[*I, length]` of consecutive numbers."""

    repeated: Operation  #: gives each number the first of its window
    length: int

    @property
    def shape(self) -> list[int]:
        """`I`."""
        of: list[int] = self.repeated.results[0].type.shape
        return of[:-1]


def window_of(index: Value, size: int) -> Window | None:
    """Return the windows of consecutive numbers that an index is made of, or None.

    The program must count up from the first number of each window. `size` is the number of rows of the buffer.
    """
    element = index.type.element_type
    if size > 2 ** (element.width - (not element.is_unsigned)):
        return None  # what counts up may wrap
    for first, number in itertools.permutations(operands_of(index, "add"), 2):
        if repeats_along_last(first) and _counts_along_last(number):
            return Window(operation(first.owner), index.type.shape[-1])
    return None


def repeats_along_last(value: Value) -> bool:
    """Return whether an array is made by repeating numbers along a last axis."""
    last = value.type.rank - 1
    return bool(operands_of(value, "broadcast_in_dim")) and last not in dims_of(operation(value.owner))


def without_last(repeated: Operation) -> Value:
    """Return what such an operation repeats, as an array without that axis."""
    source, of = repeated.operands[0], repeated.results[0].type
    shape, dims = of.shape[:-1], dims_of(repeated)
    if dims == list(range(len(shape))) and source.type.shape == shape:
        return source
    return hlo.broadcast_in_dim(tensor(shape, of.element_type), source, dense_int_array(dims))


def dims_of(broadcast: Operation) -> list[int]:
    """Return, for each axis of the operand, which axis of the result it is."""
    return list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))


def _counts_along_last(value: Value) -> bool:
    """Return whether an array is 0, 1, 2 ... along its last axis, at every place in the others."""
    while not isinstance(value, ir.BlockArgument):
        producer, last = operation(value.owner), value.type.rank - 1
        if producer.name == "stablehlo.iota":
            return producer.attributes["iota_dimension"].value == last
        if producer.name != "stablehlo.broadcast_in_dim" or dims_of(producer)[-1:] != [last]:
            return False
        value = producer.operands[0]
        if value.type.shape[-1] != producer.results[0].type.shape[-1]:
            return False
    return False


def widened(index: Value, size: int) -> Value:
    """Convert an index to a dtype that has all rows.

    XLA clamps a start in the start's own dtype. In a smaller dtype the last row that it clamps to would wrap.
    """
    element, bits = index.type.element_type, 32 if size <= INT32_MAX else 64
    if element.width > bits or (element.width == bits and (bits == 64 or not element.is_unsigned)):
        return index
    wide = 64 if element.is_unsigned and element.width == 32 else bits
    return hlo.convert(tensor(index.type.shape, ir.IntegerType.get_signless(wide)), index)


def of_positions(sizes: Value, shape: Sequence[int]) -> Value:
    """Broadcast numbers of rows `[*batch]` to the positions of an index of that shape."""
    if sizes.type.rank == len(shape):
        return sizes
    kind = tensor(shape, sizes.type.element_type)
    return hlo.broadcast_in_dim(kind, sizes, dense_int_array(range(sizes.type.rank)))


def astray(index: Value, size: Value | int) -> Value:
    """Return whether an index is out of range, elementwise; `size` is a number, or an int32 array of the same shape."""
    index = widened(index, INT32_MAX if not isinstance(size, int) else size)
    is_unsigned = index.type.element_type.is_unsigned
    if isinstance(size, int):
        limit = splat(index.type, size)
    else:
        limit = hlo.maximum(size, splat(size.type, 0)) if is_unsigned else size
        limit = limit if limit.type == index.type else hlo.convert(index.type, limit)
    strays = compare(index, limit, "GE")
    return strays if is_unsigned else hlo.or_(strays, compare(index, splat(index.type, 0), "LT"))


def compare(left: Value, right: Value, direction: str) -> Value:
    """Compare two arrays elementwise; `direction` is "LT", "EQ" and so on."""
    return hlo.compare(left, right, hlo.ComparisonDirectionAttr.get(direction))


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


class Module:
    """Answers what happens to an operand of an operation inside it, through loops and calls."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.functions = functions
        self._owned: dict[str, list[bool]] = {}
        self._held: dict[str, list[bool]] = {}
        self._held_in_loop: dict[Operation, set[int]] = {}
        self._invariants: dict[Operation, set[int]] = {}

    def owns(self, op: Operation, number: int) -> bool:
        """Return whether `op`, or an operation inside it, updates the operand in place."""
        if target(op) in IN_PLACE or op.name == "stablehlo.dynamic_update_slice":
            return number == 0
        if op.name == "stablehlo.while":
            return number not in self.invariants(op)
        return op.name == "func.call" and self._argument(self._owned, self.owns, op, number)

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
