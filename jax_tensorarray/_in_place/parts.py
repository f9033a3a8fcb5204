"""Update a buffer through views that are put back, such as `c[0]`: lenses, in the language of functional programming.

    row = c[0].at[i].set(x)              # plain JAX copies `c[0]` out of the buffer,
    c = jnp.stack([row, c[1]])           # and all parts into a new one
    # becomes
    c = ta_write(c, (0, i), x, mode="drop")

We follow each part as a map on the buffer. If the program puts the part back where it was, we rewrite access to rows of
the part as access to rows of the buffer. A part that is not put back, or in another place, stays an array, unless a
function that JAX has traced once makes both kinds. A part that we miss costs time, but changes no result.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place import access, boxes, indices, maps, rows, views
from jax_tensorarray._in_place.boxes import Box
from jax_tensorarray._in_place.maps import Map, Start
from jax_tensorarray._in_place.noted import noted
from jax_tensorarray._in_place.registers import is_divided
from jax_tensorarray._in_place.values import Guard, Origin, Selected, Taken, Update, Value, View, arrays, as_written
from jax_tensorarray._jaxprs import jaxprs, kinds, registry
from jax_tensorarray._jaxprs.kinds import READS
from jax_tensorarray._ops.primitive import Params
from jax_tensorarray._types import Array, Equation

# --- equations whose results are views ----------------------------------------------------------------------------


def _slice(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    return [own[0].sliced(eqn.params["start_indices"], eqn.outvars[0].aval.shape, eqn.params["strides"])]


def _along(m: Map, axis: int, sizes: Sequence[int]) -> list[Map | None]:
    """Return the parts of a view with those sizes along an axis."""
    starts, shape = [0] * len(m.shape), list(m.shape)
    parts = []
    for k, size in enumerate(sizes):
        starts[axis], shape[axis] = sum(sizes[:k]), size
        parts.append(m.sliced(starts, shape))
    return parts


def _split(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    return _along(own[0], eqn.params["axis"], [int(n) for n in eqn.params["sizes"]])


def _unstack(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    parts = _along(own[0], eqn.params["axis"], [1] * len(eqn.outvars))
    return [part and part.reshaped(v.aval.shape) for part, v in zip(parts, eqn.outvars, strict=True)]


def _layout(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    """Return the view in another layout. One that repeats elements cannot be put back."""
    is_repeated = eqn.outvars[0].aval.size != eqn.invars[0].aval.size or len(eqn.invars) > 1
    return [None if is_repeated else views.layout(eqn, own[0])]


def _reverse(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    return [own[0].reversed(eqn.params["dimensions"])]


def _concatenate(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    return [maps.joined(own, eqn.params["dimension"])]


def _stack(eqn: Equation, own: Sequence[Map]) -> list[Map | None]:
    axis = eqn.params["axis"]
    longer = [part.reshaped([*part.shape[:axis], 1, *part.shape[axis:]]) for part in own]
    found = [part for part in longer if part is not None]
    return [maps.joined(found, axis)] if len(found) == len(own) else [None]


_RULES: dict[str, Callable[[Equation, Sequence[Map]], list[Map | None]]] = {
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    **dict.fromkeys(kinds.LAYOUT, _layout),
    "rev": _reverse,
    "concatenate": _concatenate,
    "stack": _stack,
}


# --- what is put back ---------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """An equation between a buffer and its next version."""

    is_put: bool = False  #: it puts back a part of the buffer that has been updated
    drops: bool = False  #: the update that puts the part back is left out if it is out of range


class _Seen(NamedTuple):
    """A variable that is a view of another one, `root`."""

    root: Any
    map: Map
    path: tuple[Any, ...]  #: the variables between the two, in nested tuples
    is_updated: bool  #: or joined of several


@_compat.cached
def put_together(jaxpr: Jaxpr) -> dict[Any, Step]:
    """Return the variables between a buffer and its next version, if that is made of parts of it."""
    inner = _compat.opened(jaxpr)
    search = _Search()
    if jaxprs.any_equation(inner, kinds.is_update):
        search.look(inner, {}, {})
    return search.found


class _Search:
    """Follows the views of each buffer through a jaxpr."""

    def __init__(self) -> None:
        self.found: dict[Any, Step] = {}
        self.numbers = _IntegerNumbers()

    def look(self, inner: Any, seen: dict[Any, _Seen], numbers: dict[Any, int]) -> None:
        def of(v: Any) -> _Seen | None:
            if isinstance(v, jex.Literal):
                return None
            is_root = v not in seen and _may_be_taken(v.aval)
            return _Seen(v, Map.whole(v.aval.shape), (), False) if is_root else seen.get(v)

        for eqn in inner.eqns:
            name = eqn.primitive.name
            if (body := registry.inlined(eqn)) is not None:
                own = _compat.opened(body)
                pairs = list(zip(own.invars, eqn.invars, strict=True))
                given = {v: x for v, a in pairs if (x := of(a)) is not None}
                within = {v: self.numbers.of(a, numbers) for v, a in pairs}
                self.look(own, given, within)
                for v, x in zip(eqn.outvars, own.outvars, strict=True):
                    if not isinstance(x, jex.Literal) and x in given:
                        seen[v] = given[x]
                    numbers[v] = self.numbers.of(x, within)
                continue
            self.numbers.note(eqn, numbers)
            if name in _RULES:
                self._take(eqn, [of(v) for v in eqn.invars if not _is_empty(v.aval)], seen)
            elif name in READS and (buffer := of(eqn.invars[0])) is not None:
                box = Box.of(eqn)
                m = box and self._box(eqn, box, buffer.map, numbers)
                if m:
                    v = eqn.outvars[0]
                    seen[v] = _Seen(buffer.root, m, (v, buffer.path), buffer.is_updated)
            elif name in kinds.UPDATES:
                self._update(eqn, of(eqn.invars[0]), seen, numbers)
            elif name == "select_n" and any(not isinstance(v, jex.Literal) and v in seen for v in eqn.invars):
                cases = [of(v) for v in eqn.invars[1:]]
                first = next((x for x in cases if x is not None and x.path), None)
                if first and all(x and x.root is first.root and x.map.equals(first.map) for x in cases):
                    paths = tuple(x.path for x in cases if x is not None)
                    seen[eqn.outvars[0]] = _Seen(first.root, first.map, paths, True)

    def _box(self, eqn: Equation, box: Box, m: Map, numbers: dict[Any, int]) -> Map | None:
        """Return the map of the box of an equation."""
        own = {}
        for d, (k, part) in box.starts.items():
            v = eqn.invars[k]
            own[d] = self.numbers.part(self.numbers.of(v, numbers), part, v.aval.shape)
        known = {d: self.numbers.known[x] for d, x in own.items() if x in self.numbers.known}
        return box.map(m, known, lambda d, _: Start(own[d], made_by=eqn.outvars[0]))

    def _update(self, eqn: Equation, buffer: _Seen | None, seen: dict[Any, _Seen], numbers: dict[Any, int]) -> None:
        v, new = eqn.outvars[0], eqn.invars[boxes.rows_of(eqn)]
        own = None if isinstance(new, jex.Literal) else seen.get(new)
        if buffer is None:
            return
        if own is not None and own.root is buffer.root and own.is_updated and boxes.is_plain_write(eqn):
            box = Box.of(eqn)
            m = box and self._box(eqn, box, buffer.map, numbers)
            if box and m and m.equals(own.map):
                seen[v] = _Seen(buffer.root, buffer.map, (v, buffer.path, own.path), True)
                self._put(eqn, box, buffer, own, seen[v].path)
                return
        if eqn.invars[0] in seen and (buffer.is_updated or not buffer.map.is_whole):
            seen[v] = _Seen(buffer.root, buffer.map, (v, buffer.path), True)

    def _put(self, eqn: Equation, box: Box, buffer: _Seen, own: _Seen, path: tuple[Any, ...]) -> None:
        """Note that an equation puts back a part."""
        self._mark(path)
        self.found[eqn.outvars[0]] = Step(is_put=True)
        before = [x.number for x in buffer.map.starts]
        for start in own.map.starts:
            if box.drops and start.number not in before:
                self.found[start.made_by] = self.found.get(start.made_by, Step())._replace(drops=True)

    def _take(self, eqn: Equation, own: Sequence[_Seen | None], seen: dict[Any, _Seen]) -> None:
        """See which views an equation makes, and whether it puts a buffer together."""
        of = [x for x in own if x is not None]
        if not of or len(of) < len(own) or any(x.root is not of[0].root for x in of):
            return
        paths, is_updated = tuple(x.path for x in of), len(of) > 1 or any(x.is_updated for x in of)
        for v, m in zip(eqn.outvars, _RULES[eqn.primitive.name](eqn, [x.map for x in of]), strict=True):
            if m is None:
                continue
            if m.is_whole and is_updated:
                self._mark((v, paths))
            else:
                seen[v] = _Seen(of[0].root, m, (v, paths), is_updated)

    def _mark(self, path: tuple[Any, ...]) -> None:
        for x in path:
            if isinstance(x, tuple):
                self._mark(x)
            else:
                self.found.setdefault(x, Step())


class _IntegerNumbers(jaxprs.ValueNumbers):
    """Numbers integers, of whatever type, such that those of one number are probably equal.

    Types do not count, since in 64 bits JAX narrows some integers on the way. If two are not equal, a part stays an
    array.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}  #: integers that are known while tracing
        self.joined: dict[int, Sequence[int]] = {}  #: what has been joined along the last axis

    def of(self, v: Any, known: Mapping[Any, int]) -> int:
        """Return the number of a variable or a literal."""
        if isinstance(v, jex.Literal):
            is_integer = np.ndim(v.val) == 0 and jnp.issubdtype(jnp.result_type(v.val), jnp.integer)
            return self.literal(int(v.val)) if is_integer else self.number(id(v))
        return known[v] if v in known else self.number(v)

    def literal(self, value: int) -> int:
        number = self.number("literal", value)
        self.known[number] = value
        return number

    def part(self, number: int, part: int | None, shape: Sequence[int]) -> int:
        """Return the number of one of several integers along the last axis."""
        if part is None or shape[-1] == 1:
            return number
        joined = self.joined.get(number, ())
        return joined[part] if len(joined) == shape[-1] else self.number("part", number, part)

    def note(self, eqn: Equation, known: dict[Any, int]) -> None:
        """Keep a number for the result of an equation, if equal equations of equal operands make the same."""
        name = eqn.primitive.name
        if name in kinds.PASSES_ON:
            known.update((v, self.of(x, known)) for v, x in zip(eqn.outvars, eqn.invars, strict=True))
        if name not in indices.REPEATABLE:
            return
        of = eqn.outvars[0].aval
        if not jnp.issubdtype(of.dtype, jnp.integer) and of.dtype != np.bool_:
            return
        own = [self.of(v, known) for v in eqn.invars]
        is_moved = name in indices.KEEP_NUMBERS and len(own) == 1
        if is_moved and indices.differ_in_ones(of.shape, eqn.invars[0].aval.shape):
            value = self.known.get(own[0])
            known[eqn.outvars[0]] = own[0] if value is None else self.literal(int(np.array(value).astype(of.dtype)))
            return
        params = () if name in kinds.ELEMENTWISE else tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        known[eqn.outvars[0]] = number = self.number(name, params, *own)
        if name == "concatenate" and eqn.params["dimension"] == len(of.shape) - 1:
            self.joined[number] = own


def _is_empty(x: Any) -> bool:
    """Return whether an array has no elements, as the rows before the first one."""
    return 0 in getattr(x, "shape", ())


def _may_be_taken(aval: Any) -> bool:
    return len(getattr(aval, "shape", ())) > 0 and rows.has_rows(aval) and not is_divided(aval)


# --- the values ---------------------------------------------------------------------------------------------------


class _Edit:
    """An update of the buffer, and the view in which it is."""

    def __init__(self, update: Update, m: Map) -> None:
        self.update, self.map = update, m


class Whole:
    """A buffer that is taken apart, and its newest version."""

    def __init__(self, base: Value) -> None:
        self.base = self.newest = base
        self.applied: tuple[_Edit, ...] = ()
        self.values: list[tuple[Part, Value]] = []  # what has been taken

    def version(self, m: Map, changes: tuple[_Edit, ...]) -> Value:
        """Return a version of the buffer that has these changes in the view. It may have others elsewhere."""
        known = [x for x in self.applied if x in changes]
        rest = [x for x in changes if x not in known]
        if _is_same([*known, *rest], changes) and all(x in changes or x.map.is_apart(m) for x in self.applied):
            for change in rest:
                self.newest = self.newest.updated(change.update)
            self.applied += tuple(rest)
            self.newest.lens = Version(self, self.applied)
            return self.newest
        version = self.base
        for change in changes:
            version = version.updated(change.update)
        version.lens = Version(self, changes)
        return version


def _is_same(changes: Sequence[_Edit], other: Sequence[_Edit]) -> bool:
    """Return whether the same changes have the same effect in another order: only such apart have changed places."""
    places = [other.index(x) for x in changes]
    pairs = itertools.combinations(range(len(places)), 2)
    return all(places[j] < places[k] or changes[j].map.is_apart(changes[k].map) for j, k in pairs)


class Version(NamedTuple):
    """A buffer with changes."""

    whole: Whole
    changes: tuple[_Edit, ...]


class Part(Taken):
    """A view of a buffer, after some changes to it.

    `made` makes it as the program does. It has to if the part is out of range of the buffer and has been changed: the
    changes will be left out in the buffer.
    """

    def __init__(
        self, whole: Whole, m: Map, made: Callable[[], Array], changes: tuple[_Edit, ...] = (), *, fills: bool = False
    ) -> None:
        self.whole, self.map, self.changes, self.made, self.fills = whole, m, changes, made, fills
        self.shape, self.dtype = m.shape, whole.base.dtype

    @property
    def is_buffer(self) -> bool:
        """Whether it has the elements that the buffer has after its changes."""
        return not self.fills and not (self.changes and any(start.drops for start in self.map.starts))

    def value(self) -> Value:
        """Return the part, or the version of the buffer that it is. The value is the same for the same part."""
        if self.map.is_whole:
            return self.version()
        for part, value in self.whole.values:
            if part.changes == self.changes and part.fills == self.fills and part.map.equals(self.map, boxes.is_same):
                return value  # a select between versions asks whether they come from one
        value = Value(None, lens=self, origin=Origin.BEFORE)
        self.whole.values.append((self, value))
        return value

    def version(self) -> Value:
        return self.whole.version(self.map, self.changes)

    def array(self) -> Array:
        if not self.is_buffer:
            return self.made()
        version = self.version()
        return access.view_of(self.map, version)

    def read(self, index: Array, where: Array | None, params: Params) -> Array | None:
        at = access.access(self.map, self.dtype, index, where, params) if self.is_buffer else None
        return at and at.read(self.version())

    def updated(self, update: Update) -> "Part | None":
        changed = access.updated(self.map, self.dtype, update)
        if changed is None:
            return None
        changes = (*self.changes, _Edit(changed, self.map))
        return Part(self.whole, self.map, lambda: update.apply(self.array()), changes, fills=self.fills)


def equation(eqn: Equation, operands: Sequence[Value], step: Step) -> list[Value] | None:
    """Return the results of an equation that takes parts of a buffer or puts them together, None if they are arrays."""
    name = eqn.primitive.name
    if name in kinds.UPDATES:
        return _replaced(eqn, operands) if step.is_put else None
    if name in READS:
        return _read(eqn, operands, step)
    parts = [_part(x) for x in operands if not _is_empty(x)] if name in _RULES else []
    found = [x for x in parts if x is not None]
    if not found or len(found) < len(parts) or any(x.whole is not found[0].whole for x in found):
        return None
    results = []
    for k, m in enumerate(_RULES[name](eqn, [x.map for x in found])):
        changes = None if m is None else _of_all(found)
        if m is None or changes is None:
            return None

        made = functools.partial(_bound, eqn, operands, k)
        results.append(Part(found[0].whole, m, made, changes, fills=any(x.fills for x in found)).value())
    return results


def _read(eqn: Equation, operands: Sequence[Value], step: Step) -> list[Value] | None:
    """Return the box that an equation reads as a part."""
    buffer, box = _part(operands[0]), Box.of(eqn)
    fills = box is not None and box.drops
    if buffer is None or box is None or (fills and not step.drops) or not buffer.is_buffer:
        return None
    given = _with_note(eqn, operands)
    m = box.map(buffer.map, box.known(operands), box.dynamic_starts(operands, given, drops=step.drops))
    if m is None:
        return None
    made = functools.partial(_bound, eqn, operands)
    return [Part(buffer.whole, m, made, buffer.changes, fills=fills).value()]


def _replaced(eqn: Equation, operands: Sequence[Value]) -> list[Value] | None:
    """Put back a part of a buffer: the buffer gets the edits of the part."""
    buffer, part, box = _part(operands[0]), _part(operands[boxes.rows_of(eqn)]), Box.of(eqn)
    if buffer is None or part is None or box is None or part.whole is not buffer.whole:
        return None
    given, known = _with_note(eqn, operands), box.known(operands)
    put = box.map(buffer.map, known, box.dynamic_starts(operands, given, drops=box.drops))
    if put is None or not put.equals(part.map, boxes.puts_back):
        return None
    own = [x for x in buffer.changes if x not in part.changes]
    new = [x for x in part.changes if x not in buffer.changes]
    is_first = all(x is y for x, y in zip(buffer.changes, part.changes, strict=False) if x in part.changes)
    if not is_first or not all(x.map.is_apart(put) for x in own):
        return None
    if not all(part.map.contains(x.map, boxes.is_same) for x in new):
        return None
    made = functools.partial(_bound, eqn, operands)
    if box.drops and box.starts.keys() - known:
        inside = box.is_in_range(operands[0].shape, given)
        new = [_Edit(x.update.where_true(inside), x.map) for x in new]
    result = Part(buffer.whole, buffer.map, made, (*buffer.changes, *new), fills=buffer.fills).value()
    result.became = result.became or "updates of the part that is put back"
    return [result]


def _bound(eqn: Equation, operands: Sequence[Value], k: int = 0) -> Array:
    """Return a result of an equation as the program makes it."""
    out: Array = jaxprs.bind(eqn, as_written(operands))[k]
    return out


def _with_note(eqn: Equation, operands: Sequence[Value]) -> list[Any]:
    """Return the arrays of the operands that say where a box starts, at their places, with a note for `checkify`."""
    first = 2 if eqn.primitive.name == "dynamic_update_slice" else 1
    last = len(operands) if eqn.primitive.name.startswith("dynamic") else 2
    return [None] * first + noted(eqn, first, arrays(operands[first:last]))


def _part(x: Value) -> Part | None:
    """Return a value as a part of its buffer, None if it can be none."""
    if isinstance(x.lens, Part):
        return x.lens
    is_version = not isinstance(x.lens, View) and not isinstance(x.form, Selected) and not isinstance(x.change, Guard)
    if x.origin is not Origin.BEFORE or not is_version or not _may_be_taken(jax.typeof(x.array)):
        return None
    if x.lens is None:
        x.lens = Version(Whole(x), ())
    return Part(x.lens.whole, Map.whole(x.shape), lambda: x.array, x.lens.changes)


def _of_all(parts: Sequence[Part]) -> tuple[_Edit, ...] | None:
    """Return the changes of all parts, which begin with the same ones, None if those of some are in others, too."""
    _, *others = parts
    changes = list[_Edit]()
    if others:  # those that all of them begin with
        columns = zip(*(x.changes for x in parts), strict=False)
        same_in_all = itertools.takewhile(lambda column: all(x is column[0] for x in column), columns)
        changes += [column[0] for column in same_in_all]
    same = len(changes)
    for k, part in enumerate(parts):
        own = part.changes[same:]
        if any(not x.map.is_apart(y.map) for x in own for j, y in enumerate(parts) if j != k):
            return None
        changes += own
    return tuple(changes)
