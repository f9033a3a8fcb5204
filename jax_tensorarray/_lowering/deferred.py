"""Indices out of range on one of several CPU devices: they are raised where no device still waits for another.

An error ends the program of its device. If there is a collective later, the other devices wait for it there, until XLA
aborts the process. So a call whose attribute `op` begins with `>` drops the access, notes the error and goes on. At the
end of `main` there is a call of `raise`. It waits for all results, and so for all collectives. The results go through a
fence after it.

A loop that does not count its steps may wait for ever for a row that was dropped. In a program with such a loop, calls
raise where they are.
"""

import re

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.bounds_old import mark_those_in_range
from jax_tensorarray._lowering.build import custom_call, integer, return_from
from jax_tensorarray._lowering.calls import CONFIG, addresses_rows, declare, may_raise, target, with_config
from jax_tensorarray._lowering.mlir import (
    Operation,
    Value,
    added_by_step,
    constant,
    entry,
    operands_of,
    operation,
    terminator,
    walk,
)
from jax_tensorarray._lowering.places import Places

declare("raise", (), ("nothing",))


#: How a result is divided: the name of an attribute, and its value.
Sharding = tuple[str, ir.Attribute] | None


def raise_at_end(functions: dict[str, Operation], places: Places) -> None:
    """Have the calls in a program for several devices raise at its end, if they may."""
    mark_those_in_range(functions)
    everything = [op for function in functions.values() for op in walk(function)]
    raising = [op for op in everything if addresses_rows(op) and may_raise(op)]
    main = functions["main"]
    end = terminator(entry(main))
    results = {k: (value, _sharding(main, k)) for k, value in enumerate(end.operands) if _can_wait(value)}
    if not raising or not results or any(map(may_wait, everything)):
        return
    for op in raising:
        op.attributes[CONFIG] = with_config(op, op=">" + places.named(op))
    with ir.InsertionPoint(end), end.location:
        ready = {result: _divided(*result) for result in dict.fromkeys(results.values())}
        nothing = custom_call("raise", [*ready.values()], integer(32), {})
        operation(nothing.owner).attributes["has_side_effect"] = ir.BoolAttr.get(True)
        after = {
            result: _placed(custom_call("fence", [x, nothing], x.type, {}, in_place=True), result[0])
            for result, x in ready.items()
        }
    return_from(end.block, [after[results[k]] if k in results else x for k, x in enumerate(end.operands)])
    for op in filter(None, {_placing(value) for value, _ in after}):
        if not list(op.results[0].uses):
            op.erase()


def _sharding(main: Operation, number: int) -> Sharding:
    attributes = main.attributes["res_attrs"][number] if "res_attrs" in main.attributes else {}
    return next(((name, attributes[name]) for name in ("sdy.sharding", "mhlo.sharding") if name in attributes), None)


def _divided(value: Value, sharding: Sharding) -> Value:
    """Return what is placed, or else the value, divided as the result is: no collective has to come after this."""
    placing = _placing(value)
    value = value if placing is None else placing.operands[0]
    if sharding is None:
        return value
    name, how = sharding
    if name == "sdy.sharding":
        op = ir.Operation.create("sdy.sharding_constraint", [value.type], [value], {"sharding": how})
    else:
        attributes = {name: how, "call_target_name": ir.StringAttr.get("Sharding")}
        op = ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes)
    return op.results[0]


def _placing(value: Value) -> Operation | None:
    """Return what puts a value into another memory, if it has just been put there."""
    op = operation(value.owner)
    return op if target(op) == "annotate_device_placement" else None


def _placed(value: Value, like: Value) -> Value:
    """Return a value in the memory that another one has been put into."""
    placing = _placing(like)
    if placing is None:
        return value
    op = operation(placing.clone())
    op.operands[0] = value
    return op.results[0]


def _can_wait(value: Value) -> bool:
    """Return whether a fence can hand a value on, and it is not an argument."""
    t = value.type
    is_array = isinstance(t, ir.RankedTensorType) and t.has_static_shape and isinstance(value, ir.OpResult)
    return is_array and _WHOLE_BYTES.fullmatch(str(t.element_type)) is not None


_WHOLE_BYTES = re.compile(r"u?i(1|8|16|32|64)|b?f(16|32|64)|f8\w+|complex<f(32|64)>")


def may_wait(op: Operation) -> bool:
    """Return whether `op` is a loop that need not come to an end: it counts to no number, whatever else it looks at."""
    if op.name != "stablehlo.while":
        return False
    conditions = [terminator(op.regions[0].blocks[0]).operands[0]]
    for value in conditions:  # grows meanwhile
        conditions += operands_of(value, "and") or []
    return not any(_counts(op, value) for value in conditions)


def _counts(loop: Operation, predicate: Value) -> bool:
    condition, body = (region.blocks[0] for region in loop.regions)
    compared = operands_of(predicate, "compare", "LT")
    if not compared or not _is_argument(compared[0], condition):
        return False
    step, end = compared
    if _is_argument(end, condition):  # a value that the loop is given and passes on
        number = end.arg_number
        if terminator(body).operands[number] != body.arguments[number]:
            return False
        end = loop.operands[number]
    number = step.arg_number
    by = added_by_step(body.arguments[number], terminator(body).operands[number], {})
    return constant(end) is not None and by is not None and by > 0


def _is_argument(value: Value, block: ir.Block) -> bool:
    return isinstance(value, ir.BlockArgument) and value.owner == block
