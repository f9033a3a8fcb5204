"""The passes over lowered StableHLO, in their order.

The pipeline runs on every module into which one of our calls has been lowered. Each pass has a file, which says
what it is for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.interpreters.mlir import ir

from jax_tensorarray import _compat
from jax_tensorarray._lowering import fallback
from jax_tensorarray._lowering.calls import (
    MARK,
    PREFIX,
    WITHOUT_KERNELS,
    config,
    configs_read_once,
    is_ours,
    target,
)
from jax_tensorarray._lowering.mlir import Operation, functions_in_loops, loops_of, operation, walk
from jax_tensorarray._lowering.ordering import order_readers
from jax_tensorarray._lowering.ownership_old import Ownership
from jax_tensorarray._lowering.partition import is_divided, label_calls
from jax_tensorarray._lowering.places import Places, name_places
from jax_tensorarray._lowering.slices_old import use_slices


class Lowered:
    """A module on its way to XLA, and what is known of where it runs."""

    def __init__(self, module: ir.Module, platforms: Sequence[str], is_compiled_next: bool) -> None:
        operations = [op for op in map(operation, module.body.operations) if op.name == "func.func"]
        self.module, self.functions = module, {op.attributes["sym_name"].value: op for op in operations}
        self.divided = is_divided(module)
        self.calls_nothing = not WITHOUT_KERNELS.isdisjoint(platforms)
        standing = fallback.names(self.functions) if self.calls_nothing else ()
        self.meanings = {name: self.functions.pop(name) for name in standing}  #: functions that calls stand for
        self.places, self.ownership = Places(self.functions), Ownership(self.functions)
        #: The only platform. How XLA treats barriers and slices is known for the installed version only.
        self.platform = platforms[0] if len(platforms) == 1 else None
        if self.platform not in WITHOUT_KERNELS and (self.divided or not is_compiled_next):
            self.platform = None
        self.is_known = self.platform is not None
        self.needs_opaque_zero = self.platform is not None and not _compat.barriers_hold(self.platform)


class Pass(NamedTuple):
    """What is done to a module, and to which modules."""

    run: Callable[[Lowered], None]
    applies_to: Callable[[Lowered], bool] = lambda m: True


def _unmark(functions: dict[str, Operation]) -> None:
    for op in [op for function in functions.values() for op in walk(function) if target(op) == PREFIX + "zero"]:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _pin_to_loops(functions: dict[str, Operation]) -> None:
    """Mark the calls in loops that raise or allocate, so that XLA does not hoist them as loop-invariant.

    Hoisted, they would raise in a loop of no steps.
    """
    called = functions_in_loops(functions)
    for name, function in functions.items():
        everywhere = [function] if name in called else loops_of(function)
        for op in [op for outer in everywhere for op in walk(outer)]:
            if target(op) == PREFIX + "empty" or (is_ours(op) and config(op).strict):
                op.attributes["has_side_effect"] = ir.BoolAttr.get(True)


PASSES = (
    Pass(
        lambda m: order_readers(m.functions, m.ownership, sinks=m.calls_nothing, barriers_hold=not m.needs_opaque_zero)
    ),
    Pass(lambda m: use_slices(m.functions, platform=m.platform, divided=m.divided)),
    Pass(lambda m: _unmark(m.functions), lambda m: m.needs_opaque_zero),
    Pass(lambda m: _pin_to_loops(m.functions)),
    Pass(lambda m: name_places(m.functions, m.places)),
    Pass(lambda m: fallback.replace_calls(m.functions, m.meanings), lambda m: m.calls_nothing),
    Pass(lambda m: label_calls(m.module), lambda m: m.divided),
)


def rewrite(module: ir.Module, platforms: Sequence[str] = (), is_compiled_next: bool = False) -> None:
    """Rewrite `module` in place for these platforms. A module without our calls is left as it is."""
    if MARK not in module.operation.attributes:
        return
    del module.operation.attributes[MARK]
    with module.context, configs_read_once():
        lowered = Lowered(module, platforms, is_compiled_next)
        for each in PASSES:
            if each.applies_to(lowered):
                each.run(lowered)
