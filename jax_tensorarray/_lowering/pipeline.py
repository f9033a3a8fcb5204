"""The order of the passes over lowered StableHLO.

The pipeline runs on every module into which one of our calls has been lowered. Each pass has a file, which says
what it is for. At the end, calls in loops that raise or allocate are pinned there: hoisted, they would raise in a loop
of no steps.
"""

from collections.abc import Sequence

from jax.interpreters.mlir import ir

from jax_tensorarray import _compat
from jax_tensorarray._lowering import fallback
from jax_tensorarray._lowering.bounds import mark_those_in_range
from jax_tensorarray._lowering.branches import split_updating_branches
from jax_tensorarray._lowering.calls import (
    MARK,
    PREFIX,
    UNKNOWN,
    WITHOUT_KERNELS,
    config,
    configs_read_once,
    is_ours,
    target,
)
from jax_tensorarray._lowering.deferred import raise_at_end
from jax_tensorarray._lowering.mlir import Operation, blocks, functions_in_loops, loops_of, operation, walk
from jax_tensorarray._lowering.ordering import order_readers
from jax_tensorarray._lowering.ownership import Module
from jax_tensorarray._lowering.partition import is_divided, label_calls
from jax_tensorarray._lowering.places import Places, name_places
from jax_tensorarray._lowering.record import check_by_record, drop_strays
from jax_tensorarray._lowering.slices import default_lowering, use_slices
from jax_tensorarray._lowering.uses import mark_unordered


def rewrite(module: ir.Module, platforms: Sequence[str] = (), is_compiled_next: bool = False) -> None:
    """Rewrite `module` in place for these platforms. A module without our calls is left as it is."""
    if MARK not in module.operation.attributes:
        return
    del module.operation.attributes[MARK]
    functions = {
        op.attributes["sym_name"].value: op for op in map(operation, module.body.operations) if op.name == "func.func"
    }
    # How XLA treats barriers and slices is known for the installed version only.
    platform = platforms[0] if len(platforms) == 1 and (is_compiled_next or platforms[0] in WITHOUT_KERNELS) else None
    with module.context, configs_read_once():
        calls_nothing = not WITHOUT_KERNELS.isdisjoint(platforms)
        meanings = {name: functions.pop(name) for name in fallback.names(functions)} if calls_nothing else {}
        divided = is_divided(module)
        platform = None if divided and platform not in WITHOUT_KERNELS else platform
        places = Places(functions)
        needs_unknown = platform is not None and not _compat.barriers_hold(platform)
        if platform is not None:
            mark_those_in_range(functions)
            mark_unordered(functions, platform, barriers_hold=not needs_unknown)
            if platform in WITHOUT_KERNELS:
                drop_strays(functions)
            else:
                check_by_record(functions, default_lowering(), places, unknown=needs_unknown)
        everything = Module(functions)
        for function in functions.values():
            for block in reversed(list(blocks(function))):
                for op in [op for op in map(operation, block.operations) if op.name == "stablehlo.case"]:
                    split_updating_branches(op, everything)
        order_readers(functions, everything, sinks=calls_nothing)
        use_slices(functions, platform=platform, divided=divided)
        if needs_unknown:
            for op in [op for function in functions.values() for op in (function, *walk(function))]:
                if UNKNOWN in op.attributes:
                    del op.attributes[UNKNOWN]
        _pin_to_loops(functions)
        if divided and is_compiled_next and tuple(platforms) == ("cpu",):
            raise_at_end(functions, places)
        name_places(functions, places)
        if calls_nothing:
            fallback.replace_calls(functions, meanings)
        label_calls(module)


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
    return is_ours(op) and bool(config(op).strict)
