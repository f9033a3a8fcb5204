"""The loops of TensorFlow, with its names and arguments."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _compat
from jax_tensorarray._loops import api
from jax_tensorarray._loops.api import run_while, too_many
from jax_tensorarray._loops.from_jax import as_value, check_max_steps, known_bound
from jax_tensorarray._loops.hints import about_sizes
from jax_tensorarray._loops.strategy import Tape
from jax_tensorarray._loops.while_ import Bound


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
        swap_memory: whether reverse mode stores its values in host memory: `Tape(offload=True)`.
        maximum_iterations: the loop stops after that many steps: an integer, which may be traced.
        name: of a scope around the loop.
        max_steps: as for `while_loop`: a loop that needs more steps raises an error. Reverse mode needs it if
            `maximum_iterations` is traced or not given.

    Returns:
        The variables after the last step, in a tuple or list as `loop_vars` is. Differentiable as `while_loop`.

    Raises:
        TypeError: `loop_vars` is not a tuple or list, `body` gives another number of variables, `maximum_iterations`
            is not an integer, or another argument has the wrong type.
        ValueError: `maximum_iterations` is known and negative.
        TypeError, ValueError, jax.errors.JaxRuntimeError: as `while_loop`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> squares = tf.TensorArray(jnp.int32, 5, element_shape=())
    >>> i, squares = tf.while_loop(lambda i, _: i < 5, lambda i, ta: (i + 1, ta.write(i, i * i)), (0, squares))
    >>> print(i, squares.stack())
    5 [ 0  1  4  9 16]

    TensorFlow: `tf.while_loop`.
    """
    _check("tf.while_loop", parallel_iterations, name, back_prop=back_prop, swap_memory=swap_memory)
    for called, function in (("cond", cond), ("body", body)):
        _check_callable("tf.while_loop", called, function)
    if not isinstance(loop_vars, tuple | list):
        raise TypeError(f"tf.while_loop: loop_vars must be a tuple or list, not {type(loop_vars).__name__}")
    number = len(loop_vars)

    @_compat.placed_as(body)
    def step(variables: Any) -> Any:
        after = body(*variables)
        if not isinstance(after, tuple | list) and number == 1:
            after = (after,)
        if not isinstance(after, tuple | list) or len(after) != number:
            returned = f"{len(after)}" if isinstance(after, tuple | list) else type(after).__name__
            raise TypeError(f"tf.while_loop: body must return {number} variables, but returns {returned}")
        return tuple(after)

    @_compat.placed_as(cond)
    def goes_on(variables: Any) -> Any:
        more = cond(*variables)
        return jnp.reshape(more, ()) if np.size(more) == 1 and np.ndim(more) else more

    maximum_iterations = as_value(maximum_iterations)
    _check_maximum_iterations(maximum_iterations)
    check_max_steps("tf.while_loop", max_steps)
    error = too_many("tf.while_loop", f"cond is still true after max_steps={max_steps}", "maximum_iterations")
    constant = None if maximum_iterations is None else known_bound(maximum_iterations)
    if constant is not None and (max_steps is None or constant <= max_steps):
        max_steps, error = constant, ""
    how: dict[str, Any] = {"residuals": _residuals(swap_memory), "error": error}
    with _scope(name):
        if maximum_iterations is None or constant is not None:
            name_of_bound = Bound("maximum_iterations", "tf.while_loop(cond, body, loop_vars, ")
            after = run_while(name_of_bound, goes_on, step, tuple(loop_vars), max_steps, **how)
        else:
            _, after = run_while(
                Bound(loop="tf.while_loop(cond, body, loop_vars, maximum_iterations=..., "),
                _compat.placed_as(cond)(lambda state: (state[0] < maximum_iterations) & goes_on(state[1])),
                _compat.placed_as(body)(lambda state: (state[0] + 1, step(state[1]))),
                (jnp.zeros((), maximum_iterations.dtype), tuple(loop_vars)),
                max_steps,
                **how,
            )
    after = _differentiated(after, back_prop)
    if hasattr(loop_vars, "_fields"):
        return type(loop_vars)(*after)
    return type(loop_vars)(after)


def _check_maximum_iterations(number: Any) -> None:
    if number is None:
        return
    is_array = hasattr(number, "dtype") and hasattr(number, "shape")
    is_integer = jnp.issubdtype(number.dtype, jnp.integer) if is_array else type(number) is int
    if not is_integer or np.shape(number):
        described = f"{number.dtype}[{','.join(map(str, number.shape))}]" if is_array else repr(number)
        raise TypeError(f"tf.while_loop: maximum_iterations must be an integer, got {described}")
    if (constant := known_bound(number)) is not None and constant < 0:
        raise ValueError(f"tf.while_loop: maximum_iterations must not be negative, got {constant}")


@about_sizes
def map_fn(
    fn: Callable[[Any], Any],
    elems: Any,
    dtype: Any = None,
    parallel_iterations: int | None = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: Any = None,
) -> Any:
    """Return `fn` of every slice of `elems` along the first axis, stacked.

    Args:
        fn: maps a slice of `elems` to any pytree of arrays.
        elems: an array, or a pytree of arrays, with the same number of slices.
        dtype: another name of `fn_output_signature`, which comes first.
        parallel_iterations: ignored, as for `tf.while_loop`.
        back_prop: as for `tf.while_loop`.
        swap_memory: as for `tf.while_loop`.
        infer_shape: ignored: all results of `fn` have the same shape.
        name: of a scope around the loop.
        fn_output_signature: a pytree like the result of `fn`, of dtypes or of `jax.ShapeDtypeStruct`. The result must
            have these dtypes and shapes: nothing is converted.

    Raises:
        TypeError: `fn` returns something else than `fn_output_signature` says, or an argument has the wrong type.
        ValueError: `elems` are not arrays with the same number of slices.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.map_fn(lambda x: x * x, jnp.arange(4.0))
    Array([0., 1., 4., 9.], dtype=float32)

    TensorFlow: `tf.map_fn`.
    """
    op, signature = "tf.map_fn", dtype if fn_output_signature is None else fn_output_signature
    _check(op, parallel_iterations, name, back_prop=back_prop, swap_memory=swap_memory, infer_shape=infer_shape)
    _check_callable(op, "fn", fn)
    argument = "dtype" if fn_output_signature is None else "fn_output_signature"
    elems = _slices(op, elems)

    @_compat.placed_as(fn)
    def step(nothing: tuple[()], x: Any) -> tuple[tuple[()], Any]:
        result = fn(x)
        if signature is not None:
            _check_signature(op, argument, signature, result)
        return nothing, result

    with _scope(name):
        _, results = api.scan(step, (), elems, residuals=_residuals(swap_memory))
    return _differentiated(results, back_prop)


def _check_signature(op: str, argument: str, signature: Any, result: Any) -> None:
    """Raise TypeError if a result of `fn` does not have the structure, the dtypes and the shapes of a signature."""
    expected, leaves = jax.tree.leaves(signature), jax.tree.leaves(result)
    tree: Any = jax.tree.structure(signature)
    if tree != jax.tree.structure(result):
        raise TypeError(f"{op}: {argument} is {signature}, but fn returns {jax.tree.map(jax.typeof, result)}")
    for kind, x in zip(expected, map(jax.typeof, leaves), strict=True):
        shape = kind.shape if isinstance(kind, jax.ShapeDtypeStruct | jax.Array | np.ndarray) else None
        try:
            dtype = jax.dtypes.canonicalize_dtype(kind if shape is None else kind.dtype)
        except TypeError as error:
            raise TypeError(f"{op}: {argument} must be of dtypes, got {kind!r}") from error
        if dtype != x.dtype or shape not in (None, x.shape):
            described = f"{dtype}" if shape is None else f"{dtype}[{','.join(map(str, shape))}]"
            raise TypeError(f"{op}: {argument} says {described}, but fn returns {x.str_short()}; convert it in fn")


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

    Args:
        fn: maps an accumulator and a slice of `elems` to the next accumulator.
        elems: an array, or a pytree of arrays, with the same number of slices.
        initializer: the first accumulator, any pytree. It may hold a `TensorArray`. Without it `elems[0]` is the first.
        parallel_iterations: ignored, as for `tf.while_loop`.
        back_prop: as for `tf.while_loop`.
        swap_memory: as for `tf.while_loop`.
        name: of a scope around the loop.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `elems` are not arrays with the same number of slices, or have none to begin with.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.foldl(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(123, dtype=int32)

    TensorFlow: `tf.foldl`.
    """
    return _fold("tf.foldl", fn, elems, initializer, False, parallel_iterations, back_prop, swap_memory, name)


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
    """Fold from the last slice to the first, and otherwise as `tf.foldl`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.foldr(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(321, dtype=int32)

    TensorFlow: `tf.foldr`.
    """
    return _fold("tf.foldr", fn, elems, initializer, True, parallel_iterations, back_prop, swap_memory, name)


@about_sizes
def scan(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    parallel_iterations: int | None = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    reverse: bool = False,
    name: str | None = None,
) -> Any:
    """Return all the accumulators of a fold, stacked.

    Args:
        fn: maps an accumulator and a slice of `elems` to the next accumulator.
        elems: an array, or a pytree of arrays, with the same number of slices.
        initializer: the accumulator before the first step. Without it, the first slice is the first result.
        parallel_iterations: ignored, as for `tf.while_loop`.
        back_prop: as for `tf.while_loop`.
        swap_memory: as for `tf.while_loop`.
        infer_shape: ignored: all accumulators have the same shape.
        reverse: whether to go from the last slice to the first. The result of a slice stays where the slice is.
        name: of a scope around the loop.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `elems` are not arrays with the same number of slices, or have none to begin with.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import tf
    >>> tf.scan(lambda a, x: a + x, jnp.array([1, 2, 3]))
    Array([1, 3, 6], dtype=int32)

    TensorFlow: `tf.scan`.
    """
    op, flags = "tf.scan", {"back_prop": back_prop, "swap_memory": swap_memory}
    _check(op, parallel_iterations, name, **flags, infer_shape=infer_shape, reverse=reverse)
    start, rest, first = _initialized(op, fn, elems, initializer, reverse)

    @_compat.placed_as(fn)
    def step(a: Any, x: Any) -> tuple[Any, Any]:
        a = fn(a, x)
        return a, a

    with _scope(name):
        _, after = api.scan(step, start, rest, reverse=bool(reverse), residuals=_residuals(swap_memory))
        if first is not None:
            after = jax.tree.map(
                lambda x, xs: jnp.concatenate([xs, x[None]] if reverse else [x[None], xs]), first, after
            )
    return _differentiated(after, back_prop)


def _fold(
    op: str,
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any,
    reverse: bool,
    parallel_iterations: int | None,
    back_prop: bool,
    swap_memory: bool,
    name: str | None,
) -> Any:
    _check(op, parallel_iterations, name, back_prop=back_prop, swap_memory=swap_memory)
    start, rest, _ = _initialized(op, fn, elems, initializer, reverse)
    step = _compat.placed_as(fn)(lambda a, x: (fn(a, x), None))
    with _scope(name):
        last, _ = api.scan(step, start, rest, reverse=reverse, residuals=_residuals(swap_memory))
    return _differentiated(last, back_prop)


def _initialized(op: str, fn: Any, elems: Any, initializer: Any, reverse: bool) -> tuple[Any, Any, Any]:
    """Return the first accumulator of a fold, the slices to fold, and the first slice without an initializer."""
    _check_callable(op, "fn", fn)
    elems = _slices(op, elems)
    if initializer is not None:
        return initializer, elems, None
    if not len(jax.tree.leaves(elems)[0]):
        raise ValueError(f"{op}: without an initializer there must be at least one slice in elems")
    first, rest = (-1, slice(None, -1)) if reverse else (0, slice(1, None))
    start = jax.tree.map(lambda x: x[first], elems)
    return start, jax.tree.map(lambda x: x[rest], elems), start


# --- arguments of all loops -------------------------------------------------------------------


def _check(op: str, parallel_iterations: Any, name: Any, **flags: Any) -> None:
    """Check the arguments that all loops have. A flag is True or False."""
    is_number = isinstance(parallel_iterations, int | np.integer) and not isinstance(parallel_iterations, bool)
    if parallel_iterations is not None and not (is_number and parallel_iterations > 0):
        raise TypeError(f"{op}: parallel_iterations must be a positive integer or None, got {parallel_iterations!r}")
    if not isinstance(name, str | None):
        raise TypeError(f"{op}: name must be a string or None, got {name!r}")
    for flag, value in flags.items():
        if not isinstance(value, bool | np.bool):
            raise TypeError(f"{op}: {flag} must be True or False, got {value!r}")


def _check_callable(op: str, name: str, f: Any) -> None:
    if not callable(f):
        raise TypeError(f"{op}: {name} must be a function, got {f!r}")


def _slices(op: str, elems: Any) -> Any:
    """Return `elems` as arrays. ValueError if they do not have the same number of slices."""
    elems = jax.tree.map(jnp.asarray, elems)
    shapes = [x.shape for x in jax.tree.leaves(elems)]
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        text = ", ".join(map(str, shapes)) or "no array"
        raise ValueError(f"{op}: elems must be arrays with the same number of slices, got {text}")
    return elems


def _residuals(swap_memory: bool) -> Literal["auto"] | Tape:
    return Tape(offload=True) if swap_memory else "auto"


def _scope(name: str | None) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(name) if name else contextlib.nullcontext()


def _differentiated(results: Any, back_prop: bool) -> Any:
    return results if back_prop else jax.tree.map(lax.stop_gradient, results)
