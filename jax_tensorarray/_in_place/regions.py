"""Where the elements of a part of a buffer are: `c[0]`, `b.reshape(2, n, d)[1]`, `b.T`.

An axis of a buffer is a number with one digit or more, as hours and minutes are. A slice restricts a digit, a
transposition reorders the axes of the part, and a reshape splits digits and puts them into other axes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._in_place import rows
from jax_tensorarray._in_place.rows import Address
from jax_tensorarray._in_place.values import Left
from jax_tensorarray._ops.primitive import Params
from jax_tensorarray._ops.starts import along_axes, for_each, positions_of

Array = jax.Array
Key = tuple[int, int]  #: the axis of the buffer, and by how much a digit of it counts


class Digit(NamedTuple):
    """The values of a digit that a part has: `size` ones of `full`, from `start` on."""

    full: int
    start: int
    size: int

    @property
    def is_full(self) -> bool:
        return self.size == self.full


class Region(NamedTuple):
    """A part of a buffer of this shape."""

    buffer: tuple[int, ...]
    digits: dict[Key, Digit]
    #: The digits of each axis of the part, the highest first, without those of size 1.
    axes: tuple[tuple[Key, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        digits = {(d, 1): Digit(n, 0, n) for d, n in enumerate(shape) if n > 1}
        return cls(tuple(shape), digits, tuple(((d, 1),) if n > 1 else () for d, n in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.digits[key].size for key in keys) for keys in self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether it is the buffer itself."""
        return self.merged() == Region.whole(self.buffer)

    def of_axis(self, axis: int) -> list[Key]:
        """Return the digits of an axis of the buffer, the highest first."""
        return sorted((key for key in self.digits if key[0] == axis), reverse=True)

    def merged(self) -> "Region":
        """Return the same region with as few digits as possible."""
        digits, axes = dict(self.digits), []
        for keys in self.axes:
            kept: list[Key] = []
            for key in keys:
                low = digits[key]
                if kept and low.is_full and kept[-1] == (key[0], key[1] * low.full):
                    high = digits.pop(kept.pop())
                    digits[key] = Digit(*(n * low.full for n in high))
                kept.append(key)
            axes.append(tuple(kept))
        return Region(self.buffer, digits, tuple(axes))

    def _with(self, digits: dict[Key, Digit], axes: Sequence[Sequence[Key]]) -> "Region":
        shown = tuple(tuple(key for key in keys if digits[key].size > 1) for keys in axes)
        return Region(self.buffer, digits, shown).merged()

    def sliced(self, starts: Sequence[int], sizes: Sequence[int]) -> "Region | None":
        """Return a slice, None if it is not a region."""
        if 0 in sizes:
            return None
        digits = dict(self.digits)
        for keys, first, count in zip(self.axes, starts, sizes, strict=True):
            start, size = first, count
            for k, key in enumerate(keys):
                each = math.prod(self.digits[low].size for low in keys[k + 1 :])
                high, start = divmod(start, each)
                digit, is_one = self.digits[key], start + size <= each
                if not is_one and (start or size % each):
                    return None
                digits[key] = digit._replace(start=digit.start + high, size=1 if is_one else size // each)
                if not is_one:
                    break
        return self._with(digits, self.axes)

    def transposed(self, permutation: Sequence[int]) -> "Region":
        return self._replace(axes=tuple(self.axes[d] for d in permutation))

    def reshaped(self, shape: Sequence[int]) -> "Region | None":
        """Return it with another shape, None if it is not a region."""
        digits, axes, left = dict(self.digits), [], [key for keys in reversed(self.axes) for key in reversed(keys)]
        for size in shape:
            keys, rest = [], size
            while rest > 1:
                key = left.pop()
                digit = digits[key]
                if rest % digit.size == 0:
                    rest //= digit.size
                    keys.append(key)
                    continue
                each, is_split = divmod(digit.size, rest)
                if is_split or digit.full % each or digit.start % each:
                    return None
                high = (key[0], key[1] * each)
                digits[high], digits[key] = Digit(digit.full // each, digit.start // each, rest), Digit(each, 0, each)
                keys.append(high)
                left.append(key)
                rest = 1
            axes.append(keys)
        return self._with(digits, axes)

    def is_apart(self, other: "Region") -> bool:
        """Return whether it is certain that two regions of a buffer have no element in common."""
        if self.digits.keys() == other.digits.keys():
            pairs = [(self.digits[key], other.digits[key]) for key in self.digits]
            return any(a.start + a.size <= b.start or b.start + b.size <= a.start for a, b in pairs)
        return any(
            max(self._first(d), other._first(d)) > min(self._last(d), other._last(d)) for d in range(len(self.buffer))
        )

    def _first(self, axis: int) -> int:
        return sum(key[1] * self.digits[key].start for key in self.of_axis(axis))

    def _last(self, axis: int) -> int:
        return sum(key[1] * (self.digits[key].start + self.digits[key].size - 1) for key in self.of_axis(axis))

    def contains(self, other: "Region") -> bool:
        """Return whether it is certain that all of another region is in this one."""
        if self.digits.keys() != other.digits.keys():
            return all(self.digits[key].is_full for key in self.digits)
        pairs = [(self.digits[key], other.digits[key]) for key in self.digits]
        return all(a.start <= b.start and b.start + b.size <= a.start + a.size for a, b in pairs)

    def of(self, buffer: Array) -> Array:
        """Return the part of a buffer."""
        keys = [key for d in range(len(self.buffer)) for key in self.of_axis(d)]
        digits = [self.digits[key] for key in keys]
        split = buffer.reshape([digit.full for digit in digits])
        part = lax.slice(split, [x.start for x in digits], [x.start + x.size for x in digits])
        shown = [key for axis in self.axes for key in axis]
        order = [keys.index(key) for key in (*shown, *(key for key in keys if key not in shown))]
        return jnp.transpose(part, order).reshape(self.shape)


def joined(regions: Sequence[Region], axis: int) -> Region | None:
    """Return the concatenation of regions along an axis of theirs, None if it is not a region."""
    first = regions[0]
    differ = {key for r in regions for key, x in r.digits.items() if first.digits.get(key) != x}
    if any(r.digits.keys() != first.digits.keys() for r in regions) or len(differ) != 1:
        return None
    (key,) = differ
    digits, rests = [r.digits[key] for r in regions], []
    for r in regions:
        is_shown = r.axes[axis][:1] == (key,)
        if not is_shown and r.digits[key].size > 1:
            return None
        rests.append((*r.axes[:axis], r.axes[axis][is_shown:], *r.axes[axis + 1 :]))
    ends = [x.start + x.size for x in digits]
    if any(rest != rests[0] for rest in rests) or [x.start for x in digits[1:]] != ends[:-1]:
        return None
    total = Digit(digits[0].full, digits[0].start, ends[-1] - digits[0].start)
    axes = list(rests[0])
    axes[axis] = (key, *axes[axis])
    return Region(first.buffer, first.digits | {key: total}, tuple(axes)).merged()


class Place(NamedTuple):
    """The place in a buffer of what a row op reads or writes in a region of it."""

    region: Region
    address: Address  #: in the buffer
    at: Array  #: the index there
    where: Array | None
    params: Params
    before: int  #: the number of axes before the positions in the rows of the part
    positions: tuple[int, ...]
    taken: tuple[dict[Key, int], tuple[int, ...]]  #: how much of each digit, and of each axis of the part

    @property
    def _batch(self) -> tuple[int, ...]:
        return self.address.shape[: self.address.batch]

    @property
    def _moves(self) -> tuple[range, range]:
        """Return the axes of the positions in the rows of the part, and behind the batch."""
        count, batch = len(self.positions), self.address.batch
        return range(self.before, self.before + count), range(batch, batch + count)

    def _orders(self) -> tuple[list[Key], list[Key]]:
        """Return the digits of a box behind the batch, in the order of the buffer and in that of the part."""
        region, batch = self.region, self.address.batch
        of_buffer = [key for d in range(batch, len(region.buffer)) for key in region.of_axis(d)]
        shown = [key for keys in region.axes[batch:] for key in keys]
        return of_buffer, [*shown, *(key for key in of_buffer if key not in shown)]

    def _turned(self, box: Array, before: Sequence[Key], after: Sequence[Key]) -> Array:
        n = len(self._batch) + len(self.positions)
        split = box.reshape(*box.shape[:n], *(self.taken[0][key] for key in before))
        return jnp.transpose(split, [*range(n), *(n + before.index(key) for key in after)])

    def rows_of_buffer(self, of_part: Array) -> Array:
        """Return rows of the buffer that are given as rows of the part."""
        own, (old, new) = self.address, self._moves
        of_buffer, shown = self._orders()
        box = self._turned(jnp.moveaxis(of_part, old, new), shown, of_buffer)
        box = box.reshape(*self._batch, *self.positions, *own.rows_shape(())[own.batch :])
        return own.positions_behind(box, len(self.positions))

    def rows_of_part(self, of_buffer: Array) -> Array:
        """Return rows of the part that are given as rows of the buffer."""
        own, (old, new) = self.address, self._moves
        box = own.positions_first(of_buffer, len(self.positions))
        box = self._turned(box, *self._orders())
        box = box.reshape(*self._batch, *self.positions, *self.taken[1])
        return jnp.moveaxis(box, new, old)


def place(
    region: Region, dtype: Any, index: Array, where: Array | None, params: Params, *, is_update: bool
) -> Place | None:
    """Return the place in the buffer of rows of a region, None if a row op cannot have it.

    An example: `b` has 10 rows, the region is `b.reshape(2, 5, -1)[1]`, and `index` is a row of that, `i`. The
    numbers of the rows of `b` have two digits, `(0, 5)`, which counts by 5, and `(0, 1)`. Of the first the region has
    `Digit(2, 1, 1)`, 1 alone, and of the second `Digit(5, 0, 5)`, all. So the digits of the row are 1 and `i`, and it
    is row `5 * 1 + i` of `b`; where `i` is not one of 5, a write is left out.
    """
    axis, d, window, shape = params["batch_dims"], params["index_dims"], params["window"], region.shape
    if (window and not params["whole"]) or params["mode"] not in ("drop", "clip"):
        return None
    both = [index] if where is None else [index, where]
    batch = max((k + 1 for k in range(axis) if any(x.shape[k] > 1 for x in both)), default=0)
    if where is None:
        index = for_each(index, shape[:batch])
    if any(region.axes[k] != ((k, 1),) or region.buffer[k] != shape[k] for k in range(batch)):
        return None
    taken = [*shape[:axis], *[1] * (d - len(window)), *window, *shape[axis + d :]]
    examples = (slice(None),) * batch + (0,) * (axis - batch)
    starts = dict(enumerate(along_axes(index[examples], d), axis))
    drops, inside = params["mode"] == "drop", None
    zero = lax.full_like(starts[axis], 0, np.int32)
    of_digits: dict[Key, Any] = {key: zero + np.int32(x.start) for key, x in region.digits.items()}
    sizes = {key: x.size for key, x in region.digits.items()}
    for k, start in starts.items():
        keys = region.axes[k]
        is_axis = len(keys) == 1 and shape[k] == region.buffer[keys[0][0]]  # the part has all of an axis of the buffer
        if is_axis and taken[k] < shape[k]:
            of_digits[keys[0]], sizes[keys[0]] = rows.as_int32(start, shape[k]), taken[k]
            continue
        start = rows.as_int32(start, shape[k])
        if drops:
            is_in = (start >= 0) & (start <= np.int32(shape[k] - taken[k]))
            inside = is_in if inside is None else inside & is_in
        rest = rows.clamped(start, shape[k] - taken[k])
        if taken[k] == shape[k]:
            continue
        if len(keys) > 1 and taken[k] > 1:
            return None
        for key in reversed(keys):
            own, size = rest, np.int32(region.digits[key].size)
            if len(keys) > 1:
                own, rest = (lax.rem(rest, size), lax.div(rest, size)) if key != keys[0] else (rest, rest)
            of_digits[key], sizes[key] = own + np.int32(region.digits[key].start), taken[k]
    of_axes, boxes = {}, []
    for a in range(len(region.buffer)):
        count, is_full, start = 1, True, zero
        for key in reversed(region.of_axis(a)):
            if not is_full and sizes[key] > 1:
                return None  # some rows, others, and some of the next ones
            count *= sizes[key]
            is_full &= sizes[key] == region.digits[key].full
            start = start + np.int32(key[1]) * of_digits[key] if key[1] > 1 else of_digits[key]
        boxes.append(count)
        of_axes[a] = start
    of_axes = {a: start for a, start in of_axes.items() if boxes[a] != region.buffer[a]}
    aval = jax.ShapeDtypeStruct(region.buffer, dtype)
    address = rows.box_address(aval, boxes, batch, list(of_axes), drops=drops)
    positions = positions_of(index, d)[axis:]
    if isinstance(address, Left) or (is_update and math.prod(positions) > 1 and len(address.window) > 1):
        return None
    if inside is not None:
        low = min(of_axes)
        of_axes[low] = lax.select(inside, of_axes[low], lax.full_like(of_axes[low], -1))
    there = address.params
    given: Params = {**params, "batch_dims": there["batch_dims"], "index_dims": there["index_dims"]}
    given["window"], given["whole"] = there["window"], there["whole"]
    masks = None if where is None else address.over_axes(where[examples])
    of_part = tuple(taken[batch:])
    return Place(region, address, address.index_of(of_axes), masks, given, axis, positions, (sizes, of_part))
