"""Choose the layout of a buffer in a loop: carry it with its axes in the order that products and scans need.

    cache = cache.at[:, i].set(k)                       # carried as [batch, length, heads, dim]
    scores = jnp.einsum("bhd,blhd->bhl", q, cache)      # XLA transposes all of the cache in every step
    # becomes
    cache = cache.at[:, :, i].set(k)                    # carried as [batch, heads, length, dim]
    scores = jnp.einsum("bhd,bhld->bhl", q, cache)

XLA multiplies matrices whose axes come after those of a batch. Likewise a scan takes slices along the first axis, and
`jax.vmap` moves this axis there and back in every step of a loop around it. `in_place` permutes the axes before the
loop and back after it. Reads and writes of rows use the permuted axes. If anything else needs the original order, the
carry keeps it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat, _gates
from jax_tensorarray._in_place import access, explained
from jax_tensorarray._in_place.maps import Map
from jax_tensorarray._in_place.registers import is_divided
from jax_tensorarray._in_place.representations import Evaluator, Held, roots_of
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import ELEMENTWISE, IDENTITIES
from jax_tensorarray._jaxprs.uses import updates
from jax_tensorarray._types import Array, Equation


class Permuted(NamedTuple):
    """A buffer whose axis d is axis `order[d]` of the array."""

    array: Array
    order: tuple[int, ...]
    roots: frozenset[int] = frozenset()  #: the carries that it may be a version of

    @property
    def map(self) -> Map:
        """The map from the buffer to the array."""
        return Map.whole(self.array.shape).transposed(self.order)

    @property
    def back(self) -> tuple[int, ...]:
        """Which axis of the buffer each axis of the array is."""
        return tuple(self.order.index(a) for a in range(len(self.order)))

    def stored(self, x: Array) -> Array:
        """Return an array with the axes of the buffer, in the order of the array."""
        return jnp.transpose(x, self.back)

    def listed(self, of_axes: Sequence[Any]) -> list[Any]:
        """Return what belongs to each axis of the buffer, in the order of the array."""
        return [of_axes[d] for d in self.back]


jax.tree_util.register_dataclass(Permuted, ["array"], ["order", "roots"])


Orders = dict[int, tuple[int, ...]]  #: by carry, for each axis of the buffer the axis of the array that it is


class Layouts:
    """A loop traced with some carries in other layouts."""

    def __init__(self, loop: registry.Body, orders: Orders) -> None:
        self.orders, self.evaluator, closed = orders, _Layouts(), _compat.closed(loop.jaxpr)
        consts, carry, xs = loop.split(list(closed.in_avals))
        types = [
            t.update(shape=tuple(Permuted(t, orders[k]).listed(t.shape))) if k in orders else t
            for k, t in enumerate(carry)
        ]

        def step(consts: list[Array], carry: list[Array], xs: list[Array]) -> list[Array]:
            inputs = [Permuted(x, orders[k], frozenset([k])) if k in orders else x for k, x in enumerate(carry)]
            self.outs = outs = self.evaluator.evaluate(closed, [*consts, *inputs, *xs])
            self.evaluator.eqn = None
            return [x.array if self.stays(k) else self.evaluator.array(x) for k, x in enumerate(outs)]

        self.jaxpr = jax.make_jaxpr(step)(consts, types, xs)

    def stays(self, k: int) -> bool:
        """Return whether a carry has its layout after a step, and nothing needs another one."""
        out, order = self.outs[k], self.orders.get(k)
        return isinstance(out, Permuted) and out.order == order and k not in self.evaluator.needed

    def start(self, carry: Sequence[Array]) -> list[Array]:
        """Return the carry before the first step, from the carry as it is without layouts."""
        return [Permuted(x, self.orders[k]).stored(x) if k in self.orders else x for k, x in enumerate(carry)]

    def end(self, carry: Sequence[Array]) -> list[Array]:
        """Return the carry as it is without layouts."""
        return [jnp.transpose(x, self.orders[k]) if k in self.orders else x for k, x in enumerate(carry)]


def found_in(loop: Any, body: registry.Body, *, length: int | None = None, predicate: Any = None) -> Layouts | None:
    """Return the body of the equation `loop` with other layouts, None if they would not help.

    `length` is the number of steps, if it is known. What the predicate of a `while_loop` uses stays as it is.
    """
    if not may_be_in(body) or (length is not None and length < _gates.RING_STEPS):
        return None
    _, carry, _ = body.split(list(_compat.closed(body.jaxpr).in_avals))
    used = set() if predicate is None else _used(predicate.jaxpr, len(carry))
    large = [k for k, t in enumerate(carry) if t.ndim > 2 and has_rows(t) and k not in used and not is_divided(t)]
    as_given = Layouts(body, {k: tuple(range(carry[k].ndim)) for k in large})
    wanted = {k: order for k, order in as_given.evaluator.wanted.items() if order != as_given.orders[k]}

    def narrowed(orders: Orders) -> tuple[Orders, Layouts | None]:
        if not orders:
            return orders, None
        tried = Layouts(body, orders)
        for k in itertools.filterfalse(tried.stays, orders):
            explained.output(loop, body.jaxpr, k, "layout", "", "another-layout", by=tried.evaluator.needed.get(k))
        return {k: order for k, order in orders.items() if tried.stays(k)}, tried

    orders, found = jaxprs.fixed_point(wanted, narrowed)
    for k, order in orders.items():
        explained.output(loop, body.jaxpr, k, "layout", f"its axes in the order {order}")
    explained.add([] if found is None else found.evaluator.remarks)
    return found


def may_be_in(body: registry.Body) -> bool:
    """Return whether a body updates rows, and has batched products or a scan over a transposed array."""
    found = {"product": False, "update": False}
    transposed: set[Any] = set()

    def look(eqn: Equation) -> bool:
        if eqn.primitive.name == "transpose":
            transposed.update(eqn.outvars)
        if eqn.primitive.name == "scan":
            found["product"] |= any(v in transposed for v in eqn.invars if not isinstance(v, jex.Literal))
        if eqn.primitive.name == "dot_general":
            _, batch = eqn.params["dimension_numbers"]
            found["product"] |= any(len(dims) and v.aval.ndim > 2 for dims, v in zip(batch, eqn.invars, strict=True))
        found["update"] |= updates(eqn)
        return all(found.values())

    return jaxprs.any_equation(_compat.closed(body.jaxpr), look)


def _used(jaxpr: Jaxpr, count: int) -> set[int]:
    """Return which of the last inputs a jaxpr uses."""
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jex.Literal)}
    return {k for k, v in enumerate(jaxpr.invars[len(jaxpr.invars) - count :]) if v in used}


class _Layouts(Evaluator):
    """Evaluates a jaxpr that stores some values in other layouts."""

    held, enters = (Permuted,), Permuted

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[int, tuple[int, ...]] = {}  #: the layouts that products want

    def array(self, x: Held) -> Array:
        """Return a buffer as it was."""
        if not isinstance(x, Permuted):
            return x
        if x.order == tuple(range(len(x.order))):
            return x.array
        self.needs(x.roots)
        return jnp.transpose(x.array, x.order)

    def common(self, outs: Sequence[Held]) -> Permuted | None:
        if not all(isinstance(x, Permuted) for x in outs) or len({x.order for x in outs}) > 1:
            return None
        return outs[0]._replace(roots=roots_of(outs))


# --- rules: from the evaluator, an equation and its operands to the results, None if there is no better way -----


def _product(self: _Layouts, eqn: Equation, operands: list[Any]) -> list[Any] | None:
    """Multiply the buffer as it is stored. The axes of the result that are its own come in the order of these."""
    (own, others), batch = eqn.params["dimension_numbers"]
    dims, moved = [], []
    for x, contracted, batched, v in zip(operands, (own, others), batch, eqn.invars, strict=True):
        if isinstance(x, Permuted):
            front = [x.order[d] for d in batched]
            rest = [a for a in range(v.aval.ndim) if a not in front]
            places = [*front, *rest]
            for k in x.roots:  # while layouts are searched, the axes of a root are those of the array
                self.wanted.setdefault(k, tuple(places.index(a) for a in range(len(places))))
        order = x.order if isinstance(x, Permuted) else tuple(range(v.aval.ndim))
        dims.append(([order[d] for d in contracted], [order[d] for d in batched]))
        free = [d for d in range(v.aval.ndim) if d not in (*contracted, *batched)]
        moved.append([sorted(order[d] for d in free).index(order[d]) for d in free])
    numbers = ((dims[0][0], dims[1][0]), (dims[0][1], dims[1][1]))
    arrays = [x.array if isinstance(x, Permuted) else x for x in operands]
    params = eqn.params | {"dimension_numbers": jax.tree.map(tuple, numbers, is_leaf=lambda x: isinstance(x, list))}
    out = eqn.primitive.bind(*arrays, **params)
    n = len(batch[0])
    axes = [*range(n), *(n + k for k in moved[0]), *(n + len(moved[0]) + k for k in moved[1])]
    return [jnp.transpose(out, axes)]


def _slice(self: _Layouts, eqn: Equation, operands: list[Any]) -> list[Any] | None:
    """Return some rows, or most of them: as an array in the layout of the buffer."""
    (x,), starts, strides = operands, eqn.params["start_indices"], eqn.params["strides"]
    if (few := self.by_rows(eqn, operands)) is not None:
        return few
    part = x.map.sliced(starts, eqn.outvars[0].aval.shape, strides)
    return part and [access.view_of(part, Value(x.array))]


def _elementwise(self: _Layouts, eqn: Equation, operands: list[Any]) -> list[Any] | None:
    """Apply an operation to buffers of one layout and scalars."""
    kind = self.common([x for x in operands if isinstance(x, Permuted)])
    if kind is None or any(jnp.ndim(x) for x in operands if not isinstance(x, Permuted)):
        return None
    (array,) = jaxprs.bind(eqn, [x.array if isinstance(x, Permuted) else x for x in operands])
    return [kind._replace(array=array)]


def _transpose(self: _Layouts, eqn: Equation, operands: list[Any]) -> list[Any]:
    (x,) = operands
    return [x._replace(order=tuple(x.order[d] for d in eqn.params["permutation"]))]


def _scan(self: _Layouts, eqn: Equation, operands: list[Any]) -> list[Any]:
    """Take slices along the first axis that is stored, and stack the slices that are returned along it.

    Only for integers: floats that are reset are selected as a whole, and XLA copies them then.
    """
    [loop] = registry.ENTRIES["scan"].bodies(eqn.params)
    pairs = loop.split(list(zip(eqn.invars, operands, strict=True)))[2]
    pairs = [(v.aval, x) for v, x in pairs if isinstance(x, Permuted) and not jaxprs.is_inexact(v.aval)]
    sliced = {(t.shape, t.dtype): x for t, x in pairs}
    for _, x in pairs:
        for k in x.roots:
            self.wanted.setdefault(k, x.back)
    outs: list[Any] = jaxprs.bind(eqn, self.written(operands))
    for k, y in enumerate(outs[loop.num_carry :], loop.num_carry):
        if (x := sliced.get((y.shape, y.dtype))) is not None:
            outs[k] = Permuted(y, tuple(range(y.ndim)), x.roots)
    return outs


_Layouts.rules = {
    "scan": _scan,
    "dot_general": _product,
    "slice": _slice,
    **dict.fromkeys(ELEMENTWISE | IDENTITIES, _elementwise),
    "transpose": _transpose,
}
