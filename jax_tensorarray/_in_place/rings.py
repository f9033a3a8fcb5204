"""Circular buffers ("rings"), and rules for equations that have some as operands.

Row k of a ring is at `(start + k) mod n`. A roll adds to `start`, and reads and writes of rows add `start` to their
index. If an equation needs the rows in order, we reorder them and note it: `registers` then gives the ring up.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place import selects
from jax_tensorarray._in_place.representations import Evaluator, Held, roots_of
from jax_tensorarray._in_place.rows import as_int32, numbers_of, taken_by, with_numbers
from jax_tensorarray._in_place.values import Left, Value, as_written
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import ELEMENTWISE, IDENTITIES, LOGIC, SCATTERS
from jax_tensorarray._types import Equation

Array = jax.Array


class Ring(NamedTuple):
    """A register. Its row k along the axis is the row `(start + k) mod n` of the array."""

    array: Array
    start: Array  #: if it has axes, of each example along the first axes of the array
    axis: int
    roots: frozenset[int] = frozenset()  #: the carries that it may be a version of

    @property
    def n(self) -> int:
        return int(self.array.shape[self.axis])

    def at(self, array: Array) -> "Ring":
        """Return a register with other contents."""
        return self._replace(array=array)

    def moved(self, by: Any) -> "Ring":
        """Return the register whose first row is row `by` of this one."""
        return self._replace(start=_wrapped(self.start, by, self.n))

    def rows(self, first: Any, count: int) -> Array:
        """Return consecutive rows."""

        def read(array: Array, start: Array) -> Array:
            axis = self.axis - self.start.ndim
            if count == 1:
                return lax.dynamic_slice_in_dim(array, _wrapped(start, first, self.n), 1, axis)
            places = _wrapped(start, first + np.arange(count, dtype=np.int32), self.n)
            return jnp.take(array, places, axis, mode="clip")

        return self.each(read)

    def with_rows(self, first: Any, rows: Array) -> "Ring":
        """Return the register with consecutive rows replaced."""
        count = rows.shape[self.axis]

        def write(array: Array, start: Array, rows: Array) -> Array:
            axis = self.axis - self.start.ndim
            if count <= _gates.RING_SLICES:
                for k in range(count):
                    row = lax.slice_in_dim(rows, k, k + 1, axis=axis)
                    array = lax.dynamic_update_slice_in_dim(array, row, _wrapped(start, first + k, self.n), axis)
                return array
            places = _wrapped(start, first + np.arange(count, dtype=np.int32), self.n)
            at = array.at[(*[slice(None)] * axis, places)]
            return at.set(rows, mode="promise_in_bounds", unique_indices=True)

        return self.at(self.each(write, rows))

    def each(self, f: Callable[..., Array], *rest: Array) -> Array:
        """Call a function of the array, the start and further arrays for each example that has a start of its own."""
        for _ in range(self.start.ndim):
            f = jax.vmap(f)
        return f(self.array, self.start, *rest)


jax.tree_util.register_dataclass(Ring, ["array", "start"], ["axis", "roots"])


def _wrapped(start: Array, by: Any, n: int) -> Array:
    """Return `(start + by) mod n`, where an array `by` is from 0 to n."""
    if isinstance(by, int) and by % n == 0:
        return start
    place = start + jnp.asarray(by % n if isinstance(by, int) else by, jnp.int32)
    return jnp.where(place >= n, place - n, place)


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
            low, high = max(first - at, 0), min(first + length - at, piece.length)
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
            operands = [Value(self.array(x)) if isinstance(x, _Reversed) else x for x in operands]
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
        if isinstance(piece.of, Ring):
            return piece.of.rows(piece.first, piece.length)
        return lax.slice_in_dim(piece.of.array, piece.first, piece.first + piece.length, axis=axis)

    def written(self, operands: Iterable[Held]) -> list[Array]:
        return as_written([x if isinstance(x, Value) else Value(self.array(x)) for x in operands])

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
            return lambda number: x.of.rows(x.of.n - 1 - number, 1)[0]
        return (lambda number: x.rows(number, 1)[0]) if isinstance(x, Ring) and x.axis == 0 else None

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
            if not stays:
                ring = ring.with_rows(q, self.rows(piece, line.axis))
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


def _dynamic_slice(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    of, *starts = operands
    sizes, shape, axis = list(eqn.params["slice_sizes"]), eqn.invars[0].aval.shape, of.axis
    count, n = sizes[axis], shape[axis]
    start, takes_all = starts[axis], all(sizes[d] == shape[d] for d in range(len(shape)) if d != axis)
    if isinstance(of, _Line) and takes_all:
        if (place := _known(start)) is not None:
            return [self.made(of.part(min(max(place, 0), n - count), count))]
        return _rolled(self, of, start, count)
    if isinstance(of, _Line) or 2 * count > n:
        return None
    own, others = of.start.ndim, [as_int32(x.array, size) for x, size in zip(starts, shape, strict=True)]
    if count > 1 or any(sizes[d] != shape[d] for d in range(own)):
        rows = of.rows(_in_range(start, n, count), count)
        others[axis] = jnp.int32(0)
        return [Value(lax.dynamic_slice(rows, others, sizes))]

    def read(array: Array, first: Array) -> Array:
        others[axis] = _wrapped(first, _in_range(start, n, 1), n)
        return lax.dynamic_slice(array, others[own:], sizes[own:])

    return [Value(of.each(read))]


def _rolled(self: Rings, line: _Line, start: Value, count: int) -> list[Held] | None:
    """Roll a register by a computed number: from two of it, one after the other, take as many rows as it has."""
    rings = [piece.of for piece in line.pieces if isinstance(piece.of, Ring) and piece.length == count]
    is_twice = len(rings) == 2 and _is_same(*rings) and line.length == 2 * count
    if not is_twice:
        return None
    self.shifted |= rings[0].roots
    return [rings[0].moved(_in_range(start, line.length, count))]


def _in_range(start: Value, n: int, count: int) -> Array:
    """Return where a slice starts."""
    return jnp.clip(as_int32(start.array, n), 0, n - count)


def _dynamic_update_slice(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    of, rows, *starts = operands
    axis = (of if not isinstance(of, Value) else rows).axis
    shape, sizes = (v.aval.shape for v in eqn.invars[:2])
    count, n, start = sizes[axis], shape[axis], starts[axis]
    if any(sizes[d] != shape[d] for d in range(len(shape)) if d != axis):
        if not isinstance(of, Ring) or not isinstance(rows, Value) or 2 * count > n:
            return None
        places = [as_int32(x.array, size) for x, size in zip(starts, shape, strict=True)]
        if count == 1 and not of.start.ndim:
            places[axis] = _wrapped(of.start, _in_range(start, n, 1), n)
            return [of.at(lax.dynamic_update_slice(of.array, rows.array, places))]
        first, places[axis] = _in_range(start, n, count), jnp.int32(0)
        return [of.with_rows(first, lax.dynamic_update_slice(of.rows(first, count), rows.array, places))]
    if (place := _known(start)) is not None:
        return _replaced(self, of, rows, axis, min(max(place, 0), n - count), count)
    if not isinstance(of, Ring) or not isinstance(rows, Value) or 2 * count > n:
        return None
    return [of.with_rows(_in_range(start, n, count), rows.array)]


def _replaced(self: Rings, of: Held, rows: Held, axis: int, first: int, count: int) -> list[Held] | None:
    """Replace rows by others at a known place."""
    if not isinstance(rows, Value) and rows.axis != axis:
        rows = Value(self.array(rows))
    if isinstance(of, Ring) and isinstance(rows, Value) and 2 * count <= of.n:
        return [of.with_rows(first, rows.array)]
    if isinstance(of, Value):
        return None
    line, new = _line(of), (_Piece(rows, 0, count),) if isinstance(rows, Value) else _line(rows).pieces
    after = line.part(first + count, line.length - first - count)
    return [self.made(_Line((*line.part(0, first).pieces, *new, *after.pieces), axis))]


def _gather(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    of, indices = operands
    if not isinstance(indices, Value):
        return None
    if taken_by(eqn)[of.axis] != 1:
        return _windows(self, eqn, of, indices)
    found = _indexed(eqn, of, indices) if isinstance(of, Ring) else None
    if found is None:
        return None
    eqn, places, moved = found
    return [Value(jnp.moveaxis(jaxprs.bind(eqn, [of.array, places])[0], range(len(moved)), moved))]


def _windows(self: Rings, eqn: Equation, of: Held, indices: Value) -> list[Held] | None:
    """Read one window of each example, as `jax.vmap` of `lax.dynamic_slice` does."""
    numbers, sizes, shape = numbers_of(eqn), taken_by(eqn), eqn.invars[0].aval.shape
    examples, n, count = indices.shape[:-1], shape[of.axis], sizes[of.axis]
    batch = tuple(range(len(examples)))
    is_plain = numbers.batch == numbers.batch_of_indices == batch and not numbers.collapsed
    in_order = numbers.offset == tuple(range(len(batch), len(shape))) and eqn.params["mode"] != _FILL
    takes_all = all(sizes[k] == shape[k] for k in range(len(batch), len(shape)) if k != of.axis)
    if not (is_plain and in_order and takes_all and of.axis in numbers.starts):
        return None
    first = Value(indices.array[..., numbers.starts.index(of.axis)])
    if isinstance(of, _Line):
        return _rolled(self, of, first, count)
    return None if 2 * count > n else [Value(of.moved(_in_range(first, n, count)).rows(0, count))]


_FILL = lax.GatherScatterMode.FILL_OR_DROP


def _scatter(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    of, indices, rows = operands
    if not isinstance(indices, Value):
        return None
    taken, (shape, _, rows_shape) = taken_by(eqn), (v.aval.shape for v in eqn.invars)
    axis = (of if not isinstance(of, Value) else rows).axis
    place = _known(indices)
    takes_all = all(taken[k] == shape[k] for k in range(len(shape)) if k != axis)
    if eqn.primitive.name == "scatter" and tuple(numbers_of(eqn).starts) == (axis,) and place is not None and takes_all:
        if not 0 <= place <= shape[axis] - taken[axis]:
            return None
        if isinstance(rows, Value) or rows_shape != tuple(taken):
            # The updates of one place are windows, in the order of the axes.
            rows = Value(self.array(rows).reshape(taken))
        return _replaced(self, of, rows, axis, place, taken[axis])
    if not isinstance(of, Ring) or not isinstance(rows, Value) or taken[axis] != 1:
        return None
    found = _indexed(eqn, of, indices)
    if found is None:
        return None
    eqn, places, moved = found
    updates = jnp.moveaxis(rows.array, moved, range(len(moved)))
    return [of.at(jaxprs.bind(eqn, [of.array, places, updates])[0])]


def _known(index: Value) -> int | None:
    """Return an index as a number, if it is known."""
    literal = index.source.literal
    return int(np.asarray(literal).item()) if literal is not None and math.prod(index.shape) == 1 else None


def _indexed(eqn: Equation, ring: Ring, indices: Value) -> tuple[Any, Array, Sequence[int]] | None:
    """Return a gather or a scatter of a register, with its indices, None if it cannot be indexed that way.

    If its examples have starts but share the indices, these get axes for them in front. Also return the axes of the
    rows that have come to the front in that case.
    """
    numbers, taken = numbers_of(eqn), taken_by(eqn)
    at, shape, moved = indices.array, ring.array.shape, numbers.offset[:0]
    if ring.axis not in numbers.starts:
        return None
    if ring.start.ndim and not numbers.batch:
        own = range(ring.start.ndim)
        if any(taken[k] != shape[k] or k in numbers.starts for k in own):
            return None
        at, moved = jnp.broadcast_to(at, (*ring.start.shape, *at.shape)), numbers.offset[: len(own)]
        offset = _behind(numbers.offset[len(own) :], moved)
        numbers = numbers._replace(offset=offset, batch=tuple(own), batch_of_indices=tuple(own))
        taken[: len(own)] = [1] * len(own)
    elif tuple(numbers.batch)[: ring.start.ndim] != tuple(range(ring.start.ndim)):
        return None
    axes, mode = list(numbers.starts), eqn.params["mode"]
    parts = [as_int32(at[..., c], shape[axis]) for c, axis in enumerate(axes)]
    c, last = axes.index(ring.axis), ring.n - 1
    start = ring.start.reshape(*ring.start.shape, *[1] * (parts[c].ndim - ring.start.ndim))
    place = _wrapped(start, jnp.clip(parts[c], 0, last), ring.n)
    if mode != lax.GatherScatterMode.CLIP:  # an index out of range stays out of range
        place = jnp.where((parts[c] >= 0) & (parts[c] <= last), place, parts[c])
    parts[c] = place
    return with_numbers(eqn, numbers, taken), jnp.stack(parts, axis=-1), moved


def _behind(dims: Sequence[int], moved: Sequence[int]) -> tuple[int, ...]:
    """Renumber axes after `moved` went to the front."""
    return tuple(len(moved) + d - sum(m < d for m in moved) for d in dims)


def _select(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    which, *cases = operands
    kind = self.common(cases)
    predicate = selects.predicate_of(which) if isinstance(which, Value) else None
    if kind is None or predicate is None or predicate.mask.ndim > kind.axis:
        return None
    rings = [self.like(x, kind) for x in cases]
    if all(_is_same(x, rings[0]) for x in rings):
        return [rings[0]]
    kind = kind.at(jaxprs.bind(eqn, [which.array, *(x.array for x in rings)])[0])
    if all(x.start is rings[0].start for x in rings):
        return [kind._replace(start=rings[0].start)]
    number = jnp.asarray(which.source.array)
    shape = kind.array.shape[: max(number.ndim, kind.start.ndim)]
    return [kind._replace(start=lax.select_n(spread(number, shape), *(spread(x.start, shape) for x in rings)))]


def _contents(self: Rings, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    (of,) = operands
    return [of.at(jaxprs.bind(eqn, [of.array])[0])] if isinstance(of, Ring) else None


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
    return [_made_of(rings, jaxprs.bind(eqn, _contents_of(operands))[0], rings[0].axis)]


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


def _contents_of(operands: Sequence[Held]) -> list[Array]:
    return [x.array if isinstance(x, Ring) else as_written([x])[0] for x in operands]


def _made_of(rings: Sequence[Ring], array: Array, axis: int) -> Ring:
    """Return a register that is computed row by row from registers with the same places."""
    return Ring(array, rings[0].start, axis, roots_of(rings))


_PREDICATES = LOGIC.union(("broadcast_in_dim", "reshape", "convert_element_type"))
Rings.rules = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **{f"reduce_{kind}": _reduced for kind in ("sum", "prod", "max", "min", "and", "or")},
    "rev": _reversed,
    "concatenate": _joined,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    "select_n": _select,
    **dict.fromkeys(("scan", "while"), Evaluator.loop),
    **dict.fromkeys(IDENTITIES, _contents),
}
