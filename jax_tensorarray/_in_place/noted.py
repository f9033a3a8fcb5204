"""`ta_noted`: an identity function of indices, with a note for `checkify` of the operation that they are from.

`in_place` moves an index into range, or leaves it out. So `checkify` looks at the operation in the note instead, and
finds the errors that it finds in plain JAX. All other transformations pass the indices on, and XLA sees nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tensorarray import _compat
from jax_tensorarray._ops.primitive import ROW_OPS, make_primitive, varying_alike, zero_tangent
from jax_tensorarray._types import Array, Equation


@dataclass(frozen=True, eq=False)
class Note:
    """An operation of JAX, whose operands from number `first` on are indices."""

    primitive: Primitive
    params: dict[str, Any]
    types: Sequence[Any]
    first: int

    def on_zeros(self, *indices: Array) -> Any:
        """Apply the operation to buffers of zeros."""
        types = [*self.types[: self.first], *self.types[self.first + len(indices) :]]
        others = [jnp.zeros(t.shape, t.dtype) for t in types]
        operands = [*others[: self.first], *indices, *others[self.first :]]
        return self.primitive.bind(*varying_alike(operands), **self.params)


def noted(eqn: Equation, first: int, indices: Sequence[Any]) -> list[Any]:
    """Return the indices that an equation has as its operands from number `first` on."""
    if eqn.primitive in ROW_OPS or not any(isinstance(x, jax.core.Tracer) for x in indices):
        return list(indices)
    note = Note(eqn.primitive, eqn.params, [v.aval for v in eqn.invars], first)
    outs = ta_noted_p.bind(*indices, note=note, batched=())
    return [new if isinstance(x, jax.core.Tracer) else x for x, new in zip(indices, outs, strict=True)]


def _abstract_eval(*indices: Any, **_: Any) -> Any:
    return indices


def _jvp(primals: Any, _: Any, **params: Any) -> Any:
    outs = ta_noted_p.bind(*primals, **params)
    return outs, list(map(zero_tangent, outs))


def _batch(primitive: Any, args: Any, dims: Any, *, note: Note, batched: tuple[tuple[int | None, ...], ...]) -> Any:
    operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    axes = tuple(None if d is None else 0 for d in dims)
    outs = primitive.bind(*operands, note=note, batched=(axes, *batched))
    # The results vary over a mesh as the batched operands do. Others stay as they are.
    return [x if d is None else out for x, d, out in zip(args, axes, outs, strict=True)], list(axes)


def _checks(_: Any, *indices: Array, note: Note, batched: tuple[tuple[int | None, ...], ...]) -> None:
    f = note.on_zeros
    for axes in reversed(batched):
        f = jax.vmap(f, axes)
    f(*indices)


ta_noted_p = make_primitive(
    "ta_noted",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    batch=_batch,
    reference=lambda *indices, **_: indices,
    multiple_results=True,
)
# An identity of its own for each note would take longer to lower than the access itself.
mlir.register_lowering(ta_noted_p, lambda ctx, *indices, **_: indices)
_compat.checked_besides(ta_noted_p, _checks)
