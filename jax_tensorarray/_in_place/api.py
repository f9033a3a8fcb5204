"""The decorator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from jax_tensorarray._in_place import early, refs
from jax_tensorarray._in_place.repair import Repair, has_loops
from jax_tensorarray._loops.from_jax import check_max_steps

_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


@overload
def in_place(
    fun: Callable[..., Any],
    *,
    max_steps: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]: ...


@overload
def in_place(
    fun: None = None,
    *,
    max_steps: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def in_place(
    fun: Callable[..., Any] | None = None,
    *,
    max_steps: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Return the same function with the loops in it made linear, as they are written.

    A loop of plain JAX that reads and writes rows of a buffer copies all of it in every step in three cases: if a read
    and a write are unordered, if a whole buffer is selected, as by `jnp.where` and `jax.vmap`, and under `jax.grad`.
    `in_place` finds the reads and writes of rows in `fun` (`b[i]`, `b[:, i]`, `b[i, j]`, `.at[].set`, `.at[].add`,
    `lax.dynamic_slice` and so on) and replaces them by this library's ops. The results are the same; indices out of
    range mean what they mean in JAX.

    Any other operation stays as it was. `jax_tensorarray.inspect.loop_copies(in_place(fun), ...)` lists what still
    copies.

    Args:
        fun: a function that JAX can trace. It may differentiate, batch and compile inside, and the result may be
            differentiated, batched and compiled. Without it, a decorator is returned.
        max_steps: None, or an upper bound on the steps of every `lax.while_loop` inside. With a bound these loops are
            differentiable in reverse mode.
        static_argnums: as for `jax.jit`: arguments that are not arrays.
        static_argnames: likewise.

    Returns:
        A function with the signature of `fun`.

    Raises:
        TypeError: `fun` is not callable, or `max_steps` is not an integer.
        ValueError: `max_steps` is negative.
        jax.errors.JaxRuntimeError, ValueError: a loop takes more than `max_steps` steps (while running; on a GPU later,
            see `check_errors`).

    >>> import jax, jax.numpy as jnp
    >>> from jax import lax
    >>> def f(b):
    ...     body = lambda i, b: b.at[i].set(jnp.sin(b[i - 1]))
    ...     return lax.fori_loop(1, len(b), body, b).sum()
    >>> jax.grad(in_place(f))(jnp.ones(4))
    Array([2.16485, 0.     , 0.     , 0.     ], dtype=float32)
    """
    if fun is None:
        return functools.partial(
            in_place, max_steps=max_steps, static_argnums=static_argnums, static_argnames=static_argnames
        )
    if not callable(fun):
        raise TypeError(f"in_place: fun must be callable, got {fun!r}")
    check_max_steps("in_place", max_steps)

    def repaired(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.core.Tracer) for x in leaves]  # the others are static

        def of_arrays(*arrays: Any) -> Any:
            rest = iter(arrays)
            whole = [next(rest) if flag else x for x, flag in zip(leaves, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, whole)
            return fun(*args, **kwargs)

        arrays = [x for x, flag in zip(leaves, is_array, strict=True) if flag]
        # Inlined: within another jit it is as if the equations stood there.
        plain = jax.jit(of_arrays, inline=True)
        with early.repairs(max_steps):
            traced = plain.trace(*arrays)
            jaxpr = refs.as_arrays(traced.jaxpr)
            # A function without loops is treated as the body of a loop.
            repair = Repair(max_steps, in_loop=not has_loops(jaxpr))
            if not repair.finds(jaxpr):
                return plain(*arrays)
        outs = repair.function(jaxpr, is_whole=True)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), outs)

    functools.update_wrapper(repaired, fun, [name for name in _NAMES if hasattr(fun, name)])
    static: Any = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return jax.jit(repaired, inline=True, **{name: given for name, given in static.items() if given != ()})
