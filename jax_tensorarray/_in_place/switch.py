"""Whether `in_place` rewrites programs: a variable of the environment, a context manager and an option say so."""

import contextlib
from collections.abc import Iterator

from jax_tensorarray import _contexts
from jax_tensorarray._environment import value_of

VARIABLE = "JAX_TENSORARRAY_IN_PLACE"


@contextlib.contextmanager
def disable_in_place() -> Iterator[None]:
    """Turn `in_place` off in a block: functions under `in_place` run as they are written.

    Inside the block `in_place(f)` means `jax.jit(f)`. It treats arguments and results as before, and rewrites no loop.
    The functions that `in_place_package` has put under `in_place` run as they are written, too. JAX keeps what it
    compiles inside the block apart from what it compiles outside, also for `jax.jit(in_place(f))`.

    The environment variable `JAX_TENSORARRAY_IN_PLACE=0` turns `in_place` off for a whole process, and
    `in_place(f, enabled=False)` turns it off for one function.

    Returns:
        A context manager, which is also a decorator.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import disable_in_place, in_place
    >>> f = in_place(lambda b: jax.lax.fori_loop(1, 4, lambda i, b: b.at[i].set(b[i - 1]), b))
    >>> with disable_in_place():
    ...     "ta_write" in str(jax.make_jaxpr(f)(jnp.ones(4)))
    False
    >>> "ta_write" in str(jax.make_jaxpr(f)(jnp.ones(4)))
    True
    """
    with _contexts.decided("off"):
        yield


@contextlib.contextmanager
def enable_in_place() -> Iterator[None]:
    """Turn `in_place` on in a block, whatever the environment says: for the doctor, which shows what it would do."""
    with _contexts.decided("on"):
        yield


def why_off(enabled: bool = True) -> str:
    """Return what has turned `in_place` off, as a user writes it. Return an empty text if it is on.

    `enabled` is the option of the function.
    """
    if not enabled:
        return "enabled=False"
    if (decided := _contexts.decided.value) is not None:
        return "disable_in_place()" if decided == "off" else ""
    return f"{VARIABLE}=0" if value_of(VARIABLE, ("0", "1"), "1") == "0" else ""
