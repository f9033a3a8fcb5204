"""Keep in place what a scan takes as slices of `xs` and gives back, with some rows updated, as slices of `ys`.

So the caches of several layers pass through a scan over the layers. JAX copies each slice out of one stack and into
another one. Here the whole stack is carried, and a row of a slice is a row of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tensorarray import _compat
from jax_tensorarray._in_place.representations import Evaluator, Held
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import is_update
from jax_tensorarray._loops.log import BufferVersion, followed
from jax_tensorarray._ops.primitive import ROW_OPS
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._types import INT32_MAX

Array = jax.Array


class Stacks(NamedTuple):
    """A scan that carries stacks in place of slices."""

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
    if not places:
        return None

    def of_stacks(carry: Sequence[Array], xs: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        *rest, number = xs
        stacks = {k: _Slice(stack, k) for k, stack in zip(places.values(), carry[n:], strict=True)}
        others = iter(rest)
        slices = (stacks[k] if k in stacks else next(others) for k in range(len(types)))
        evaluator = _Slices(number)
        outs = evaluator.evaluate(jaxpr, [*consts, *carry[:n], *slices])
        after = [
            y.stack if isinstance(y := outs[n + j], _Slice) else ta_write(stacks[k].stack, number, y, mode="drop")
            for j, k in places.items()
        ]
        ys = [evaluator.array(x) for j, x in enumerate(outs[n:]) if j not in places]
        return [*map(evaluator.array, outs[:n]), *after], ys

    return Stacks(of_stacks, places)


def _slice_of(t: Any) -> Any:
    return jax.ShapeDtypeStruct(t.shape[1:], t.dtype)


def _has_slices(t: Any) -> bool:
    return t.ndim > 1 and math.prod(t.shape) <= INT32_MAX and has_rows(_slice_of(t))


class _Slice(NamedTuple):
    """The slice of a stack that belongs to a step."""

    stack: Array
    root: int  #: the number of the stack among `xs`


jax.tree_util.register_dataclass(_Slice, ["stack"], ["root"])


class _Slices(Evaluator):
    """Evaluates the body at step `number`, leaving slices in their stacks."""

    held, enters, with_options = (_Slice,), _Slice, True

    def __init__(self, number: Array) -> None:
        super().__init__()
        self.number = number

    def array(self, x: Held) -> Array:
        return ta_read(x.stack, self.number, mode="drop") if isinstance(x, _Slice) else x

    def common(self, outs: Sequence[Held]) -> _Slice | None:
        is_one = all(isinstance(x, _Slice) for x in outs) and len({x.root for x in outs}) == 1
        return outs[0] if is_one else None


def _row_op(self: _Slices, eqn: Any, operands: list[Held]) -> list[Held] | None:
    """Run an op of a slice on the stack: its rows are those from the first of the slice on."""
    p, params = eqn.primitive, eqn.params
    if any(isinstance(x, _Slice) for x in operands[1:]) or not _is_simple(params):
        return None
    (stack, root), index, *rest = operands
    b, d, (_, *shape) = params["batch_dims"], params["index_dims"], stack.shape
    index, n, call = jnp.asarray(index).astype(jnp.int32), math.prod(shape[b : b + d]), ROW_OPS[p]
    rows = len(call.operands) - 2  # all but the index and `where`
    where = (index >= 0) & (index < n)
    first = self.number
    for size in shape[:b]:
        first = first[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    index = first.reshape(*first.shape, *[1] * (index.ndim - b)) * n + index
    where = jnp.broadcast_to(where & rest[rows] if len(rest) > rows else where, index.shape)
    of_stack = params | {"batch_dims": 0, "index_dims": 1 + b + d}
    out = p.bind(stack, index, *rest[:rows], where, **of_stack)
    if not call.in_place:
        return [out]
    new, *old = out if p.multiple_results else [out]
    return [_Slice(new, root), *old]


_Slices.rules = {p.name: _row_op for p in ROW_OPS}


def _is_simple(params: Any) -> bool:
    """Return whether rows out of range are left out one by one."""
    return params["mode"] == "drop" and (not params["window"] or params["whole"])
