"""The loops that users call: replacements for the loops of `jax.lax` that are differentiable in reverse."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_tensorarray import _compat, _contexts
from jax_tensorarray._array import growth
from jax_tensorarray._array.in_loops import entering_loop, leaving_loop, needs_to_look
from jax_tensorarray._loops.as_while import by_rows, numbered, row_of
from jax_tensorarray._loops.auto import Auto, Checkpoints, Undo
from jax_tensorarray._loops.from_jax import (
    Steps,
    as_value,
    bind_loop,
    check_max_steps,
    in_python,
    known_bound,
    lax_fori_loop,
    lax_known_fori_loop,
)
from jax_tensorarray._loops.hints import about_sizes, explained, unpacked
from jax_tensorarray._loops.inverse import Inverse, check_inverse_type
from jax_tensorarray._loops.recompute import Recompute
from jax_tensorarray._loops.strategy import Strategy, Tape
from jax_tensorarray._loops.while_ import OF_WHILE_LOOP, Bound
from jax_tensorarray._ops.empty import ta_empty

_Carry = TypeVar("_Carry")
_Slice = TypeVar("_Slice")
_Stacked = TypeVar("_Stacked")

#: The strategies without arguments, by name.
ByName = Literal["auto", "tape", "recompute", "undo"]

#: After `max_steps` steps, a loop whose condition is still true raises or stops.
OnLimit = Literal["raise", "stop"]

#: The strategies of reverse mode, by name.
_BY_NAME = {"auto": Auto(), "tape": Tape(), "recompute": Recompute(), "undo": Undo()}

#: The object to write instead of the name of a strategy that needs arguments.
_INSTEAD = {
    "checkpoint": "Checkpoint(16), with the number of carries to keep",
    "inverse": "Inverse(f), with a function from a carry to the one before it",
}

#: Under `jax.disable_jit`, trace a loop that Python cannot run, as JAX does: a batched condition is no bool.
_falling_back = contextlib.suppress(jax.errors.ConcretizationTypeError)


def _strategy_of(op: str, residuals: Any, max_steps: int | None, others: Sequence[str] = ()) -> Strategy:
    """Return the strategy for a name or an object. `others` are further names that the caller accepts."""
    strategy = _BY_NAME.get(residuals) if isinstance(residuals, str) else residuals
    if not isinstance(strategy, Strategy):
        names = ", ".join([*_BY_NAME, *others])
        has_arguments = isinstance(residuals, str) and residuals in _INSTEAD
        hint = f"; write residuals={_INSTEAD[residuals]}" if has_arguments else ""
        raise ValueError(f"{op}: residuals must be one of {names}, or an object like Undo(); got {residuals!r}{hint}")
    if max_steps is None and not isinstance(strategy, Tape) and strategy != Auto():
        raise ValueError(f"{op}: residuals={residuals!r} needs max_steps")
    return strategy


def _is_inverse(residuals: Any) -> bool:
    return isinstance(residuals, Inverse) or (isinstance(residuals, str) and residuals == "inverse")


def strategy_within(op: str, residuals: Any, memory: Any) -> Strategy:
    """Return the strategy for all loops of a function. Each may store `memory` bytes."""
    if residuals == "checkpoint":
        return Checkpoints(memory)
    if memory is not None and residuals != "auto":
        raise ValueError(f'{op}: memory is for residuals="auto" or "checkpoint", got residuals={residuals!r}')
    if _is_inverse(residuals):
        raise ValueError(f"{op}: an Inverse belongs to one loop; write while_loop(..., residuals=Inverse(f))")
    return Auto(memory) if residuals == "auto" else _strategy_of(op, residuals, 0, ["checkpoint"])


def raises(op: str, on_limit: Any) -> bool:
    """Return whether a loop that needs too many steps raises an error."""
    if not isinstance(on_limit, str) or on_limit not in get_args(OnLimit):
        raise ValueError(f"{op}: on_limit must be one of {', '.join(get_args(OnLimit))}; got {on_limit!r}")
    return on_limit == "raise"


def too_many(op: str, problem: str, to_stop: str = 'on_limit="stop"') -> str:
    """Return the error of a loop that needs too many steps. `to_stop` is the argument that ends it there."""
    return f"{op}: {problem}. Give a larger max_steps, or {to_stop} to end the loop there"


@overload
def while_loop(
    cond_fun: Callable[[_Carry], ArrayLike],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    on_limit: OnLimit = "raise",
    residuals: ByName | Strategy = "auto",
    return_steps: Literal[False] = False,
) -> _Carry: ...


@overload
def while_loop(
    cond_fun: Callable[[_Carry], ArrayLike],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    on_limit: OnLimit = "raise",
    residuals: ByName | Strategy = "auto",
    return_steps: Literal[True],
) -> tuple[_Carry, Steps]: ...


@overload
def while_loop(
    cond_fun: Callable[[_Carry], ArrayLike],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    on_limit: OnLimit = "raise",
    residuals: ByName | Strategy = "auto",
    return_steps: bool = False,
) -> _Carry | tuple[_Carry, Steps]: ...


@explained
@about_sizes
def while_loop(
    cond_fun: Callable[[_Carry], ArrayLike],
    body_fun: Callable[[_Carry], _Carry],
    init_val: _Carry,
    *,
    max_steps: int | None = None,
    on_limit: OnLimit = "raise",
    residuals: ByName | Strategy = "auto",
    return_steps: bool = False,
) -> _Carry | tuple[_Carry, Steps]:
    """Run `jax.lax.while_loop`, with a derivative in reverse mode that costs what the steps taken cost.

    Under `jax.grad` each step stores on a tape the values that its derivative needs. The tape has room for `max_steps`
    steps. On a CPU it takes memory only for the steps taken. Under `jax.vmap` every example ends by itself. The loop
    never copies a buffer that it updates by rows: a `TensorArray`, or an array and the row ops.

    Args:
        cond_fun: maps the carry to a bool: whether to take another step.
        body_fun: maps the carry to the next one, of the same structure, shapes and dtypes.
        init_val: the initial carry, any pytree. A TensorArray without `element_shape` takes the shape of the rows that
            `body_fun` writes. A TensorArray that grows and has no `max_size` gets room for `max_steps` more rows.
        max_steps: an upper bound on the number of steps. Reverse mode needs a bound below 2**31. Without 64-bit types,
            2**31 and more are no bound.
        on_limit: what happens if `cond_fun` is still true after `max_steps` steps.

            - "raise": the loop raises an error. On a TPU, which cannot raise errors, it stops.
            - "stop": the loop stops there, and returns the carry. `return_steps` tells.
        residuals: what reverse mode stores of each step: a name, or an object with options.

            - "tape", `Tape()`: all values that its derivative needs, perhaps in host memory.
            - "recompute", `Recompute()`: the carry, and the rows that the step read. The rest is computed again.
            - "undo", `Undo()`: the rows that the step overwrote, and other values that cannot be computed again.
            - `Checkpoint(k)`: nothing. The whole loop stores `k` carries, and runs again from them.
            - `Inverse(f)`: nothing. `f` computes the carry before a step from the carry after it.
            - "auto", `Auto()`: "undo" if a tape would hold whole buffers that the body updates by rows, else "tape". A
              tape of at most 2 MiB is kept if "undo" would compute much of it again. Given `Auto(memory=n)`, "undo" or
              a `Checkpoint` if this takes more than n bytes.
        return_steps: whether to return a pair: the carry, and a named tuple `(taken, cut)`. `taken` is the number of
            steps. `cut` is whether `cond_fun` was still true; with `on_limit="raise"` it is False, except on a TPU.
            Without 64-bit types, 2**31 - 1 steps means that many or more.

    Returns:
        The carry after the last step. It is differentiable in `init_val` and in all values that the functions close
        over: in forward mode and, with `max_steps`, in reverse mode and every order of both.

    Raises:
        TypeError, ValueError: as `jax.lax.while_loop`, with its messages.
        ValueError: `max_steps` is negative, or not given although a derivative in reverse mode goes through the loop
            or `residuals` is neither "tape" nor "auto"; or `on_limit` or `residuals` is none of the above.
        jax.errors.JaxRuntimeError, ValueError: the loop needs more than `max_steps` steps (while running; on a GPU
            later, see `check_errors`). Under `jax.vmap`: one of the examples does.

    >>> import jax
    >>> def root(a):  # Newton's method, until it is good enough
    ...     return while_loop(lambda x: abs(x * x - a) > 1e-6 * a, lambda x: (x + a / x) / 2, a, max_steps=100)
    >>> print(f"{root(2.0):.4f} {jax.grad(root)(2.0):.4f}")
    1.4142 0.3536

    TensorFlow: `tf.while_loop`.
    """
    error = too_many("while_loop", f"cond_fun is still true after max_steps={max_steps}")
    return run_while(
        OF_WHILE_LOOP,
        cond_fun,
        body_fun,
        init_val,
        max_steps,
        residuals,
        return_steps,
        error if raises("while_loop", on_limit) else "",
    )


def run_while(
    bound: Bound,
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    max_steps: int | None,
    residuals: str | Strategy,
    return_steps: bool = False,
    error: str = "",
) -> Any:
    """Run `while_loop` for a loop that may have another name for `max_steps`, with the text `error`.

    With an empty text, the loop stops after `max_steps`.
    """
    check_max_steps("while_loop", max_steps)
    if max_steps is None and (most := _contexts.bound.value) is not None:
        max_steps, error = most, _MORE
    strategy = _strategy_of("while_loop", residuals, max_steps)
    init_val = entering_loop(body_fun, init_val, max_steps)
    if jax.config.jax_disable_jit:
        with _falling_back:
            return leaving_loop(in_python(cond_fun, body_fun, init_val, max_steps, return_steps, error))
    functions = (cond_fun, body_fun)
    try:
        return leaving_loop(
            bind_loop(lax.while_loop, functions, (init_val,), max_steps, strategy, (), bound, return_steps, error)
        )
    except TypeError as error_of_jax:
        if ported := unpacked("while_loop", {"cond_fun": cond_fun, "body_fun": body_fun}, init_val):
            raise ported from error_of_jax
        raise


#: The error of a loop whose bound is from `growing`.
_MORE = f"growing: the loop takes more steps than {growth.CURED}"


@explained
@about_sizes
def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[Any, _Carry], _Carry],
    init_val: _Carry,
    *,
    unroll: int | bool | None = None,
    max_steps: int | None = None,
    on_limit: OnLimit = "raise",
    residuals: ByName | Strategy = "auto",
) -> _Carry:
    """Run `jax.lax.fori_loop`, with a derivative in reverse mode even if the bounds are known only at run time.

    Args:
        lower: the first index, an integer that may be traced, or a symbolic dimension of `jax.export`.
        upper: the index past the last one, an integer or a dimension like `lower`.
        body_fun: maps an index and the carry to the next carry.
        init_val: the initial carry, any pytree.
        unroll: how many steps to unroll, if both bounds are known.
        max_steps: an upper bound on `upper - lower`. Reverse mode needs it if one of them is traced.
        on_limit: what happens if `upper - lower` is larger than `max_steps`: as for `while_loop`.
        residuals: as for `while_loop`, without `Inverse`.

    Returns:
        The carry after the last step. Differentiable like the result of `while_loop`.

    Raises:
        TypeError, ValueError: as `jax.lax.fori_loop` and `while_loop`.
        ValueError: both bounds are known, and `upper - lower` is larger than `max_steps` (while tracing).
        jax.errors.JaxRuntimeError, ValueError: the loop needs more than `max_steps` steps, as for `while_loop`.

    >>> import jax
    >>> power = lambda x, n: fori_loop(0, n, lambda i, y: x * y, 1.0, max_steps=1000)
    >>> print(jax.jit(jax.grad(power))(2.0, 3))
    12.0
    """
    check_max_steps("fori_loop", max_steps)
    error = too_many("fori_loop", f"upper - lower is more than max_steps={max_steps}")
    error = error if raises("fori_loop", on_limit) else ""
    lower, upper = as_value(lower), as_value(upper)
    low, high = (known_bound(b) for b in (lower, upper))
    has_known_bounds = low is not None and high is not None
    if has_known_bounds:
        steps = max(high - low, 0)  # type: ignore[operator]
        if max_steps is None:
            max_steps = steps
        elif steps > max_steps and error:
            raise ValueError(too_many("fori_loop", f"upper - lower is {steps}, more than max_steps={max_steps}"))
    if max_steps is None and (most := _contexts.bound.value) is not None:
        max_steps, error = most, _MORE
    if _is_inverse(residuals):
        raise ValueError("fori_loop: Inverse is for while_loop and scan; write residuals=Undo() or Checkpoint(16)")
    strategy = _strategy_of("fori_loop", residuals, max_steps)
    # The index is traced when we look at a step, as it is in the loop.
    one = _compat.placed_as(body_fun)(lambda state: (state[0], body_fun(*state)))
    _, init_val = entering_loop(one, (lower, init_val), max_steps)
    is_offloaded = isinstance(strategy, Tape) and strategy.offload
    if has_known_bounds and not is_offloaded:
        if steps > max_steps:  # type: ignore[operator]
            lower, upper = low, low + max_steps  # type: ignore[operator, assignment]
        if strategy == Tape() or jax.config.jax_disable_jit:
            return leaving_loop(lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll))
        options = (lower, upper, unroll)
        return leaving_loop(bind_loop(lax_known_fori_loop, (body_fun,), (init_val,), max_steps, strategy, options))
    unroll, args = None if has_known_bounds else unroll, (lower, upper, init_val)
    if jax.config.jax_disable_jit:

        def step(state: Any) -> Any:
            return state[0] + 1, state[1], body_fun(state[0], state[2])

        with _falling_back:
            return leaving_loop(in_python(lambda state: state[0] < state[1], step, args, max_steps, False, error)[2])
    bound = Bound(loop="fori_loop(lower, upper, body_fun, init_val, ")
    return leaving_loop(bind_loop(lax_fori_loop, (body_fun,), args, max_steps, strategy, (unroll,), bound, error=error))


@about_sizes
def scan(
    f: Callable[[_Carry, _Slice], tuple[_Carry, _Stacked]],
    init: _Carry,
    xs: _Slice | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    residuals: ByName | Strategy = "auto",
) -> tuple[_Carry, _Stacked]:
    """Run `jax.lax.scan`, with a choice of what reverse mode stores.

    Args:
        f: maps the carry and a slice of `xs` to the next carry and a slice of the second result.
        init: the initial carry, any pytree.
        xs: arrays of the same leading length, any pytree.
        length: the number of steps, if there are no `xs`.
        reverse: whether to go from the last slice to the first.
        unroll: how many steps to unroll.
        residuals: as for `while_loop`.

    Returns:
        The last carry, and the stacked slices.

    >>> import jax.numpy as jnp
    >>> last, before = scan(lambda total, x: (total + x, total), jnp.float32(0), jnp.arange(4.0))
    >>> print(last, before)
    6.0 [0. 0. 1. 3.]
    """
    strategy = _strategy_of("scan", residuals, 0)
    steps = next((np.shape(x)[0] for x in jax.tree.leaves(xs) if np.ndim(x)), length)
    slices = jax.tree.map(lambda x: x[0], xs) if needs_to_look(init) else None
    one = _compat.placed_as(f)(lambda state: (state[0], f(*state[::-1])[0]))
    _, init = entering_loop(one, (slices, init), steps)
    if isinstance(strategy, Inverse) or (isinstance(strategy, Tape) and strategy.offload):
        return leaving_loop(_scan_by_rows(f, init, xs, length, reverse, strategy))
    are_arrays = all(hasattr(x, "shape") for x in jax.tree.leaves(xs))  # otherwise JAX's scan raises its error
    if strategy == Tape() or jax.config.jax_disable_jit or not are_arrays:
        return leaving_loop(lax.scan(f, init, xs, length, reverse, unroll))
    return leaving_loop(bind_loop(lax.scan, (f,), (init, xs), None, strategy, (length, reverse, unroll)))


def _scan_by_rows(
    f: Callable[[Any, Any], Any], init: Any, xs: Any, length: int | None, reverse: bool, strategy: Strategy
) -> tuple[Any, Any]:
    """Run a scan as a loop that reads rows of `xs` and writes rows of the second result."""
    # JAX's own scan raises errors for arguments that do not fit, and returns the shapes of the results.
    last, shapes = jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length, reverse), init, xs)
    leaves = [*jax.tree.leaves(shapes), *jax.tree.leaves(xs)]
    n = leaves[0].shape[0] if leaves else int(length or 0)
    if isinstance(strategy, Inverse):
        inverse, row = strategy.f, jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), xs)
        check_inverse_type("scan", jax.eval_shape(inverse, last, row), last)

        def back(state: Any) -> Any:
            i, carry, ys = state
            return i - 1, inverse(carry, row_of(xs, n - i if reverse else i - 1)), ys

        strategy = replace(strategy, f=back)
    ys = jax.tree.map(lambda a: ta_empty(a.shape[0], a.shape[1:], a.dtype), shapes)
    state = (jnp.int32(0), init, ys)
    body = numbered(by_rows(f, xs), n, reverse=reverse)
    _, carry, ys = while_loop(lambda state: state[0] < n, body, state, max_steps=n, residuals=strategy)
    return carry, ys
