"""Compose an index map with a read or an update: a row op on a view is a row op on the buffer.

    b.reshape(2, n, d)[1].T[k]
    # becomes
    b[n : 2 * n, k]

A row of a view is an outer product of sets of indices, one set for each axis of the buffer. If each set is a range, the
row is a box, perhaps with its digits in another order. Otherwise each index of such a set is a row of its own, as in a
gather: a window of a rotated buffer may wrap.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _gates
from jax_tensorarray._in_place import rows
from jax_tensorarray._in_place.maps import Along, Map
from jax_tensorarray._in_place.rows import Address
from jax_tensorarray._in_place.values import Left, Update, Value, arrays
from jax_tensorarray._ops.primitive import Params, row_params
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import along_axes, in_range, positions_of
from jax_tensorarray._types import Array

# --- the indices along one axis -----------------------------------------------------------------------------------


class IndexSet(NamedTuple):
    """The indices along an axis of the buffer: a start and places behind it, or a set that is computed."""

    start: Any  #: a number or an array `[*batch, *I]`
    order: np.ndarray  #: the place behind the start of each element, with an axis for each digit that the view has
    indices: Array | None = None  #: `[*batch, *I, n]` if it is no range

    @property
    def size(self) -> int:
        return self.order.size

    def is_all(self, size: int) -> bool:
        """Return whether these are all indices of an axis of that size."""
        return self.indices is None and isinstance(self.start, int) and (self.start, self.size) == (0, size)

    def as_range(self) -> "IndexSet":
        """Return the same indices, as a set if they are no range."""
        return self if self.order.max() + 1 == self.size else self.as_indices()

    def apart(self, sizes: Sequence[int]) -> "list[IndexSet] | None":
        """Return the indices along several axes that are counted together, None if they are no product of sets."""
        start, order, found = self.start, self.order, list[IndexSet]()
        for n in reversed(sizes[1:]):
            if self.indices is not None or (order % n).any():
                return None
            is_known = isinstance(start, int)
            rest, own = divmod(start, n) if is_known else (lax.div(start, np.int32(n)), lax.rem(start, np.int32(n)))
            found.append(IndexSet(own, np.zeros((), np.int32)))
            start, order = rest, order // n
        return [IndexSet(start, order), *reversed(found)]

    def as_indices(self) -> "IndexSet":
        """Return the same indices as a set."""
        if self.indices is not None:
            return self
        indices = jnp.asarray(self.start, np.int32)[..., None] + self.order.ravel().astype(np.int32)
        return self._replace(indices=indices, order=np.arange(self.size).reshape(self.order.shape))

    def of(self, array: Array, axis: int) -> Array:
        """Return the elements of an array at these indices, in the order of the view."""
        if self.indices is not None:
            return jnp.take(array, self.indices, axis, mode="clip")
        if isinstance(self.start, int):
            array = lax.slice_in_dim(array, self.start, self.start + self.size, axis=axis)
        else:
            array = lax.dynamic_slice_in_dim(array, self.start, self.size, axis)
        return in_order(array, axis, self.order)

    def rotated(self, start: Array, n: int) -> "IndexSet":
        """Return the indices `(start + k) mod n` of these indices k."""
        if self.indices is None and self.size == 1:
            return self._replace(start=wrapped(start, self.start, n))
        own = self.as_indices()
        return own._replace(indices=wrapped(start[..., None], own.indices, n))


def wrapped(start: Array, by: Any, n: int) -> Array:
    """Return `(start + by) mod n`, where an array `by` is from 0 to n."""
    if isinstance(by, int) and by % n == 0:
        return start
    place = start + (np.int32(by % n) if isinstance(by, int) else by)
    return jnp.where(place >= n, place - np.int32(n), place)


def _index_sets(
    m: Map, at: Mapping[int, Array], rotations: Mapping[int, Array], counts: Sequence[int], batch: int
) -> list[IndexSet] | None:
    """Return the indices along each axis of the buffer behind the batch, where rotated axes start at `rotations`.

    Return None if those along axes that the map counts together are no product of sets.
    """
    sets = [*[IndexSet(0, np.zeros((), np.int32))] * batch, *(_index_set(own, at, counts) for own in m.along[batch:])]
    for axes in m.together:
        apart = sets[axes[0]].apart([m.buffer[a] for a in axes])
        if apart is None:
            return None
        sets[axes[0] : axes[-1] + 1] = apart
    ranges = [x.as_range() for x in sets]
    return [x.rotated(rotations[a], m.buffer[a]) if a in rotations else x for a, x in enumerate(ranges)][batch:]


def _index_set(along: Along, at: Mapping[int, Array], counts: Sequence[int]) -> IndexSet:
    """Return the indices along an axis, if digits start at the numbers `at` and have `counts` values each."""
    keys, table, _ = along
    moving, shape = [k for k, d in enumerate(keys) if d in at], [counts[d] for d in keys if counts[d] > 1]
    steps = [_step_along(table, k) for k in moving]
    start: Any = None
    if None not in steps:
        offsets = table[tuple(slice(counts[d]) if d in at else slice(None) for d in keys)]
        for k, step in zip(moving, steps, strict=True):
            term = at[keys[k]] if step == 1 else at[keys[k]] * np.asarray(step, np.int32)
            start = term if start is None else start + term
    else:
        by_row = np.moveaxis(table, moving[0], 0).reshape(table.shape[moving[0]], -1)
        offsets = by_row[0]
        if len(moving) > 1 or counts[keys[moving[0]]] > 1 or (by_row - by_row[:, :1] != offsets - offsets[0]).any():
            return _computed(along, at, counts, shape)
        start = _looked_up(by_row[:, 0] - offsets[0], at[keys[moving[0]]])
    low = int(offsets.min())
    start = low if start is None else start + np.int32(low) if low else start
    return IndexSet(start, (offsets - low).reshape(shape))


def _step_along(table: np.ndarray, axis: int) -> int | None:
    """Return the difference between neighbours along an axis, None if there are several."""
    steps = np.diff(table, axis=axis)
    first = steps.flat[0]
    return int(first) if (steps == first).all() else None


def _looked_up(table: np.ndarray, at: Array) -> Array:
    """Return an element of a table. If it consists of two lines, as that of a rotation, return it by arithmetic."""
    for step in (table[1] - table[0], table[-1] - table[-2]):
        breaks = np.flatnonzero(np.diff(table) != step)
        if len(breaks) == 1:
            k = breaks[0] + 1
            low, high = (np.int32(table[j] - j * step) for j in (0, k))
            return at * np.int32(step) + jnp.where(at < np.int32(k), low, high)
    return jnp.take(table, at, mode="clip")


def _computed(along: Along, at: Mapping[int, Array], counts: Sequence[int], shape: Sequence[int]) -> IndexSet:
    """Return indices from any table."""
    rank, axis, place = len(shape), 0, np.int32(0)
    for d, size in zip(along.digits, along.table.shape, strict=True):
        own: Any = lax.expand_dims(at[d], range(at[d].ndim, at[d].ndim + rank)) if d in at else np.int32(0)
        if counts[d] > 1:
            own = own + np.arange(counts[d], dtype=np.int32).reshape([-1 if k == axis else 1 for k in range(rank)])
            axis += 1
        place = place * np.int32(size) + own
    found, count = jnp.take(along.table.ravel(), place, mode="clip"), math.prod(shape)
    order = np.arange(count).reshape(shape)
    if not shape:
        return IndexSet(found, order)
    return IndexSet(None, order, lax.reshape(found, (*found.shape[: found.ndim - rank], count)))


def in_order(array: Array, axis: int, order: np.ndarray, *, is_inverse: bool = False) -> Array:
    """Return an array whose element k along an axis is element `order[k]` of the given one, or the inverse of that.

    The axes of `order` are the digits of k. Most orders only change the order of digits, or their direction.
    """
    flat, n = order.ravel(), order.size
    if np.array_equal(flat, np.arange(n)):
        return array
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    steps = [int(order.take(1, k).flat[0] - order.flat[0]) if size > 1 else 0 for k, size in enumerate(order.shape)]
    digits = sorted(range(order.ndim), key=lambda k: -abs(steps[k]))
    down = [k for k, step in enumerate(steps) if step < 0]
    if np.array_equal(np.flip(order, tuple(down)).transpose(digits).ravel(), np.arange(n)):
        at, rest = range(axis), range(axis + len(digits), len(before) + len(digits) + len(after))
        if is_inverse:
            array = lax.rev(lax.reshape(array, (*before, *order.shape, *after)), [axis + k for k in down])
            array = lax.transpose(array, [*at, *(axis + k for k in digits), *rest])
        else:
            array = lax.reshape(array, (*before, *(order.shape[k] for k in digits), *after))
            array = lax.transpose(array, [*at, *(axis + digits.index(k) for k in range(len(digits))), *rest])
            array = lax.rev(array, [axis + k for k in down])
        return lax.reshape(array, (*before, n, *after))
    own = np.argsort(flat) if is_inverse else flat
    first = int(own[0])
    if np.array_equal(own, (first + np.arange(n)) % n):
        parts = [lax.slice_in_dim(array, first, n, axis=axis), lax.slice_in_dim(array, 0, first, axis=axis)]
        return lax.concatenate(parts, axis)
    return jnp.take(array, own, axis, mode="clip", unique_indices=True)


def _as_seen(m: Map, array: Array, lead: int, order: Sequence[int], counts: Sequence[int], batch: int) -> Array:
    """Return an array `[*lead, *digits]` with its digits in this order as a view `[*lead, *axes behind the batch]`."""
    shown = [d for keys in m.axes[batch:] for d in keys if counts[d] > 1]
    split = lax.reshape(array, (*array.shape[:lead], *(counts[d] for d in order)))
    own = [d for d in shown if d in order]
    split = lax.transpose(split, [*range(lead), *(lead + order.index(d) for d in own)])
    if own != shown:
        wide = (*array.shape[:lead], *(counts[d] for d in shown))
        split = lax.broadcast_in_dim(split, wide, [*range(lead), *(lead + shown.index(d) for d in own)])
    shape = [math.prod(counts[d] for d in keys) for keys in m.axes[batch:]]
    return lax.reshape(split, (*array.shape[:lead], *shape))


# --- row ops ------------------------------------------------------------------------------------------------------


class Access(NamedTuple):
    """A row op on the buffer, and how its rows are those of the view."""

    map: Map
    address: Address | None  #: None: it takes all of the buffer
    index: Any
    where: Array | None
    params: Params
    axis: int  #: the number of axes before the positions in the rows of the view
    single: int  #: how many axes from there on have size 1 in each of these rows
    batch: int
    examples: int  #: so many of the positions are examples, whose axes are not the first ones of the buffer
    positions: tuple[int, ...]
    boxes: list[IndexSet]  #: for each axis of the buffer behind the batch
    counts: list[int]  #: how many values of each digit a row has

    @property
    def _sets(self) -> list[int]:
        """The axes behind the batch along which each index is a row of its own."""
        return [k for k, x in enumerate(self.boxes) if x.indices is not None]

    @property
    def _digits(self) -> list[int]:
        """The digits of the rows of the buffer, in their order."""
        along, sets = self.map.along[self.batch :], self._sets
        axes = [*sets, *(k for k in range(len(along)) if k not in sets)]
        return [d for k in axes for d in along[k].digits if self.counts[d] > 1]

    def read(self, buffer: Value) -> Array:
        """Return the rows of the view."""
        if self.address is None:
            (array,) = arrays([buffer])
            batch, n = array.shape[: self.batch], len(self.positions)
            array = lax.expand_dims(array, range(self.batch, self.batch + n))
            return self._rows_of_view(
                jnp.broadcast_to(array, (*batch, *self.positions, *array.shape[self.batch + n :]))
            )
        if self.where is not None:
            buffer.is_used = True
            found = ta_read_p.bind(buffer.array, self.index, self.where, **self.params)
        else:
            found = rows.read(buffer, self.index, self.address)
        return self._rows_of_view(self.address.positions_first(found, len(self.positions) + len(self._sets)))

    def _rows_of_view(self, box: Array) -> Array:
        """Return `[*batch, *I, *sets, *axes]` as rows of the view."""
        lead, sets = self.batch + len(self.positions), self._sets
        ranges = [x for x in self.boxes if x.indices is None]
        sizes = [*(self.boxes[k].size for k in sets), *(x.size for x in ranges)]
        box = lax.reshape(box, (*box.shape[:lead], *sizes))
        for k, x in enumerate(ranges, lead + len(sets)):
            box = in_order(box, k, x.order)
        found = _as_seen(self.map, box, lead, self._digits, self.counts, self.batch)
        n, first = len(self.positions), self.batch + self.examples
        of_single = range(n + self.axis, n + self.axis + self.single)
        found = lax.squeeze(found, (*range(n, n + self.examples), *of_single))
        return jnp.moveaxis(found, range(first, lead), range(self.axis, self.axis + lead - first))

    def rows_of_buffer(self, of_view: Array) -> Array:
        """Return rows of the view as rows of the buffer."""
        assert self.address is not None
        lead, sets, n = self.batch + len(self.positions), self._sets, len(self.positions)
        first = self.batch + self.examples
        box = jnp.moveaxis(of_view, range(self.axis, self.axis + lead - first), range(first, lead))
        shown = [d for keys in self.map.axes[self.batch :] for d in keys if self.counts[d] > 1]
        box = lax.reshape(box, (*box.shape[:lead], *(self.counts[d] for d in shown)))
        box = lax.transpose(box, [*range(lead), *(lead + shown.index(d) for d in self._digits)])
        ranges = [x for x in self.boxes if x.indices is None]
        of_sets = [self.boxes[k].size for k in sets]
        box = lax.reshape(box, (*box.shape[:lead], *of_sets, *(x.size for x in ranges)))
        for k, x in enumerate(ranges, lead + len(sets)):
            box = in_order(box, k, x.order, is_inverse=True)
        own = self.address
        box = lax.reshape(box, (*box.shape[:lead], *of_sets, *own.rows_shape(())[own.batch :]))
        return own.positions_behind(box, n + len(sets))


def view_of(m: Map, buffer: Value) -> Array:
    """Return a view of a buffer as an array. If it is a few rows, or starts somewhere, it is read as a row op reads."""
    if m.together:
        (array,) = arrays([buffer])
        return view_of(m._replace(buffer=m.sizes), Value(lax.reshape(array, m.sizes)))
    batch = max((np.ndim(start.value) for start in m.starts), default=0)
    at = {d: digit.start.value for d, digit in enumerate(m.digits) if digit.start is not None}
    rotations = {a: own.rotation.value for a, own in enumerate(m.along) if own.rotation is not None}
    counts = [digit.seen for digit in m.digits]

    def sets(at: Mapping[int, Array], rotations: Mapping[int, Array]) -> list[IndexSet]:
        found = _index_sets(m, at, rotations, counts, batch)
        assert found is not None  # no axes are counted together
        return found

    boxes = sets(at, rotations)
    if at or rotations or math.prod(x.size for x in boxes) <= _gates.KNOWN_SHARE * math.prod(m.buffer):
        boxes = _with_sets_last(boxes, m.buffer[batch:], is_update=False)
        address = _address(m, boxes, buffer.dtype, batch, drops=False)
        if not isinstance(address, Left):
            params = row_params("in_place", "clip", batch_dims=batch, whole=True)
            found = Access(m, None, None, None, params, batch, 0, batch, 0, (), boxes, counts)
            return _placed(found, address, None, None).read(buffer)

    def read(array: Array, at: Mapping[int, Array], rotations: Mapping[int, Array]) -> Array:
        for a, found in enumerate(sets(at, rotations)):
            array = found.of(array, a)
        return _as_seen(m, array, 0, [d for x in m.along[batch:] for d in x.digits if counts[d] > 1], counts, batch)

    for _ in range(batch):
        read = jax.vmap(read)
    (array,) = arrays([buffer])
    return read(array, at, rotations)


def access(
    m: Map, dtype: Any, index: Array, where: Array | None, params: Params, *, is_update: bool = False
) -> Access | None:
    """Return a row op on a view as a row op on the buffer, None if it is none.

    An example: `b` has 10 rows, the view is `b.reshape(2, 5, -1)[1]`, and `index` is a row of that, `i`. It is row
    `5 + i` of `b`. If `i` is not one of 5, a write with `mode="drop"` is left out.
    """
    axis, d, window, shape = params["batch_dims"], params["index_dims"], params["window"], m.shape
    if (window and not params["whole"]) or params["mode"] not in ("drop", "clip"):
        return None
    both = [index] if where is None else [index, where]
    of_starts = [np.ndim(start.value) for start in m.starts]
    batch = max((*of_starts, *(k + 1 for k in range(axis) if any(x.shape[k] > 1 for x in both))), default=0)
    if batch > axis:
        return None
    if is_update and m.is_repeating:
        return None
    positions = positions_of(index, d)[axis:]
    sizes = [*shape[:axis], *[1] * (d - len(window)), *window, *shape[axis + d :]]
    of_examples, rank = (slice(None),) * batch + (0,) * (axis - batch), batch + len(positions)

    def over_positions(x: Array) -> Array:
        return lax.expand_dims(x, range(np.ndim(x), rank))

    drops, checked = params["mode"] == "drop", list[tuple[Array, int, int]]()
    # The op on the buffer clips or drops by itself, unless it will be left out for another reason.
    is_plain = drops or not any(start.drops for start in m.starts)
    counts = [digit.seen for digit in m.digits]
    at = {k: over_positions(digit.start.value) for k, digit in enumerate(m.digits) if digit.start is not None}
    rotations = {a: over_positions(own.rotation.value) for a, own in enumerate(m.along) if own.rotation is not None}
    examples = 0
    if not all(shape[k] == m.buffer[k] and m.is_axis(k, k) for k in range(batch)):
        if any(of_starts) or any(len(m.axes[k]) > 1 for k in range(batch)):
            return None
        for k, key in [(axis, key) for axis in range(batch) for key in m.axes[axis]]:
            number = lax.broadcasted_iota(np.int32, [shape[d] if d == k else 1 for d in range(rank)], k)
            at[key], counts[key] = at[key] + number if key in at else number, 1
        positions, examples, batch = (*shape[:batch], *positions), batch, 0
    for k, number in enumerate(along_axes(index[of_examples], d), axis):
        if sizes[k] == shape[k]:
            continue
        keys, size, number = m.axes[k], sizes[k], rows.as_int32(number, shape[k])
        owner = m.owner(keys[0]) if len(keys) == 1 else None
        if is_plain and owner is not None and shape[k] == m.buffer[owner] and m.is_axis(k, owner):
            at[keys[0]], counts[keys[0]] = number, size
            continue
        if drops:
            checked.append((number, shape[k], size))
        number = rows.clamped(number, shape[k] - size)
        if len(keys) > 1 and (size > 1 or any(key in at for key in keys)):
            return None
        for key in reversed(keys):
            own = number
            if len(keys) > 1:
                full = np.int32(m.digits[key].size)
                own, number = lax.rem(number, full), lax.div(number, full)
            at[key], counts[key] = at[key] + own if key in at else own, size
    sets = _index_sets(m, at, rotations, counts, batch)
    if sets is None:
        return None
    boxes = _with_sets_last(sets, m.buffer[batch:], is_update=is_update and math.prod(positions) > 1)
    address = _address(m, boxes, dtype, batch, drops=drops)
    found = Access(m, None, None, None, params, axis, d - len(window), batch, examples, positions, boxes, counts)
    is_all = all(x.is_all(n) for x, n in zip(boxes, m.buffer[batch:], strict=True))
    if isinstance(address, Left):
        return None if is_update or where is not None or not is_all else found
    inside = in_range(*zip(*checked, strict=True)) if checked else None
    return _placed(found, address, inside, None if where is None else where[of_examples])


def updated(m: Map, dtype: Any, update: Update) -> Update | None:
    """Return an update of a view as one of the buffer, None if it is none."""
    at = access(m, dtype, update.index, update.where, update.params, is_update=True)
    if at is None:
        return None
    return update._replace(index=at.index, rows=at.rows_of_buffer(update.rows), where=at.where, params=at.params)


def _with_sets_last(boxes: list[IndexSet], shape: Sequence[int], *, is_update: bool) -> list[IndexSet]:
    """Return the boxes such that no range of several rows is before a set of indices.

    An update of several boxes is one of ranges along one axis only.
    """
    sets = [k for k, x in enumerate(boxes) if x.indices is not None]
    if not sets:
        return boxes
    starts = [k for k, (x, n) in enumerate(zip(boxes, shape, strict=True)) if not x.is_all(n)]
    behind = [k for k in range(sets[-1] + 1, starts[-1] + 1) if boxes[k].size > 1]
    last = starts[-1] if is_update or len(behind) > 1 else sets[-1]
    is_set = range(starts[0], last + 1)
    return [x.as_indices() if k in is_set and x.size > 1 else x for k, x in enumerate(boxes)]


def _address(m: Map, boxes: Sequence[IndexSet], dtype: Any, batch: int, *, drops: bool) -> Address | Left:
    aval, buffer = jax.ShapeDtypeStruct(m.buffer, dtype), m.buffer
    sets = [k for k, x in enumerate(boxes, batch) if x.indices is not None]
    starts = [k for k, x in enumerate(boxes, batch) if not x.is_all(buffer[k])]
    sizes = [*buffer[:batch], *(1 if x.indices is not None else x.size for x in boxes)]
    rotated = [k for k in sets if m.along[k].rotation is not None]
    if any(2 * boxes[k - batch].size > buffer[k] for k in rotated):  # most of it: then all of it is put in order
        return Left("large-box")
    if sets != rotated and math.prod(x.size for x in boxes) >= _gates.BOX_SHARE * math.prod(buffer[batch:]):
        return Left("large-box")
    return rows.box_address(aval, sizes, batch, starts, drops=drops)


def _placed(found: Access, address: Address, inside: Array | None, where: Array | None) -> Access:
    """Return an access with its index on the buffer."""
    batch, boxes, sets = found.batch, found.boxes, found._sets
    rank = batch + len(found.positions)
    starts: dict[int, Any] = {}
    for k, box in enumerate(boxes):
        if k in sets:
            of_set = sets.index(k)
            shape = [*[1] * of_set, box.size, *[1] * (len(sets) - of_set - 1)]
            indices = jnp.asarray(box.indices)
            starts[batch + k] = lax.reshape(indices, (*indices.shape[:-1], *shape))
        elif not box.is_all(address.shape[batch + k]):
            start = jnp.asarray(box.start, np.int32)
            starts[batch + k] = lax.expand_dims(start, range(start.ndim, start.ndim + len(sets) * bool(start.ndim)))
    least = (*[1] * batch, *found.positions, *[1] * len(sets))
    wide = np.broadcast_shapes(least, *map(np.shape, starts.values()))
    starts = {k: jnp.broadcast_to(x, wide) for k, x in starts.items()}
    if inside is not None:
        first = min(starts)
        is_inside = jnp.broadcast_to(lax.expand_dims(inside, range(rank, rank + len(sets))), wide)
        starts[first] = lax.select(is_inside, starts[first], lax.full_like(starts[first], -1))
    there = address.params
    params: Params = {**found.params, "batch_dims": there["batch_dims"], "index_dims": there["index_dims"]}
    params["window"], params["whole"], params["mode"] = there["window"], there["whole"], there["mode"]
    if where is not None:
        where = lax.expand_dims(where, range(where.ndim, where.ndim + len(sets)))
        where = address.over_axes(jnp.broadcast_to(where, np.broadcast_shapes(where.shape, wide)))
    return found._replace(address=address, index=address.index_of(starts), where=where, params=params)
