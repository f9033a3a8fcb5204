"""Show what the passes of this library make of a program before JAX lowers it."""

from collections.abc import Callable
from typing import Any

import jax

from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._lowering.program import steps, target_of


def passes(f: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return what each pass over a program makes of it, by the name of the pass, which is that of its file.

    Nothing is compiled. A program without row ops and loops of this library has no passes.

    Args:
        f: any function of JAX.
        args: its arguments; shapes and dtypes are enough, as `jax.ShapeDtypeStruct`.
        platform: `"cpu"`, `"cuda"` or `"tpu"`. None is where JAX would run it. The device need not be there.
        kwargs: its keyword arguments.

    Returns:
        Jaxprs in the order of the passes, the first of them `"traced"`, before all passes.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import ta_write
    >>> after = passes(lambda b: ta_write(b, 1, 2.0), jnp.zeros(3))
    >>> "ta_write" in str(after["traced"]), "ta_write" in str(after["slices"])
    (True, False)
    """
    traced = jax.make_jaxpr(f)(*args, **kwargs)
    if platform is None:
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    target = target_of((platform,), is_compiled_next=True)
    return {"traced": traced} | dict(steps(traced, target) if jaxprs.has_ours(traced) else ())
