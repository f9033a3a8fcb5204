"""Read rows of a view of a buffer without making the view: `q.T[i]`, `(q * 2)[i]`, `q.astype(bfloat16)[i]`.

    y = (q * 2)[i]
    # becomes
    y = ta_read(q, i) * 2

The gradient of plain JAX makes a cotangent of the size of the view in every step, and takes all of it back through the
view. A view that does not depend on the loop is computed once, before the loop (loop-invariant code motion), and the
cotangents of its rows are added in place.

A conversion to a smaller float is never computed before the loop: the cotangents would be added in the smaller type.

An update can be such a view, too: `b.at[i].set(x)[j]` in a step that returns `b`. It stays as it is: see `discarded`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place import access, explained, indices, patterns, rows, selects
from jax_tensorarray._in_place.boxes import Box
from jax_tensorarray._in_place.maps import Map
from jax_tensorarray._in_place.rows import Address
from jax_tensorarray._in_place.values import Left, Value, View, arrays, as_written
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.jaxprs import flagged
from jax_tensorarray._jaxprs.kinds import CHEAP, ELEMENTWISE, IDENTITIES, LAYOUT, READS, is_update
from jax_tensorarray._types import Array, Equation, bytes_of


def viewed(jaxpr: Jaxpr, masks: frozenset[Any] = frozenset()) -> frozenset[Any]:
    """Return the variables that a jaxpr reads rows from, directly or through views.

    An array that is computed as a whole in any case, such as an output, is no view: rows are read of the array itself.
    Computing them again would read the operands later, and XLA could not reuse their memory for the array.

    A select by a mask that is true in one place reads the row that is there, and so does a product of integers. `masks`
    are inputs that are such masks.
    """
    return _uses(jaxpr, masks)[0]


#: Primitives that compute with each element of their operands. A select passes elements on.
_COMPUTES = ELEMENTWISE - {"select_n"}


@_compat.cached
def computed_with(jaxpr: Jaxpr) -> frozenset[Any]:
    """Return the variables that a jaxpr computes with as a whole: so does its derivative."""
    opened = _compat.opened(jaxpr)
    whole = _uses(opened, frozenset())[1]
    eqns = [eqn for eqn in opened.eqns if eqn.primitive.name in _COMPUTES and eqn.outvars[0] in whole]
    return frozenset(v for eqn in eqns for v in eqn.invars if not isinstance(v, jex.Literal))


@_compat.cached
def _uses(jaxpr: Jaxpr, masks: frozenset[Any]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the variables of which rows are read, and those that are used as a whole."""
    found = set[Any]()
    opened = _compat.opened(jaxpr)
    masks = patterns.may_be_masks(opened, masks)
    whole = {v for v in opened.outvars if not isinstance(v, jex.Literal)}

    def is_mask(v: Any) -> bool:
        return not isinstance(v, jex.Literal) and v in masks

    for eqn in reversed(opened.eqns):
        name, inner = eqn.primitive.name, registry.inlined(eqn)
        by_rows, as_whole = list[Any](), list(eqn.invars)
        if name in READS:
            by_rows = eqn.invars[:1] if rows.is_of_rows(eqn) else []
            as_whole = eqn.invars[len(by_rows) :]
        elif inner is not None:
            pairs = list(zip(eqn.invars, _compat.opened(inner).invars, strict=True))
            given = frozenset(own for v, own in pairs if is_mask(v))
            by_rows, as_whole = ([v for v, own in pairs if own in of] for of in _uses(_compat.opened(inner), given))
        elif name == "select_n" and is_mask(eqn.invars[0]):
            by_rows, as_whole = eqn.invars[1:], []
        elif name == "dot_general" and patterns.is_of_integers(eqn) and any(map(is_mask, eqn.invars)):
            by_rows, as_whole = [v for v in eqn.invars if not is_mask(v)], []
        elif (name in ELEMENTWISE or name == "squeeze") and eqn.outvars[0] in whole:
            found.discard(eqn.outvars[0])
        elif (name in ELEMENTWISE or name in LAYOUT) and eqn.outvars[0] in found:
            by_rows, as_whole = eqn.invars, eqn.invars if eqn.outvars[0] in whole else []
        for used, by in ((found, by_rows), (whole, as_whole)):
            used.update(v for v in by if not isinstance(v, jex.Literal) and len(getattr(v.aval, "shape", ())))
    return frozenset(found), frozenset(whole)


def discarded(jaxpr: Jaxpr) -> frozenset[Any]:
    """Return the versions of a buffer that only rows are read of, although the buffer before may be used on.

    An example is a change that a step tries: `rows = b.at[i].set(x)[j]`, and the step returns `b`. XLA computes these
    rows alone. An update in place would copy the buffer first. Arrays computed from such a version are versions, too.
    So are choices by place, as in `jnp.where(jnp.arange(n) == i, x, b)[j]`.
    """
    opened = _compat.opened(jaxpr)
    neither = (False,) * len(opened.invars)
    found, others = _discarded(opened, (True,) * len(opened.outvars), neither, neither)
    return found - others


#: Elements are computed one by one, so XLA computes those that are read.
_ONE_BY_ONE = ELEMENTWISE | LAYOUT


@_compat.cached
def _discarded(
    jaxpr: Jaxpr, outputs: tuple[bool, ...], versions: tuple[bool, ...], of_places: tuple[bool, ...]
) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the variables that are discarded, and others: a function may be called for one and for the other.

    The flags are of outputs that are used as a whole, of inputs that are discarded versions, and of inputs that are
    computed from the numbers of places: a `select_n` by such a mask is an update.
    """
    kept, found, others = _kept(jaxpr, outputs), set(flagged(jaxpr.invars, versions)), set[Any]()
    from_places, repeated = set(flagged(jaxpr.invars, of_places)), set[Any]()
    for eqn in jaxpr.eqns:
        is_version, is_of_places = (
            [not isinstance(v, jex.Literal) and v in some for v in eqn.invars] for some in (found, from_places)
        )
        if eqn.primitive.name == "iota" or (eqn.primitive.name in _ONE_BY_ONE and any(is_of_places)):
            from_places.update(v for v in eqn.outvars if not jaxprs.is_inexact(v.aval))
        # `vmap` makes a cond of a choice between arrays that it repeats for the examples. These are no versions.
        is_same = eqn.primitive.name in IDENTITIES and repeated.issuperset(_variables(eqn.invars))
        repeated.update(eqn.outvars if is_same or eqn.primitive.name == "broadcast_in_dim" else ())
        if (inner := registry.inlined(eqn)) is not None:
            body = _compat.opened(inner)
            within = _discarded(body, tuple(v in kept for v in eqn.outvars), tuple(is_version), tuple(is_of_places))
            for own, of_body in zip((found, others), within, strict=True):
                pairs = zip(eqn.outvars, body.outvars, strict=True)
                own |= {*of_body, *(v for v, x in pairs if not isinstance(x, jex.Literal) and x in of_body)}
        elif is_update(eqn) or eqn.primitive.name in _ONE_BY_ONE:
            is_choice = eqn.primitive.name == "select_n" and not repeated.issuperset(_variables(eqn.invars[1:]))
            is_tried = is_update(eqn) or any(is_version) or (is_choice and is_of_places[0])
            (found if is_tried and eqn.outvars[0] not in kept else others).add(eqn.outvars[0])
    return frozenset(found), frozenset(others)


def _kept(jaxpr: Jaxpr, outputs: Sequence[bool]) -> set[Any]:
    """Return the variables that more is used of than rows, where the flagged outputs are used as a whole.

    Parts at known places count as rows, unless they are more than half of an array together: these are joined again.
    """
    kept, in_parts = set(_variables(flagged(jaxpr.outvars, outputs))), Counter[Any]()
    for eqn in reversed(jaxpr.eqns):
        operands = eqn.invars
        if (inner := registry.inlined(eqn)) is not None:
            body = _compat.opened(inner)
            within = _kept(body, [v in kept for v in eqn.outvars])
            operands = [v for v, own in zip(operands, body.invars, strict=True) if own in within]
        elif eqn.primitive.name == "slice" or (eqn.outvars and eqn.outvars[0] not in kept and _passes_elements(eqn)):
            out = eqn.outvars[0]
            size = bytes_of([out.aval]) if eqn.primitive.name == "slice" else in_parts[out]
            of, rest = (operands[:1], operands[1:]) if is_update(eqn) else (operands, [])
            for source in _variables(of):
                in_parts[source] += size
            many = [v for v in _variables(of) if in_parts[v] > _gates.KNOWN_SHARE * bytes_of([v.aval])]
            operands = [*many, *rest]
        elif eqn.primitive.name in READS:
            operands = operands[1:]
        kept.update(_variables(operands))
    return kept


def _passes_elements(eqn: Equation) -> bool:
    """Return whether an element of the result needs one element of each operand, or is an updated one."""
    return is_update(eqn) or eqn.primitive.name in _ONE_BY_ONE


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [v for v in operands if not isinstance(v, jex.Literal)]


def view(eqn: Equation, operands: Sequence[Value]) -> list[Value] | None:
    """Return the result as a view of its operands, which is an array only if something needs all of it."""
    name, of = eqn.primitive.name, eqn.outvars[0].aval
    if not rows.has_rows(of) or not (name == "broadcast_in_dim" or any(x.shape for x in operands)):
        return None
    if name in ELEMENTWISE and all(_fits(x.shape, of.shape) for x in operands):
        return [_view(eqn, operands)]
    return [_view(eqn, operands)] if name in LAYOUT and len(operands) == 1 else None


def _view(eqn: Equation, operands: Sequence[Value], shape: tuple[int, ...] | None = None) -> Value:
    def read(index: Array, address: Address) -> Array | None:
        if eqn.primitive.name in LAYOUT:
            m = layout(eqn, Map.whole(operands[0].shape))
            return m and through(operands[0], m, index, address)
        found = [_part(x, index, address) for x in operands]
        present = [x for x in found if x is not None]
        return jaxprs.bind(eqn, present)[0] if len(present) == len(found) else None

    return Value(None, lens=View(eqn, tuple(operands), shape or eqn.outvars[0].aval.shape, read))


def layout(eqn: Equation, m: Map) -> Map | None:
    """Return the map of what an equation of `LAYOUT` makes of a view, None if it has none."""
    of = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "transpose":
        return m.transposed(eqn.params["permutation"])
    if eqn.primitive.name in ("reshape", "squeeze"):
        return m.reshaped(of)
    return m.repeated(of, eqn.params["broadcast_dimensions"])


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether an operand of an elementwise operation is a scalar, or an array that may be repeated."""
    return not shape or all(n in (1, size) for n, size in zip(shape, whole, strict=True))


def _part(x: Value, index: Array, address: Address) -> Array | None:
    """Return the part of an operand that belongs to the rows."""
    if not x.shape:
        return as_written([x])[0]
    if (short := patterns.rows_of_short(x, address, address.positions_of(index))) is not None:
        return short
    if x.source is not x and len(x.source.shape) <= address.axis:  # a predicate of the examples
        shape, source = address.rows_shape(address.positions_of(index)), arrays([x.source])[0]
        return lax.broadcast_in_dim(source, shape, range(source.ndim))
    if x.shape == address.shape:
        return rows.read(x, index, address)
    return of_repeated(x, index, address)


def through(source: Value, m: Map, index: Array, address: Address) -> Array | None:
    """Return rows of a view of a value, None if they are no rows of it."""
    at = access.access(m, source.dtype, index, None, address.params_of_read)
    return at and at.read(source)


def of_repeated(source: Value, index: Array, address: Address) -> Array | None:
    """Return the rows of what repeats an array along its axes of size 1."""
    return through(source, Map.whole(source.shape).repeated(address.shape, range(len(source.shape))), index, address)


def note(eqn: Equation, operands: Sequence[Value], results: Sequence[Value]) -> None:
    """Note which box of a buffer has been read, so that rows of the box are read of the buffer.

    Then nothing needs all of the box. If the buffer has been updated since, rows are read of the box: XLA would have to
    keep an older version of the buffer.
    """
    if eqn.primitive.name not in READS:
        return
    source, (result, *_) = operands[0], results
    is_array = source.taken is None and (source.view is None or source.view.is_made)
    box = Box.of(eqn) if is_array and result.lens is None else None
    if box is None or box.drops or not box.starts:
        return

    def read(index: Array, address: Address) -> Array | None:
        start = box.dynamic_starts(operands, [x.array for x in operands], drops=False)
        m = None if source.is_consumed else box.map(Map.whole(source.shape), {}, start)
        return m and through(source, m, index, address)

    result.lens = View(eqn, tuple(operands), result.shape, read, is_made=True)


def invariant(jaxpr: Jaxpr, known: Mapping[Any, Value]) -> dict[Any, Value]:
    """Return the values that rows are read of and that depend on `known` only.

    They are computed here, before the loop. None of them can fail or have effects, and otherwise each would be computed
    in every step.
    """
    inner = _compat.opened(jaxpr)
    needed, wanted = _read_in(inner), []
    for eqn in reversed(inner.eqns):
        if any(v in needed for v in eqn.outvars):
            wanted.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
    values, made = dict(known), dict[Any, Value]()
    for eqn in reversed(wanted):
        is_known = all(isinstance(v, jex.Literal) or v in values for v in eqn.invars)
        # In the loop it is seen that a select chooses between an operand and itself without a derivative.
        is_stopped = eqn.primitive.name == "stop_gradient" and any(v is eqn.invars[0] for v in known)
        if eqn.effects or not is_known or _has_while(eqn) or is_stopped:
            continue
        operands = [Value.of_literal(v) if isinstance(v, jex.Literal) else values[v] for v in eqn.invars]
        outs = _before(eqn, operands)
        if outs is not None:
            values.update(zip(eqn.outvars, outs, strict=True))
            with eqn.ctx.manager, jaxprs.with_types_of(eqn):
                patterns.note(eqn, operands, outs)
            indices.define(eqn, operands, outs, is_kept=False)
            if eqn.primitive.name == "iota" and outs[0].array.size <= _gates.COUNTED:
                continue
            explained.before_the_loop(inner, eqn)
            if not any(map(_is_repeated, outs)):
                made.update(zip(eqn.outvars, outs, strict=True))
    return made


def _has_while(eqn: Equation) -> bool:
    """Return whether an equation may run for ever, which one in a loop of no steps does not."""
    is_while = lambda eqn: eqn.primitive.name == "while"  # noqa: E731
    return is_while(eqn) or any(jaxprs.any_equation(inner, is_while) for inner in jaxprs.jaxprs_in(eqn.params))


def _read_in(inner: Any) -> set[Any]:
    """Return the variables that may be read by rows, here or in jaxprs that the equations run."""
    found = set(viewed(inner))
    for eqn in inner.eqns:
        if any(jaxprs.jaxprs_in(eqn.params)):
            found.update(v for v in eqn.invars if not isinstance(v, jex.Literal) and rows.has_rows(v.aval))
    return found


def _before(eqn: Equation, operands: Sequence[Value]) -> list[Value] | None:
    name, of = eqn.primitive.name, eqn.outvars[0].aval
    if name == "transpose" or (name == "broadcast_in_dim" and math.prod(of.shape) > math.prod(operands[0].shape)):
        return [_view(eqn, operands)]  # XLA reads columns as well as rows, and reads repeated elements once
    if name in CHEAP and any(x.shape for x in operands) and (found := view(eqn, operands)) is not None:
        return found
    inner = operands[0].view if name == "reshape" else None
    if inner is not None and inner.eqn.primitive.name in CHEAP and _is_square(inner):
        # Reshape the operands first, so that rows are read of the array.
        moved = [_before(eqn, [x]) if x.shape else [x] for x in inner.operands]
        found = [x[0] for x in moved if x is not None]
        return [_view(inner.eqn, found, of.shape)] if len(found) == len(moved) else None
    if any(_is_repeated(x) or _is_smaller_float(x) for x in operands):
        return None
    stopped = selects.stop_gradient(eqn, operands) if name == "stop_gradient" else Left()
    return [Value(x) for x in jaxprs.bind(eqn, as_written(operands))] if isinstance(stopped, Left) else stopped


def _is_square(view: View) -> bool:
    """Return whether all operands are scalars or have the shape of the result."""
    return all(x.shape in ((), view.shape) for x in view.operands)


def _is_repeated(x: Value) -> bool:
    """Return whether a value is larger than what it is made of."""
    return x.view is not None and x.view.eqn.primitive.name == "broadcast_in_dim"


def _is_smaller_float(x: Value) -> bool:
    """Return whether a value is a view of larger floats."""
    if x.view is None:
        return False
    size = x.dtype.itemsize
    if jnp.issubdtype(x.dtype, jnp.floating) and any(y.dtype.itemsize > size for y in x.view.operands if y.shape):
        return True
    return any(map(_is_smaller_float, x.view.operands))
