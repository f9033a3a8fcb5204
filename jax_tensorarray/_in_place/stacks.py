"""Keep in place what a scan takes as slices of `xs` and gives back, with some rows updated, as slices of `ys`.

So the caches of several layers pass through a scan over the layers. JAX copies each slice out of one stack and into
another one. Here the whole stack is carried, and a row of a slice is a row of it.
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
from jax_tensorarray._jaxprs.kinds import is_update
from jax_tensorarray._loops.log import BufferVersion, followed
from jax_tensorarray._ops.primitive import ROW_OPS, may_raise
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.starts import along_axes, for_each, joined
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._types import INT32_MAX, Equation

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
    return t.ndim > 1 and t.shape[0] <= INT32_MAX and has_rows(_slice_of(t))


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


def _row_op(self: _Slices, eqn: Equation, operands: list[Held]) -> list[Held] | None:
    """Run an op of a slice on the stack, where the slice and the example are two more axes along which it starts."""
    p, params = eqn.primitive, eqn.params
    is_by_row = may_raise(params) or (params["window"] and not params["whole"])
    if is_by_row or any(isinstance(x, _Slice) for x in operands[1:]):
        return None
    (stack, root), index, *rest = operands
    b, d, call = params["batch_dims"], params["index_dims"], ROW_OPS[p]
    batch, value, where = stack.shape[1 : 1 + b], rest[: call.takes_value], rest[call.takes_value :]
    starts = [for_each(as_int32(x, n), batch) for x, n in zip(along_axes(index, d), stack.shape[1 + b :], strict=False)]
    shape = starts[0].shape
    examples = [lax.broadcasted_iota(np.int32, shape, k) for k in range(b)]
    index = joined([jnp.broadcast_to(self.number, shape).astype(np.int32), *examples, *starts])
    where = [for_each(x, batch) for x in where]
    out = p.bind(stack, index, *value, *where, **params | {"batch_dims": 0, "index_dims": 1 + b + d})
    if not call.in_place:
        return [out]
    new, *old = out if p.multiple_results else [out]
    return [_Slice(new, root), *old]


_Slices.rules = {p.name: _row_op for p in ROW_OPS}
