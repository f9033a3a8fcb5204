"""Read rows of what is computed from a whole buffer: `q.T[i]`, `(q * 2)[i]`, `q.astype(bfloat16)[i]`.

The gradient of plain JAX makes a cotangent of the size of the view in every step, and takes all of it back through the
view. Here the rows of the buffer are read, and the view is applied to these. What does not depend on the loop is
computed before the loop, once, so that the cotangents of its rows are added in place.

A conversion to a smaller float is never computed before the loop: the cotangents would be added in the smaller type.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place import explained, patterns, rows, selects
from jax_tensorarray._in_place.rows import Address
from jax_tensorarray._in_place.values import Left, Value, View, arrays, as_written
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import CHEAP, ELEMENTWISE, LAYOUT, READS
from jax_tensorarray._ops.starts import along_axes
from jax_tensorarray._types import INT32_MAX, Equation

Array = jax.Array


def viewed(jaxpr: Jaxpr, masks: frozenset[Any] = frozenset()) -> frozenset[Any]:
    """Return the variables that a jaxpr reads rows from, directly or through views.

    What is made as a whole in any case, as an output is, is no view: its rows are read of it. To compute them again
    would read its operands after it is made, so that XLA could not make it in their place.

    A select by a mask that is true in one place reads the row that is there, and so does a product of integers. `masks`
    are inputs that are such masks.
    """
    return _uses(jaxpr, masks)[0]


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
        elif name in ELEMENTWISE and eqn.outvars[0] in whole:
            found.discard(eqn.outvars[0])
        elif (name in ELEMENTWISE or name in LAYOUT) and eqn.outvars[0] in found:
            by_rows, as_whole = eqn.invars, eqn.invars if eqn.outvars[0] in whole else []
        for used, by in ((found, by_rows), (whole, as_whole)):
            used.update(v for v in by if not isinstance(v, jex.Literal) and len(getattr(v.aval, "shape", ())))
    return frozenset(found), frozenset(whole)


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
        if eqn.primitive.name == "transpose":
            return _of_transposed(operands[0], eqn.params["permutation"], index, address)
        if eqn.primitive.name == "reshape":
            return _of_reshaped(operands[0], index, address)
        if eqn.primitive.name == "broadcast_in_dim":
            return of_repeated(operands[0], eqn.params["broadcast_dimensions"], index, address)
        found = [_part(x, index, address) for x in operands]
        present = [x for x in found if x is not None]
        return jaxprs.bind(eqn, present)[0] if len(present) == len(found) else None

    return Value.of_view(View(eqn, tuple(operands), shape or eqn.outvars[0].aval.shape, read))


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether an operand of an elementwise operation is a scalar, or an array that may be repeated."""
    return not shape or all(n in (1, size) for n, size in zip(shape, whole, strict=True))


def _part(x: Value, index: Array, address: Address) -> Array | None:
    """Return the part of an operand that belongs to the rows."""
    if not x.shape:
        return as_written([x])[0]
    if (short := patterns.rows_of_short(x, address, address.positions_of(index))) is not None:
        return short
    if x.repeated is not None and len(x.source.shape) <= address.axis:  # a predicate of the examples
        shape, source = address.rows_shape(address.positions_of(index)), arrays([x.source])[0]
        return lax.broadcast_in_dim(source, shape, range(source.ndim))
    if x.shape == address.shape:
        return rows.read(x, index, address)
    return of_repeated(x, range(len(x.shape)), index, address)


def _of_transposed(source: Value, permutation: Sequence[int], index: Array, address: Address) -> Array | None:
    dims = [permutation.index(k) for k in range(len(permutation))]
    box = None if address.batch else _box(source, dims, index, address)
    if box is None:
        return None
    positions = box.ndim - len(dims)
    return _as_rows(jnp.transpose(box, [*range(positions), *(positions + k for k in permutation)]), address)


def _box(source: Value, dims: Sequence[int], index: Array, address: Address) -> Array | None:
    """Return the part `[*I, *box]` of an array that belongs to the rows of an index `[..., *I]`.

    Axis k of the array is axis `dims[k]` of the view, or has one element to be repeated.
    """
    starts = dict(enumerate(along_axes(index[(0,) * address.axis], len(address.sizes)), address.axis))
    shape, positions = source.shape, starts[address.axis].shape
    taken = dict(enumerate(address.taken, address.axis))
    box = [taken.get(d, n) if n == address.shape[d] else n for n, d in zip(shape, dims, strict=True)]
    if box == list(shape):
        (array,) = arrays([source])
        return lax.broadcast_in_dim(array, (*positions, *shape), range(len(positions), len(positions) + len(shape)))
    own_starts = {k: starts[d] for k, d in enumerate(dims) if d in starts}
    own = rows.address_of(source, box, list(own_starts))
    if isinstance(own, Left):
        return None
    found = rows.read(source, own.index_of(own_starts), own)
    return own.positions_first(found, len(positions)).reshape(*positions, *box)


def _as_rows(box: Array, address: Address) -> Array:
    """Reorder `[*I, *box]` to the rows of an index."""
    positions = box.shape[: box.ndim - len(address.shape)]
    ordered = box.reshape(*positions, *address.rows_shape(()))
    return address.positions_behind(ordered, len(positions))


def _of_reshaped(source: Value, index: Array, address: Address) -> Array | None:
    if address.batch or address.axis or len(address.sizes) != 1 or not _has_rows(source):
        return None
    size, shape = math.prod(address.shape[1:]), source.shape
    many = math.prod(address.window)
    for axes in range(1, len(shape) + 1):
        each = math.prod(shape[axes:])
        fits = each and size % each == 0 and math.prod(shape[:axes]) <= INT32_MAX
        # Of several axes a window may not go on in the next row of the last one.
        if fits and (axes == 1 or (shape[axes - 1] % (size // each) == 0 and not address.window)):
            break
    else:
        return None
    window = () if size == each and not address.window else (size // each * many,)
    own = Address(shape, 0, 0, shape[:axes], window, drops=False)
    starts, rest = {}, rows.clamped(index, address.shape[0] - many) * np.int32(size // each)
    for axis in reversed(range(1, axes)):
        starts[axis], rest = lax.rem(rest, np.int32(shape[axis])), lax.div(rest, np.int32(shape[axis]))
    found = rows.read(source, own.index_of(starts | {0: rest}), own)
    return found.reshape(address.rows_shape(index.shape))


def of_repeated(source: Value, dims: Sequence[int], index: Array, address: Address) -> Array | None:
    """Return the rows of what repeats an array, whose axis k is its axis `dims[k]`. None if examples have their own."""
    box = None if address.batch else _box(source, dims, index, address)
    if box is None:
        return None
    positions = box.ndim - len(dims)
    taken = [*address.shape[: address.axis], *address.taken, *address.shape[address.after :]]
    whole = (*box.shape[:positions], *taken)
    return _as_rows(lax.broadcast_in_dim(box, whole, [*range(positions), *(positions + d for d in dims)]), address)


def _has_rows(x: Value) -> bool:
    return rows.has_rows(jax.ShapeDtypeStruct(x.shape, x.dtype))


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
    """Return the variables that may be read by rows, here or in what the equations run."""
    found = set(viewed(inner))
    for eqn in inner.eqns:
        if any(jaxprs.jaxprs_in(eqn.params)):
            found.update(v for v in eqn.invars if not isinstance(v, jex.Literal) and rows.has_rows(v.aval))
    return found


def _before(eqn: Equation, operands: Sequence[Value]) -> list[Value] | None:
    name, of = eqn.primitive.name, eqn.outvars[0].aval
    if name == "transpose" or (name == "broadcast_in_dim" and math.prod(of.shape) > math.prod(operands[0].shape)):
        return [_view(eqn, operands)]  # XLA reads columns as well as rows, and what is repeated only once
    if name in CHEAP and any(x.shape for x in operands) and (found := view(eqn, operands)) is not None:
        return found
    inner = operands[0].view if name == "reshape" else None
    if inner is not None and inner.eqn.primitive.name in CHEAP and _is_square(inner):
        # The other way round, so that rows are read of the array.
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
