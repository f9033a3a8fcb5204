"""Views of a buffer as index maps: `b[40:].reshape(2, 30, 8)[1].T` is `b` seen through a map.

A map says which element of the buffer each element of a view is. Slices, strides, reversals, rotations,
transpositions, reshapes, concatenations and rows at computed places of a view are mostly maps again, so a chain of them
is one map. If a method cannot say a view as a map, it returns None. The axes of a view consist of digits, as in a
mixed-radix number. Along each axis of the buffer, the index is a table with one axis per digit. In the example, where
`b` has the shape `(100, 8)`:

    digits: 0 has 8 values, 1 has 30        axes of the view: (0,), (1,)
    row of b: table[digit 1] = 70 + digit 1        column of b: table[digit 0] = digit 0

A slice of `b.reshape(-1)` may begin in the middle of a row. A table of rows and a table of columns cannot say which
elements it has. So one table counts along both axes together, as in `b.reshape(800, 1)`.

A digit may start at a number that is known only at run time, such as `k` in `b[k]` or `lax.dynamic_slice(b, (k, 0), (5,
8))`. The table then has all values that the digit could take. XLA's `IndexingMap`, TVM's `iter_affine_map` and the
index functions of Futhark are relatives.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jax_tensorarray._types import INT32_MAX

#: Sets of at most so many indices are compared element by element, and so many may be in a table of several axes.
_FEW = 100_000


class Start(NamedTuple):
    """A dynamic start of a digit: a number that is known only at run time."""

    number: Any  #: tells it from others: nested tuples that end in what `equals` compares
    value: Any = None  #: the number in range, `[*batch]` of int32; None while only places are compared
    made_by: Any = None  #: the variable of the box, while only places are compared
    drops: bool = False  #: if it is out of range, the update that puts the part back does nothing

    def moved(self, by: int, *, factor: int = 1) -> "Start":
        """Return `by + factor * start`."""
        value = None if self.value is None else np.int32(by) + np.int32(factor) * self.value
        return self._replace(number=("moved", self.number, by, factor), value=value)

    def digit(self, low: int, size: int) -> "Start":
        """Return the digit of this size that counts by `low`."""
        value = self.value
        if value is not None:
            value = lax.rem(lax.div(value, np.int32(low)), np.int32(size))
        return self._replace(number=("digit", self.number, low, size), value=value)


class Digit(NamedTuple):
    """A digit with `size` values, of which `seen` are in the view: all, or those from a start on."""

    size: int
    seen: int
    start: Start | None = None


class Along(NamedTuple):
    """The index along one axis of the buffer: a table with an axis for each of these digits.

    If the buffer is stored rotated, as a circular buffer is, its index k is the index `(rotation + k) mod n`.
    """

    digits: tuple[int, ...]
    table: Any
    rotation: Start | None = None


def _is_same_number(a: Start, b: Start, size: int) -> bool:
    return bool(a.number == b.number)


class Map(NamedTuple):
    """A view of a buffer of this shape.

    First come the digits that the axes of the view show, in order, then those of which the view has one value.
    """

    buffer: tuple[int, ...]
    digits: tuple[Digit, ...]
    axes: tuple[tuple[int, ...], ...]  #: the digits of each axis of the view, the highest first
    along: tuple[Along, ...]
    #: The shape that `along` has the indices of: the buffer's, or neighbouring axes are counted together. The first of
    #: them then has the size of all, and the others have size 1.
    sizes: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def whole(cls, shape: tuple[int, ...]) -> "Map":
        """Return the map of the buffer itself."""
        digits = tuple(Digit(n, n) for n in shape)
        along = tuple(Along((d,), np.arange(n, dtype=np.int32)) for d, n in enumerate(shape))
        return cls(shape, digits, tuple((d,) for d in range(len(shape))), along, shape).normalized()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.digits[d].seen for d in keys) for keys in self.axes)

    @property
    def starts(self) -> list[Start]:
        """The dynamic starts of its digits, and of the axes of the buffer."""
        found = (*(digit.start for digit in self.digits), *(own.rotation for own in self.along))
        return [start for start in found if start is not None]

    @property
    def is_whole(self) -> bool:
        """Whether it is the map of the buffer itself."""
        return self.shape == self.buffer and all(map(self.is_axis, range(len(self.buffer)), range(len(self.buffer))))

    @property
    def is_repeating(self) -> bool:
        """Whether an element of the buffer may be several elements of the view: then no row of it can be updated."""
        if any(self.owner(d) is None for keys in self.axes for d in keys):
            return True
        return any(np.bincount(own.table.ravel(), minlength=1).max() > 1 for own in self.along)

    def is_axis(self, axis: int, of_buffer: int) -> bool:
        """Return whether an axis of the view is that axis of the buffer, all of it and in order."""
        keys, (digits, table, rotation) = self.axes[axis], self.along[of_buffer]
        is_static = rotation is None and all(self.digits[d].start is None for d in keys)
        is_static = is_static and self.sizes[of_buffer] == self.buffer[of_buffer]
        return keys == digits and is_static and np.array_equal(table.ravel(), np.arange(self.buffer[of_buffer]))

    def equals(self, other: "Map", is_same: Callable[[Start, Start, int], bool] = _is_same_number) -> bool:
        """Return whether it is certain that two maps are the same. `is_same` compares starts of digits of a size."""
        is_alike = (self.buffer, self.sizes, self.axes) == (other.buffer, other.sizes, other.axes)
        if not is_alike or len(self.digits) != len(other.digits):
            return False
        for a, b in zip(self.digits, other.digits, strict=True):
            if a[:2] != b[:2] or (a.start is None) != (b.start is None):
                return False
            if a.start is not None and b.start is not None and not is_same(a.start, b.start, a.size):
                return False
        pairs = zip(self.along, other.along, strict=True)
        is_table = all(a.digits == b.digits and np.array_equal(a.table, b.table) for a, b in pairs)
        return is_table and self._is_stored_as(other, is_same)

    def _is_stored_as(self, other: "Map", is_same: Callable[[Start, Start, int], bool]) -> bool:
        """Return whether it is certain that the buffers of two maps are rotated alike."""
        pairs = [(a.rotation, b.rotation, n) for n, a, b in zip(self.buffer, self.along, other.along, strict=True)]
        return all(a is b or (a is not None and b is not None and is_same(a, b, n)) for a, b, n in pairs)

    # --- views ---

    def normalized(self) -> "Map":
        """Return the same map with as few digits as possible, numbered in order: its normal form."""
        return self._counted_apart()._with_few_digits()

    def _with_few_digits(self) -> "Map":
        digits, axes = list(self.digits), [list(keys) for keys in self.axes]
        along = [(list(keys), table) for keys, table, _ in self.along]
        owner = {d: a for a, (keys, _) in enumerate(along) for d in keys}
        for a, (keys, table) in enumerate(along):
            single = [k for k, d in enumerate(keys) if digits[d].size == 1]
            along[a] = ([d for k, d in enumerate(keys) if k not in single], table.squeeze(tuple(single)))
        for keys in axes:
            kept: list[int] = []
            for d in (d for d in keys if digits[d].seen > 1):
                high = kept[-1] if kept else d
                are_static = digits[high].start is None and digits[d].start is None
                if kept and are_static and owner.get(high) == owner.get(d):
                    kept.pop()
                    if d in owner:
                        own, table = along[owner[d]]
                        table = np.moveaxis(table, [own.index(high), own.index(d)], [-2, -1])
                        own = [*(x for x in own if x not in (high, d)), d]
                        along[owner[d]] = own, table.reshape(*table.shape[:-2], -1)
                    size = digits[high].size * digits[d].size
                    digits[d] = Digit(size, size)
                kept.append(d)
            keys[:] = kept
        shown = [d for keys in axes for d in keys]
        order = [*shown, *(d for own, _ in along for d in sorted(own) if d not in shown)]
        number = {d: k for k, d in enumerate(order)}
        sorted_along = []
        for (own, table), (_, _, rotation) in zip(along, self.along, strict=True):
            places = sorted(range(len(own)), key=lambda k, own=own: number[own[k]])  # type: ignore[misc]
            sorted_along.append(Along(tuple(number[own[k]] for k in places), table.transpose(places), rotation))
        of_axes = tuple(tuple(number[d] for d in keys) for keys in axes)
        return Map(self.buffer, tuple(digits[d] for d in order), of_axes, tuple(sorted_along), self.sizes)

    def owner(self, digit: int) -> int | None:
        return next((a for a, own in enumerate(self.along) if digit in own.digits), None)

    def _with_table(self, digit: int, change: Callable[[np.ndarray], np.ndarray]) -> "tuple[Along, ...]":
        """Return the indices after a change of the table whose first axis is the digit."""

        def changed(own: Along) -> Along:
            if digit not in own.digits:
                return own
            k = own.digits.index(digit)
            return own._replace(table=np.moveaxis(change(np.moveaxis(own.table, k, 0)), 0, k))

        return tuple(map(changed, self.along))

    def narrowed(self, digit: int, values: slice) -> "Map":
        """Return the view of some values of a digit."""
        digits, size = list(self.digits), len(range(*values.indices(self.digits[digit].size)))
        digits[digit] = Digit(size, size)
        return self._replace(digits=tuple(digits), along=self._with_table(digit, lambda table: table[values]))

    def _started(self, digit: int, count: int, start: Start) -> "Map":
        digits = list(self.digits)
        digits[digit] = digits[digit]._replace(seen=count, start=start)
        return self._replace(digits=tuple(digits))

    def sliced(
        self, starts: Sequence[int | Start], sizes: Sequence[int], strides: Sequence[int] | None = None
    ) -> "Map | None":
        """Return the map of a slice, None if it has none. A start is an integer, or a dynamic `Start`."""
        if 0 in sizes:
            return None
        found: Map | None = self
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            step = 1 if strides is None else strides[axis]
            if found is not None and size != self.shape[axis]:
                found = found._at(axis, start, size, step)
        return found and found.normalized()

    def _at(self, axis: int, start: Any, size: int, step: int) -> "Map | None":
        at = self._at_dynamic if isinstance(start, Start) else self._at_static
        found = at(self.axes[axis], start, size, step)
        if found is None and (one_digit := self._with_one_digit(axis)) is not None:
            return one_digit._at(axis, start, size, step)
        return found

    def _at_static(self, keys: Sequence[int], start: Any, size: int, step: int) -> "Map | None":
        found = self
        for k, d in enumerate(keys):
            each = math.prod(self.digits[low].seen for low in keys[k + 1 :])
            (high, start), digit = divmod(start, each), self.digits[d]
            is_last, is_one = k == len(keys) - 1, start + (size - 1) * step < each
            if not is_last and not is_one and (start or size % each or step > 1):
                return None
            count = size if is_last else 1 if is_one else size // each
            if digit.start is None:
                found = found.narrowed(d, slice(high, high + (count - 1) * step + 1, step if is_last else 1))
            elif step > 1:
                return None
            else:
                found = found._started(d, count, digit.start.moved(high))
            if is_last or not is_one:
                return found
        return None

    def _at_dynamic(self, keys: Sequence[int], start: Any, size: int, step: int) -> "Map | None":
        if step > 1 or (size > 1 and len(keys) > 1) or any(self.digits[d].start is not None for d in keys):
            return None
        found, low = self, 1
        for d in reversed(keys):
            own = start if len(keys) == 1 else start.digit(low, self.digits[d].size)
            found, low = found._started(d, size, own), low * self.digits[d].size
        return found

    def reversed(self, axes: Sequence[int]) -> "Map":
        """Return the map of a view from its last element to its first one, along some axes."""
        found = self
        for d in (d for axis in axes for d in self.axes[axis]):
            digit = found.digits[d]
            found = found._replace(along=found._with_table(d, lambda table: table[::-1]))
            if digit.start is not None:
                found = found._started(d, digit.seen, digit.start.moved(digit.size - digit.seen, factor=-1))
        return found.normalized()

    def transposed(self, permutation: Sequence[int]) -> "Map":
        return self._replace(axes=tuple(self.axes[d] for d in permutation)).normalized()

    def reshaped(self, shape: Sequence[int]) -> "Map | None":
        """Return the map of a view with another shape, None if it has none."""
        flat = self._replace(axes=(tuple(d for keys in self.axes for d in keys),)).normalized()
        found = flat._divided(shape)
        if found is None and (one_digit := flat._with_one_digit(0)) is not None:
            found = one_digit._divided(shape)
        return found

    def _divided(self, shape: Sequence[int]) -> "Map | None":
        """Return the map of a view of one axis with another shape, None if the digits do not divide."""
        digits, along, axes = list(self.digits), list(self.along), []
        left = list(reversed(self.axes[0]))
        for size in shape:
            keys, rest = [], size
            while rest > 1:
                d = left.pop()
                count = digits[d].seen
                if rest % count:
                    each, is_odd = divmod(count, rest)
                    if is_odd or digits[d].start is not None:
                        return None
                    left.append(len(digits))
                    for a, (own, table, rotation) in enumerate(along):
                        if d in own:
                            k = own.index(d)
                            table = table.reshape(*table.shape[:k], rest, each, *table.shape[k + 1 :])
                            along[a] = Along((*own[: k + 1], len(digits), *own[k + 1 :]), table, rotation)
                    digits[d] = Digit(rest, rest)
                    digits.append(Digit(each, each))
                    count = rest
                keys.append(d)
                rest //= count
            axes.append(tuple(keys))
        return self._replace(digits=tuple(digits), axes=tuple(axes), along=tuple(along)).normalized()

    def repeated(self, shape: Sequence[int], dims: Sequence[int]) -> "Map":
        """Return the map of what repeats a view, whose axis k is axis `dims[k]` of that shape."""
        of_axis, own = dict(zip(dims, self.axes, strict=True)), dict(zip(dims, self.shape, strict=True))
        digits, axes = list(self.digits), []
        for d, size in enumerate(shape):
            if own.get(d, 1) == size:
                axes.append(of_axis.get(d, ()))
                continue
            axes.append((len(digits),))
            digits.append(Digit(size, size))
        return self._replace(digits=tuple(digits), axes=tuple(axes)).normalized()

    def stored_rotated(self, axis: int, start: Start) -> "Map":
        """Return the same view if index k along an axis of the buffer is stored at index `(start + k) mod n`."""
        along = list(self.along)
        along[axis] = along[axis]._replace(rotation=start)
        return self._replace(along=tuple(along))

    # --- axes of the buffer that are counted together ---

    @property
    def together(self) -> list[range]:
        """The neighbouring axes of the buffer that are counted together."""
        found = []
        for first, size in enumerate(self.sizes):
            last = first
            while math.prod(self.buffer[first : last + 1]) < size:
                last += 1
            if first < last:
                found.append(range(first, last + 1))
        return found

    def counted_together(self, first: int, last: int) -> "Map | None":
        """Return the same view with an index that counts along these axes together, None if the table is too large."""
        own, sizes = self.along[first : last + 1], self.sizes[first : last + 1]
        keys, size = [d for x in own for d in x.digits], math.prod(sizes)
        is_rotated = any(x.rotation is not None for x in own)
        are_of_examples = any(np.ndim(start.value) > first for start in self.starts)
        count = math.prod(self.digits[d].size for d in keys)
        if is_rotated or are_of_examples or count > _FEW or size > INT32_MAX:
            return None
        table = np.zeros((), np.int32)
        for x, n in zip(own, sizes, strict=True):
            table = np.add.outer(table * np.int32(n), x.table)
        others = [Along((), np.zeros((), np.int32))] * (last - first)
        along = (*self.along[:first], Along(tuple(keys), table), *others, *self.along[last + 1 :])
        of_all = (*self.sizes[:first], size, *[1] * (last - first), *self.sizes[last + 1 :])
        return self._replace(along=along, sizes=of_all)

    def _counted_apart(self) -> "Map":
        """Return the same view with as few axes counted together as possible."""
        for axes in self.together:
            first, last = axes[0], axes[-1]
            keys, table, _ = self.along[first]
            for second in axes[1:]:
                n = math.prod(self.buffer[second : last + 1])
                high, low = np.divmod(table, np.int32(n))
                of_low = {k for k in range(table.ndim) if (low != low.take([0], k)).any()}
                if any((high != high.take([0], k)).any() for k in of_low):
                    continue
                along, sizes = list(self.along), list(self.sizes)
                for a, part, own in ((first, high, {*range(table.ndim)} - of_low), (second, low, of_low)):
                    kept = part[tuple(slice(None) if k in own else 0 for k in range(table.ndim))]
                    along[a] = Along(tuple(d for k, d in enumerate(keys) if k in own), kept)
                sizes[first], sizes[second] = sizes[first] // n, n
                return self._replace(along=tuple(along), sizes=tuple(sizes))._counted_apart()
        return self

    def _with_one_digit(self, axis: int) -> "Map | None":
        """Return the same view with an axis of one digit, None if it has none."""
        keys = self.axes[axis]
        owners = [-1 if (own := self.owner(d)) is None else own for d in keys]
        if len(keys) < 2 or -1 in owners or any(self.digits[d].start is not None for d in keys):
            return None
        found = self.counted_together(min(owners), max(owners))
        return found and found._with_few_digits()

    # --- sets of elements ---

    def is_apart(self, other: "Map") -> bool:
        """Return whether it is certain that two views of a buffer have no element in common."""
        if not (alike := _counted_alike([self, other])) or not self._is_stored_as(other, _is_same_number):
            return False
        pairs = [(a.table, b.table) for a, b in zip(*(m.along for m in alike), strict=True)]
        if any(a.max() < b.min() or b.max() < a.min() for a, b in pairs):
            return True
        return any(max(a.size, b.size) <= _FEW and not np.isin(a, b).any() for a, b in pairs)

    def contains(self, other: "Map", is_same: Callable[[Start, Start, int], bool] = _is_same_number) -> bool:
        """Return whether it is certain that this view has all elements of another one."""
        if not (alike := _counted_alike([self, other])) or not self._is_stored_as(other, is_same):
            return False
        return all(alike[0]._contains_along(a, alike[1], is_same) for a in range(len(self.buffer)))

    def _contains_along(self, axis: int, other: "Map", is_same: Callable[[Start, Start, int], bool]) -> bool:
        mine, its = self.along[axis], other.along[axis]
        pairs = []  # digits that start at the same number
        for d in mine.digits:
            size, seen, start = self.digits[d]
            if start is not None:
                alike = [(e, other.digits[e]) for e in its.digits if other.digits[e][:2] == (size, seen)]
                same = [e for e, x in alike if x.start is not None and is_same(start, x.start, size)]
                if not same:
                    return False
                pairs.append((d, same[0]))
        if not pairs and mine.table.size == self.sizes[axis]:
            return True
        is_alike = not pairs or tuple(zip(*pairs, strict=True)) == (mine.digits, its.digits)
        if is_alike and np.array_equal(mine.table, its.table):
            return True
        if max(mine.table.size, its.table.size) > _FEW:
            return False
        count = math.prod(self.digits[d].size for d, _ in pairs)
        whole, part = (
            np.moveaxis(own.table, [own.digits.index(p[k]) for p in pairs], range(len(pairs))).reshape(count, -1)
            + self.sizes[axis] * np.arange(count)[:, None]
            for k, own in enumerate((mine, its))
        )
        return bool(np.isin(part, whole).all())


def _counted_alike(maps: Sequence[Map]) -> Sequence[Map]:
    """Return views of a buffer that count along the same axes together, none if a table is too large."""
    if all(m.sizes == maps[0].sizes for m in maps):
        return maps
    axes = [a for m in maps for some in m.together for a in some]
    found = [m.counted_together(min(axes), max(axes)) for m in maps]
    alike = [m._with_few_digits() for m in found if m is not None]
    return alike if len(alike) == len(maps) else []


def joined(maps: Sequence[Map], axis: int) -> Map | None:
    """Return the map of the concatenation of views along an axis of theirs, None if it has none.

    The views differ in one digit, which is the highest of that axis. Its tables are joined.
    """
    if len(maps) == 1:
        return maps[0]
    maps = _counted_alike(maps)
    for a in range(len(maps[0].buffer)) if maps else ():
        pairs = [_without_highest(m, axis, a) for m in maps]
        (first, _), tables = pairs[0], [table for _, table in pairs]
        is_digit = all(_differ_along(first, rest, a) for rest, _ in pairs)
        if not is_digit or any(x.shape[1:] != tables[0].shape[1:] for x in tables):
            continue
        if all(np.array_equal(x, tables[0]) for x in tables):
            continue
        table, number = np.concatenate(tables), len(first.digits)
        along, axes = list(first.along), list(first.axes)
        along[a] = along[a]._replace(digits=(number, *along[a].digits), table=table)
        axes[axis] = (number, *axes[axis])
        digits = (*first.digits, Digit(len(table), len(table)))
        return first._replace(digits=digits, axes=tuple(axes), along=tuple(along)).normalized()
    return None


def _without_highest(m: Map, axis: int, of_buffer: int) -> tuple[Map, np.ndarray]:
    """Return a view at the first value of the highest digit of an axis, and the table, whose first axis is that digit.

    If the digit does not belong to this axis of the buffer, return the view as it is.
    """
    digits, table, _ = m.along[of_buffer]
    d = next(iter(m.axes[axis]), None)
    if d is None or d not in digits or m.digits[d].start is not None:
        return m, table[None]
    return m.narrowed(d, slice(0, 1))._with_few_digits(), np.moveaxis(table, digits.index(d), 0)


def _differ_along(a: Map, b: Map, axis: int) -> bool:
    """Return whether two maps are the same but for the table of an axis of the buffer."""
    same = tuple(x if k == axis else own for k, (own, x) in enumerate(zip(b.along, a.along, strict=True)))
    return a.along[axis].digits == b.along[axis].digits and a.equals(b._replace(along=same))
