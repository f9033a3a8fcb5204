"""A pass over lowered StableHLO that lets XLA update every buffer in place.

XLA copies a buffer before an in-place operation if a reader of the old value might run later. Readers that come
earlier in the program, but that the update does not depend on, are such readers: nothing orders the two. This pass
makes the order explicit. For each value with readers and one last owner (the operation that updates it in place,
or the loop, branch or call inside which that happens), the readers' results become operands of the owner, which
ignores them, so that reading comes first by data dependence. An owner that is not one of our calls gets a fence in
front: an in-place identity that takes those operands instead. A reader that follows its owner in the program text
but does not depend on it is moved in front of it. If what it is made of may not move, the owner is moved after it.

What XLA would fuse with a reader of a whole buffer reads that buffer as well, so the owner waits for all of it.
"""

from collections.abc import Sequence

from jax.interpreters.mlir import ir

from jax_tensorarray import _gates
from jax_tensorarray._lowering.build import custom_call, layouts, replaced
from jax_tensorarray._lowering.calls import (
    PREFIX,
    UPDATING,
    is_ours,
    target,
)
from jax_tensorarray._lowering.mlir import Operation, Value, blocks, callee, nested_operands, num_bytes, operation, walk
from jax_tensorarray._lowering.ownership import Ownership


def order_readers(
    functions: dict[str, Operation], ownership: Ownership, *, sinks: bool = False, barriers_hold: bool = True
) -> None:
    """Put the readers of every value before its last owner, in all blocks.

    `sinks` says that XLA computes an array again inside of a loop if it is larger than its operands, as it does for a
    TPU.
    """
    for function in functions.values():
        for block in list(blocks(function)):
            _order_block(block, ownership, sinks, barriers_hold)


# --- ordering one block ----------------------------------------------------------------------------------------


class _Block:
    """The operations of one block in their current order; the terminator is the last."""

    def __init__(self, block: ir.Block, functions: dict[str, Operation]) -> None:
        self.block, self.functions = block, functions
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

    def descendants(self, k: int, until: int) -> set[int]:
        """Return the operations before operation `until` that depend on operation `k`, itself included."""
        found = {k}
        for m in self.order[self.rank[k] + 1 : self.rank[until]]:
            producers = (self.producer(value) for _, _, value in nested_operands(self.operations[m]))
            if any(p in found for p in producers):
                found.add(m)
        return found

    def used_after(self, owner: int, result: Value, limit: float) -> Value:
        """Return a result, or what is made of it, that is used after the owner, too.

        What passes a barrier and is not used then does not wait: XLA removes it from the barrier.
        """
        values, found = [result], {result}
        for value in values:
            users = self.users(value)
            if any(self.rank[k] > self.rank[owner] for k in users) and num_bytes(value) <= limit:
                return value
            values += self._made_before(owner, users, found)
        return result

    def users(self, value: Value) -> list[int]:
        """Return the operations that use a value, except for fences that were put in."""
        return [k for k, _, _ in self.uses(value)]

    def uses(self, value: Value) -> list[tuple[int, Operation, int]]:
        """Return the uses of a value here: the operation of the block, the one in it that uses it, and as what."""
        found = [(operation(use.owner), use.operand_number) for use in value.uses]
        return [(k, user, number) for user, number in found if (k := self.number_of(user)) is not None]

    def _made_before(self, owner: int, users: Sequence[int], found: set[Value]) -> list[Value]:
        """Return the results of those operations that come before the owner. They are added to what was `found`."""
        made = [x for k in users if self.rank[k] < self.rank[owner] for x in self.operations[k].results]
        new = [x for x in dict.fromkeys(made) if x not in found]
        found.update(new)
        return new

    def made_at_once(self, reader: int, buffer: Value) -> list[int]:
        """Return a reader of all of a buffer, and what uses the large arrays that are made of it, except the last."""
        found = [reader]
        if num_bytes(buffer) < _gates.ORDERED_BYTES_OF_ALL or not _is_fused(self.operations[reader], self.functions):
            return found
        for k in found:
            large = [x for x in self.operations[k].results if num_bytes(x) > num_bytes(buffer) / 2]
            users = {m for x in large for m in self.users(x)}
            found += sorted(m for m in users if m not in found and m != len(self.operations) - 1)
        return found

    def waited_for(self, owner: int, reader: int, buffer: Value) -> list[Value]:
        """Return what the owner has to wait for, so that a reader of its buffer comes first."""
        op, limit = self.operations[reader], num_bytes(buffer) / 2
        results = [x for x in op.results if isinstance(x.type, ir.RankedTensorType)]
        if not is_ours(op) and _is_fused(op, self.functions) and num_bytes(buffer) >= _gates.ORDERED_BYTES_OF_ALL:
            return list(dict.fromkeys(x for result in results for x in self._made_of(owner, result, limit)))
        # What a read of ours gives passes a barrier of its own.
        results = [x for x in results if num_bytes(x) <= limit]
        return results if is_ours(op) else [self.used_after(owner, x, limit) for x in results]

    def _made_of(self, owner: int, result: Value, limit: float) -> list[Value]:
        """Return all that is made of a result of a reader with which XLA may fuse the reader.

        That is nothing if a large array is used after the owner: it would have to be materialised.
        """
        waited, values, found = [], [result], {result}
        for value in values:
            if not _is_fused(operation(value.owner), self.functions):
                last = self.used_after(owner, value, limit)
                waited += [last] if num_bytes(last) <= limit else []
                continue
            users = self.users(value)
            if any(self.rank[k] > self.rank[owner] for k in users):
                if num_bytes(value) > limit:
                    return []
                waited.append(value)
            values += self._made_before(owner, users, found)
        return waited

    def number_of(self, op: Operation) -> int | None:
        """Return the operation that an operation is, or is inside of: None for a fence, and for one outside."""
        while op.block != self.block:
            op = operation(op.block.owner)
            if op.name == "func.func":
                return None
        return self.identity.get(op)

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
        users = self._taken_out({operation(use.owner) for result in op.results for use in result.uses})
        self.operations[k] = _with_operands(op, extra)
        self.identity.update([(self.operations[k], k), *users])

    def fence(self, k: int, value: Value, readers: Sequence[Value]) -> None:
        """Give an operation the value through a fence."""
        op = self.operations[k]
        own = self._taken_out({op})
        _fence(op, value, readers)
        self.identity.update(own)

    def _taken_out(self, ops: set[Operation]) -> list[tuple[Operation, int]]:
        """Take operations out of `identity` that are to have other operands, and return them with their numbers.

        MLIR computes the hash of an operation from its operands.
        """
        return [(op, self.identity.pop(op)) for op in ops if op in self.identity]


def _order_block(mlir_block: ir.Block, ownership: Ownership, sinks: bool, barriers_hold: bool) -> None:
    block = _Block(mlir_block, ownership.functions)
    owning: dict[Value, set[int]] = {}
    for k, op in enumerate(block.operations):
        for user in (op, *walk(op)):
            for number in ownership.owned(user):
                owning.setdefault(user.operands[number], set()).add(k)
    # In which operation of the block each of these values is used, by which operation in it, and as which operand.
    uses = {value: block.uses(value) for value in owning}
    pinned = set().union(*owning.values())

    def may_move(moved: set[int]) -> bool:
        return not moved & pinned and all(_is_pure(block.operations[m], ownership.functions) for m in moved)

    pending: dict[int, list[tuple[Value, list[int]]]] = {}
    for value, candidates in owning.items():
        if num_bytes(value) < _gates.ORDERED_BYTES and not any(n in ownership.held(user) for _, user, n in uses[value]):
            continue  # and no call of ours has it as its buffer
        # Of several owners the last may have the buffer itself; the others copy it, as their meaning demands.
        owner = max(candidates, key=lambda k: block.rank[k])
        readers = []
        for k in sorted({k for k, _, _ in uses[value]} - candidates):
            if k == len(block.operations) - 1:
                continue  # the value leaves the block, so it has to outlive the owner
            if block.rank[k] > block.rank[owner]:
                since = block.rank[owner]
                together = set().union(*(block.ancestors(m, since) for m in block.made_at_once(k, value)))
                moved = together if may_move(together) else block.ancestors(k, since)
                if may_move(moved):
                    block.move_before(moved, owner)
                elif owner in moved or not _sink(block, owner, k, owning, ownership):
                    continue  # it depends on the owner, or neither may move: XLA has to copy
            readers.append(k)
        if readers:
            pending.setdefault(owner, []).append((value, readers))

    # Last owner first: an op is replaced to give it operands, and its old results are gone for the owners after it.
    for owner, values in sorted(pending.items(), key=lambda item: -block.rank[item[0]]):
        for value, readers in values:
            known = block.ancestors(owner, min(block.rank[k] for k in readers))
            if barriers_hold and num_bytes(value) >= _gates.ORDERED_BYTES and _is_read_before_it_leaves(block, owner):
                known = set()
            results = [x for k in readers if k not in known for x in block.waited_for(owner, k, value)]
            op = block.operations[owner]
            if not results:
                continue
            if target(op) in UPDATING and op.operands[0] == value:
                block.add_operands(owner, results)
            else:
                block.fence(owner, value, results)

    for op in block.operations:
        if op.name == "stablehlo.while":
            for k in ownership.invariants(op):
                if (_is_splat(op.operands[k]) or (sinks and _is_computed(op.operands[k]))) and k in ownership.held(op):
                    _fence(op, op.operands[k], [])


def _is_read_before_it_leaves(block: _Block, owner: int) -> bool:
    """Return whether a branch returns what an operation makes of a buffer, and reads it, too.

    Then XLA copies the buffer twice, even if the operation is made of all that is read before: a barrier prevents it.
    """
    if operation(block.block.owner).name != "stablehlo.case":
        return False
    end = len(block.operations) - 1
    users = [[operation(use.owner) for use in result.uses] for result in block.operations[owner].results]
    found = [{block.number_of(op) for op in ops} for ops in users]
    return any(end in numbers and len(numbers) > 1 for numbers in found)


def _sink(block: _Block, owner: int, reader: int, owning: dict[Value, set[int]], ownership: Ownership) -> bool:
    """Move an owner and what depends on it after a reader. Return whether that is possible."""
    moved = block.descendants(owner, reader)
    between = {k for k in block.order[block.rank[owner] : block.rank[reader] + 1] if k not in moved}
    for k in moved:
        op = block.operations[k]
        if not _is_pure(op, ownership.functions) and target(op) not in UPDATING:
            return False
        if any(owning.get(value, set()) & between for _, _, value in nested_operands(op)):
            return False  # it reads what is updated between the two
    block.move_before(moved, block.order[block.rank[reader] + 1])
    return True


def _is_fused(op: Operation, functions: dict[str, Operation]) -> bool:
    """Return whether XLA may repeat an operation in each fusion that uses its results."""
    if (name := callee(op)) is not None:
        return all(_is_fused(inner, functions) for inner in walk(functions[name]) if inner.name != "func.return")
    is_plain = op.name.startswith(("stablehlo.", "chlo.")) and not len(op.regions)
    return is_plain and op.name.removeprefix("stablehlo.") not in _MADE_ALONE


#: Operations without a region that XLA repeats in no fusion.
_MADE_ALONE = frozenset(
    (
        *("cholesky", "convolution", "custom_call", "dot_general", "dynamic_update_slice", "fft"),
        *("optimization_barrier", "rng", "rng_bit_generator", "triangular_solve"),
    )
)


def _is_splat(value: Value) -> bool:
    """Return whether XLA would rather make this array again in every iteration than carry it into a loop."""
    producer = None if isinstance(value, ir.BlockArgument) else operation(value.owner)
    return producer is not None and producer.name in ("stablehlo.broadcast_in_dim", "stablehlo.constant")


def _is_computed(value: Value) -> bool:
    """Return whether this array is made elementwise, so that XLA may move what makes it."""
    producer = None if isinstance(value, ir.BlockArgument) else operation(value.owner)
    if producer is None or not producer.name.startswith("stablehlo."):
        return False
    return not producer.regions and producer.name not in ("stablehlo.custom_call", "stablehlo.optimization_barrier")


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


def _with_operands(op: Operation, extra: Sequence[Value]) -> Operation:
    more = ir.ArrayAttr.get([*op.attributes["operand_layouts"], *layouts(extra)])
    return replaced(op, [*op.operands, *extra], [], operand_layouts=more)


def _fence(op: Operation, value: Value, readers: Sequence[Value]) -> None:
    """Give `op` the value through an in-place identity that waits for the readers."""
    with ir.InsertionPoint(op), op.location:
        fence = custom_call("fence", [value, *readers], value.type, {}, in_place=True)
    for user, number, used in list(nested_operands(op)):
        if used == value:
            user.operands[number] = fence
