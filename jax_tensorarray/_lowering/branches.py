"""Conditionals whose branches update buffers, in the form that XLA runs in place.

XLA's copy insertion treats the branches of a conditional as steps that run one after the other (always before jaxlib
0.12, and in some programs since). A branch that updates a buffer in place then seems to destroy what a later branch
still needs, and the buffer is copied in every execution. Only an update in the last branch is safe. So of two branches
the one that updates becomes the last. Any other conditional whose earlier branches update buffers becomes a chain of
two-way conditionals. Each conditional either passes everything on or, as its last branch, runs one of the original
branches. Exactly one of them does.
"""

from collections.abc import Callable, Sequence

from jax.interpreters.mlir import ir

from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.build import case, compare, return_from, splat, zeros
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    blocks,
    everything_in,
    is_inside,
    nested_operands,
    operation,
    terminator,
)
from jax_tensorarray._lowering.ownership import Ownership


def split_updating_branches(functions: dict[str, Operation], ownership: Ownership) -> None:
    """Rewrite every conditional so that at most its last branch updates a buffer from outside in place."""
    for function in functions.values():
        for block in reversed(list(blocks(function))):
            for op in [op for op in map(operation, block.operations) if op.name == "stablehlo.case"]:
                _split(op, ownership)


def _split(op: Operation, ownership: Ownership) -> None:
    branches = [region.blocks[0] for region in op.regions]
    owned = [_owned_captures(block, ownership) for block in branches]
    updating = [k for k, values in enumerate(owned) if values]
    if not updating or updating == [len(branches) - 1] or not all(_is_ranked(r) for r in op.results):
        return
    with ir.InsertionPoint(op), op.location:
        if len(branches) == 2 and updating == [0]:
            # In the other order. Of three branches, 0.10 copies if the two others return different things.
            _replace(op, case(_is_run(op.operands[0], 0, 2), [r.type for r in op.results], branches[::-1]))
            return
        stands_for = _placeholders(op, branches, dict.fromkeys(v for values in owned for v in values))
        passed = [stands_for[j] if j in stands_for else zeros(r.type) for j, r in enumerate(op.results)]
        if len(updating) < len(branches):
            passed = _case_of_others(op, [None if k in updating else b for k, b in enumerate(branches)], passed)
        for k in updating:
            _rename(branches[k], {v: passed[j] for j, v in stands_for.items()})
            index = _is_run(op.operands[0], k, len(branches))
            passed = case(index, [v.type for v in passed], [_passing(passed), branches[k]])
    _replace(op, passed)


def _replace(op: Operation, results: Sequence[Value]) -> None:
    for old, new in zip(op.results, results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _is_ranked(value: Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType) and value.type.has_static_shape


def _nested(block: ir.Block) -> list[tuple[Operation, int, Value]]:
    return [use for op in block.operations for use in nested_operands(operation(op))]


def _owned_captures(block: ir.Block, ownership: Ownership) -> dict[Value, None]:
    """Return the values from outside that a block updates in place.

    The set is ordered, so that the same program always lowers to the same text.
    """
    owned = (op.operands[number] for op in everything_in(block) for number in ownership.owned(op))
    return dict.fromkeys(v for v in owned if not is_inside(v, operation(block.owner)))


def _placeholders(op: Operation, blocks: Sequence[ir.Block], owned: dict[Value, None]) -> dict[int, Value]:
    """Map each result that is an outer buffer, updated in place, to that buffer, which is passed on meanwhile."""
    found: dict[int, Value] = {}
    left = dict(owned)
    for block in blocks:
        for j, value in enumerate(terminator(block).operands):
            source = _source(value, owned)
            if j not in found and source in left:
                found[j] = source
                del left[source]
    for j, result in enumerate(op.results):
        same = [v for v in left if v.type == result.type]
        if j not in found and same:
            found[j] = same[0]
            del left[same[0]]
    return found


def _source(value: Value, owned: dict[Value, None]) -> Value:
    """Follow a chain of in-place updates back, from each result to the operand in its place if it has its type."""
    while value not in owned and not isinstance(value, ir.BlockArgument):
        operands = list(operation(value.owner).operands)
        if value.result_number >= len(operands) or operands[value.result_number].type != value.type:
            break
        value = operands[value.result_number]
    return value


def _rename(block: ir.Block, names: dict[Value, Value]) -> None:
    for user, number, value in _nested(block):
        if value in names:
            user.operands[number] = names[value]


def _case_of_others(op: Operation, blocks: Sequence[ir.Block | None], passed: Sequence[Value]) -> list[Value]:
    """Make the conditional of the branches that update nothing.

    Values that all of them pass on unchanged do not go through it. Otherwise XLA takes the result for a buffer of its
    own, and copies.
    """
    others = [block for block in blocks if block is not None]
    changed = [j for j, v in enumerate(passed) if any(terminator(block).operands[j] != v for block in others)]
    if not changed and all(len(block.operations) == 1 for block in others):
        return list(passed)
    if changed:
        for block in others:
            return_from(block, [terminator(block).operands[j] for j in changed])
    else:
        changed = list(range(len(passed)))
    through = [passed[j] for j in changed]
    branches = [_passing(through) if block is None else block for block in blocks]
    results = case(op.operands[0], [v.type for v in through], branches)
    new = dict(zip(changed, results, strict=True))
    return [new.get(j, v) for j, v in enumerate(passed)]


def _passing(values: Sequence[Value]) -> Callable[[], Sequence[Value]]:
    return lambda: values


def _is_run(index: Value, k: int, count: int) -> Value:
    """Return 1 if a conditional of `count` branches would run branch `k` for `index`, else 0."""

    def compared(direction: str, to: int) -> Value:
        return compare(index, splat(index.type, to), direction)

    # An index out of range runs the last branch.
    runs = compared("EQ", k) if k < count - 1 else hlo.or_(compared("LT", 0), compared("GE", k))
    return hlo.convert(index.type, runs)
