"""`growing`: compile a function for a bound on its steps and rows, and double the bound if a call needs more."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from jax_tensorarray import _compat, _contexts, _kernels
from jax_tensorarray._array import growth
from jax_tensorarray._array.in_loops import leaving_loop
from jax_tensorarray._ops.calls import WITHOUT_KERNELS

_P = ParamSpec("_P")
_R = TypeVar("_R")


def growing(
    fun: Callable[_P, _R],
    *,
    initial_bound: int = 64,
    max_bound: int | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> "Growing[_P, _R]":
    """Compile `fun` with a bound on its steps and rows. If a call needs more, double the bound and run it again.

    XLA has no arrays that grow, so it compiles `fun` for a bound. Inside of `fun` the loops of this library that have
    no `max_steps` or `maximum_iterations` take at most that many steps. Every growing `TensorArray` that is made there
    without `max_size` has room for that many rows. If a call needs more, `growing` drops its results, doubles the bound
    and compiles and calls `fun` again. Later calls begin with the bound that sufficed last. Each bound is compiled
    once. Therefore short sequences take little memory on a GPU too, and reverse mode needs no `max_steps`.

    A call waits for its results, to see whether the bound was enough. If a call is repeated, its side effects, such as
    `jax.debug.print`, happen again, and a callback may see a run whose results are dropped.

    Args:
        fun: the function to compile, for instance a loss, its `jax.grad` or `jax.value_and_grad`, or a train step. It
            may take and return any pytree. A `TensorArray` among its results has as many rows as were written.
        initial_bound: the first bound, at least 1.
        max_bound: the largest bound. A call that needs more raises the error of the loop or array that does. None sets
            no limit, and a loop that never ends then takes all memory.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.

    Returns:
        A function with the arguments and results of `fun`, and an attribute `bound`, the present one. It donates no
        arguments, since it needs them again if it repeats a call. It is not differentiable: write
        `growing(jax.grad(fun))`, not `jax.grad(growing(fun))`.

    Raises:
        TypeError: `fun` is not callable, or a bound is not an integer. When it is called: a transformation of JAX is
            around the call.
        ValueError: `initial_bound` is below 1, or `max_bound` is below `initial_bound`.
        NotImplementedError: when it is called on a TPU, where a program cannot say that it needs more.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import TensorArray, while_loop
    >>> def collatz(n):
    ...     ta = TensorArray(jnp.int32, size=0, dynamic_size=True, element_shape=())
    ...     step = lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1].append(c[0]))
    ...     return while_loop(lambda c: c[0] != 1, step, (n, ta))[1]
    >>> f = growing(collatz, initial_bound=8)
    >>> f(6).stack()
    Array([ 6,  3, 10,  5, 16,  8,  4,  2], dtype=int32)
    >>> print(f.bound, len(f(27)), f.bound)
    8 111 128
    """
    if not callable(fun):
        raise TypeError(f"growing: fun must be a function, got {fun!r}")
    initial_bound = _as_bound("initial_bound", initial_bound)
    if initial_bound < 1:
        raise ValueError(f"growing: initial_bound must be at least 1, got {initial_bound}")
    if max_bound is not None and (max_bound := _as_bound("max_bound", max_bound)) < initial_bound:
        raise ValueError(f"growing: max_bound must be at least initial_bound, {initial_bound}, got {max_bound}")
    options = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return Growing(fun, initial_bound, max_bound, options)


def _as_bound(name: str, bound: Any) -> int:
    try:
        if not isinstance(bound, bool):
            return operator.index(bound)
    except TypeError:
        pass
    raise TypeError(f"growing: {name} must be an integer, got {bound!r}")


class Growing(Generic[_P, _R]):
    """A function that `growing` returns."""

    def __init__(self, fun: Callable[_P, _R], bound: int, max_bound: int | None, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)
        self.bound = bound
        self._fun, self._max_bound, self._options = fun, max_bound, options
        self._compiled: dict[int, Callable[_P, _R]] = {}

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if jax.config.jax_disable_jit:  # arrays and loops of Python need no bound
            return self._fun(*args, **kwargs)
        if not _compat.executes_eagerly():
            raise TypeError(
                f"growing: {self._name()} is called inside of jit, grad, vmap or another transformation, where it "
                "cannot see whether its bound was enough. Put growing around all of it, as in growing(jax.grad(fun))"
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
                if bound == self._max_bound:
                    kind = ValueError if isinstance(error, growth.NeedsMoreError) else type(error)
                    raise kind(f"{error}. It may not be larger: max_bound={bound}") from None
                more = 2 * bound if self._max_bound is None else min(2 * bound, self._max_bound)
                self.bound = max(self.bound, more)  # another thread may have doubled it
            else:
                grown: _R = leaving_loop(results)
                return grown

    def _for(self, bound: int) -> Callable[_P, _R]:
        """Return the function for a bound. JAX compiles it once for each type of the arguments."""
        if bound not in self._compiled:

            @functools.wraps(self._fun)
            def bounded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
                with _contexts.bound(bound):
                    return self._fun(*args, **kwargs)

            self._compiled[bound] = jax.jit(bounded, **self._options)
        return self._compiled[bound]

    def _name(self) -> str:
        return getattr(self._fun, "__name__", repr(self._fun))
