"""Make StableHLO: types, constants, comparisons, conditionals, and calls of our kernels."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.interpreters.mlir import dense_int_array, i64_attr, ir

from jax_tensorarray._compat import hlo
from jax_tensorarray._lowering.calls import (
    CONFIG,
    IN_RANGE,
    PREFIX,
    WHOLE,
    WINDOW,
    box_of,
    clips,
    config,
    index_sizes,
    mask_of,
    steps_along,
    window_of,
)
from jax_tensorarray._lowering.mlir import Operation, Value, joined_columns, terminator
from jax_tensorarray._types import INT32_MAX


def layouts(values: Sequence[Value]) -> list[ir.Attribute]:
    """Return row-major layouts, in which our calls take and return arrays."""
    ranks = [value.type.rank for value in values]
    return [ir.DenseIntElementsAttr.get(np.arange(rank - 1, -1, -1), type=ir.IndexType.get()) for rank in ranks]


_FIRST_TO_ONLY = "output_tuple_indices = [], operand_index = 0, operand_tuple_indices = []"


def custom_call(
    name: str, operands: Sequence[Value], result: ir.Type, config: Mapping[str, ir.Attribute], *, in_place: bool = False
) -> Value:
    """Call one of our kernels and return its result, which may be its first operand updated in place."""
    alias = ir.Attribute.parse(f"#stablehlo.output_operand_alias<{_FIRST_TO_ONLY}>")
    # As `jax.ffi` makes them: the attributes of the kernel are not a string, and stay beside it.
    call = ir.Operation.create(
        "stablehlo.custom_call",
        [result],
        operands,
        {
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1),
            "backend_config": ir.StringAttr.get(""),
            CONFIG: ir.DictAttr.get(dict(config)),
            "call_target_name": ir.StringAttr.get(PREFIX + name),
            "has_side_effect": ir.BoolAttr.get(False),
            "operand_layouts": ir.ArrayAttr.get(layouts(operands)),
            "output_operand_aliases": ir.ArrayAttr.get([alias] if in_place else []),
        },
    )
    call.attributes["result_layouts"] = ir.ArrayAttr.get(layouts(call.results))
    return call.results[0]


def tensor(shape: Sequence[int], element: ir.Type) -> ir.RankedTensorType:
    """Return the type of an array."""
    return ir.RankedTensorType.get(shape, element)


def integer(bits: int) -> ir.RankedTensorType:
    """Return the type of a signed integer."""
    return tensor([], ir.IntegerType.get_signless(bits))


def splat(type_: Any, value: int) -> Value:
    """Make a constant tensor in which all elements are that number."""
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        part = splat(tensor(type_.shape, element.element_type), value)
        return hlo.complex(part, splat(part.type, 0))
    is_integer = isinstance(element, ir.IntegerType)
    number = ir.IntegerAttr.get(element, value) if is_integer else ir.FloatAttr.get(element, float(value))
    return hlo.constant(ir.DenseElementsAttr.get_splat(type_, number))


def widened(index: Value, size: int) -> Value:
    """Convert an index to a dtype that has all rows.

    XLA clamps a start in the start's own dtype. In a smaller dtype the last row that it clamps to would wrap.
    """
    element, bits = index.type.element_type, 32 if size <= INT32_MAX else 64
    if element.width > bits or (element.width == bits and (bits == 64 or not element.is_unsigned)):
        return index
    wide = 64 if element.is_unsigned and element.width == 32 else bits
    return hlo.convert(tensor(index.type.shape, ir.IntegerType.get_signless(wide)), index)


def repeated(value: Value, more: Sequence[int]) -> Value:
    """Repeat an array along new last axes."""
    shape = value.type.shape
    kind = tensor([*shape, *more], value.type.element_type)
    return hlo.broadcast_in_dim(kind, value, dense_int_array(range(len(shape))))


def reshaped(value: Value, shape: Sequence[int]) -> Value:
    """Reshape an array."""
    of = tensor(shape, value.type.element_type)
    return value if value.type == of else hlo.reshape(of, value)


def for_each(value: Value, batch: Sequence[int]) -> Value:
    """Repeat an index or a mask along the batch axes whose examples share it."""
    shape = [*batch, *value.type.shape[len(batch) :]]
    if value.type.shape == shape:
        return value
    return hlo.broadcast_in_dim(tensor(shape, value.type.element_type), value, dense_int_array(range(len(shape))))


def starts_of(call: Operation) -> list[Value]:
    """Return where a row op starts along each axis, for each position."""
    index, axes = call.operands[1], len(index_sizes(call))
    if axes == 1:
        return [index]
    shape = index.type.shape[:-1]
    columns = joined_columns(index, axes) or [
        hlo.slice(index, *map(dense_int_array, ([*[0] * len(shape), k], [*shape, k + 1], [1] * (len(shape) + 1))))
        for k in range(axes)
    ]
    return [reshaped(column, shape) for column in columns]


def every_row(first: Value, count: int, size: int) -> Value:
    """Return consecutive numbers from the first ones on, along a last axis, in a dtype that has all rows."""
    first = repeated(widened(first, size), [count])
    rows = hlo.add(first, hlo.iota(first.type, i64_attr(first.type.rank - 1)))
    if not first.type.element_type.is_unsigned:
        return rows
    return hlo.select(compare(rows, first, "LT"), first, rows)  # what wraps to a row stays out of range


def in_range(starts: Sequence[Value], sizes: Sequence[int], box: Sequence[int]) -> Value:
    """Return which boxes are in range along all axes."""
    each = [is_out_of_bounds(x, size - n + 1) for x, size, n in zip(starts, sizes, box, strict=True)]
    return hlo.not_(functools.reduce(hlo.or_, each))


def clamped(start: Value, last: int) -> Value:
    """Move starts into the range from 0 to `last`."""
    scalar = tensor([], start.type.element_type)
    return hlo.clamp(splat(scalar, 0), start, splat(scalar, last))


def flatten(call: Operation) -> None:
    """Give a call of a kernel what it takes: the numbers of all rows in each example, and the mask of these rows."""
    shape, batch_dims, mask = call.operands[0].type.shape, config(call).batch_dims or 0, mask_of(call)
    batch, window = shape[:batch_dims], window_of(call)
    with ir.InsertionPoint(call), call.location:
        call.operands[1] = for_each(_numbers_of_rows(call, window), batch)
        if mask is not None:
            call.operands[list(call.operands).index(mask)] = for_each(repeated(mask, window), batch)
    call.attributes["operand_layouts"] = ir.ArrayAttr.get(layouts(call.operands))
    for name in (WINDOW, WHOLE):
        if name in call.attributes:
            del call.attributes[name]


def _numbers_of_rows(call: Operation, window: Sequence[int]) -> Value:
    """Return the numbers of all rows, the last axis fastest. That of a row that is left out is out of range."""
    starts, sizes, box = starts_of(call), index_sizes(call), box_of(call)
    is_known = IN_RANGE in call.attributes
    moves = clips(call) and not is_known
    if len(sizes) == 1 and not moves and not (window and WHOLE in call.attributes):
        return every_row(*starts, *window, *sizes) if window else starts[0]
    total = math.prod(sizes)
    of = tensor(starts[0].type.shape, integer(32 if total <= INT32_MAX else 64).element_type)
    rows = splat(of, 0)
    for start, size, count in zip(starts, sizes, box, strict=True):
        start = widened(start, size)
        start = clamped(start, size - count) if moves else start
        rows = hlo.add(hlo.multiply(rows, splat(of, size)), hlo.convert(of, start))
    inside = None if is_known or moves else in_range(starts, sizes, box)
    rank, rows = rows.type.rank, repeated(rows, window)
    for k, step in enumerate(steps_along(sizes)[len(sizes) - len(window) :]):
        along = hlo.iota(rows.type, i64_attr(rank + k))
        rows = hlo.add(rows, hlo.multiply(along, splat(rows.type, step)))
    return rows if inside is None else hlo.select(repeated(inside, window), rows, splat(rows.type, -1))


def at_positions(sizes: Value, shape: Sequence[int]) -> Value:
    """Broadcast numbers of rows `[*batch]` to the positions of an index of that shape."""
    if sizes.type.rank == len(shape):
        return sizes
    kind = tensor(shape, sizes.type.element_type)
    return hlo.broadcast_in_dim(kind, sizes, dense_int_array(range(sizes.type.rank)))


def is_out_of_bounds(index: Value, size: Value | int) -> Value:
    """Return whether an index is out of range, elementwise; `size` is a number, or an int32 array of the same shape."""
    index = widened(index, INT32_MAX if not isinstance(size, int) else size)
    is_unsigned = index.type.element_type.is_unsigned
    if isinstance(size, int):
        limit = splat(index.type, size)
    else:
        limit = hlo.maximum(size, splat(size.type, 0)) if is_unsigned else size
        limit = limit if limit.type == index.type else hlo.convert(index.type, limit)
    outside = compare(index, limit, "GE")
    return outside if is_unsigned else hlo.or_(outside, compare(index, splat(index.type, 0), "LT"))


def compare(left: Value, right: Value, direction: str) -> Value:
    """Compare two arrays elementwise; `direction` is "LT", "EQ" and so on."""
    return hlo.compare(left, right, hlo.ComparisonDirectionAttr.get(direction))


def zeros(of: ir.RankedTensorType) -> Value:
    """Make an array of zeros from a number: the bindings cannot make a constant of every element type."""
    number = hlo.convert(tensor([], of.element_type), splat(tensor([], ir.F32Type.get()), 0))
    return hlo.broadcast_in_dim(of, number, dense_int_array([]))


def case(index: Value, types: Sequence[ir.Type], branches: Sequence[ir.Block | Callable[[], Sequence[Value]]]) -> Any:
    """Make a conditional. Each branch is a block, which moves there, or a function that makes what it returns."""
    op = ir.Operation.create("stablehlo.case", types, [index], regions=len(branches))
    for region, branch in zip(op.regions, branches, strict=True):
        if isinstance(branch, ir.Block):
            branch.append_to(region)
        else:
            with ir.InsertionPoint(region.blocks.append()):
                hlo.return_(branch())
    return list(op.results)


def counted(start: Value, stop: Value, carry: Sequence[Value], body: Callable[..., Sequence[Value]]) -> Sequence[Value]:
    """Make a loop over the numbers from `start` to `stop`, and return the carry at its end.

    `body` makes the next carry of a number and a carry.
    """
    operands = [start, stop, *carry]
    types, places = [x.type for x in operands], [ir.Location.current] * len(operands)
    op = ir.Operation.create("stablehlo.while", types, operands, regions=2)
    condition, step = (region.blocks.append(*types, arg_locs=places) for region in op.regions)
    with ir.InsertionPoint(condition):
        hlo.return_([compare(condition.arguments[0], condition.arguments[1], "LT")])
    with ir.InsertionPoint(step):
        number, end, *rest = step.arguments
        after = body(number, *rest)
        hlo.return_([hlo.add(number, splat(number.type, 1)), end, *after])
    return list(op.results)[2:]


def return_from(block: ir.Block, values: Sequence[Value]) -> None:
    """Have a block return other values."""
    end = terminator(block)
    with ir.InsertionPoint(end):
        ir.Operation.create(end.name, [], values, loc=end.location)
    end.erase()


def replaced(op: Operation, operands: Sequence[Value], types: Sequence[ir.Type], **changed: ir.Attribute) -> Operation:
    """Replace an operation, whose regions fit already, by one with other operands, more results, changed attributes."""
    attributes = {name: op.attributes[name] for name in op.attributes} | changed
    types = [*(result.type for result in op.results), *types]
    with ir.InsertionPoint(op):
        new = ir.Operation.create(op.name, types, operands, attributes, regions=len(op.regions), loc=op.location)
    for old_region, new_region in zip(op.regions, new.regions, strict=True):
        old_region.blocks[0].append_to(new_region)
    for old, result in zip(op.results, new.results, strict=False):
        old.replace_all_uses_with(result)
    op.erase()
    return new
