"""A pass over lowered StableHLO that lets XLA update every buffer in place.

XLA copies a buffer before an in-place operation if a reader of the old value might run later. Readers that come
earlier in the program, but that the update does not depend on, are such readers: nothing orders the two. This pass
makes the order explicit. For each value with readers and one last owner (the operation that updates it in place,
or the loop, branch or call inside which that happens), the readers' results become operands of the owner, which
ignores them, so that reading comes first by data dependence. An owner that is not one of our calls gets a fence in
front: an in-place identity that takes those operands instead. A reader that follows its owner in the program text
but does not depend on it is moved in front of it.

The same walk marks the calls that XLA must not hoist out of a loop: those whose operands do not change in it, and
that raise or allocate. Hoisted, they would raise in a loop of no steps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.interpreters.mlir import ir

PREFIX = "jax_tensorarray_"

#: Our calls that update their first operand in place.
IN_PLACE = frozenset(PREFIX + name for name in ("write", "add", "swap", "mask", "fence"))

Operation = Any


def order_readers(module: ir.Module) -> None:
    """Rewrite `module` in place. A module without our calls is left as it is."""
    functions = {op.attributes["sym_name"].value: op for op in map(_operation, module.body.operations)
                 if op.name == "func.func"}
    if not any(_target(op).startswith(PREFIX) for f in functions.values() for op in _walk(f)):
        return
    with module.context:
        everything = _Module(functions)
        for function in functions.values():
            for block in list(_blocks(function)):
                _order_block(block, everything)
        _Hoisting(functions).function("main", [False] * len(_entry(functions["main"]).arguments), False)


# --- reading MLIR ----------------------------------------------------------------------------------------------


def _operation(op: Any) -> Operation:
    return getattr(op, "operation", op)


def _target(op: Operation) -> str:
    return op.attributes["call_target_name"].value if op.name == "stablehlo.custom_call" else ""


def _entry(function: Operation) -> ir.Block:
    return function.regions[0].blocks[0]


def _blocks(op: Operation) -> Iterator[ir.Block]:
    """Every block inside `op`, innermost last."""
    for region in op.regions:
        for block in region.blocks:
            yield block
            for inner in block.operations:
                yield from _blocks(_operation(inner))


def _walk(op: Operation) -> Iterator[Operation]:
    for block in _blocks(op):
        yield from map(_operation, block.operations)


def _nested_operands(op: Operation) -> Iterator[tuple[Operation, int, ir.Value]]:
    """Each (operation, operand number, value) of `op` and of everything in its regions."""
    for number, value in enumerate(op.operands):
        yield op, number, value
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _nested_operands(_operation(inner))


def _num_bytes(value: ir.Value) -> float:
    """Size of a ranked tensor; infinite for anything else."""
    if not isinstance(value.type, ir.RankedTensorType) or not value.type.has_static_shape:
        return math.inf
    element = value.type.element_type
    width = element.element_type.width * 2 if isinstance(element, ir.ComplexType) else getattr(element, "width", 8)
    return math.prod(value.type.shape) * max(width, 8) / 8


# --- who owns a buffer -----------------------------------------------------------------------------------------


class _Module:
    """Answers what happens to an operand of an operation inside it, through loops and calls."""

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.functions = functions
        self._owned: dict[str, list[bool]] = {}
        self._held: dict[str, list[bool]] = {}

    def owns(self, op: Operation, number: int) -> bool:
        """Whether the operand is updated in place by `op`, or inside it."""
        if _target(op) in IN_PLACE or op.name == "stablehlo.dynamic_update_slice":
            return number == 0
        if op.name == "stablehlo.while":
            return number not in _invariants(op)
        return op.name == "func.call" and self._argument(self._owned, self.owns, op, number)

    def holds(self, op: Operation, number: int) -> bool:
        """Whether one of our calls gets the operand as its buffer, in `op` or inside it."""
        if op.name == "stablehlo.while":
            body = op.regions[1].blocks[0]
            return body.arguments[number] in self._values(body, self.holds)
        if op.name == "func.call":
            return self._argument(self._held, self.holds, op, number)
        return number == 0 and _target(op).startswith(PREFIX)

    def _argument(self, known: dict[str, list[bool]], relation: Any, call: Operation, number: int) -> bool:
        name = call.attributes["callee"].value
        if name not in known:
            block = _entry(self.functions[name])
            values = self._values(block, relation)
            known[name] = [argument in values for argument in block.arguments]
        return known[name][number]

    @staticmethod
    def _values(block: ir.Block, relation: Any) -> set[ir.Value]:
        return {value for op in map(_operation, block.operations) for user, number, value in _nested_operands(op)
                if relation(user, number)}


def _invariants(loop: Operation) -> set[int]:
    """Positions of the loop-carried values that the body returns as they were."""
    body = loop.regions[1].blocks[0]
    yielded = _operation(list(body.operations)[-1]).operands
    return {k for k, (argument, value) in enumerate(zip(body.arguments, yielded, strict=True)) if argument == value}


# --- ordering one block ----------------------------------------------------------------------------------------


class _Block:
    """The operations of one block in their current order; the terminator is the last."""

    def __init__(self, block: ir.Block) -> None:
        self.operations = [_operation(op) for op in block.operations]
        self.identity = {op: k for k, op in enumerate(self.operations)}
        self.order = list(range(len(self.operations)))
        self.rank = list(self.order)

    def producer(self, value: ir.Value) -> int | None:
        """The operation of this block that makes `value`."""
        return None if isinstance(value, ir.BlockArgument) else self.identity.get(_operation(value.owner))

    def ancestors(self, k: int, since: int) -> set[int]:
        """Operations of rank `since` or more that operation `k` depends on, itself included."""
        found, stack = set(), [k]
        while stack:
            at = stack.pop()
            if at in found or self.rank[at] < since:
                continue
            found.add(at)
            producers = (self.producer(value) for _, _, value in _nested_operands(self.operations[at]))
            stack.extend(p for p in producers if p is not None)
        return found

    def move_before(self, moved: set[int], k: int) -> None:
        in_order = [m for m in self.order if m in moved]
        for m in in_order:
            self.operations[m].move_before(self.operations[k])
        rest = [m for m in self.order if m not in moved]
        at = rest.index(k)
        self.order = [*rest[:at], *in_order, *rest[at:]]
        for r, m in enumerate(self.order):
            self.rank[m] = r

    def add_operands(self, k: int, extra: Sequence[ir.Value]) -> None:
        """Replace one of our calls by the same call with more operands."""
        op = self.operations[k]
        del self.identity[op]
        self.operations[k] = _with_operands(op, extra)
        self.identity[self.operations[k]] = k


def _order_block(mlir_block: ir.Block, module: _Module) -> None:
    block = _Block(mlir_block)
    users: dict[ir.Value, set[int]] = {}
    owning: dict[ir.Value, set[int]] = {}
    for k, op in enumerate(block.operations):
        for user, number, value in _nested_operands(op):
            users.setdefault(value, set()).add(k)
            if module.owns(user, number):
                owning.setdefault(value, set()).add(k)
    pinned = set().union(*owning.values())

    pending: dict[int, list[tuple[ir.Value, list[int]]]] = {}
    for value, candidates in owning.items():
        # Of several owners the last may have the buffer itself; the others copy it, as their meaning demands.
        owner = max(candidates, key=lambda k: block.rank[k])
        readers = []
        for k in sorted(users[value] - candidates):
            if k == len(block.operations) - 1:
                continue  # the value leaves the block, so it has to outlive the owner
            if block.rank[k] > block.rank[owner]:
                moved = block.ancestors(k, block.rank[owner])
                if moved & pinned or not all(_is_pure(block.operations[m], module.functions) for m in moved):
                    continue  # it depends on the owner, or may not move: XLA has to copy
                block.move_before(moved, owner)
            readers.append(k)
        if readers:
            pending.setdefault(owner, []).append((value, readers))

    for owner, values in pending.items():
        for value, readers in values:
            known = block.ancestors(owner, min(block.rank[k] for k in readers))
            results = _small_results([block.operations[k] for k in readers if k not in known], _num_bytes(value) / 2)
            op = block.operations[owner]
            if not results:
                continue
            if _target(op) in IN_PLACE and op.operands[0] == value:
                block.add_operands(owner, results)
            else:
                _fence(op, value, results)

    for op in block.operations:
        if op.name == "stablehlo.while":
            for k in _invariants(op):
                if _is_splat(op.operands[k]) and module.holds(op, k):
                    _fence(op, op.operands[k], [])


def _is_splat(value: ir.Value) -> bool:
    """Whether XLA would rather make this array anew in every iteration of a loop than carry it into the loop."""
    producer = None if isinstance(value, ir.BlockArgument) else _operation(value.owner)
    return producer is not None and producer.name in ("stablehlo.broadcast_in_dim", "stablehlo.constant")


def _is_pure(op: Operation, functions: dict[str, Operation]) -> bool:
    """Whether running `op` at another point of its block cannot be observed."""
    if op.name == "stablehlo.custom_call":
        return _target(op) == PREFIX + "read"
    if op.name == "func.call":
        return all(_is_pure(inner, functions) for inner in _walk(functions[op.attributes["callee"].value]))
    if not op.name.startswith(("stablehlo.", "chlo.", "func.return")) or op.name in _IMPURE:
        return False
    return all(_is_pure(inner, functions) for inner in _walk(op))


_IMPURE = frozenset("stablehlo." + name for name in (
    "after_all", "collective_broadcast", "create_token", "infeed", "outfeed", "recv", "rng", "send"))


def _small_results(readers: Sequence[Operation], limit: float) -> list[ir.Value]:
    """What to wait for. A result as large as the buffer would have to be materialised for it, so none of those."""
    return [result for op in readers for result in op.results if _num_bytes(result) <= limit]


def _layouts(values: Sequence[ir.Value]) -> list[ir.Attribute]:
    ranks = [value.type.rank for value in values]
    return [ir.DenseIntElementsAttr.get(np.arange(rank - 1, -1, -1), type=ir.IndexType.get()) for rank in ranks]


def _with_operands(op: Operation, extra: Sequence[ir.Value]) -> Operation:
    attributes = {name: op.attributes[name] for name in op.attributes}
    attributes["operand_layouts"] = ir.ArrayAttr.get([*attributes["operand_layouts"], *_layouts(extra)])
    with ir.InsertionPoint(op):
        new = ir.Operation.create(op.name, [r.type for r in op.results], [*op.operands, *extra], attributes, loc=op.location)
    for old_result, new_result in zip(op.results, new.results, strict=True):
        old_result.replace_all_uses_with(new_result)
    op.erase()
    return new


def _fence(op: Operation, value: ir.Value, readers: Sequence[ir.Value]) -> None:
    """Give `op` the value by way of an in-place identity that waits for the readers."""
    attributes = {
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
        "backend_config": ir.DictAttr.get({}),
        "call_target_name": ir.StringAttr.get(PREFIX + "fence"),
        "has_side_effect": ir.BoolAttr.get(False),
        "operand_layouts": ir.ArrayAttr.get(_layouts([value, *readers])),
        "output_operand_aliases": ir.Attribute.parse(
            "[#stablehlo.output_operand_alias<output_tuple_indices = [], operand_index = 0, operand_tuple_indices = []>]"
        ),
        "result_layouts": ir.ArrayAttr.get(_layouts([value])),
    }
    with ir.InsertionPoint(op):
        fence = ir.Operation.create("stablehlo.custom_call", [value.type], [value, *readers], attributes, loc=op.location)
    for user, number, used in list(_nested_operands(op)):
        if used == value:
            user.operands[number] = fence.results[0]


# --- what must stay in its loop --------------------------------------------------------------------------------


class _Hoisting:
    """Marks calls that raise or allocate, and that XLA could take for invariant in the loop around them.

    A value varies if it depends on a loop-carried value that the body changes. XLA's own analysis finds no fewer
    invariant values than that, but for an expression it can simplify to one.
    """

    def __init__(self, functions: dict[str, Operation]) -> None:
        self.functions = functions
        self.seen: dict[tuple[str, tuple[bool, ...], bool], list[bool]] = {}

    def function(self, name: str, varies: Sequence[bool], in_loop: bool) -> list[bool]:
        """Visit a function whose arguments vary as told; return whether its results do."""
        key = (name, tuple(varies), in_loop)
        if key not in self.seen:
            block = _entry(self.functions[name])
            varying = {argument for argument, v in zip(block.arguments, varies, strict=True) if v}
            self.block(block, varying, in_loop)
            self.seen[key] = [value in varying for value in _operation(list(block.operations)[-1]).operands]
        return self.seen[key]

    def block(self, block: ir.Block, varying: set[ir.Value], in_loop: bool) -> None:
        for op in map(_operation, block.operations):
            operands = [value in varying for value in op.operands]
            if op.name == "func.call":
                results = self.function(op.attributes["callee"].value, operands, in_loop)
            else:
                if op.name == "stablehlo.while":
                    self.loop(op)
                else:
                    for region in op.regions:
                        for inner in region.blocks:
                            varying |= set(inner.arguments) if any(operands) else set()
                            self.block(inner, varying, in_loop)
                any_varies = any(value in varying for _, _, value in _nested_operands(op))
                results = [any_varies] * len(op.results)
                if in_loop and not any_varies and _raises_or_allocates(op):
                    op.attributes["has_side_effect"] = ir.BoolAttr.get(True)
            varying |= {value for value, v in zip(op.results, results, strict=True) if v}

    def loop(self, op: Operation) -> None:
        body, invariants = op.regions[1].blocks[0], _invariants(op)
        self.block(body, {argument for k, argument in enumerate(body.arguments) if k not in invariants}, True)


def _raises_or_allocates(op: Operation) -> bool:
    if _target(op) == PREFIX + "empty":
        return True
    config = op.attributes["backend_config"] if _target(op).startswith(PREFIX) else None
    return isinstance(config, ir.DictAttr) and "strict" in config and config["strict"].value
