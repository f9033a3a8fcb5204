"""Decide whether two indices are equal: the expressions that compute them are, as in common subexpression elimination.

JAX computes an index again for each read and each update of a row. So each value has a note of the equation that made
it and of the operands, and two values are equal if equal equations made them of equal operands.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import registry
from jax_tensorarray._jaxprs.kinds import ELEMENTWISE, OF_INDICES, PASSES_ON, READS
from jax_tensorarray._types import Equation

#: Primitives with equal results for equal operands and parameters, which can be compared.
REPEATABLE = OF_INDICES | READS

#: Primitives that keep the numbers in an array, unless they are repeated, or out of the range of another type.
KEEP_NUMBERS = PASSES_ON.union(("broadcast_in_dim", "convert_element_type", "reshape", "squeeze"))

#: At most so many pairs of values are compared. The remainder of an index that may be negative takes 20.
_MOST = 100


class Definition(NamedTuple):
    """How a value was made."""

    eqn: Equation
    operands: tuple[Value, ...]
    is_kept: bool  #: whether the equation stays as it is


def note(eqn: Equation, operands: Sequence[Value], results: Sequence[Value], *, is_kept: bool) -> None:
    """Note how values were made, and which operands are used for more than a read of rows."""
    name = eqn.primitive.name
    if name not in READS and registry.inlined(eqn) is None:  # the equations of an inlined one have been noted
        for x in operands:
            x.is_consumed = True
    define(eqn, operands, results, is_kept=is_kept)


def define(eqn: Equation, operands: Sequence[Value], results: Sequence[Value], *, is_kept: bool) -> None:
    """Note how values were made."""
    name = eqn.primitive.name
    for k, x in enumerate(results):
        if x.made_by is None and not x.is_given:  # else a rule has returned an older value
            x.made_by = Definition(eqn, (operands[k],) if name in PASSES_ON else tuple(operands), is_kept)


def part(indices: Value, number: int) -> Value | None:
    """Return one of the indices `[..., d]` that have been joined along the last axis, None if they have not been."""
    made, count = indices.made_by, indices.shape[-1]
    is_joined = made is not None and made.eqn.primitive.name == "concatenate" and len(made.operands) == count
    if count > 1 and is_joined and made.eqn.params["dimension"] == len(indices.shape) - 1:
        return made.operands[number]
    return indices if count == 1 else None


def known(x: Value) -> int | None:
    """Return the number that all elements of a value are, None if that is not known while tracing."""
    if x.literal is not None:
        return int(x.array) if jnp.issubdtype(x.dtype, jnp.integer) else None
    made = x.made_by
    if made is None or made.eqn.primitive.name not in KEEP_NUMBERS or len(made.operands) != 1:
        return None
    number = known(made.operands[0]) if differ_in_ones(made.operands[0].shape, x.shape) else None
    return None if number is None else int(np.array(number).astype(x.dtype))


def is_same(x: Value, y: Value, compared: set[tuple[Value, Value]] | None = None) -> bool:
    """Return whether it is certain that two values have the same elements, but for axes of size 1."""
    x, y = _plain(x), _plain(y)
    compared = set() if compared is None else compared
    if x is y or (x, y) in compared:  # as soon as one pair differs, all do
        return True
    if x.literal is not None and y.literal is not None:
        return bool(x.literal == y.literal)
    compared.add((x, y))
    a, b = x.made_by, y.made_by
    if a is None or b is None or x.dtype != y.dtype or len(compared) > _MOST or len(a.operands) != len(b.operands):
        return False
    name = a.eqn.primitive.name
    if name not in REPEATABLE or a.eqn.primitive is not b.eqn.primitive or a.eqn.params != b.eqn.params:
        return False
    pairs = list(zip(a.operands, b.operands, strict=True))
    are_alike = name in ELEMENTWISE or all(v.shape == w.shape for v, w in pairs)
    return are_alike and all(is_same(v, w, compared) for v, w in pairs)


def is_same_row(read: Value, written: Value, size: int, *, drops: bool) -> bool:
    """Return whether an update writes the row that was read, or, if it `drops`, none of the axis of that size.

    In 64 bits JAX narrows the index `i` of a read before it counts from the end, and that of a write after it. Let `n`
    be the narrowed `i`. If both have one sign, both results are `n`, or `n + size`. If not, the write is at a negative
    `n`, or at `n + size` with `n` at least 0, which is out of range.
    """
    if is_same(read, written):
        return True
    narrowed = _from_end(read, size)
    wide = _from_end(_widened(written), size)
    return drops and narrowed is not None and wide is not None and is_same(_widened(narrowed), wide)


def _widened(x: Value) -> Value:
    """Return the integer of 64 bits that was narrowed to one of 32, or the value itself."""
    made = (x := _plain(x)).made_by
    types = None if made is None else (made.eqn.primitive.name, made.operands[0].dtype, x.dtype)
    return made.operands[0] if types == ("convert_element_type", np.int64, np.int32) else x


def _from_end(x: Value, size: int) -> Value | None:
    """Return `i` of the index `jnp.where(i < 0, i + size, i)`, None for another one."""
    made = _plain(x).made_by
    if made is None or made.eqn.primitive.name != "select_n" or len(made.operands) != 3:
        return None
    which, index, counted = made.operands
    for name, value, number in (("lt", which, 0), ("add", counted, size)):
        own = value.made_by
        if own is None or own.eqn.primitive.name != name or own.operands[1].literal != number:
            return None
        if not is_same(own.operands[0], index):
            return None
    return index


def _plain(x: Value) -> Value:
    """Return the value before conversions to a wider type and changes of axes of size 1, which keep all numbers."""
    while (made := x.made_by) is not None and made.operands:
        name, (first, *others) = made.eqn.primitive.name, made.operands
        is_wider = jnp.issubdtype(first.dtype, jnp.integer) and np.can_cast(first.dtype, x.dtype)
        is_moved = name in ("broadcast_in_dim", "reshape", "squeeze") and not others
        is_kept = name in PASSES_ON or (name == "convert_element_type" and is_wider)
        if not (differ_in_ones(first.shape, x.shape) if is_moved else is_kept):
            break
        x = first
    return x


def differ_in_ones(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes differ in nothing but axes of size 1."""
    return [n for n in one if n != 1] == [n for n in other if n != 1]
