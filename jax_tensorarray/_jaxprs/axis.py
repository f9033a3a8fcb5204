"""A batch axis that `jax.vmap` adds, and which results have it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Jaxpr

from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._ops.primitive import to_front, with_axis
from jax_tensorarray._types import Array


class Axis(NamedTuple):
    """An axis that vmap adds. Collectives in the body refer to it by its name."""

    name: Any
    size: int
    spmd_name: Any

    def vmap(self, f: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
        return jax.vmap(
            f,
            in_axes=list(in_axes),
            out_axes=out_axes,
            axis_name=self.name,
            axis_size=self.size,
            spmd_axis_name=self.spmd_name,
        )

    def vmap_to(self, f: Callable[..., Sequence[Array]], in_flags: Sequence[bool], out_flags: Sequence[bool]) -> Any:
        """Return `f` for all examples. The flagged arguments and results have a batch axis.

        Another result must be the same for all examples. If `jax.vmap` batches it, we return that of the first one.
        """

        @custom_vmap
        def with_axes(number: Array, *outs: Array) -> list[Array]:
            return list(outs)

        @with_axes.def_vmap  # always called: the numbers of the examples differ
        def _(size: int, batched: Sequence[bool], number: Array, *outs: Array) -> Any:
            values = zip(outs, batched[1:], out_flags, strict=True)
            return [_with_axis(x, is_batched, is_batched_out, size) for x, is_batched, is_batched_out in values], list(
                out_flags
            )

        def of_one(number: Array, *args: Array) -> list[Array]:
            return with_axes(number, *f(*args))

        of_all = self.vmap(of_one, [0, *axes(in_flags)], axes(out_flags))
        return lambda *args: of_all(jnp.arange(self.size), *args)

    def batched_outputs(self, jaxpr: Jaxpr, flags: Sequence[bool]) -> list[bool]:
        """Return which outputs `jax.vmap` batches if the flagged inputs have a batch axis."""
        flags_of_outs: list[Sequence[bool]] = []

        @custom_vmap
        def probe(*outs: Array) -> tuple[Array, ...]:
            return outs

        @probe.def_vmap  # only called if some are batched
        def _(size: int, batched: Sequence[bool], *outs: Array) -> Any:
            flags_of_outs.append(batched)
            return outs, tuple(batched)

        def probed(*args: Array) -> None:
            probe(*jaxprs.function(jaxpr)(*args))

        types = [with_axis(t, self.size) if flag else t for t, flag in zip(list(jaxpr.in_avals), flags, strict=True)]
        jax.eval_shape(self.vmap(probed, axes(flags), None), *types)
        return list(flags_of_outs[-1]) if flags_of_outs else [False] * len(jaxpr.out_avals)


def _with_axis(x: Array, is_batched: bool, is_batched_out: bool, size: int) -> Array:
    if is_batched and not is_batched_out:
        return lax.index_in_dim(x, 0, keepdims=False)
    return to_front(x, None, size) if is_batched_out and not is_batched else x


def axes(flags: Sequence[bool]) -> list[Any]:
    """Return axis 0 for each flag that is true, and None for the others."""
    return [0 if flag else None for flag in flags]


def names_axis(name: Any, jaxprs: Iterable[Any]) -> bool:
    """Return whether the jaxprs have collectives over the axis of that name."""
    return any(getattr(effect, "name", None) == name for jaxpr in jaxprs for effect in jaxpr.effects)
