"""`jax.jit` that puts the function under `in_place`: for the doctor, and for packages that `package` hooks."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from jax_tensorarray._in_place import switch
from jax_tensorarray._in_place.api import in_place
from jax_tensorarray._in_place.arguments import named_as

#: The `jit` of JAX, which the doctor replaces.
jit = jax.jit

#: The attribute of a function that keeps it under `in_place`, so that JAX knows it when it is jitted again.
_KEPT = "__jax_tensorarray_in_place__"


@functools.wraps(jit)
def jit_in_place(*fun: Any, **options: Any) -> Any:
    """Do what `jax.jit` does, with the function under `in_place`."""
    if not fun:
        return functools.partial(jit_in_place, **options)
    if not callable(fun[0]):
        return jit(*fun, **options)
    jitted: Any = jit(_under_in_place(fun[0]), *fun[1:], **options)
    jitted.__wrapped__ = fun[0]
    return jitted


def _under_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `in_place`: the same one each time, or JAX would compile it each time.

    The function itself keeps it. Other objects are callable too, but may have no room for it.
    """
    attributes = vars(fun) if isinstance(fun, types.FunctionType | functools.partial) else {}
    kept = attributes.get(_KEPT)
    if kept is None or kept.__wrapped__ is not fun:  # `functools.wraps` copies attributes to other functions
        kept = attributes[_KEPT] = _made_under_in_place(fun)
    return kept


def _made_under_in_place(fun: Callable[..., Any]) -> Callable[..., Any]:
    @named_as(fun)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        if switch.why_off():  # JAX's caches know of `disable_in_place`
            return fun(*args, **kwargs)
        # The arguments without arrays are static: constants of any type, which stay as they are.
        given: dict[Any, Any] = dict(enumerate(args)) | dict(kwargs)
        traced = {k: x for k, x in given.items() if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}

        def of_traced(traced: dict[Any, Any]) -> Any:
            filled = given | traced
            return fun(*(filled[k] for k in range(len(args))), **{name: filled[name] for name in kwargs})

        return in_place(of_traced)(traced)

    if isinstance(fun, functools.partial):  # JAX calls it by the name of the function inside
        rewritten.__name__ = getattr(fun.func, "__name__", rewritten.__name__)
    return rewritten
