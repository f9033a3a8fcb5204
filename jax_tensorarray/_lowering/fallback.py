"""Plain JAX for the calls that are left, on platforms without kernels.

There, too, a row op is lowered to a call, so that the pass over the module finds it, and also to a function of the
same meaning. The calls that have not become slices become calls of these functions, and fences become barriers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters.mlir import ir

from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.calls import FALLBACK, PREFIX, target
from jax_tensorarray._lowering.mlir import Operation, Value, entry, walk


def add(context: Any, name: str, call: Operation, count: int, meaning: Callable[..., Sequence[Value]]) -> None:
    """Add a function with the meaning of a call to the module of a `context`, and name it in the call.

    It takes so many of the call's operands; the others are waited for.
    """
    inputs = [v.type for v in list(call.operands)[:count]]
    attributes = {
        "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, [v.type for v in call.results])),
        "sym_name": ir.StringAttr.get(f"{PREFIX}{name}"),
        "sym_visibility": ir.StringAttr.get("private"),
    }
    with ir.InsertionPoint(context.module.body):
        function = ir.Operation.create("func.func", [], [], attributes, regions=1)
    found = context.symbol_table.insert(function)
    block = function.regions[0].blocks.append(*inputs)
    with ir.InsertionPoint(block):
        ir.Operation.create("func.return", [], meaning(*block.arguments))
    call.attributes[FALLBACK] = ir.FlatSymbolRefAttr.get(found.value)


def names(functions: dict[str, Operation]) -> set[str]:
    """Return the names of the functions that calls stand for."""
    calls = (op for function in functions.values() for op in walk(function) if FALLBACK in op.attributes)
    return {op.attributes[FALLBACK].value for op in calls}


def replace_calls(functions: dict[str, Operation], meanings: dict[str, Operation]) -> None:
    """Replace the calls in `functions` for which there are `meanings`, and the fences."""
    used = set()
    for function in functions.values():
        for op in list(walk(function)):
            if FALLBACK in op.attributes:
                name = op.attributes[FALLBACK].value
                used.add(name)
                _replace(op, len(entry(meanings[name]).arguments))
            elif target(op) == PREFIX + "fence":
                _replace_fence(op)
    for name, function in meanings.items():
        if name not in used:
            function.erase()


def _replace(call: Operation, count: int) -> None:
    """Replace a call by a call of its function, which takes `count` operands. It waits for the other operands."""
    operands = list(call.operands)
    with ir.InsertionPoint(call), call.location:
        if len(operands) > count:
            operands[0] = _after(operands[0], operands[count:])
        attributes = {"callee": call.attributes[FALLBACK]}
        new = ir.Operation.create("func.call", [r.type for r in call.results], operands[:count], attributes)
    for old_result, new_result in zip(call.results, new.results, strict=True):
        old_result.replace_all_uses_with(new_result)
    call.erase()


def _replace_fence(fence: Operation) -> None:
    buffer, *readers = fence.operands
    with ir.InsertionPoint(fence), fence.location:
        fence.results[0].replace_all_uses_with(_after(buffer, readers))
    fence.erase()


def _after(buffer: Value, readers: Sequence[Value]) -> Value:
    passed = hlo.optimization_barrier([buffer, *readers])  # of one operand, it is not a sequence
    return passed[0] if readers else passed
