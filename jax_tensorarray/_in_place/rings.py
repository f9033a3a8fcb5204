"""Circular buffers ("rings"), and rules for equations that have some as operands.

Row k of a ring is at `(start + k) mod n`. A roll adds to `start`, and reads and writes of rows add `start` to their
index. If an equation needs the rows in order, we reorder them and note it: `registers` then gives the ring up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _compat
from jax_tensorarray._in_place import access, indices, selects
from jax_tensorarray._in_place.boxes import Box, is_plain_write, rows_of
from jax_tensorarray._in_place.maps import Map, Start
from jax_tensorarray._in_place.representations import Evaluator, Held, roots_of
from jax_tensorarray._in_place.rows import clamped
from jax_tensorarray._in_place.values import Left, Update, Value, as_written
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import ELEMENTWISE, IDENTITIES, LOGIC, READS, UPDATES
from jax_tensorarray._ops.primitive import row_params
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Equation


class Ring(NamedTuple):
    """A register. Its row k along the axis is the row `(start + k) mod n` of the array."""

    array: Array
    start: Array  #: if it has axes, of each example along the first axes of the array
    axis: int
    roots: frozenset[int] = frozenset()  #: the carries that it may be a version of

    @property
    def n(self) -> int:
        return int(self.array.shape[self.axis])

    def moved(self, by: Any) -> "Ring":
        """Return the register whose first row is row `by` of this one."""
        return self._replace(start=access.wrapped(self.start, by, self.n))

    @property
    def map(self) -> Map:
        """The map from the register to the array."""
        return Map.whole(self.array.shape).stored_rotated(self.axis, Start(id(self.start), self.start))

    def part(self, first: int | Array, count: int) -> Map:
        """Return the map of consecutive rows."""
        starts: list[Any] = [0] * self.array.ndim
        starts[self.axis] = first if isinstance(first, int) else Start(id(first), first)
        found = self.map.sliced(starts, [count if d == self.axis else n for d, n in enumerate(self.array.shape)])
        assert found is not None
        return found

    def rows(self, first: int | Array, count: int) -> Array:
        """Return consecutive rows."""
        return access.view_of(self.part(first, count), Value(self.array))

    def with_rows(self, first: int, rows: Array) -> "Ring":
        """Return the register with consecutive rows replaced, at most half of them."""
        count = rows.shape[self.axis]
        params = row_params("in_place", "clip", batch_dims=self.axis, window=(count,), whole=True)
        all_of_them = Update(ta_write_p, np.zeros([1] * self.axis, np.int32), rows, None, params)
        update = access.updated(self.part(first, count), rows.dtype, all_of_them)
        assert update is not None
        return self._replace(array=update.apply(self.array))


jax.tree_util.register_dataclass(Ring, ["array", "start"], ["axis", "roots"])


class _Piece(NamedTuple):
    """Consecutive rows of a register, or of an array."""

    of: Any  #: a `Ring` or a `Value`
    first: int
    length: int


class _Line(NamedTuple):
    """Pieces, one after the other along an axis."""

    pieces: tuple[_Piece, ...]
    axis: int

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def part(self, first: int, length: int) -> "_Line":
        found, at = list[_Piece](), 0
        for piece in self.pieces:
            low, high = (min(max(k - at, 0), piece.length) for k in (first, first + length))
            if low < high or (length == 0 and not found):
                found.append(piece._replace(first=piece.first + low, length=high - low))
            at += piece.length
        return _Line(tuple(found), self.axis)


class _Reversed(NamedTuple):
    """A register from its last row to its first one."""

    of: Ring

    @property
    def axis(self) -> int:
        return self.of.axis


def longer(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the longer shape: starts that examples share have fewer axes."""
    return a if len(a) >= len(b) else b


def spread(x: Array, shape: Sequence[int]) -> Array:
    """Repeat along further axes, which come last."""
    return x if x.shape == tuple(shape) else lax.broadcast_in_dim(x, shape, range(x.ndim))


class Rings(Evaluator):
    """Evaluates a jaxpr that holds registers as rings, and their rows as lines. Other values are `Value`s."""

    held, enters = (Ring, _Line, _Reversed), Ring

    def __init__(self) -> None:
        super().__init__()
        self.shifted: set[int] = set()  #: the carries whose rows have moved

    def known(self, x: Array) -> Value:
        return Value.given(x)

    def literal(self, v: Any) -> Value:
        return Value.of_literal(v)

    def equation(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        has_reversed = any(isinstance(x, _Reversed) for x in operands)
        if has_reversed and eqn.primitive.name not in ("rev", "scan") and registry.inlined(eqn) is None:
            self.eqn = eqn
            operands = [self.as_value(x) if isinstance(x, _Reversed) else x for x in operands]
        return super().equation(eqn, operands)

    def without_rule(self, eqn: Equation, operands: list[Held]) -> list[Held]:
        name = eqn.primitive.name
        if name in _PREDICATES and all(isinstance(x, Value) for x in operands):
            results = selects.RULES[name](eqn, operands)
            if not isinstance(results, Left):
                return results
        return super().without_rule(eqn, operands)

    def array(self, x: Held) -> Array:
        """Return all rows, in order."""
        if isinstance(x, Value):
            return x.array
        if isinstance(x, _Reversed):
            return lax.rev(self.array(x.of), (x.axis,))
        line = _line(x)
        for piece in line.pieces:
            if isinstance(piece.of, Ring) and 2 * piece.length > piece.of.n:
                self.needs(piece.of.roots)
        arrays = [self.rows(piece, line.axis) for piece in line.pieces]
        return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, line.axis)

    def rows(self, piece: _Piece, axis: int) -> Array:
        if piece.length == 0:  # no part of the register: its cotangent would be all of it
            return lax.full(
                [0 if d == axis else n for d, n in enumerate(piece.of.array.shape)], 0, piece.of.array.dtype
            )
        if isinstance(piece.of, Ring):
            return self.read(piece.of, piece.first, piece.length)
        return lax.slice_in_dim(piece.of.array, piece.first, piece.first + piece.length, axis=axis)

    def read(self, ring: Ring, first: int | Array, count: int) -> Array:
        """Return consecutive rows of a register."""
        self.remark("read", "ta_read", ring.array)
        return ring.rows(first, count)

    def write(self, ring: Ring, first: int, rows: Array) -> Ring:
        """Return a register with consecutive rows replaced, at most half of them."""
        self.remark("write", "ta_write", ring.array)
        return ring.with_rows(first, rows)

    def as_value(self, x: Held) -> Value:
        return x if isinstance(x, Value) else Value(self.array(x))

    def common(self, outs: Sequence[Held]) -> Ring | None:
        rings = [x for x in outs if isinstance(x, Ring)]
        if not rings or any(isinstance(x, _Line | _Reversed) for x in outs) or len({x.axis for x in rings}) > 1:
            return None
        start = functools.reduce(lambda a, b: a if a.ndim >= b.ndim else b, (x.start for x in rings))
        return rings[0]._replace(start=start, roots=roots_of(rings))

    def like(self, x: Held, kind: Ring, inputs: Sequence[Held] = ()) -> Ring:
        ring = x if isinstance(x, Ring) else Ring(x.array, jnp.int32(0), kind.axis)
        return kind._replace(array=ring.array, start=spread(ring.start, kind.start.shape))

    def slices(self, x: Held) -> Callable[[Array], Array] | None:
        if isinstance(x, _Reversed) and x.axis == 0:
            return lambda number: self.read(x.of, x.of.n - 1 - number, 1)[0]
        return (lambda number: self.read(x, number, 1)[0]) if isinstance(x, Ring) and x.axis == 0 else None

    def made(self, line: _Line) -> Held:
        """Return a line as a register, if one has most of its rows."""
        offsets = np.cumsum([0, *(piece.length for piece in line.pieces)])
        parts = [(p, int(q)) for p, q in zip(line.pieces, offsets, strict=False)]
        best, at = max((x for x in parts if isinstance(x[0].of, Ring)), key=lambda x: x[0].length, default=(None, 0))
        if best is None or line.length != best.of.n or 2 * best.length < line.length:
            return line
        ring = best.of.moved(best.first - at)
        if (best.first - at) % ring.n:
            self.shifted |= ring.roots
        for piece, q in parts:
            stays = _is_same(piece.of, best.of) and (piece.first - q - best.first + at) % ring.n == 0
            if piece.length and not stays:
                ring = self.write(ring, q, self.rows(piece, line.axis))
        return ring


def _line(x: Held) -> _Line:
    if isinstance(x, Ring):
        return _Line((_Piece(x, 0, x.n),), x.axis)
    assert isinstance(x, _Line)
    return x


def _is_same(a: Any, b: Any) -> bool:
    return isinstance(a, Ring) and isinstance(b, Ring) and a.array is b.array and a.start is b.start


# --- rules: from the evaluator, an equation and its operands to the results, None if there is no better way -----


def _joined(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    axis = eqn.params["dimension"]
    if any(x.axis != axis for x in operands if not isinstance(x, Value)):
        return None
    pieces = [(_Piece(x, 0, x.shape[axis]),) if isinstance(x, Value) else _line(x).pieces for x in operands]
    return [self.made(_Line(tuple(p for some in pieces for p in some), axis))]


def _slice(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held]:
    line, first, last = _line(operands[0]), list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides, axis = eqn.params["strides"], line.axis
    part = line.part(first[axis], last[axis] - first[axis])
    first[axis], last[axis] = 0, part.length
    shape = [part.length if d == axis else n for d, n in enumerate(eqn.invars[0].aval.shape)]
    if not any(first) and last == shape and (strides is None or set(strides) == {1}):
        return [self.made(part)]
    return [Value(lax.slice(self.array(part), first, last, strides))]


def _read(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    """Read rows of a line at a known place, or roll a register: from two of it, take as many rows as it has."""
    line, box = operands[0], Box.of(eqn)
    if not isinstance(line, _Line) or box is None or box.drops or box.shape != box.sizes:
        return None
    if [*box.starts] != [line.axis] or not all(isinstance(x, Value) for x in operands[1:]):
        return None
    count = box.sizes[line.axis]
    if (place := _place(box, line.axis, operands)) is not None:
        return [self.made(line.part(min(max(place, 0), line.length - count), count))]
    rings = [piece.of for piece in line.pieces if isinstance(piece.of, Ring) and piece.length == count]
    if len(rings) != 2 or not _is_same(*rings) or line.length != 2 * count:
        return None
    self.shifted |= rings[0].roots
    given: list[Any] = [None, *(x.array for x in operands[1:])]
    start = box.start(eqn.invars[0].aval.shape, given, line.axis)
    return [rings[0].moved(clamped(start, count))]


def _write(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    """Replace rows by others at a known place, if either are rows of a register."""
    of, new, box = operands[0], operands[rows_of(eqn)], Box.of(eqn)
    axis = next((x.axis for x in (of, new) if not isinstance(x, Value)), None)
    if axis is None or box is None or not {*box.starts} <= {axis} or not is_plain_write(eqn):
        return None
    count, length, place = box.sizes[axis], eqn.invars[0].aval.shape[axis], _place(box, axis, operands)
    if isinstance(of, Value) or place is None or (box.drops and not 0 <= place <= length - count):
        return None
    if isinstance(new, Value) or new.axis != axis or box.shape != box.sizes:
        new = Value(lax.reshape(self.array(new), box.sizes))
    line, first = _line(of), min(max(place, 0), length - count)
    if isinstance(of, Ring) and isinstance(new, Value) and 2 * count <= length:
        return [self.write(of, first, new.array)]
    own = (_Piece(new, 0, count),) if isinstance(new, Value) else _line(new).pieces
    after = line.part(first + count, length - first - count)
    return [self.made(_Line((*line.part(0, first).pieces, *own, *after.pieces), axis))]


def _place(box: Box, axis: int, operands: Sequence[Held]) -> int | None:
    """Return where a box starts along an axis, if it is known."""
    if axis not in box.starts:
        return 0
    index = operands[box.starts[axis][0]]
    return indices.known(index.source) if isinstance(index, Value) else None


def _select(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    which, *cases = operands
    kind = self.common(cases)
    predicate = selects.predicate_of(which) if isinstance(which, Value) else None
    if kind is None or predicate is None or predicate.mask.ndim > kind.axis:
        return None
    rings = [self.like(x, kind) for x in cases]
    if all(_is_same(x, rings[0]) for x in rings):
        return [rings[0]]
    kind = kind._replace(array=jaxprs.bind(eqn, [which.array, *(x.array for x in rings)])[0])
    if all(x.start is rings[0].start for x in rings):
        return [kind._replace(start=rings[0].start)]
    number = jnp.asarray(which.source.array)
    shape = kind.array.shape[: max(number.ndim, kind.start.ndim)]
    return [kind._replace(start=lax.select_n(spread(number, shape), *(spread(x.start, shape) for x in rings)))]


def _reversed(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    (of,) = operands
    if tuple(eqn.params["dimensions"]) != (of.axis,) or isinstance(of, _Line):
        return None
    return [of.of if isinstance(of, _Reversed) else _Reversed(of)]


def _elementwise(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    """Compute with registers whose rows are at the same places, and with values that all rows share."""
    rings = [x for x in operands if isinstance(x, Ring)]
    if not rings or any(x.start is not rings[0].start or x.axis != rings[0].axis for x in rings):
        return None
    if not all(isinstance(x, Ring) or (isinstance(x, Value) and _is_same_for_rows(x, rings[0].axis)) for x in operands):
        return None
    contents = [x.array if isinstance(x, Ring) else as_written([x])[0] for x in operands]
    return [_made_of(rings, jaxprs.bind(eqn, contents)[0], rings[0].axis)]


def _is_same_for_rows(x: Value, axis: int) -> bool:
    if not x.shape:
        return True
    maker = _compat.maker_of(x.array)
    if maker is None or maker.primitive.name != "broadcast_in_dim":
        return False
    dims, shape = maker.params["broadcast_dimensions"], np.shape(_compat.operands_of(maker)[0])
    return axis not in dims or shape[dims.index(axis)] == 1


def _reduced(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    """Reduce each row."""
    (of,), axes = operands, eqn.params["axes"]
    if not isinstance(of, Ring) or any(k == of.axis or k < of.start.ndim for k in axes):
        return None
    return [_made_of(operands, jaxprs.bind(eqn, [of.array])[0], of.axis - sum(k < of.axis for k in axes))]


def _made_of(rings: Sequence[Ring], array: Array, axis: int) -> Ring:
    """Return a register that is computed row by row from registers with the same places."""
    return Ring(array, rings[0].start, axis, roots_of(rings))


_PREDICATES = LOGIC.union(("broadcast_in_dim", "reshape", "convert_element_type"))
Rings.rules = {
    **dict.fromkeys(ELEMENTWISE | IDENTITIES, _elementwise),
    **{f"reduce_{kind}": _reduced for kind in ("sum", "prod", "max", "min", "and", "or")},
    "rev": _reversed,
    "concatenate": _joined,
    "slice": _slice,
    **dict.fromkeys(READS, _read),
    **dict.fromkeys(UPDATES, _write),
    "select_n": _select,
    **dict.fromkeys(("scan", "while"), Evaluator.loop),
}
