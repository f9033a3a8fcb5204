"""`growing`: compile a function for a bound of steps and rows, and for twice that bound if it was not enough."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax

from jax_tensorarray import _compat, _kernels
from jax_tensorarray._array import growth
from jax_tensorarray._array.in_loops import leaving_loop
from jax_tensorarray._ops.calls import WITHOUT_KERNELS


def growing(
    f: Callable[..., Any],
    start: int = 64,
    limit: int | None = None,
    *,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> "Growing":
    """Return `jax.jit(f)` for an `f` that takes as many steps, and makes as many rows, as it turns out to need.

    XLA has no arrays that grow, so `f` is compiled for a bound. Inside of `f` the loops of this library that have no
    `max_steps` or `maximum_iterations` take at most that many steps, and every growing `TensorArray` that is made
    there without `max_size` has room for that many rows. If a call needs more, its results are thrown away, the bound
    is doubled, `f` is compiled for it and called again. Later calls begin with the bound that sufficed last, and `f` is
    compiled once for each. So short sequences cost little memory on a GPU too, and reverse mode needs no `max_steps`.

    A call waits for its results, to see whether they are right. What `f` does besides computing, such as a
    `jax.debug.print` or another callback, happens again when the call is repeated: a callback may see a run that is
    thrown away.

    Args:
        f: the function to compile, for instance a loss, its `jax.grad` or `jax.value_and_grad`, or a train step. It may
            take and return any pytree. A `TensorArray` among its results has as many rows as were written.
        start: the first bound, at least 1.
        limit: the largest bound. A call that needs more raises the error of the loop or array that does. None sets no
            limit, and a loop that never ends then takes all memory.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.
        donate_argnums: must be None: a call that is repeated needs its arguments again.
        donate_argnames: must be None.

    Returns:
        A function with the arguments and results of `f`, and an attribute `bound`, the present one. Not differentiable:
        write `growing(jax.grad(f))`, not `jax.grad(growing(f))`.

    Raises:
        TypeError: `f` is not callable, `start` or `limit` is not an integer; when it is called, a transformation of JAX
            is around the call.
        ValueError: `start` is below 1, `limit` below `start`, or arguments are to be donated.
        NotImplementedError: when it is called, on a TPU: a program cannot say there that it needs more.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import TensorArray, while_loop
    >>> def collatz(n):
    ...     ta = TensorArray(jnp.int32, size=0, dynamic_size=True, element_shape=())
    ...     step = lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1].append(c[0]))
    ...     return while_loop(lambda c: c[0] != 1, step, (n, ta))[1]
    >>> f = growing(collatz, start=8)
    >>> f(6).stack()
    Array([ 6,  3, 10,  5, 16,  8,  4,  2], dtype=int32)
    >>> print(f.bound, len(f(27)), f.bound)
    8 111 128
    """
    if not callable(f):
        raise TypeError(f"growing: f must be a function, got {f!r}")
    start = _as_bound("start", start)
    if start < 1:
        raise ValueError(f"growing: start must be at least 1, got {start}")
    if limit is not None and (limit := _as_bound("limit", limit)) < start:
        raise ValueError(f"growing: limit must not be below start, {start}, got {limit}")
    if donate_argnums not in (None, ()) or donate_argnames not in (None, ()):
        raise ValueError("growing: no arguments can be donated, since a call that is repeated needs them again")
    return Growing(f, start, limit, {"static_argnums": static_argnums, "static_argnames": static_argnames})


def _as_bound(name: str, given: Any) -> int:
    try:
        if not isinstance(given, bool):
            return operator.index(given)
    except TypeError:
        pass
    raise TypeError(f"growing: {name} must be an integer, got {given!r}")


class Growing:
    """A function that `growing` has made."""

    def __init__(self, f: Callable[..., Any], start: int, limit: int | None, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, f)
        self.bound = start
        self._f, self._limit, self._options = f, limit, options
        self._compiled: dict[int, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # arrays and loops of Python need no bound
            return self._f(*args, **kwargs)
        if not _compat.executes_eagerly():
            raise TypeError(
                f"growing: {self._name()} is called inside of jit, grad, vmap or another transformation, where it "
                "cannot see whether its bound was enough. Put growing around all of it, as in growing(jax.grad(f))"
            )
        if jax.default_backend() in WITHOUT_KERNELS:
            raise NotImplementedError(
                "growing: a program on a TPU cannot say that it needs more; give max_steps and max_size"
            )
        while True:
            bound = self.bound
            try:
                results = self._for(bound)(*args, **kwargs)
                jax.block_until_ready(results)
                _kernels.check_errors()
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                if growth.CURED not in str(error):
                    raise
                if bound == self._limit:
                    kind = ValueError if isinstance(error, growth.NeedsMoreError) else type(error)
                    raise kind(f"{error}. It may not be larger: limit={bound}") from None
                more = 2 * bound if self._limit is None else min(2 * bound, self._limit)
                self.bound = max(self.bound, more)  # another thread may have been here
            else:
                return leaving_loop(results)

    def _for(self, bound: int) -> Callable[..., Any]:
        """Return the function for a bound, which JAX compiles once for arguments of the same types."""
        if bound not in self._compiled:

            @functools.wraps(self._f)
            def bounded(*args: Any, **kwargs: Any) -> Any:
                with growth.bound(bound):
                    return self._f(*args, **kwargs)

            self._compiled[bound] = jax.jit(bounded, **self._options)
        return self._compiled[bound]

    def _name(self) -> str:
        return getattr(self._f, "__name__", repr(self._f))
