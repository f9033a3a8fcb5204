"""The decorator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tensorarray._in_place.repair import Repair
from jax_tensorarray._in_place.values import Value


def in_place(
    fun: Callable[..., Any] | None = None,
    *,
    max_steps: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    if fun is None:
        return functools.partial(
            in_place, max_steps=max_steps, static_argnums=static_argnums, static_argnames=static_argnames
        )

    def repaired(*args: Any, **kwargs: Any) -> Any:
        flat, tree = jax.tree.flatten((args, kwargs))
        jaxpr, out = jax.make_jaxpr(lambda *xs: fun(*tree.unflatten(xs)[0], **tree.unflatten(xs)[1]), return_shape=True)(*flat)
        outs = Repair(max_steps).evaluate(jaxpr, [Value(x) for x in flat])
        return jax.tree.unflatten(jax.tree.structure(out), [x.array for x in outs])

    functools.update_wrapper(repaired, fun)
    return jax.jit(repaired, static_argnums=static_argnums, static_argnames=static_argnames, inline=True)
