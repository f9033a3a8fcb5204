"""Find one-hot masks by abstract interpretation: how the elements of an array depend on their position.

Such arrays are few and small. So each value has a note of its pattern, whatever rule has made the value.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal
from jax.extend.core.primitives import iota_p

from jax_tensorarray import _compat, _gates
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import ELEMENTWISE
from jax_tensorarray._types import Array, Equation, bytes_of


class Coordinate(NamedTuple):
    """Each element is the number of its place along an axis, which has more than one."""

    axis: int


class Repeated(NamedTuple):
    """The elements are those of a shorter array, repeated along axes where that has size 1."""

    shape: tuple[int, ...]  #: of the shorter array
    short: Callable[[], Array]
    is_zero: bool = False


class Place(NamedTuple):
    """One number along each of some axes, where conditions hold.

    Numbers and conditions are arrays of the rank of the mask, of size 1 along axes on which they do not depend.
    """

    starts: Mapping[int, Array]
    conditions: tuple[Array, ...] = ()

    def with_arrays(self, f: Callable[[Array], Array], axes: Callable[[int], int] = lambda k: k) -> "Place":
        return Place({axes(k): f(x) for k, x in self.starts.items()}, tuple(map(f, self.conditions)))


class Mask(NamedTuple):
    """True, or 1, in some places, and false, or 0, elsewhere; or inverted."""

    places: tuple[Place, ...]
    inverted: bool = False


class Zero(NamedTuple):
    """A number that is 0."""


#: Primitives that may make a mask of a mask.
_OF_MASKS = frozenset(
    ("and", "broadcast_in_dim", "convert_element_type", "gt", "not", "or", "reshape", "squeeze", "sub", "transpose")
)

#: Primitives that multiply a buffer by a mask.
PRODUCTS = ("mul", "dot_general")

#: A mask of more places stays a mask, since each place would become a row op.
_PLACES = 4


def note(eqn: Equation, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Note the patterns of the results of an equation, if they have one."""
    find = _FOUND_BY.get(eqn.primitive.name)
    if find is None or results[0].pattern is not None or any(results[0] is x for x in operands):
        return
    if not jaxprs.has_symbolic_shapes(eqn) and math.prod(eqn.outvars[0].aval.shape) > 0:
        results[0].pattern = find(eqn, operands)


def copy(values: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Give the inputs of a loop's body the patterns of the values that are passed in."""
    for x, own in zip(values, inputs, strict=False):
        if isinstance(x.pattern, Coordinate):
            own.pattern = x.pattern


def masks_among(invars: Sequence[Any], inputs: Sequence[Any]) -> frozenset[Any]:
    """Return the variables of the inputs that are masks of places."""
    return frozenset(v for v, x in zip(invars, inputs, strict=True) if isinstance(x.pattern, Mask))


def is_masked(operands: Sequence[Any]) -> bool:
    """Return whether one of the operands is a mask of places."""
    return any(isinstance(x.pattern, Mask) for x in operands)


@_compat.cached
def may_be_masks(jaxpr: Jaxpr, masks: frozenset[Any]) -> frozenset[Any]:
    """Return the variables of a jaxpr that may be masks of places, given those of its inputs that are."""
    found = set(masks)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("eq", "ne"):
            found.update(v for v in eqn.outvars if is_of_integers(eqn) and len(getattr(v.aval, "shape", ())))
        elif name in _OF_MASKS:
            found.update(v for v in eqn.outvars if any(w in found for w in eqn.invars if not isinstance(w, Literal)))
        elif (inner := registry.inlined(eqn)) is not None:
            opened = _compat.opened(inner)
            given = frozenset(
                v for v, w in zip(opened.invars, eqn.invars, strict=True) if not isinstance(w, Literal) and w in found
            )
            own = may_be_masks(opened, given)
            found.update(
                v for v, w in zip(eqn.outvars, opened.outvars, strict=True) if not isinstance(w, Literal) and w in own
            )
    return frozenset(found)


def chooses_rows(jaxpr: Jaxpr, masks: Iterable[Any] = (), *, by_products: bool = False) -> bool:
    """Return whether a jaxpr may choose rows of a large array by a mask, or, if asked for, multiply one by a mask."""
    opened = _compat.opened(jaxpr)
    masks = may_be_masks(opened, frozenset(masks))
    for eqn in opened.eqns:
        name, is_mask = eqn.primitive.name, [not isinstance(v, Literal) and v in masks for v in eqn.invars]
        if not any(is_mask) or jaxprs.has_symbolic_shapes(eqn):
            continue
        if (inner := registry.inlined(eqn)) is not None:
            own = [v for v, flag in zip(_compat.opened(inner).invars, is_mask, strict=True) if flag]
            if chooses_rows(inner, own, by_products=by_products):
                return True
        is_choice = name == "select_n" or (name in PRODUCTS and (by_products or is_of_integers(eqn)))
        if is_choice and max(bytes_of([v.aval]) for v in eqn.invars) >= _gates.MASKED_BYTES:
            return True
    return False


def is_of_integers(eqn: Any) -> bool:
    """Return whether the first operand of an equation is of integers."""
    return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.integer)


def short_shape(x: Any, rank: int) -> tuple[int, ...]:
    """Return the shape of `short`."""
    if isinstance(x.pattern, Repeated):
        return x.pattern.shape
    return x.shape or (1,) * rank


def short(x: Any, rank: int) -> Array:
    """Return the elements of a value, with size 1 along axes along which it is known to be repeated."""
    if isinstance(x.pattern, Repeated):
        return x.pattern.short()
    array = jnp.asarray(x.array)
    return array if array.ndim else lax.reshape(array, (1,) * rank)


def rows_of_short(x: Any, address: Any, positions: Sequence[int]) -> Array | None:
    """Return the rows for positions of that shape, if all rows of a value are the same, else None."""
    rank, taken = len(x.shape), range(address.axis, address.after)
    shape = short_shape(x, rank)
    if not isinstance(x.pattern, Repeated) or len(address.shape) != rank or any(shape[k] != 1 for k in taken):
        return None
    rows = address.rows_shape(positions)
    behind = len(rows) - (rank - address.after)
    array = lax.squeeze(short(x, rank), list(taken))
    if math.prod(array.shape) == math.prod(rows):
        return lax.reshape(array, rows)
    return lax.broadcast_in_dim(array, rows, [*range(address.axis), *range(behind, len(rows))])


def _coordinate(x: Any) -> int | None:
    """Return the axis along which each element is the number of its place."""
    if x.pattern is None and x.view is None:
        x.pattern = _of_array(x.array)
    return x.pattern.axis if isinstance(x.pattern, Coordinate) else None


def _of_array(x: Any) -> Coordinate | None:
    """Return the pattern of an array that the evaluated program is given, such as one that a function closes over."""
    if not isinstance(x, jax.core.Tracer):
        return Coordinate(int(np.argmax(x.shape))) if _counts(x) else None
    maker = _compat.maker_of(x)  # while a loop is repaired before it is differentiated, it has no equations around it
    return _numbers(maker.params["dimension"], jax.typeof(x)) if maker and maker.primitive is iota_p else None


def _counts(x: Any) -> bool:
    """Return whether a concrete array, such as one that a function closes over, is 0, 1, 2 and so on."""
    is_here = isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and x.is_fully_addressable)
    size = x.size if is_here else 0
    if size < 2 or max(x.shape) != size or not jnp.issubdtype(x.dtype, jnp.integer) or not _holds(x.dtype, size):
        return False
    return np.array_equal(np.asarray(x).ravel(), np.arange(size))


def _holds(dtype: Any, size: int) -> bool:
    """Return whether a dtype has an integer for each place along an axis of that size."""
    return jnp.issubdtype(dtype, jnp.integer) and size - 1 <= jnp.iinfo(dtype).max


# --- what equations make of patterns ---------------------------------------------------------------------------


def _iota(eqn: Any, _: Sequence[Any]) -> Any:
    return _numbers(eqn.params["dimension"], eqn.outvars[0].aval)


def _numbers(axis: int, of: Any) -> Coordinate | None:
    """Return the pattern of an iota along an axis."""
    return Coordinate(axis) if of.shape[axis] > 1 and _holds(of.dtype, of.shape[axis]) else None


def _moved(x: Any, axes: Mapping[int, int], shorter: Callable[[Array], Array], shape: tuple[int, ...]) -> Any:
    """Return the pattern of a value whose axes have other numbers. `shorter` maps a short array to that `shape`."""
    pattern = x.pattern
    if isinstance(pattern, Coordinate):
        return Coordinate(axes[pattern.axis])
    if isinstance(pattern, Mask):
        return pattern._replace(places=tuple(p.with_arrays(shorter, axes.__getitem__) for p in pattern.places))
    is_zero = isinstance(pattern, Zero) or x.literal == 0 or (isinstance(pattern, Repeated) and pattern.is_zero)
    return Repeated(shape, functools.cache(lambda: shorter(short(x, len(x.shape)))), is_zero)


def _broadcast_in_dim(eqn: Equation, operands: Sequence[Any]) -> Any:
    dims, x, of = eqn.params["broadcast_dimensions"], operands[0], eqn.outvars[0].aval
    dims, rank = [int(d) for d in dims], of.ndim
    if len(operands) > 1:
        return None

    def wide(shape: Sequence[int]) -> tuple[int, ...]:
        sizes = dict(zip(dims, shape, strict=True))
        return tuple(sizes.get(d, 1) for d in range(rank))

    def shorter(array: Array) -> Array:
        return lax.reshape(array, wide(array.shape))

    found = _moved(x, dict(enumerate(dims)), shorter, wide(short_shape(x, 0)))
    return None if isinstance(found, Repeated) and found.shape == of.shape else found


def _reshape(eqn: Equation, operands: Sequence[Any]) -> Any:
    """Return the pattern of a reshape that adds or removes axes of size 1."""
    x, of = operands[0], eqn.outvars[0].aval.shape
    old, new = ([k for k, n in enumerate(shape) if n != 1] for shape in (x.shape, of))
    is_alike = [x.shape[k] for k in old] == [of[k] for k in new]
    if len(operands) > 1 or not is_alike or not isinstance(x.pattern, Coordinate | Mask | Repeated):
        return None
    axes = dict(zip(old, new, strict=True))

    def shape(sizes: Sequence[int]) -> tuple[int, ...]:
        found = {axes[k]: sizes[k] for k in old}
        return tuple(found.get(k, 1) for k in range(len(of)))

    return _moved(x, axes, lambda array: lax.reshape(array, shape(array.shape)), shape(short_shape(x, 0)))


def _transpose(eqn: Equation, operands: Sequence[Any]) -> Any:
    (x,), order = operands, eqn.params["permutation"]
    if not isinstance(x.pattern, Coordinate | Mask | Repeated):
        return None
    shape = short_shape(x, 0)
    axes = {old: new for new, old in enumerate(order)}
    return _moved(x, axes, lambda array: lax.transpose(array, order), tuple(shape[k] for k in order))


def _convert_element_type(eqn: Equation, operands: Sequence[Any]) -> Any:
    (x,), of = operands, eqn.outvars[0].aval
    if isinstance(x.pattern, Mask):
        return x.pattern
    if isinstance(x.pattern, Coordinate):
        return x.pattern if _holds(of.dtype, of.shape[x.pattern.axis]) else None
    if not of.shape and (x.literal == 0 or isinstance(x.pattern, Zero)):
        return Zero()
    return _elementwise(eqn, operands)


def _elementwise(eqn: Equation, operands: Sequence[Any]) -> Any:
    """Return the pattern of a result of repeated arrays: it is repeated, too."""
    of = eqn.outvars[0].aval.shape
    if not of or not any(isinstance(x.pattern, Repeated) for x in operands):
        return None
    shape = np.broadcast_shapes(*(short_shape(x, len(of)) for x in operands))

    def shorter() -> Array:
        found = [jnp.broadcast_to(short(x, len(of)), shape) for x in operands]
        return jaxprs.bind(eqn, found)[0]

    return None if shape == of else Repeated(shape, functools.cache(shorter))


def _eq(eqn: Equation, operands: Sequence[Any]) -> Any:
    of = eqn.outvars[0].aval.shape
    if not of:
        return None
    for one, other in (operands, operands[::-1]):
        axis = _coordinate(one)
        if axis is not None and of[axis] > 1 and short_shape(other, len(of))[axis] == 1:
            return Mask((Place({axis: short(other, len(of))}),))
        if isinstance(one.pattern, Mask) and other.literal in (0, 1):
            return one.pattern if other.literal else _inverted(one.pattern)
    return _elementwise(eqn, operands)


def _ne(eqn: Equation, operands: Sequence[Any]) -> Any:
    found = _eq(eqn, operands)
    return _inverted(found) if isinstance(found, Mask) else found


def _gt(eqn: Equation, operands: Sequence[Any]) -> Any:
    one, other = operands
    if isinstance(one.pattern, Mask) and other.literal == 0 and one.dtype != np.bool_:
        return one.pattern
    return _elementwise(eqn, operands)


def _inverted(mask: Mask) -> Mask:
    return mask._replace(inverted=not mask.inverted)


def _not(eqn: Equation, operands: Sequence[Any]) -> Any:
    (x,) = operands
    if isinstance(x.pattern, Mask):
        return _inverted(x.pattern) if x.dtype == np.bool_ else None
    return _elementwise(eqn, operands)


def _sub(eqn: Equation, operands: Sequence[Any]) -> Any:
    one, other = operands
    if isinstance(other.pattern, Mask):
        return _inverted(other.pattern) if one.literal == 1 else None
    return _elementwise(eqn, operands)


def _and(eqn: Equation, operands: Sequence[Any]) -> Any:
    return _both(eqn, operands, negated=False)


def _or(eqn: Equation, operands: Sequence[Any]) -> Any:
    """Return the pattern of `a | b`, which is `~(~a & ~b)`."""
    found = _both(eqn, operands, negated=True)
    return _inverted(found) if isinstance(found, Mask) else found


def _both(eqn: Equation, operands: Sequence[Any], *, negated: bool) -> Any:
    """Return where both operands are true, or neither of them."""
    masks = [x.pattern for x in operands if isinstance(x.pattern, Mask)]
    if not masks or eqn.outvars[0].aval.dtype != np.bool_:
        return _elementwise(eqn, operands)
    one, *others = map(_inverted, masks) if negated else masks
    if others:
        return _of_two(one, others[0])
    (other,), rank = [x for x in operands if not isinstance(x.pattern, Mask)], eqn.outvars[0].aval.ndim
    axes, shape = {k for place in one.places for k in place.starts}, short_shape(other, rank)
    if one.inverted or any(shape[k] != 1 for k in axes):
        return None
    condition = ~short(other, rank) if negated else short(other, rank)
    return Mask(tuple(p._replace(conditions=(*p.conditions, condition)) for p in one.places))


def _of_two(a: Mask, b: Mask) -> Mask | None:
    """Return where both masks are true."""
    if a.inverted and b.inverted:
        places = (*a.places, *b.places)
        return Mask(places, inverted=True) if len(places) <= _PLACES else None
    if a.inverted or b.inverted or len(a.places) * len(b.places) > _PLACES:
        return None
    found = []
    for one in a.places:
        for other in b.places:
            same = [one.starts[k] == other.starts[k] for k in one.starts if k in other.starts]
            starts = {**one.starts, **other.starts}
            conditions = (*one.conditions, *other.conditions, *same)
            if any(x.shape[k] != 1 for x in (*starts.values(), *conditions) for k in starts):
                return None
            found.append(Place(starts, conditions))
    return Mask(tuple(found))


_FOUND_BY: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "and": _and,
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert_element_type,
    "eq": _eq,
    "gt": _gt,
    "iota": _iota,
    "ne": _ne,
    "not": _not,
    "or": _or,
    "reshape": _reshape,
    "squeeze": _reshape,
    "sub": _sub,
    "transpose": _transpose,
}
