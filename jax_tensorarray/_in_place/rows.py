"""Rewrite slices, gathers and scatters of a few rows as row ops.

    b = b.at[:, i].add(x)
    # becomes
    b = ta_add(b, i, x, axis=1, mode="drop")

An `Address` says which box of the buffer an equation takes, as far as shapes determine it. The equation starts
somewhere along some axes, takes one row or a box of rows from the first of these axes to the last, and takes all other
axes as a whole. An equation that takes only a part of any other axis, or all rows, stays as it is.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jax_tensorarray import _gates
from jax_tensorarray._in_place.noted import noted
from jax_tensorarray._in_place.values import Broadcast, Guard, Left, Selected, SparseRows, Update, Value, arrays
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.kinds import MAKES_ALL
from jax_tensorarray._ops.add import ta_add_p
from jax_tensorarray._ops.guard import ta_guard
from jax_tensorarray._ops.max import ta_max_p
from jax_tensorarray._ops.primitive import ROW_OPS, Params, is_packed, row_params
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import in_range, joined, positions_of
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import INT32_MAX, Array, Equation


class Address(NamedTuple):
    """The box of a buffer of this shape that an equation takes."""

    shape: tuple[int, ...]
    batch: int  #: number of leading axes that have indices of their own
    axis: int  #: the first axis along which it starts somewhere; those from `batch` to it are taken as a whole
    sizes: tuple[int, ...]  #: the sizes of the axes from there to the last one along which it starts somewhere
    window: tuple[int, ...]  #: the sizes of a box along the last of these axes; it takes one row along the others
    drops: bool  #: True: leave out boxes that are out of range; False: move them into range

    @property
    def params(self) -> Params:
        """The parameters of an update."""
        mode, index_dims = "drop" if self.drops else "clip", len(self.sizes)
        return row_params("in_place", mode, batch_dims=self.axis, index_dims=index_dims, window=self.window, whole=True)

    @property
    def params_of_read(self) -> Params:
        """The parameters of a read. Nobody uses the rows of a box that is out of range."""
        return self._replace(drops=False).params

    def in_example(self, axes: int) -> "Address":
        """Return the address in one example of a batch along the first `axes` axes."""
        return self._replace(shape=self.shape[axes:], batch=self.batch - axes, axis=self.axis - axes)

    @property
    def taken(self) -> tuple[int, ...]:
        """How many rows it takes along each of these axes."""
        return (*[1] * (len(self.sizes) - len(self.window)), *self.window)

    @property
    def after(self) -> int:
        """The first axis after the axes along which it starts."""
        return self.axis + len(self.sizes)

    def index_of(self, starts: Mapping[int, Array]) -> Array:
        """Return the index `[*batch, *axes, *I]` or `[*batch, *axes, *I, d]` of starts `[*batch, *I]` by axis.

        The index along an axis that is taken as a whole is 0. If a box starts elsewhere along it, the box is left out.
        """
        starts = {axis: as_int32(start, self.shape[axis]) for axis, start in starts.items()}
        like = next(iter(starts.values()))
        own = [
            starts.pop(axis) if axis in starts and count < size else lax.full_like(like, 0)
            for axis, count, size in zip(range(self.axis, self.after), self.taken, self.sizes, strict=True)
        ]
        if self.drops and starts:
            own[0] = lax.select(self.in_range(starts), own[0], lax.full_like(like, -1))
        return self.over_axes(joined(own))

    def in_range(self, starts: Mapping[int, Array]) -> Array:
        """Return which boxes are in range, of starts by axis."""
        taken = dict(enumerate(self.taken, self.axis))
        sizes = [self.shape[axis] for axis in starts]
        return in_range([*starts.values()], sizes, [taken.get(axis, self.shape[axis]) for axis in starts])

    def over_axes(self, index: Array) -> Array:
        """Return the index with the axes that are taken as a whole: they share it, so they have size 1."""
        return lax.expand_dims(index, range(self.batch, self.axis))

    def positions_of(self, index: Array) -> tuple[int, ...]:
        """Return the shape `I` of an index, which may have starts along several axes at its end."""
        return positions_of(index, len(self.sizes))[self.axis :]

    def rows_shape(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the rows for positions of shape `I`."""
        return (*self.shape[: self.axis], *positions, *self.window, *self.shape[self.after :])

    def positions_first(self, rows: Array, count: int) -> Array:
        """Reorder rows `[*batch, *axes, *I, ...]` to `[*batch, *I, *axes, ...]`."""
        return jnp.moveaxis(rows, range(self.axis, self.axis + count), range(self.batch, self.batch + count))

    def positions_behind(self, rows: Array, count: int) -> Array:
        """Reorder rows `[*batch, *I, *axes, ...]` to `[*batch, *axes, *I, ...]`."""
        return jnp.moveaxis(rows, range(self.batch, self.batch + count), range(self.axis, self.axis + count))


def clamped(start: Array, last: int) -> Array:
    """Move starts into the range from 0 to `last`.

    In a `shard_map` by two operations: a batch with `spmd_axis_name` varies over one more axis of the mesh, and JAX's
    rule for a batched `clamp` leaves its limits without.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return lax.clamp(np.int32(0), start, np.int32(last))
    return lax.min(lax.max(start, np.int32(0)), np.int32(last))


def as_int32(start: Array, size: Any) -> Array:
    """Convert a start along an axis of that size to int32.

    A start out of range of the axis stays out of range, but may become another number.
    """
    start = jnp.asarray(start)
    limits = jnp.iinfo(start.dtype)
    if limits.max > INT32_MAX:
        start = jnp.minimum(start, np.asarray(size, start.dtype))
    if limits.min < -INT32_MAX - 1:
        start = jnp.maximum(start, np.asarray(-1, start.dtype))
    return start.astype(np.int32)


def has_rows(aval: Any) -> bool:
    """Return whether row ops support the type of a buffer, which has more than one element.

    In buffers of 32 bytes they already take 0.5 to 1.0 times as long as plain JAX (CPU, jax 0.12, also batches of 8).
    """
    return why_no_rows(aval) is None


def why_no_rows(aval: Any) -> str | None:
    """Return the name of the reason why row ops do not support a buffer of this type, None if they do."""
    if not hasattr(aval, "dtype"):  # a token
        return "one-element"
    if is_packed(aval.dtype):
        return "packed-type"
    if math.prod(aval.shape) <= 1:
        return "one-element"
    return "too-large" if max(aval.shape) > INT32_MAX else None


def box_address(aval: Any, taken: Sequence[int], batch: int, starts: Sequence[int], *, drops: bool) -> Address | Left:
    """Return the address of an access that takes `taken` of each axis, and starts somewhere along the axes `starts`."""
    shape = aval.shape
    starts = [int(d) for d in starts if taken[d] != shape[d]]  # a gather may give NumPy integers
    reason = why_no_rows(aval) or ("all-rows" if not starts or 0 in taken else None)
    if reason is not None:
        return Left(reason)
    first, after = min(starts), max(starts) + 1
    if first < batch or any(taken[d] != shape[d] for d in (*range(batch, first), *range(after, len(shape)))):
        return Left()
    box = list(taken[first:after])
    while box and box[0] == 1:
        del box[0]
    if len(box) > 1 and math.prod(taken) >= _gates.BOX_SHARE * math.prod(shape):
        return Left("large-box")
    return Address(shape, batch, first, shape[first:after], tuple(box), drops)


# --- dynamic_slice and dynamic_update_slice ---------------------------------------------------------------------


def _of_slice(aval: Any, taken: Sequence[int]) -> Address | Left:
    starts = [d for d, (n, size) in enumerate(zip(taken, aval.shape, strict=True)) if n != size]
    return box_address(aval, taken, 0, starts, drops=False)


def _starts(address: Address, operands: Sequence[Any]) -> dict[int, Any]:
    """Return the starts by axis, of one for each axis of the buffer."""
    return {d: operands[d] for d in range(address.axis, address.after)}


def dynamic_slice(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    buffer, *starts = operands
    taken = eqn.params["slice_sizes"]
    address = _of_slice(eqn.invars[0].aval, taken)
    if isinstance(address, Left):
        return address
    if len(starts) != len(taken):
        return Left()
    index = address.index_of(_starts(address, noted(eqn, 1, arrays(starts))))
    return [Value(read(buffer, index, address).reshape(taken))]


def _of_known_slice(aval: Any, taken: Sequence[int]) -> Address | Left:
    """Return the address of a box that starts in a place known while tracing."""
    if math.prod(taken) > _gates.KNOWN_SHARE * math.prod(aval.shape):
        return Left("large-share")
    return _of_slice(aval, taken)


def _known(address: Address, starts: Sequence[int]) -> Array:
    """Return the index of a slice that starts there."""
    return address.index_of(_starts(address, [np.int32(start) for start in starts]))


def slice_(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Read some rows of a buffer that existed before the step.

    For any other buffer the derivative takes all of it anyway.
    """
    (buffer,), box = operands, _box_of_slice(eqn)
    address = _of_known_slice(eqn.invars[0].aval, box) if buffer.is_given else Left("made-in-the-step")
    if isinstance(address, Left):
        return address
    rows = read(buffer, _known(address, eqn.params["start_indices"]), address).reshape(box)
    return [Value(lax.slice(rows, [0] * len(box), box, eqn.params["strides"]))]


def _box_of_slice(eqn: Equation) -> list[int]:
    """Return the sizes of the smallest box around a slice, strided or not."""
    shape = eqn.outvars[0].aval.shape
    return [_spread(n, step - 1) for n, step in zip(shape, eqn.params["strides"] or [1] * len(shape), strict=True)]


def _spread(count: int, between: int) -> int:
    """Return the size of an axis of so many elements with others between them."""
    return count + max(count - 1, 0) * between


def pad(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Pad some rows with zeros: the transpose of a slice from a known place."""
    rows, zero = operands
    result, config = eqn.outvars[0].aval, eqn.params["padding_config"]
    is_of_rows = zero.literal == 0 and all(low >= 0 and high >= 0 for low, high, _ in config)
    box = [_spread(n, inner) for n, (_, _, inner) in zip(rows.shape, config, strict=True)]
    address = _of_known_slice(result, box) if is_of_rows else Left()
    if isinstance(address, Left):
        return address
    index, (written,) = _known(address, [low for low, _, _ in config]), arrays([rows])
    spread = lax.pad(written, zero.array, [(0, 0, inner) for _, _, inner in config])
    update = Update(ta_add_p, index, spread.reshape(address.rows_shape(())), None, address.params, is_window=True)
    return [Value(jaxprs.bind(eqn, [written, zero.array])[0], form=SparseRows((update,)))]


def dynamic_update_slice(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    buffer, rows, *starts = operands
    taken = eqn.invars[1].aval.shape
    if taken == buffer.shape:  # XLA says so too, but not of the scatter that `vmap` makes of it
        noted(eqn, 2, arrays(starts))
        return [rows]
    address = Left("made-anew") if _is_new(buffer) else _of_slice(eqn.invars[0].aval, taken)
    if isinstance(address, Left):
        return address
    if len(starts) != len(address.shape):
        return Left()
    index = address.index_of(_starts(address, noted(eqn, 2, arrays(starts))))
    update = Update(ta_write_p, index, _reshaped(rows, address.rows_shape(())), None, address.params)
    return [_updated(buffer, update._replace(is_window=True, is_zero=rows.sparse_updates == ()))]


def read(buffer: Value, index: Array, address: Address) -> Array:
    """Read the rows.

    If all examples share a buffer, or it was selected from a buffer and zeros, the original buffer is read. Of a view
    the rows of its operands are read.
    """
    if buffer.taken is not None:
        if (rows := buffer.taken.read(index, None, address.params_of_read)) is not None:
            buffer.is_used = True
            return rows
    elif buffer.view is not None:
        if (rows := buffer.view.rows(index, address)) is not None:
            return rows
        buffer.is_made_whole = not buffer.view.is_of_box
    form, change = buffer.form, buffer.change
    if isinstance(form, Broadcast) and 0 < form.axes <= address.batch:
        read_one = functools.partial(read, form.source, address=address.in_example(form.axes))
        for _ in range(form.axes):
            read_one = jax.vmap(read_one)
        return read_one(index)
    if isinstance(form, Selected) and not form.updates and form.active.mask.ndim <= address.axis:
        active = form.active.at_positions(index, len(address.sizes))
        return ta_read_p.bind(*arrays([form.whole]), index, active, **address.params_of_read)
    if isinstance(change, Guard) and buffer.before is not None and change.active.mask.ndim <= address.axis:
        return ta_guard(change.active.mask, read(buffer.before, index, address))
    return ta_read_p.bind(*arrays([buffer]), index, **address.params_of_read)


def _reshaped(rows: Value, shape: Sequence[int]) -> Array:
    (array,) = arrays([rows])
    return array.reshape(shape)


def _updated(buffer: Value, update: Update, *, became: str = "") -> Value:
    """Return the next version of a buffer. For a buffer of zeros, remember which rows are not zero."""
    value, form, written = buffer.updated(update, became=became), buffer.form, update.primitive is ta_write_p
    if isinstance(form, Selected) and written and form.active.mask.ndim <= update.params["batch_dims"]:
        value.form = form._replace(updates=(*form.updates, update))
    if buffer.sparse_updates is not None and update.primitive is ta_add_p:
        value.form = SparseRows((*buffer.sparse_updates, update))
    elif buffer.sparse_updates == () and _writes_once(update):
        value.form = SparseRows((update._replace(primitive=ta_add_p),))
    return value


def _writes_once(update: Update) -> bool:
    """Return whether rows are written, no two of them to one place, as is certain for a window."""
    return update.primitive is ta_write_p and update.is_window


def _is_new(buffer: Value) -> bool:
    """Return whether an unchanged equation has computed all elements of a buffer, so that rows matter little."""
    made = buffer.made_by
    return made is not None and made.is_kept and made.eqn.primitive.name in MAKES_ALL


# --- row ops: those of a buffer in another representation -----------------------------------------------------------


def address_of(eqn: Equation) -> Address | Left:
    """Return the address of a row op that `in_place` has made."""
    buffer, index, p = eqn.invars[0].aval, eqn.invars[1].aval, eqn.params
    if p["op"] != "in_place" or p["reverse"] or p["mode"] not in ("clip", "drop") or (p["window"] and not p["whole"]):
        return Left()
    axis, after = p["batch_dims"], p["batch_dims"] + p["index_dims"]
    batch = max((k + 1 for k in range(axis) if index.shape[k] > 1), default=0)
    return Address(buffer.shape, batch, axis, buffer.shape[axis:after], p["window"], p["mode"] == "drop")


def row_read(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    buffer, index, *where = operands
    address = address_of(eqn)
    if isinstance(address, Left) or where:
        return Left()
    (at,) = arrays([index])
    return [Value(read(buffer, at, address))]


def row_update(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    buffer, index, rows, *where = operands
    address = address_of(eqn)
    if isinstance(address, Left) or where:
        return Left()
    at, new = arrays([index, rows])
    is_window = math.prod(address.positions_of(at)) == 1
    return [_updated(buffer, Update(eqn.primitive, at, new, None, eqn.params, is_window, rows.sparse_updates == ()))]


# --- gather and scatter ----------------------------------------------------------------------------------------


class DimensionNumbers(NamedTuple):
    """The dimension numbers of a gather or a scatter, under names common to both."""

    offset: tuple[int, ...]  #: axes of the rows in the result or in the updates
    collapsed: tuple[int, ...]
    starts: tuple[int, ...]
    batch: tuple[int, ...]
    batch_of_indices: tuple[int, ...]


#: These names in JAX.
_OF_GATHER = (
    *("offset_dims", "collapsed_slice_dims", "start_index_map"),
    *("operand_batching_dims", "start_indices_batching_dims"),
)
_OF_SCATTER = (
    *("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims"),
    *("operand_batching_dims", "scatter_indices_batching_dims"),
)


def numbers_of(eqn: Equation) -> DimensionNumbers:
    names = _OF_GATHER if eqn.primitive.name == "gather" else _OF_SCATTER
    return DimensionNumbers(*(getattr(eqn.params["dimension_numbers"], name) for name in names))


def taken_by(eqn: Equation) -> list[int]:
    """Return how much a gather or a scatter takes of each axis of the buffer."""
    if "slice_sizes" in eqn.params:
        return list(eqn.params["slice_sizes"])
    numbers = numbers_of(eqn)
    window = iter(eqn.invars[2].aval.shape[k] for k in numbers.offset)
    axes = range(eqn.invars[0].aval.ndim)
    return [1 if k in (*numbers.collapsed, *numbers.batch) else next(window) for k in axes]


class _Gathered(NamedTuple):
    """An address, and the layout of its rows in the result of a gather or the updates of a scatter."""

    address: Address
    numbers: DimensionNumbers
    taken: tuple[int, ...]

    @property
    def kept(self) -> list[int]:
        """The axes of the buffer that the rows have."""
        return [d for d in range(len(self.taken)) if d not in (*self.numbers.collapsed, *self.numbers.batch)]

    def order(self, rank: int) -> list[int]:
        """Return which axis of `[*batch, *I, *kept]` each axis of the result is."""
        positions = rank - len(self.numbers.offset)
        row_axes, position_axes = iter(range(positions, rank)), iter(range(positions))
        return [next(row_axes if d in self.numbers.offset else position_axes) for d in range(rank)]

    def starts(self, indices: Array) -> dict[int, Array]:
        """Return the starts by axis."""
        return {int(d): indices[..., k] for k, d in enumerate(self.numbers.starts)}

    def index_of(self, indices: Array) -> Array:
        """Return the index of the row op."""
        address = self.address
        is_partial = all(count < size for count, size in zip(address.taken, address.sizes, strict=True))
        if len(address.sizes) > 1 and is_partial and self.numbers.starts == tuple(range(address.axis, address.after)):
            return address.over_axes(as_int32(indices, np.array(address.sizes)))
        return address.index_of(self.starts(indices))


def drops(eqn: Equation) -> bool:
    """Return whether a scatter leaves out rows that are out of range, or a gather fills them."""
    mode, promised = eqn.params["mode"], lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return mode == lax.GatherScatterMode.FILL_OR_DROP or (mode == promised and eqn.primitive.name != "gather")


def gathered(eqn: Equation) -> _Gathered | Left:
    """Return the address of a gather or a scatter, if it accesses rows that have a place in a buffer."""
    buffer, indices = (v.aval for v in eqn.invars[:2])
    numbers, taken = numbers_of(eqn), taken_by(eqn)
    batch, mode = len(numbers.batch), eqn.params["mode"]
    if numbers.batch != tuple(range(batch)) or numbers.batch_of_indices != tuple(range(batch)):
        return Left()
    if mode == lax.GatherScatterMode.ONE_HOT or not jnp.issubdtype(indices.dtype, jnp.integer):
        return Left("one-hot")
    address = box_address(buffer, taken, batch, numbers.starts, drops=drops(eqn))
    if isinstance(address, Left):
        return address
    count, size = math.prod(indices.shape[batch:-1]), math.prod(address.sizes)
    if count > 1 and len(address.window) > 1 and eqn.primitive.name != "gather":
        return Left("several-boxes")
    is_of_elements = not address.window and math.prod(address.shape[address.after :]) == 1
    are_elements = is_of_elements and eqn.primitive.name == "scatter"
    share = _gates.ELEMENTS_SHARE if are_elements else _gates.ROWS_SHARE
    if count > 1 and count * math.prod(address.window) >= share * size:
        return Left("large-share")
    return _Gathered(address, numbers, tuple(taken))


def gather(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    buffer, indices = operands
    found = gathered(eqn)
    if isinstance(found, Left):
        return found
    address, result = found.address, eqn.outvars[0].aval
    (at,) = noted(eqn, 1, arrays([indices]))
    index = found.index_of(at)
    rows = read(buffer, index, address)
    positions = at.shape[address.batch : -1]
    rows = address.positions_first(rows, len(positions))
    rows = rows.reshape(*at.shape[:-1], *(found.taken[d] for d in found.kept))
    if address.drops:
        inside = lax.broadcast_in_dim(address.in_range(found.starts(at)), rows.shape, range(at.ndim - 1))
        rows = jnp.where(inside, rows, jnp.asarray(eqn.params["fill_value"], rows.dtype))
    order = found.order(result.ndim)
    rows = jnp.transpose(rows, order)
    return [Value(rows)]


def scatter(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    buffer, indices, updates = operands
    if _replaces_all(eqn):
        noted(eqn, 1, arrays([indices]))
        return [updates]
    primitive, combine = _SCATTERS[eqn.primitive.name]
    found = Left("made-anew") if _is_new(buffer) else gathered(eqn)
    if isinstance(found, Left):
        return found
    if not _combines(eqn, primitive):
        return Left("other-combination")
    address = found.address
    is_window = math.prod(indices.shape[address.batch : -1]) == 1
    is_min = eqn.primitive.name == "scatter-min" and jnp.issubdtype(buffer.dtype, jnp.floating)
    may_repeat = combine is not None and not (is_window or eqn.params["unique_indices"])
    if may_repeat and not is_min:
        return Left("rows-twice")
    if combine is not None and not address.window and is_window:
        address = address._replace(window=(1,))  # XLA fuses both slices with `combine` if there is no reshape between
    at, rows = arrays([indices, updates])
    (at,) = noted(eqn, 1, [at])
    index = found._replace(address=address).index_of(at)
    positions = at.shape[address.batch : -1]
    order = found.order(rows.ndim)
    rows = jnp.transpose(rows, np.argsort(order).tolist())
    batch, axes = address.shape[: address.batch], address.shape[address.batch : address.axis]
    rest = address.rows_shape(())[address.axis :]
    rows = address.positions_behind(rows.reshape(*batch, *positions, *axes, *rest), len(positions))
    if eqn.primitive.name == "scatter-sub":
        rows = -rows
    if may_repeat:
        own, new = arrays([buffer, updates])
        return [Value(_minimum(eqn, found, own, at, new, index, rows))]
    if combine is not None:
        rows = combine(read(buffer, index, address), rows)
    update = Update(primitive, index, rows, None, address.params, is_window, updates.sparse_updates == ())
    return [_updated(buffer, update, became="" if combine is None else "a ta_read and a ta_write")]


def _replaces_all(eqn: Equation) -> bool:
    """Return whether the updates of a scatter are its result: a batched `dynamic_update_slice` of all of an array.

    XLA keeps such a scatter, although it removes such a slice.
    """
    numbers, shape = numbers_of(eqn), eqn.invars[0].aval.shape
    batch = (*range(len(numbers.batch)),)
    is_in_order = numbers.offset == (*range(len(batch), len(shape)),)
    is_plain = eqn.primitive.name == "scatter" and _combines(eqn, ta_write_p) and not drops(eqn)
    is_batch = numbers.batch == numbers.batch_of_indices == batch
    return is_plain and is_batch and is_in_order and eqn.invars[2].aval.shape == shape


def _minimum(
    eqn: Equation, found: _Gathered, buffer: Array, at: Array, updates: Array, index: Array, rows: Array
) -> Array:
    """Return the scatter as it is, with a derivative by rows: that of the maximum of the negated rows.

    The scatter is in place by itself, and takes less time than negating the rows. But its derivative in JAX makes whole
    buffers.
    """
    params = found.address.params

    @jax.custom_jvp
    def minimum(buffer: Array, at: Array, updates: Array, index: Array, rows: Array) -> Array:
        del index, rows
        return jaxprs.bind(eqn, [buffer, at, updates])[0]

    def negated(buffer: Array, index: Array) -> Array:
        return ta_write_p.bind(buffer, index, -ta_read_p.bind(buffer, index, **params), **params)

    @minimum.defjvp
    def _jvp(primals: Any, dots: Any) -> Any:
        buffer, _, _, index, rows = primals

        def by_rows(buffer: Array, rows: Array) -> Array:
            return negated(ta_max_p.bind(negated(buffer, index), index, -rows, **params), index)

        return jax.jvp(by_rows, (buffer, rows), (dots[0], dots[4]))

    return minimum(buffer, at, updates, index, rows)


#: The op, and, if no op combines rows that way, the function from the old row and the update to the row to write.
_SCATTERS: dict[str, tuple[Primitive, Callable[[Array, Array], Array] | None]] = {
    "scatter": (ta_write_p, None),
    "scatter-add": (ta_add_p, None),
    "scatter-sub": (ta_add_p, None),
    "scatter-max": (ta_max_p, None),
    "scatter-min": (ta_write_p, jnp.minimum),
    "scatter-mul": (ta_write_p, lax.mul),
}


def _combines(eqn: Equation, primitive: Primitive) -> bool:
    """Return whether a scatter combines rows as the op does."""
    if eqn.primitive.name == "scatter":
        jaxpr = eqn.params["update_jaxpr"]
        return jaxpr is None or (not jaxpr.eqns and jaxpr.outvars[0] is jaxpr.invars[1])
    dtype = eqn.invars[0].aval.dtype
    return dtype != np.bool_ and not (primitive is ta_max_p and jnp.issubdtype(dtype, jnp.complexfloating))


def is_of_rows(eqn: Equation) -> bool:
    """Return whether a rule of this module may apply to an equation: one with an address, or on a buffer with rows."""
    name = eqn.primitive.name
    if eqn.primitive in ROW_OPS:
        return not isinstance(address_of(eqn), Left)
    if name == "gather" or name in _SCATTERS:
        return has_rows(eqn.invars[0].aval)
    return name in ("slice", "dynamic_slice", "dynamic_update_slice") and why_left(eqn) is None


def why_left(eqn: Equation) -> Left | None:
    """Return why the rules of this module leave a read or write, whatever its operands are. None if they may not."""
    name, aval = eqn.primitive.name, eqn.invars[0].aval
    found: Address | _Gathered | Left
    if name == "slice":
        found = _of_known_slice(aval, _box_of_slice(eqn))
    elif name == "dynamic_slice":
        found = _of_slice(aval, eqn.params["slice_sizes"])
    elif name == "dynamic_update_slice":
        found = _of_slice(aval, eqn.invars[1].aval.shape)
    else:
        found = gathered(eqn)
    return found if isinstance(found, Left) else None


RULES: dict[str, Callable[[Any, Sequence[Value]], list[Value] | Left]] = {
    "slice": slice_,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(_SCATTERS, scatter),
    ta_read_p.name: row_read,
    **dict.fromkeys((p.name for p in (ta_add_p, ta_max_p, ta_write_p)), row_update),
}
