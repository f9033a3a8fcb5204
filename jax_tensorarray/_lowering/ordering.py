"""A pass over lowered StableHLO that lets XLA update every buffer in place.

XLA copies a buffer before an in-place operation if a reader of the old value might run later. Readers that come
earlier in the program, but that the update does not depend on, are such readers: nothing orders the two. This pass
makes the order explicit. For each value with readers and one last owner (the operation that updates it in place,
or the loop, branch or call inside which that happens), the readers' results become operands of the owner, which
ignores them, so that reading comes first by data dependence. An owner that is not one of our calls gets a fence in
front: an in-place identity that takes those operands instead. A reader that follows its owner in the program text
but does not depend on it is moved in front of it.

Calls in loops that raise or allocate are pinned there: hoisted, they would raise in a loop of no steps.
"""

from collections.abc import Sequence
from typing import Any

from jax.interpreters.mlir import ir

from jax_tensorarray import _compat
from jax_tensorarray._lowering import fallback
from jax_tensorarray._lowering.bounds import mark_those_in_range
from jax_tensorarray._lowering.branches import split_updating_branches
from jax_tensorarray._lowering.mlir import (
    CONFIG,
    IN_PLACE,
    MARK,
    PREFIX,
    UNKNOWN,
    WITHOUT_KERNELS,
    Module,
    Operation,
    Value,
    blocks,
    config,
    custom_call,
    functions_in_loops,
    is_ours,
    layouts,
    loops_of,
    nested_operands,
    num_bytes,
    operation,
    target,
    walk,
)
from jax_tensorarray._lowering.partition import is_divided, label_calls
from jax_tensorarray._lowering.record import check_by_record, drop_strays
from jax_tensorarray._lowering.slices import default_lowering, use_slices


def order_readers(module: ir.Module, platforms: Sequence[str] = (), is_compiled_next: bool = False) -> None:
    """Rewrite `module` in place for these platforms. A module without our calls is left as it is."""
    if MARK not in module.operation.attributes:
        return
    del module.operation.attributes[MARK]
    functions = {
        op.attributes["sym_name"].value: op for op in map(operation, module.body.operations) if op.name == "func.func"
    }
    # How XLA treats barriers and slices is known for the installed version only.
    platform = platforms[0] if len(platforms) == 1 and (is_compiled_next or platforms[0] in WITHOUT_KERNELS) else None
    with module.context:
        calls_nothing = not WITHOUT_KERNELS.isdisjoint(platforms)
        meanings = {name: functions.pop(name) for name in fallback.names(functions)} if calls_nothing else {}
        divided = is_divided(module)
        platform = None if divided and platform not in WITHOUT_KERNELS else platform
        needs_unknown = platform is not None and not _compat.barriers_hold(platform)
        if platform is not None:
            mark_those_in_range(functions)
            if platform in WITHOUT_KERNELS:
                drop_strays(functions)
            else:
                check_by_record(functions, default_lowering(), unknown=needs_unknown)
        everything = Module(functions)
        for function in functions.values():
            for block in reversed(list(blocks(function))):
                for op in [op for op in map(operation, block.operations) if op.name == "stablehlo.case"]:
                    split_updating_branches(op, everything)
        for function in functions.values():
            for block in list(blocks(function)):
                _order_block(block, everything)
        use_slices(functions, platform=platform, divided=divided)
        if needs_unknown:
            for op in [op for function in functions.values() for op in (function, *walk(function))]:
                if UNKNOWN in op.attributes:
                    del op.attributes[UNKNOWN]
        _pin_to_loops(functions)
        if calls_nothing:
            fallback.replace_calls(functions, meanings)
        label_calls(module)


# --- ordering one block ----------------------------------------------------------------------------------------


class _Block:
    """The operations of one block in their current order; the terminator is the last."""

    def __init__(self, block: ir.Block) -> None:
        self.operations = [operation(op) for op in block.operations]
        self.identity = {op: k for k, op in enumerate(self.operations)}
        self.order = list(range(len(self.operations)))
        self.rank = list(self.order)

    def producer(self, value: Value) -> int | None:
        """Return the operation of this block that makes `value`."""
        return None if isinstance(value, ir.BlockArgument) else self.identity.get(operation(value.owner))

    def ancestors(self, k: int, since: int) -> set[int]:
        """Return the operations of rank `since` or more that operation `k` depends on, itself included."""
        found, stack = set(), [k]
        while stack:
            at = stack.pop()
            if at in found or self.rank[at] < since:
                continue
            found.add(at)
            producers = (self.producer(value) for _, _, value in nested_operands(self.operations[at]))
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

    def add_operands(self, k: int, extra: Sequence[Value]) -> None:
        """Replace one of our calls by the same call with more operands."""
        op = self.operations[k]
        del self.identity[op]
        self.operations[k] = _with_operands(op, extra)
        self.identity[self.operations[k]] = k


def _order_block(mlir_block: ir.Block, module: Module) -> None:
    block = _Block(mlir_block)
    users: dict[Value, set[int]] = {}
    owning: dict[Value, set[int]] = {}
    for k, op in enumerate(block.operations):
        for user, number, value in nested_operands(op):
            users.setdefault(value, set()).add(k)
            if module.owns(user, number):
                owning.setdefault(value, set()).add(k)
    pinned = set().union(*owning.values())

    pending: dict[int, list[tuple[Value, list[int]]]] = {}
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

    # Last owner first: an op is replaced to give it operands, and its old results are gone for the owners after it.
    for owner, values in sorted(pending.items(), key=lambda item: -block.rank[item[0]]):
        for value, readers in values:
            known = block.ancestors(owner, min(block.rank[k] for k in readers))
            results = _small_results([block.operations[k] for k in readers if k not in known], num_bytes(value) / 2)
            op = block.operations[owner]
            if not results:
                continue
            if target(op) in IN_PLACE and op.operands[0] == value:
                block.add_operands(owner, results)
            else:
                _fence(op, value, results)

    for op in block.operations:
        if op.name == "stablehlo.while":
            for k in module.invariants(op):
                if _is_splat(op.operands[k]) and module.holds(op, k):
                    _fence(op, op.operands[k], [])


def _is_splat(value: Value) -> bool:
    """Return whether XLA would rather make this array anew in every iteration than carry it into a loop."""
    producer = None if isinstance(value, ir.BlockArgument) else operation(value.owner)
    return producer is not None and producer.name in ("stablehlo.broadcast_in_dim", "stablehlo.constant")


def _is_pure(op: Operation, functions: dict[str, Operation]) -> bool:
    """Return whether running `op` at another point of its block cannot be observed."""
    if op.name == "stablehlo.custom_call":
        return target(op) in (PREFIX + "read", PREFIX + "read_part", PREFIX + "check")
    if op.name == "func.call":
        return all(_is_pure(inner, functions) for inner in walk(functions[op.attributes["callee"].value]))
    if not op.name.startswith(("stablehlo.", "chlo.", "func.return")) or op.name in _IMPURE:
        return False
    return all(_is_pure(inner, functions) for inner in walk(op))


_IMPURE = frozenset(
    "stablehlo." + name
    for name in ("after_all", "collective_broadcast", "create_token", "infeed", "outfeed", "recv", "rng", "send")
)


def _small_results(readers: Sequence[Operation], limit: float) -> list[Value]:
    """Return the results to wait for. Large results are left out: they would have to be materialised."""
    results = [result for op in readers for result in op.results if isinstance(result.type, ir.RankedTensorType)]
    return [result for result in results if num_bytes(result) <= limit]


def _with_operands(op: Operation, extra: Sequence[Value]) -> Operation:
    attributes = {name: op.attributes[name] for name in op.attributes}
    attributes["operand_layouts"] = ir.ArrayAttr.get([*attributes["operand_layouts"], *layouts(extra)])
    with ir.InsertionPoint(op):
        new = ir.Operation.create(
            op.name, [r.type for r in op.results], [*op.operands, *extra], attributes, loc=op.location
        )
    for old_result, new_result in zip(op.results, new.results, strict=True):
        old_result.replace_all_uses_with(new_result)
    op.erase()
    return new


def _fence(op: Operation, value: Value, readers: Sequence[Value]) -> None:
    """Give `op` the value by way of an in-place identity that waits for the readers."""
    with ir.InsertionPoint(op), op.location:
        fence = custom_call("fence", [value, *readers], value.type, {}, in_place=True)
    for user, number, used in list(nested_operands(op)):
        if used == value:
            user.operands[number] = fence


# --- what must stay in its loop --------------------------------------------------------------------------------


def _pin_to_loops(functions: dict[str, Operation]) -> None:
    """Mark the calls in loops that raise or allocate, so that XLA does not hoist them as loop-invariant."""
    called = functions_in_loops(functions)
    for name, function in functions.items():
        everywhere = [function] if name in called else loops_of(function)
        for op in [op for outer in everywhere for op in walk(outer)]:
            if _raises_or_allocates(op):
                op.attributes["has_side_effect"] = ir.BoolAttr.get(True)


def _raises_or_allocates(op: Operation) -> bool:
    if target(op) == PREFIX + "empty":
        return True
    attributes: Any = config(op) if is_ours(op) and CONFIG in op.attributes else {}
    return "strict" in attributes and attributes["strict"].value
