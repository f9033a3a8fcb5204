"""The one box that an equation reads or replaces: `lax.dynamic_slice`, `lax.dynamic_update_slice`, a gather, a scatter.

A box has a size and an offset along each axis of the buffer. The offset is known while tracing, or only at run time.
Two offsets of the second kind are the same if equal equations compute them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_tensorarray._in_place import indices, rows
from jax_tensorarray._in_place.maps import Map, Start
from jax_tensorarray._in_place.values import Left, Value
from jax_tensorarray._ops.primitive import ROW_OPS
from jax_tensorarray._ops.starts import in_range
from jax_tensorarray._types import Array, Equation


class Box(NamedTuple):
    """A box of a buffer: its sizes, and the operands that have its starts."""

    sizes: tuple[int, ...]
    starts: Mapping[int, tuple[int, int | None]]  #: by axis the operand, and which element of its last axis
    shape: tuple[int, ...]  #: of the array that is read or written
    batch: int  #: the number of leading axes whose examples have starts of their own
    drops: bool  #: whether a box that is out of range is left out, or has a fill value

    @classmethod
    def of(cls, eqn: Equation) -> "Box | None":
        """Return the box, None if there are several, or the examples of a batch are not its first axes."""
        name, buffer = eqn.primitive.name, eqn.invars[0].aval
        starts: Mapping[int, tuple[int, int | None]]
        if name in ("dynamic_slice", "dynamic_update_slice"):
            first = 1 if name == "dynamic_slice" else 2
            of_rows = (eqn.outvars[0] if first == 1 else eqn.invars[1]).aval.shape
            starts = {d: (first + d, None) for d, n in enumerate(buffer.shape) if of_rows[d] != n}
            return cls(of_rows, starts, of_rows, 0, False) if len(eqn.invars) == first + buffer.ndim else None
        if eqn.primitive in ROW_OPS:
            return cls._of_row_op(eqn)
        numbers, taken, at, mode = rows.numbers_of(eqn), rows.taken_by(eqn), eqn.invars[1].aval, eqn.params["mode"]
        batch, of_rows = len(numbers.batch), (eqn.outvars[0] if name == "gather" else eqn.invars[2]).aval.shape
        is_batch = numbers.batch == numbers.batch_of_indices == tuple(range(batch))
        is_in_order = tuple(numbers.offset) == tuple(range(len(of_rows) - len(numbers.offset), len(of_rows)))
        if not is_batch or not is_in_order or any(n != 1 for n in at.shape[batch:-1]):
            return None
        if not jnp.issubdtype(at.dtype, jnp.integer) or mode == lax.GatherScatterMode.ONE_HOT:
            return None
        sizes = tuple(n if d < batch else taken[d] for d, n in enumerate(buffer.shape))
        drops = rows.drops(eqn)  # also if it starts elsewhere along an axis of which it takes all
        starts = {int(d): (1, k) for k, d in enumerate(numbers.starts) if drops or sizes[d] != buffer.shape[d]}
        return cls(sizes, starts, of_rows, batch, drops)

    @classmethod
    def _of_row_op(cls, eqn: Equation) -> "Box | None":
        address, index = rows.address_of(eqn), eqn.invars[1].aval
        has_mask = len(eqn.invars) > 2 + ROW_OPS[eqn.primitive].takes_value
        if isinstance(address, Left) or has_mask or any(n != 1 for n in address.positions_of(index)):
            return None
        taken = dict(enumerate(address.taken, address.axis))
        sizes = tuple(taken.get(d, n) for d, n in enumerate(address.shape))
        is_one = len(address.sizes) == 1
        starts = {d: (1, None if is_one else k) for k, d in enumerate(taken) if taken[d] != address.shape[d]}
        return cls(sizes, starts, address.rows_shape(address.positions_of(index)), address.batch, address.drops)

    def map(self, m: Map, known: Mapping[int, int], start: Callable[[int, int], Start]) -> Map | None:
        """Return the box of a view. `start` maps an axis that is not `known`, and its last start, to a `Start`."""
        last = [n - size for n, size in zip(m.shape, self.sizes, strict=True)]
        if any(not 0 <= x <= last[d] for d, x in known.items()):
            return None
        starts: list[Any] = [known.get(d, 0) for d in range(len(last))]
        for d in self.starts:
            starts[d] = known[d] if d in known else start(d, last[d])
        found = m.sliced(starts, self.sizes)
        return found and found.reshaped(self.shape)

    def known(self, operands: Sequence[Value]) -> dict[int, int]:
        """Return the starts that are known while tracing, by axis."""
        numbers = {d: self._number(operands, d) for d in self.starts}
        found = {d: indices.known(x.value) for d, x in numbers.items() if x.part is None}
        return {d: number for d, number in found.items() if number is not None}

    def dynamic_starts(
        self, operands: Sequence[Value], given: Sequence[Array], *, drops: bool
    ) -> Callable[[int, int], Start]:
        """Return the function `start` for `map`. `given` are the arrays of the operands."""

        def start(d: int, last: int) -> Start:
            place = rows.clamped(self.start(operands[0].shape, given, d), last)
            return Start(self._number(operands, d), place, drops=drops)

        return start

    def _number(self, operands: Sequence[Value], axis: int) -> "Number":
        (k, part), size = self.starts[axis], operands[0].shape[axis]
        number = operands[k] if part is None else indices.part(operands[k], part)
        return Number(operands[k], part, size) if number is None else Number(number, None, size)

    def is_in_range(self, shape: Sequence[int], given: Sequence[Array]) -> Array:
        """Return where the box is in range of a buffer of that shape, `[*batch]`."""
        starts = [self.start(shape, given, d) for d in self.starts]
        return in_range(starts, [shape[d] for d in self.starts], [self.sizes[d] for d in self.starts])

    def start(self, shape: Sequence[int], given: Sequence[Array], axis: int) -> Array:
        """Return the start of the box along an axis in the program as it is written."""
        k, part = self.starts[axis]
        at = jnp.asarray(given[k] if part is None else given[k][..., part])
        return rows.as_int32(at.reshape(shape[: self.batch]), shape[axis])


class Number(NamedTuple):
    """The start of a box along an axis of that size, in the program as it is written."""

    value: Value
    part: int | None  #: which of several numbers along its last axis
    size: int


def is_same(a: Start, b: Start, size: int) -> bool:
    """Return whether two starts are certainly the same, and updates there are left out in the same cases."""
    return a.drops == b.drops and _is_same(a.number, b.number, drops=False)


def puts_back(put: Start, read: Start, size: int) -> bool:
    """Return whether a part that was read at one start is certainly put back there, or left out."""
    return put.drops == read.drops and _is_same(read.number, put.number, drops=put.drops)


def _is_same(a: Any, b: Any, *, drops: bool) -> bool:
    if isinstance(a, Number) and isinstance(b, Number):
        if a.part is None and b.part is None and a.size == b.size:
            return indices.is_same_row(a.value, b.value, a.size, drops=drops)
        return a[1:] == b[1:] and indices.is_same(a.value, b.value)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_is_same(x, y, drops=drops) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def rows_of(eqn: Equation) -> int:
    """Return the number of the operand of an update that is written."""
    return 1 if eqn.primitive.name == "dynamic_update_slice" else 2


def is_plain_write(eqn: Equation) -> bool:
    """Return whether an update writes what it is given, and combines it with nothing."""
    return eqn.primitive.name in ("dynamic_update_slice", "ta_write") or (
        eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is None
    )
