"""The loops of TensorFlow, with its names and arguments."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._loops import api
from jax_tensorarray._loops.api import run_while
from jax_tensorarray._loops.from_jax import as_value, check_max_steps, known_bound
from jax_tensorarray._loops.hints import about_sizes, explained
from jax_tensorarray._loops.strategy import Tape
from jax_tensorarray._loops.while_ import Bound

Array = jax.Array


@about_sizes
def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    shape_invariants: Any = None,
    parallel_iterations: int | None = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: Any = None,
    name: str | None = None,
    *,
    max_steps: int | None = None,
) -> Any:
    """Run a loop over several variables, with the arguments of TensorFlow's `tf.while_loop`.

    Args:
        cond: maps the variables, each an argument, to a bool, or an array of one: whether to take another step.
        body: maps the variables to a tuple or list of the next ones; a single one may also be returned by itself.
        loop_vars: a tuple or list of the initial variables. Each is a pytree, such as a `TensorArray`.
        shape_invariants: ignored: no shape of a JAX loop changes.
        parallel_iterations: ignored: XLA finds what can run at the same time.
        back_prop: whether the results are differentiated. If not, their derivatives are zero.
        swap_memory: whether the residuals of reverse mode are kept in host memory: `Tape(offload=True)`.
        maximum_iterations: an upper bound of the number of steps: an integer, which may be traced.
        name: of a scope around the loop.
        max_steps: as for `while_loop`. Only needed in reverse mode, if `maximum_iterations` is traced or not given.

    Returns:
        The variables after the last step, in a tuple or list as `loop_vars` is. Differentiable as `while_loop`.

    Raises:
        TypeError: `loop_vars` is not a tuple or list, `body` gives another number of variables, or `maximum_iterations`
            is not an integer.
        ValueError: `maximum_iterations` is known and negative.
        TypeError, ValueError: as `while_loop`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> squares = tf.TensorArray(jnp.int32, 5, element_shape=())
    >>> i, squares = tf.while_loop(lambda i, _: i < 5, lambda i, ta: (i + 1, ta.write(i, i * i)), (0, squares))
    >>> print(i, squares.stack())
    5 [ 0  1  4  9 16]

    TensorFlow: `tf.while_loop`.
    """
    if not isinstance(loop_vars, tuple | list):
        raise TypeError(f"tf.while_loop: loop_vars must be a tuple or list, not {type(loop_vars).__name__}")
    number = len(loop_vars)

    def step(variables: Any) -> Any:
        after = body(*variables)
        if not isinstance(after, tuple | list) and number == 1:
            after = (after,)
        if not isinstance(after, tuple | list) or len(after) != number:
            given = f"{len(after)}" if isinstance(after, tuple | list) else type(after).__name__
            raise TypeError(f"tf.while_loop: body must return {number} variables, but returns {given}")
        return tuple(after)

    def goes_on(variables: Any) -> Any:
        more = cond(*variables)
        return jnp.reshape(more, ()) if np.size(more) == 1 and np.ndim(more) else more

    maximum_iterations = as_value(maximum_iterations)
    _check_maximum_iterations(maximum_iterations)
    check_max_steps("tf.while_loop", max_steps)
    bound = None if maximum_iterations is None else known_bound(maximum_iterations)
    if bound is not None:
        max_steps = bound if max_steps is None else min(bound, max_steps)
    options = (max_steps, Tape(offload=swap_memory) if swap_memory else "auto")
    with jax.named_scope(name) if name else contextlib.nullcontext():
        if maximum_iterations is None or bound is not None:
            name_of_bound = Bound("maximum_iterations", "tf.while_loop(cond, body, loop_vars, ")
            after = run_while(name_of_bound, goes_on, step, tuple(loop_vars), *options)
        else:
            _, after = run_while(
                Bound(loop="tf.while_loop(cond, body, loop_vars, maximum_iterations=..., "),
                lambda state: (state[0] < maximum_iterations) & goes_on(state[1]),
                lambda state: (state[0] + 1, step(state[1])),
                (jnp.zeros((), maximum_iterations.dtype), tuple(loop_vars)),
                *options,
            )
    if not back_prop:
        after = jax.tree.map(lax.stop_gradient, after)
    if hasattr(loop_vars, "_fields"):
        return type(loop_vars)(*after)
    return type(loop_vars)(after)


def _check_maximum_iterations(given: Any) -> None:
    if given is None:
        return
    is_array = hasattr(given, "dtype") and hasattr(given, "shape")
    is_integer = jnp.issubdtype(given.dtype, jnp.integer) if is_array else type(given) is int
    if not is_integer or np.shape(given):
        described = f"{given.dtype}[{','.join(map(str, given.shape))}]" if is_array else repr(given)
        raise TypeError(f"tf.while_loop: maximum_iterations must be an integer, got {described}")
    if (known := known_bound(given)) is not None and known < 0:
        raise ValueError(f"tf.while_loop: maximum_iterations must not be negative, got {known}")


@explained
def map_fn(fn: Callable[[Any], Any], elems: Any) -> Any:
    """Return `fn` of every slice of `elems` along the first axis, stacked.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.map_fn(lambda x: x * x, jnp.arange(4.0))
    Array([0., 1., 4., 9.], dtype=float32)

    TensorFlow: `tf.map_fn`.
    """
    _, ys = lax.scan(lambda _, x: (None, fn(x)), None, elems)
    return ys


@about_sizes
def foldl(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    parallel_iterations: int | None = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """Return `fn(...fn(fn(initializer, elems[0]), elems[1])..., elems[-1])`.

    Without an initializer, `elems[0]` is the initializer. The other arguments are as for `tf.while_loop`. An
    accumulator may hold a `TensorArray`, like the carry of `scan`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.foldl(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(123, dtype=int32)

    TensorFlow: `tf.foldl`.
    """
    return _fold("tf.foldl", fn, elems, initializer, False, back_prop, swap_memory, name)


@about_sizes
def foldr(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    parallel_iterations: int | None = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """Fold from the last slice to the first, and otherwise as `foldl`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.foldr(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(321, dtype=int32)

    TensorFlow: `tf.foldr`.
    """
    return _fold("tf.foldr", fn, elems, initializer, True, back_prop, swap_memory, name)


@explained
def scan(fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None, reverse: bool = False) -> Any:
    """Return all the accumulators of a fold, stacked. Without an initializer the first slice is the first of them.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.scan(lambda a, x: a + x, jnp.array([1, 2, 3]))
    Array([1, 3, 6], dtype=int32)

    TensorFlow: `tf.scan`.
    """
    start, rest, first = _initialized("tf.scan", elems, initializer, reverse)

    def step(a: Any, x: Any) -> tuple[Any, Any]:
        a = fn(a, x)
        return a, a

    _, after = lax.scan(step, start, rest, reverse=reverse)
    if first is None:
        return after
    return jax.tree.map(lambda x, xs: jnp.concatenate([xs, x[None]] if reverse else [x[None], xs]), first, after)


def _fold(
    op: str,
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any,
    reverse: bool,
    back_prop: bool,
    swap_memory: bool,
    name: str | None,
) -> Any:
    start, rest, _ = _initialized(op, elems, initializer, reverse)
    residuals = Tape(offload=swap_memory) if swap_memory else "auto"
    with jax.named_scope(name) if name else contextlib.nullcontext():
        last, _ = api.scan(lambda a, x: (fn(a, x), None), start, rest, reverse=reverse, residuals=residuals)
    return last if back_prop else jax.tree.map(lax.stop_gradient, last)


def _initialized(op: str, elems: Any, initializer: Any, reverse: bool) -> tuple[Any, Any, Any]:
    """Return what a fold starts with, what it goes through, and the first slice if no initializer is given."""
    if initializer is not None:
        return initializer, elems, None
    elems = jax.tree.map(jnp.asarray, elems)
    if any(x.ndim == 0 or x.shape[0] == 0 for x in jax.tree.leaves(elems)):
        raise ValueError(f"{op}: without an initializer there must be at least one slice in elems")
    first, rest = (-1, slice(None, -1)) if reverse else (0, slice(1, None))
    start = jax.tree.map(lambda x: x[first], elems)
    return start, jax.tree.map(lambda x: x[rest], elems), start
