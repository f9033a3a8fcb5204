"""Rewrite selects by a one-hot mask as row ops.

    b = jnp.where((jnp.arange(T) == i)[:, None], x, b)
    # becomes
    b = ta_write(b, i, x, mode="drop")

`patterns` finds where a mask is true. A select between a buffer and rows writes these rows. A select between zeros and
a buffer reads them, if it is summed. A product of integers with a mask of 0 and 1 counts as such a select. A product of
floats does not, since 0 times infinity is not 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _gates
from jax_tensorarray._in_place import patterns, rows, selects, views
from jax_tensorarray._in_place.patterns import Mask, Place, Repeated
from jax_tensorarray._in_place.values import Left, Update, Value, View
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._ops.add import ta_add_p
from jax_tensorarray._ops.starts import along_axes, in_range, sizes_of
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Equation, bytes_of


class OneHotRows:
    """The pattern of an array of zeros with the rows of `source` in one place."""

    def __init__(self, located: "_Location", source: Value, then: Sequence[Equation] = ()) -> None:
        self.located, self.source, self.then = located, source, then

    def rows(self) -> Array:
        """Return the rows of the place. They mean nothing if the place is out of range."""
        found = self.located.rows_of(self.source)
        for eqn in self.then:
            (found,) = jaxprs.bind(eqn, [found])
        return found

    def added_to(self, buffer: Value) -> Value:
        return buffer.updated(self.located.update(ta_add_p, self.rows()), became="ta_add")

    def short(self) -> Array:
        """Return the array with size 1 along the axes of the place: the rows, or zeros."""
        found, (address, index, where) = self.rows(), self.located
        sizes = sizes_of(jax.ShapeDtypeStruct(address.shape, found.dtype), address.params)
        inside = in_range(along_axes(index, len(sizes)), sizes, address.window)
        inside = inside if where is None else inside & where
        shape = [*address.shape[: address.axis], *address.taken, *address.shape[address.after :]]
        inside = lax.reshape(inside, (*inside.shape, *[1] * (len(shape) - inside.ndim)))
        return jnp.where(inside, lax.reshape(found, shape), jnp.zeros((), found.dtype))


class _Location(NamedTuple):
    """Where a place is in a buffer."""

    address: rows.Address
    at: Array
    where: Array | None

    def rows_of(self, x: Value) -> Array:
        address, index, _ = self
        found = patterns.rows_of_short(x, address, ())
        if found is None and isinstance(x.pattern, Repeated):
            found = views.of_repeated(Value(x.pattern.short()), index, address)
        return rows.read(x, index, address) if found is None else found

    def update(self, primitive: Any, new: Array, *, is_zero: bool = False) -> Update:
        return Update(primitive, self.at, new, self.where, self.address.params, is_window=True, is_zero=is_zero)


def _located(place: Place, of: Any) -> _Location | Left:
    """Return where a place is in a buffer of that type."""
    axes, shape = sorted(place.starts), of.shape
    first, after = axes[0], axes[-1] + 1
    own = [x.shape for x in place.starts.values()]
    batch = max((k + 1 for own_shape in own for k, n in enumerate(own_shape) if n != 1), default=0)
    conditions = [x.shape[first:] for x in place.conditions]
    if batch > first or any(n != 1 for rest in conditions for n in rest) or any(shape[k] == 1 for k in axes):
        return Left("mask-of-elements")
    if batch and bytes_of([of]) < _gates.MASKED_BYTES_OF_EXAMPLES:
        return Left("mask-of-elements")
    taken = [1 if k in axes else n for k, n in enumerate(shape)]
    address = rows.box_address(of, taken, batch, axes, drops=True)
    if isinstance(address, Left):
        return address
    if (address.axis, address.after) != (first, after):
        return Left()
    common = np.broadcast_shapes(*own)[:batch]
    starts = {k: jnp.broadcast_to(lax.reshape(x, x.shape[:batch]), common) for k, x in place.starts.items()}
    where = None
    for x in place.conditions:
        condition = lax.reshape(x, x.shape[:first])
        where = condition if where is None else where & condition
    return _Location(address, address.index_of(starts), where)


def _all_located(mask: Mask, of: Any) -> list[_Location] | Left:
    found = []
    for place in mask.places:
        located = _located(place, of)
        if isinstance(located, Left):
            return located
        found.append(located)
    return found


def select_n(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    which, *cases = operands
    mask, of = which.pattern, eqn.outvars[0].aval
    if not isinstance(mask, Mask) or len(cases) != 2 or not _is_large(of):
        return Left()
    no, yes = reversed(cases) if mask.inverted else cases
    return _selected(eqn, operands, mask, no, yes)


def _selected(eqn: Equation, operands: Sequence[Value], mask: Mask, no: Value, yes: Value) -> list[Value] | Left:
    """Return `yes` in the places of a mask, and `no` elsewhere."""
    if not set(map(id, no.versions())).isdisjoint(map(id, yes.versions())):
        return Left()  # versions of one buffer
    is_zero = isinstance(no.pattern, Repeated) and no.pattern.is_zero
    if not is_zero and not _is_buffer(no):
        return Left()
    found = _all_located(mask, eqn.outvars[0].aval)
    if isinstance(found, Left):
        return found
    if not is_zero:
        return [_written(found, no, yes)]
    has_its_rows = yes.is_given or yes.view is not None or isinstance(yes.pattern, Repeated)
    if len(found) > 1 or not has_its_rows or not rows.has_rows(eqn.outvars[0].aval):
        return Left()
    return [_masked(eqn, operands, OneHotRows(found[0], yes))]


def _is_buffer(x: Value) -> bool:
    """Return whether a value is a version of a carry, or of the result of branches or of an inner loop."""
    made = list(x.versions())[-1].made_by
    return selects.is_of_carry(x) or (made is not None and registry.entry_of(made.eqn).kind in ("branches", "loop"))


def _written(found: Sequence[_Location], buffer: Value, source: Value) -> Value:
    """Return a buffer with the rows of another in these places. Places that are the same get the same row."""
    is_zero = isinstance(source.pattern, Repeated) and source.pattern.is_zero
    for located in found:
        update = located.update(ta_write_p, located.rows_of(source), is_zero=is_zero)
        buffer = buffer.updated(update, became="ta_write")
    return buffer


def _masked(eqn: Equation, operands: Sequence[Value], pattern: OneHotRows) -> Value:
    """Return an array of zeros and rows, which is made only if something needs all of it."""
    value = Value(None, lens=View(eqn, tuple(operands), eqn.outvars[0].aval.shape, lambda *_: None))
    value.pattern = pattern
    return value


def _is_large(aval: Any) -> bool:
    return bytes_of([aval]) >= _gates.MASKED_BYTES and rows.has_rows(aval)


def convert_element_type(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Convert zeros and rows, as a sum does that is done in larger floats."""
    (x,) = operands
    if not isinstance(x.pattern, OneHotRows):
        return Left()
    pattern = OneHotRows(x.pattern.located, x.pattern.source, (*x.pattern.then, eqn))
    return [_masked(eqn, operands, pattern)]


def reduce_sum(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Sum up zeros and rows: only the rows count."""
    (x,) = operands
    if not isinstance(x.pattern, OneHotRows):
        return Left()
    address = x.pattern.located.address
    if not set(range(address.axis, address.after)) <= set(eqn.params["axes"]):
        return Left()
    return [Value(jaxprs.bind(eqn, [x.pattern.short()])[0])]


def add(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Add rows to a buffer."""
    for buffer, other in (operands, operands[::-1]):
        if isinstance(other.pattern, OneHotRows) and buffer.shape == other.shape and _is_buffer(buffer):
            return [other.pattern.added_to(buffer)]
    return Left()


def mul(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Multiply integers by a mask of 0 and 1."""
    of = eqn.outvars[0].aval
    if not jnp.issubdtype(of.dtype, jnp.integer) or not of.shape or not _is_large(of):
        return Left()
    for x, other in (operands, operands[::-1]):
        mask = other.pattern
        if isinstance(mask, Mask) and all(other.shape[k] == of.shape[k] for place in mask.places for k in place.starts):
            zeros = _repeated(Value(jnp.zeros((), of.dtype)), of.shape, is_zero=True)
            whole = x if x.shape == of.shape else _repeated(x, of.shape)
            no, yes = (whole, zeros) if mask.inverted else (zeros, whole)
            return _selected(eqn, operands, mask, no, yes)
    return Left()


def dot_general(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Multiply a matrix of integers by a vector of 0 and 1 that is 1 for one row: `one_hot(i, n, dtype=int) @ b`."""
    of, (contracted, batches) = eqn.outvars[0].aval, eqn.params["dimension_numbers"]
    are_integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (*operands, of))
    if not are_integers or eqn.params.get("out_sharding") is not None:
        return Left()
    for one, other in ((0, 1), (1, 0)):
        mask, x, axes, batch = operands[one].pattern, operands[other], contracted[other], len(batches[one])
        is_vector = len(operands[one].shape) == batch + 1 and tuple(contracted[one]) == (batch,)
        has_its_rows = x.is_given or x.view is not None
        if not isinstance(mask, Mask) or mask.inverted or len(mask.places) > 1 or not (is_vector and has_its_rows):
            continue
        [place], rank = mask.places, len(x.shape)
        if any(tuple(b) != tuple(range(batch)) for b in batches) or set(place.starts) != {batch}:
            continue
        type_of = jax.ShapeDtypeStruct(x.shape, x.dtype)

        def over_rows(array: Array, batch: int = batch, rank: int = rank) -> Array:
            return lax.reshape(array, (*array.shape[:batch], *[1] * (rank - batch)))

        moved = place.with_arrays(over_rows, dict.fromkeys(place.starts, axes[0]).__getitem__)
        found = _located(moved, type_of) if _is_large(type_of) else Left("mask-of-elements")
        if isinstance(found, Left) or (x.view is not None and x.view.rows(found.at, found.address) is None):
            continue
        row = lax.squeeze(OneHotRows(found, x).short(), axes)
        return [Value(lax.convert_element_type(row, of.dtype))]
    return Left()


def _repeated(x: Value, shape: tuple[int, ...], *, is_zero: bool = False) -> Value:
    """Return a value as JAX repeats it in an elementwise operation whose result has that shape."""
    value = Value(jnp.broadcast_to(jnp.asarray(x.array), shape))
    value.pattern = Repeated(patterns.short_shape(x, len(shape)), lambda: patterns.short(x, len(shape)), is_zero)
    return value


RULES: dict[str, Callable[[Any, Sequence[Value]], list[Value] | Left]] = {
    "select_n": select_n,
    "convert_element_type": convert_element_type,
    "reduce_sum": reduce_sum,
    "add": add,
    "mul": mul,
    "dot_general": dot_general,
}
