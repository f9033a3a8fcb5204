"""Show what the passes of this library make of a program before JAX lowers it."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr

from jax_tensorarray._in_place import arguments
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._lowering.program import steps, target_of
from jax_tensorarray.doctor._text import check_is_function


def passes(
    fun: Callable[..., object], *, platform: Literal["cpu", "cuda", "tpu"] | None = None
) -> Callable[..., dict[str, Jaxpr]]:
    """Return a function that shows a program after each pass of this library over it, before JAX lowers the program.

    The returned function takes the arguments of `fun`, or `jax.ShapeDtypeStruct`s instead of arrays. It compiles
    nothing. A program without row ops and loops of this library has no passes.

    Args:
        fun: a function that JAX can trace.
        platform: `"cpu"`, `"cuda"` or `"tpu"`, or None for the platform on which JAX would run the program. No such
            device is needed.

    Returns:
        A function that returns a dict of jaxprs, in the order of the passes. Its first entry, `"traced"`, is the
        program before all passes. The other keys are the names of the passes, which are the names of their files.

    Raises:
        TypeError: `fun` is not a function.
        ValueError: there is no such `platform`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import ta_write
    >>> from jax_tensorarray.doctor import passes
    >>> after = passes(lambda b: ta_write(b, 1, 2.0))(jnp.zeros(3))
    >>> "ta_write" in str(after["traced"]), "ta_write" in str(after["slices"])
    (True, False)
    """
    check_is_function("passes", fun)
    if platform not in (None, "cpu", "cuda", "tpu"):
        raise ValueError(f"passes: platform must be None, 'cpu', 'cuda' or 'tpu', but it is {platform!r}.")

    @arguments.named_as(fun)
    def of(*args: Any, **kwargs: Any) -> dict[str, Jaxpr]:
        traced = jax.make_jaxpr(fun)(*args, **kwargs)
        here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        target = target_of((platform or here,), is_compiled_next=True)
        return {"traced": traced} | dict(steps(traced, target) if jaxprs.has_ours(traced) else ())

    return of
