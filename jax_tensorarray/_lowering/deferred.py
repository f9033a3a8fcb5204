"""Indices out of range on one of several CPU devices: they are raised where no device waits for another any more.

An error ends the program of its device. If there is a collective later, the other devices wait for it there, until XLA
aborts the process. So a call whose attribute `op` begins with `>` drops the access, notes the error and goes on. At the
end of `main` stands a call of `raise`. It waits for all results, and so for all collectives. The results go through a
fence behind it.

A loop that does not count its steps may wait for ever for a row that was dropped. In a program with such a loop calls
raise where they are.
"""

import re

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.build import custom_call, integer, return_from
from jax_tensorarray._lowering.calls import CONFIG, addresses_rows, declare, may_raise, with_config
from jax_tensorarray._lowering.mlir import Operation, Value, entry, operation, terminator, walk
from jax_tensorarray._lowering.places import Places
from jax_tensorarray._lowering.record import may_wait

declare("raise", (), ("nothing",))


def raise_at_end(functions: dict[str, Operation], places: Places) -> None:
    """Have the calls in a program for several devices raise at its end, if they may."""
    everything = [op for function in functions.values() for op in walk(function)]
    raising = [op for op in everything if addresses_rows(op) and may_raise(op)]
    end = terminator(entry(functions["main"]))
    results = [x for x in dict.fromkeys(end.operands) if _can_wait(x)]
    if not raising or not results or any(map(may_wait, everything)):
        return
    for op in raising:
        op.attributes[CONFIG] = with_config(op, op=">" + places.named(op))
    with ir.InsertionPoint(end), end.location:
        nothing = custom_call("raise", results, integer(32), {})
        operation(nothing.owner).attributes["has_side_effect"] = ir.BoolAttr.get(True)
        behind = {x: custom_call("fence", [x, nothing], x.type, {}, in_place=True) for x in results}
    return_from(end.block, [behind.get(x, x) for x in end.operands])


def _can_wait(value: Value) -> bool:
    """Return whether a fence can hand a value on, and it is no argument."""
    t = value.type
    is_array = isinstance(t, ir.RankedTensorType) and t.has_static_shape and isinstance(value, ir.OpResult)
    return is_array and _WHOLE_BYTES.fullmatch(str(t.element_type)) is not None


_WHOLE_BYTES = re.compile(r"u?i(1|8|16|32|64)|b?f(16|32|64)|f8\w+|complex<f(32|64)>")
