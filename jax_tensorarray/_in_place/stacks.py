"""Carry a stack of buffers that a scan takes as slices of `xs` and returns, with some rows updated, as slices of `ys`.

    after = lax.map(lambda c: c.at[i].set(x), stack)           # copies each slice out of one stack and into another
    # becomes
    for k in range(len(stack)):                                # a scan that carries the stack
        stack = ta_write(stack, (k, i), x, mode="drop")

So the caches of several layers pass through a scan over the layers, and the states of environments through a `lax.map`.
If a branch returns another array instead of the slice (an environment that is reset), we write it into the stack.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _compat
from jax_tensorarray._in_place.representations import Evaluator, Held
from jax_tensorarray._in_place.rows import as_int32, has_rows
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.custom_jvp import differentiated_as
from jax_tensorarray._jaxprs.kinds import is_update
from jax_tensorarray._loops.log import BufferVersion, followed
from jax_tensorarray._ops.primitive import ROW_OPS, may_raise
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.starts import along_axes, for_each, joined
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._types import INT32_MAX, Array, Equation


class Stacks(NamedTuple):
    """A scan that carries stacks instead of taking slices."""

    step: Callable[[Sequence[Array], Sequence[Array]], registry.Step]
    places: dict[int, int]  #: for each of `ys` that is a stack, the number of it among `xs`

    def start(self, carry: Sequence[Array], xs: Sequence[Array], length: int) -> tuple[list[Array], list[Array]]:
        """Return the carry and the `xs` of the scan."""
        rest = [x for k, x in enumerate(xs) if k not in self.places.values()]
        return [*carry, *(xs[k] for k in self.places.values())], [*rest, jnp.arange(length, dtype=jnp.int32)]

    def end(self, carry: list[Array], ys: list[Array]) -> list[Array]:
        """Return the results of the scan as it was."""
        n = len(carry) - len(self.places)
        stacks, rest = dict(zip(self.places, carry[n:], strict=True)), iter(ys)
        count = len(ys) + len(self.places)
        return [*carry[:n], *(stacks[j] if j in stacks else next(rest) for j in range(count))]


def found_in(loop: registry.Body, consts: Sequence[Array], xs: Sequence[Array]) -> Stacks | None:
    """Return a scan that carries stacks, if there are any among `xs`. `loop` is its repaired body."""
    jaxpr, n, first = _compat.closed(loop.jaxpr), loop.num_carry, loop.num_consts + loop.num_carry
    if not jaxprs.any_equation(jaxpr, lambda eqn: is_update(eqn) or eqn.primitive in ROW_OPS):
        return None
    ys = list(jaxpr.out_avals)[n:]
    types = [jax.typeof(x).update(weak_type=False) for x in xs]
    may_pass = [any(t.shape[1:] == y.shape and t.dtype == y.dtype for y in ys) and _has_slices(t) for t in types]
    if not any(may_pass):
        return None
    held = [*[None] * first, *(BufferVersion(first + k) if flag else None for k, flag in enumerate(may_pass))]
    places: dict[int, int] = {}
    for j, version in enumerate(followed(jaxpr, held)[n:]):
        if version is not None and version.since and not version.has_holes:
            k = version.root - first
            if k >= 0 and k not in places.values() and types[k].shape[1:] == ys[j].shape:
                places[j] = k
    replaced = _replaced_in(jaxpr, loop, xs, may_pass, places)
    places = dict(sorted((places | replaced).items()))
    if not places:
        return None

    def of_stacks(carry: Sequence[Array], xs: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        *rest, number = xs
        stacks = {k: _Slice(stack, k, 0) for k, stack in zip(places.values(), carry[n:], strict=True)}
        others = iter(rest)
        slices = (stacks[k] if k in stacks else next(others) for k in range(len(types)))
        evaluator = _Slices(number, frozenset(replaced.values()))
        outs = evaluator.evaluate(jaxpr, [*consts, *carry[:n], *slices])
        after = [
            y.stack if isinstance(y := outs[n + j], _Slice) else ta_write(stacks[k].stack, number, y, mode="drop")
            for j, k in places.items()
        ]
        ys = [evaluator.array(x) for j, x in enumerate(outs[n:]) if j not in places]
        return [*map(evaluator.array, outs[:n]), *after], ys

    return Stacks(of_stacks, places)


def _replaced_in(
    jaxpr: Any, loop: registry.Body, xs: Sequence[Array], may_pass: Sequence[bool], places: dict[int, int]
) -> dict[int, int]:
    """Return, like `places`, the others of `ys` that are a slice unless a branch returns another array instead."""
    found: dict[int, int] = {}
    roots = frozenset(k for k, flag in enumerate(may_pass) if flag) - {*places.values()}
    if not roots or not jaxprs.any_equation(jaxpr, lambda eqn: registry.entry_of(eqn).kind == "branches"):
        return found

    def step(number: Array, before: Sequence[Array], slices: Sequence[Array]) -> list[Array]:
        given = [_Slice(x, k, 0) if k in roots else x for k, x in enumerate(slices)]
        evaluator = _Slices(number, roots)
        outs = evaluator.evaluate(jaxpr, [*before, *given])[loop.num_carry :]
        # XLA keeps an older version, all of the stack, if nothing orders the reads of it before the branches.
        late = set() if _compat.barriers_hold("cpu") else evaluator.read_late
        for j, y in enumerate(outs):
            if isinstance(y, _Slice) and y.updates and j not in places and y.root not in {*found.values(), *late}:
                found[j] = y.root
        return []

    first = loop.num_consts + loop.num_carry
    slices = [
        jax.typeof(x) if k in roots else t for k, (x, t) in enumerate(zip(xs, jaxpr.in_avals[first:], strict=True))
    ]
    jax.make_jaxpr(step)(jax.ShapeDtypeStruct((), jnp.int32), list(jaxpr.in_avals[:first]), slices)
    return found


def _slice_of(t: Any) -> Any:
    return jax.ShapeDtypeStruct(t.shape[1:], t.dtype)


def _has_slices(t: Any) -> bool:
    return t.ndim > 1 and t.shape[0] <= INT32_MAX and has_rows(_slice_of(t))


class _Slice(NamedTuple):
    """The slice of a stack that belongs to a step."""

    stack: Array
    root: int  #: the number of the stack among `xs`
    updates: int  #: how many there have been in this step


jax.tree_util.register_dataclass(_Slice, ["stack"], ["root", "updates"])


class _Slices(Evaluator):
    """Evaluates the body at step `number`, leaving slices in their stacks.

    If a branch returns an array instead of the slice of a stack in `replaced`, the array is written into the stack.
    """

    held, enters, with_options, is_view = (_Slice,), _Slice, True, False

    def __init__(self, number: Array, replaced: frozenset[int]) -> None:
        super().__init__()
        self.number, self.replaced = number, replaced
        self.newest: dict[int, int] = {}  #: by root, the updates of the last version that branches have made
        self.read_late: set[int] = set()  #: roots with a read of an older version

    def array(self, x: Held) -> Array:
        return ta_read(x.stack, self.number, mode="drop") if isinstance(x, _Slice) else x

    def common(self, outs: Sequence[Held]) -> _Slice | None:
        held = [x for x in outs if isinstance(x, _Slice)]
        is_replaced = len(held) < len(outs)
        if len({x.root for x in held}) != 1 or (is_replaced and held[0].root not in self.replaced):
            return None
        common = held[0]._replace(updates=max(x.updates for x in held) + is_replaced)
        if is_replaced:
            self.newest[common.root] = common.updates
        return common

    def like(self, x: Held, kind: _Slice, inputs: Sequence[Held] = ()) -> _Slice:
        if isinstance(x, _Slice):
            return x
        # All versions of a stack agree in the other slices. XLA need not copy the newest one.
        newest = max((y for y in inputs if isinstance(y, _Slice) and y.root == kind.root), key=lambda y: y.updates)
        if jaxprs.is_inexact(x):  # else the gradient would store the zero derivative of a constant for every step
            x = lax.add(x, _negative_zeros(self.array(newest)))
        return kind._replace(stack=_written(newest.stack, self.number, x))


def _written(stack: Array, number: Array, x: Array) -> Array:
    """Return a stack with another slice, by a loop: under `jax.vmap` it runs only if an example has to write."""

    def once(stack: Array, number: Array, x: Array) -> Array:
        return lax.while_loop(lambda s: s[0], lambda s: (False, at_once(s[1], number, x)), (True, stack))[1]

    def at_once(stack: Array, number: Array, x: Array) -> Array:
        return ta_write(stack, number, x, mode="drop")

    out: Array = differentiated_as(at_once, once)(stack, number, x)
    return out


def _negative_zeros(x: Array) -> Array:
    """Return negative zeros, which change no sum, as a function of an array that JAX differentiates."""
    none = lax.slice(x, [0] * x.ndim, [0] * x.ndim)
    return lax.pad(none, jnp.array(-0.0, x.dtype), [(0, n, 0) for n in x.shape])


def _row_op(self: _Slices, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    """Run an op of a slice on the stack: the slice and the axes of the batch are further axes along which it starts."""
    p, params = eqn.primitive, eqn.params
    is_by_row = may_raise(params) or (params["window"] and not params["whole"])
    if is_by_row or any(isinstance(x, _Slice) for x in operands[1:]):
        return None
    (stack, root, updates), index, *rest = operands
    b, d, call = params["batch_dims"], params["index_dims"], ROW_OPS[p]
    batch, value, where = stack.shape[1 : 1 + b], rest[: call.takes_value], rest[call.takes_value :]
    starts = [for_each(as_int32(x, n), batch) for x, n in zip(along_axes(index, d), stack.shape[1 + b :], strict=False)]
    shape = starts[0].shape
    examples = [lax.broadcasted_iota(np.int32, shape, k) for k in range(b)]
    index = joined([jnp.broadcast_to(self.number, shape).astype(np.int32), *examples, *starts])
    where = [for_each(x, batch) for x in where]
    out = p.bind(stack, index, *value, *where, **params | {"batch_dims": 0, "index_dims": 1 + b + d})
    if updates < self.newest.get(root, 0):
        self.read_late.add(root)
    if not call.in_place:
        return [out]
    new, *old = out if p.multiple_results else [out]
    return [_Slice(new, root, updates + 1), *old]


_Slices.rules = {p.name: _row_op for p in ROW_OPS}
