"""Absolute values of integers, written so that XLA does not take them to be non-negative.

The absolute value of the least integer is negative. XLA's compiler of fusions forgets that (`SimplifyArithPass`, in all
versions from jaxlib 0.10.2 to 0.12), and drops the comparisons of an index with 0 by which a row is left out, and a
slice stays in its array. It sees an absolute value only if it is written with `x >= 0`. The machine code is the same.
"""

from jax.interpreters.mlir import ir

from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.build import compare, splat
from jax_tensorarray._lowering.mlir import Operation, walk


def write_out(functions: dict[str, Operation]) -> None:
    """Write every absolute value of signed integers as `where(x < 0, -x, x)`, since any may be part of an index."""
    found = [op for function in functions.values() for op in walk(function) if op.name == "stablehlo.abs"]
    for op in found:
        (x,) = op.operands
        if not isinstance(x.type.element_type, ir.IntegerType) or not x.type.has_static_shape:
            continue
        with ir.InsertionPoint(op), op.location:
            is_negative = compare(x, splat(x.type, 0), "LT")
            op.results[0].replace_all_uses_with(hlo.select(is_negative, hlo.negate(x), x))
        op.erase()
