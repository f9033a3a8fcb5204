"""Update a buffer that is taken apart and put together again: `jnp.stack([c[0].at[i].set(x), c[1].at[i].set(y)])`.

Plain JAX copies each part out of the buffer, and all of them into a new one. Here a part is a place in the buffer, and
its rows are rows of the buffer. The same is done for a buffer that is updated in another shape or order of its axes.
A part that is not put back, or not in its place, is what it was in the program: only cost depends on what is found.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place import regions, rows
from jax_tensorarray._in_place.regions import Region
from jax_tensorarray._in_place.registers import is_divided
from jax_tensorarray._in_place.values import Update, Value
from jax_tensorarray._jaxprs import kinds, registry
from jax_tensorarray._ops.primitive import Params
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._types import Equation

Array = jax.Array

#: The size of an index that is looked at while tracing.
_FEW = 8

# --- equations that take parts, and put them together -------------------------------------------------------------


def _slice(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    if strides is not None and any(step != 1 for step in strides):
        return [None]
    return [own[0].sliced(starts, [b - a for a, b in zip(starts, limits, strict=True)])]


def _along(region: Region, axis: int, sizes: Sequence[int]) -> list[Region | None]:
    """Return the parts of a region with those sizes along an axis."""
    starts, shape = [0] * len(region.shape), list(region.shape)
    parts = []
    for k, size in enumerate(sizes):
        starts[axis], shape[axis] = sum(sizes[:k]), size
        parts.append(region.sliced(starts, shape))
    return parts


def _split(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    return _along(own[0], eqn.params["axis"], [int(n) for n in eqn.params["sizes"]])


def _unstack(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    parts = _along(own[0], eqn.params["axis"], [1] * len(eqn.outvars))
    return [part and part.reshaped(v.aval.shape) for part, v in zip(parts, eqn.outvars, strict=True)]


def _reshape(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    return [own[0].reshaped(eqn.outvars[0].aval.shape)]


def _broadcast(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    of, (buffer,) = eqn.outvars[0].aval, own
    return _reshape(eqn, own) if of.size == math.prod(buffer.shape) and len(eqn.invars) == 1 else [None]


def _transpose(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    return [own[0].transposed(eqn.params["permutation"])]


def _concatenate(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    return [regions.joined(own, eqn.params["dimension"])]


def _stack(eqn: Equation, own: Sequence[Region]) -> list[Region | None]:
    axis = eqn.params["axis"]
    longer = [part.reshaped([*part.shape[:axis], 1, *part.shape[axis:]]) for part in own]
    found = [part for part in longer if part is not None]
    return [regions.joined(found, axis)] if len(found) == len(own) else [None]


_RULES: dict[str, Callable[[Equation, Sequence[Region]], list[Region | None]]] = {
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "squeeze": _reshape,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "stack": _stack,
}


def _put(eqn: Equation, buffer: Region, known: Mapping[Any, np.ndarray]) -> Region | None:
    """Return the part of a buffer that an update replaces as a whole, in a place known while tracing."""
    numbers: list[Any] = [known.get(v) if not isinstance(v, jex.Literal) else np.asarray(v.val) for v in eqn.invars]
    if eqn.primitive.name == "dynamic_update_slice":
        at, box = numbers[2:], eqn.invars[1].aval.shape
        starts = [0 if n is None and size == full else n for n, size, full in zip(at, box, buffer.shape, strict=True)]
    elif eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is None and numbers[1] is not None:
        of, box = rows.numbers_of(eqn), rows.taken_by(eqn)
        if numbers[1].ndim != 1 or of.batch:
            return None
        starts = [0] * len(box)
        for d, n in zip(of.starts, numbers[1], strict=True):
            starts[d] = n
    else:
        return None
    if any(n is None or not 0 <= n <= full - size for n, size, full in zip(starts, box, buffer.shape, strict=True)):
        return None
    part = buffer.sliced([int(n) for n in starts], box)
    return part and part.reshaped(eqn.invars[_rows_of(eqn)].aval.shape)


def _rows_of(eqn: Equation) -> int:
    """Return which operand of an update is what is written."""
    return 1 if eqn.primitive.name == "dynamic_update_slice" else 2


# --- what is put together -----------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A variable that is a region of another one, `root`."""

    root: Any
    region: Region
    path: tuple[Any, ...]  #: the variables on the way to it, in nested tuples
    is_updated: bool


@_compat.cached
def put_together(jaxpr: Jaxpr) -> dict[Any, Region | None]:
    """Return the variables on the way from a buffer to its next version that is put together of parts of it.

    The value of one that replaces a part of a buffer is the region of that part.
    """
    found: dict[Any, Region | None] = {}
    inner = _compat.opened(jaxpr)
    if any(eqn.primitive.name in _RULES for eqn in inner.eqns):
        _look(inner, {}, found)
    return found


def _look(inner: Any, seen: dict[Any, _Seen], found: dict[Any, Region | None]) -> None:
    known: dict[Any, np.ndarray] = {}

    def of(v: Any) -> _Seen | None:
        if isinstance(v, jex.Literal) or not _may_be_taken(v.aval):
            return None
        return seen.get(v) or _Seen(v, Region.whole(v.aval.shape), (), False)

    for eqn in inner.eqns:
        name = eqn.primitive.name
        if (body := registry.inlined(eqn)) is not None:
            own = _compat.opened(body)
            given = {v: x for v, a in zip(own.invars, eqn.invars, strict=True) if (x := of(a)) is not None}
            _look(own, given, found)
            seen.update((v, given[x]) for v, x in zip(eqn.outvars, own.outvars, strict=True) if _in(given, x))
            continue
        if (number := _known(eqn, known)) is not None:
            known[eqn.outvars[0]] = number
        elif name in _RULES:
            _take(eqn, [of(v) for v in eqn.invars], seen, found)
        elif name in kinds.UPDATES and (buffer := of(eqn.invars[0])) is not None:
            v, rows_ = eqn.outvars[0], of(eqn.invars[_rows_of(eqn)])
            if rows_ is not None and rows_.root is buffer.root and rows_.is_updated:
                part = _put(eqn, buffer.region, known)
                if part == rows_.region:
                    seen[v] = _Seen(buffer.root, buffer.region, (v, buffer.path, rows_.path), True)
                    _mark(seen[v].path, found)
                    found[v] = part
                    continue
            if eqn.invars[0] in seen:
                seen[v] = _Seen(buffer.root, buffer.region, (v, buffer.path), True)
        elif name == "select_n":
            cases = [of(v) for v in eqn.invars[1:]]
            first = next((x for x in cases if x is not None and x.path), None)
            if first is not None and all(x is not None and x[:2] == first[:2] for x in cases):
                paths = tuple(x.path for x in cases if x is not None)
                seen[eqn.outvars[0]] = _Seen(first.root, first.region, paths, True)


def _in(seen: Mapping[Any, _Seen], v: Any) -> bool:
    return not isinstance(v, jex.Literal) and v in seen


def _take(eqn: Equation, own: Sequence[_Seen | None], seen: dict[Any, _Seen], found: dict[Any, Region | None]) -> None:
    """See which regions an equation makes, and whether it puts a buffer together."""
    of = [x for x in own if x is not None]
    if len(of) < len(own) or any(x.root is not of[0].root for x in of):
        return
    paths, is_updated = tuple(x.path for x in of), any(x.is_updated for x in of)
    for v, region in zip(eqn.outvars, _RULES[eqn.primitive.name](eqn, [x.region for x in of]), strict=True):
        if region is None:
            continue
        if region.is_whole and v.aval.shape == of[0].root.aval.shape:
            if is_updated or len(of) > 1:
                _mark((v, paths), found)
            continue
        seen[v] = _Seen(of[0].root, region, (v, paths), is_updated)


def _mark(path: tuple[Any, ...], found: dict[Any, Region | None]) -> None:
    for x in path:
        if isinstance(x, tuple):
            _mark(x, found)
        else:
            found.setdefault(x, None)


def _known(eqn: Equation, known: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    """Return the value of an index that is known while tracing: JAX makes an array of it."""
    name = eqn.primitive.name
    if name not in ("broadcast_in_dim", "convert_element_type", "concatenate", "reshape", "squeeze"):
        return None
    of: Any = eqn.outvars[0].aval
    if not jnp.issubdtype(of.dtype, jnp.integer) or of.size > _FEW:
        return None
    values = [np.asarray(v.val) if isinstance(v, jex.Literal) else known.get(v) for v in eqn.invars]
    found = [x for x in values if x is not None]
    if len(found) < len(values):
        return None
    if name == "concatenate":
        return np.concatenate(found, eqn.params["dimension"])
    (value,) = found
    if name == "broadcast_in_dim":
        shape = [1] * len(of.shape)
        for axis, size in zip(eqn.params["broadcast_dimensions"], value.shape, strict=True):
            shape[axis] = size
        return np.broadcast_to(value.reshape(shape), of.shape)
    return value.astype(of.dtype).reshape(of.shape)


def _may_be_taken(aval: Any) -> bool:
    return len(getattr(aval, "shape", ())) > 0 and rows.has_rows(aval) and not is_divided(aval)


# --- the values ---------------------------------------------------------------------------------------------------


class _Change:
    """An update of the buffer, and the region in which it is."""

    def __init__(self, update: Update, region: Region) -> None:
        self.update, self.region = update, region


class Whole:
    """A buffer that is taken apart, and its newest version."""

    def __init__(self, base: Value) -> None:
        self.base = self.newest = base
        self.applied: tuple[_Change, ...] = ()
        self.values: list[tuple[Part, Value]] = []  # what has been taken

    def version(self, region: Region, changes: tuple[_Change, ...]) -> Value:
        """Return a version of the buffer that has these changes in the region. It may have others elsewhere."""
        known = [x for x in self.applied if x in changes]
        rest = [x for x in changes if x not in known]
        if _is_same([*known, *rest], changes) and all(x in changes or x.region.is_apart(region) for x in self.applied):
            for change in rest:
                self.newest = self.newest.updated(change.update)
            self.applied += tuple(rest)
            return self.newest
        version = self.base
        for change in changes:
            version = version.updated(change.update)
        return version


def _is_same(changes: Sequence[_Change], other: Sequence[_Change]) -> bool:
    """Return whether the same changes have the same effect in another order: only such apart have changed places."""
    places = [other.index(x) for x in changes]
    pairs = itertools.combinations(range(len(places)), 2)
    return all(places[j] < places[k] or changes[j].region.is_apart(changes[k].region) for j, k in pairs)


class Part:
    """A region of a buffer, after some changes to it. See `values.Taken`."""

    def __init__(self, whole: Whole, region: Region, changes: tuple[_Change, ...] = ()) -> None:
        self.whole, self.region, self.changes = whole, region, changes
        self.shape, self.dtype = region.shape, whole.base.dtype

    def value(self) -> Value:
        """Return the part, or the version of the buffer that it is. The value is the same for the same part."""
        if self.region.is_whole:
            return self.version()
        for part, value in self.whole.values:
            if part.region == self.region and part.changes == self.changes:
                return value  # a select between versions asks whether they come from one
        value = Value.of_taken(self)
        self.whole.values.append((self, value))
        return value

    def version(self) -> Value:
        return self.whole.version(self.region, self.changes)

    def array(self) -> Array:
        version = self.version()
        version.is_used = True
        return self.region.of(version.array)

    def read(self, index: Array, where: Array | None, params: Params) -> Array | None:
        at = regions.place(self.region, self.dtype, index, where, params, is_update=False)
        if at is None:
            return None
        masks = [] if at.where is None else [at.where]
        version = self.version()
        if masks or version.taken is not None:
            version.is_used = True
            found = ta_read_p.bind(version.array, at.at, *masks, **at.params)
        else:
            found = rows.read(version, at.at, at.address)
        return at.rows_of_part(found)

    def updated(self, update: Update) -> "Part | None":
        at = regions.place(self.region, self.dtype, update.index, update.where, update.params, is_update=True)
        if at is None:
            return None
        changed = update._replace(index=at.at, rows=at.rows_of_buffer(update.rows), where=at.where, params=at.params)
        return Part(self.whole, self.region, (*self.changes, _Change(changed, self.region)))


def equation(eqn: Equation, operands: Sequence[Value], put: Region | None) -> list[Value] | None:
    """Return the results of an equation that takes parts of a buffer or puts them together, None if they are arrays."""
    name = eqn.primitive.name
    if name in kinds.UPDATES:
        return None if put is None else _replaced(eqn, operands, put)
    parts = [_part(x) for x in operands] if name in _RULES else []
    found = [x for x in parts if x is not None]
    if not found or len(found) < len(parts) or any(x.whole is not found[0].whole for x in found):
        return None
    made = _RULES[name](eqn, [x.region for x in found])
    results = []
    for region in made:
        changes = None if region is None else _of_all(found)
        if region is None or changes is None:
            return None
        results.append(Part(found[0].whole, region, changes).value())
    return results


def _replaced(eqn: Equation, operands: Sequence[Value], put: Region) -> list[Value] | None:
    """Replace a part of a buffer by what it has become."""
    buffer, part = _part(operands[0]), _part(operands[_rows_of(eqn)])
    if buffer is None or part is None or part.whole is not buffer.whole or part.region != put:
        return None
    own = [x for x in buffer.changes if x not in part.changes]
    new = [x for x in part.changes if x not in buffer.changes]
    is_first = all(x is y for x, y in zip(buffer.changes, part.changes, strict=False) if x in part.changes)
    if not is_first or not all(x.region.is_apart(put) for x in own) or not all(put.contains(x.region) for x in new):
        return None
    return [Value.of_taken(Part(buffer.whole, buffer.region, (*buffer.changes, *new)))]


def _part(x: Value) -> Part | None:
    """Return what is known of a part, None if it can be none."""
    if x.taken is not None:
        return x.taken if isinstance(x.taken, Part) else None
    is_buffer = x.is_given and not x.is_constant and x.view is None and x.part is None and x.guard is None
    if not is_buffer or not _may_be_taken(jax.typeof(x.array)):
        return None
    x.whole = x.whole or Whole(x)
    return Part(x.whole, Region.whole(x.shape))


def _of_all(parts: Sequence[Part]) -> tuple[_Change, ...] | None:
    """Return the changes of all parts, which begin with the same ones, None if those of some are in others, too."""
    _, *others = parts
    changes = list[_Change]()
    if others:  # those that all of them begin with
        columns = zip(*(x.changes for x in parts), strict=False)
        same_in_all = itertools.takewhile(lambda column: all(x is column[0] for x in column), columns)
        changes += [column[0] for column in same_in_all]
    same = len(changes)
    for k, part in enumerate(parts):
        own = part.changes[same:]
        if any(not x.region.is_apart(y.region) for x in own for j, y in enumerate(parts) if j != k):
            return None
        changes += own
    return tuple(changes)
