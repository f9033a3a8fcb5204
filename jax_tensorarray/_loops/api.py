"""The loops that users call: replacements for the loops of `jax.lax` that are differentiable in reverse."""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat, checkpoint_policies
from jax_tensorarray._loops import bodies
from jax_tensorarray._loops.ported import explained, unpacked
from jax_tensorarray._loops.replay import Checkpoint, Inverse, OnHost
from jax_tensorarray._loops.residuals import linearize
from jax_tensorarray._loops.undo import Auto, Choice, Undo, choose_within
from jax_tensorarray._loops.while_ import counting, while_
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray._tensorarray import entering_loop, leaving_loop

Array = Any


class Steps(NamedTuple):
    """How a loop ended: the number of steps it took, and whether `max_steps` cut it short."""

    taken: Any
    cut: Any


@explained
def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    residuals: str = "auto",
    offload: bool = False,
    memory: int | None = None,
    checkpoints: int | None = None,
    inverse: Callable[[Any], Any] | None = None,
    check_inverse: float | None = None,
    return_steps: bool = False,
) -> Any:
    """Run `jax.lax.while_loop`, differentiable in reverse at the cost of the steps taken.

    Under `jax.grad` and its kin each step records the values that its derivative needs, on a tape with room for
    `max_steps` steps. The tape takes no time and no memory before it is written, so 500 steps cost the same whatever
    `max_steps` is. Under `jax.vmap` every example ends by itself. Buffers that are updated by rows (a `TensorArray`,
    or an array and the row ops) are never copied.

    Args:
        cond_fun: maps the carry to a bool: whether to take another step.
        body_fun: maps the carry to the next one, of the same structure, shapes and dtypes.
        init_val: the initial carry, any pytree. A TensorArray without `element_shape` takes the shape of the rows that
            `body_fun` writes. One that grows and has no `max_size` gets room for `max_steps` more rows.
        max_steps: an upper bound on the number of steps. The loop ends there even if `cond_fun` is still true. Reverse
            mode needs a bound below 2**31 if the loop is differentiated. Without 64-bit types, 2**31 and more are no
            bound.
        residuals: what reverse mode keeps of each step.

            - "tape": all values that its derivative needs.
            - "recompute": the carry, and the rows that were read; everything else is computed again.
            - "checkpoint": nothing. The whole loop keeps `checkpoints` carries, and runs on from them as often as it
              must. They are placed so that the fewest steps are run (binomial checkpointing).
            - "inverse": nothing. `inverse` computes the carry before a step from the carry after it.
            - "undo": the rows that the step overwrote, and the carries that are not updated by rows. For bodies that
              use a whole buffer in each step: a tape would hold T copies of it.
            - "auto": "undo" if a tape would hold whole buffers that the body updates by rows, else "tape". If this
              does not fit into `memory`, "undo" or "checkpoint". `choice_of_residuals` returns the choice.
        offload: whether the tape of "tape" or "recompute" is in host memory ("auto" is "tape" then). The device holds
            no part of it, whatever `max_steps` is. Each row is sent to the host while the loop goes on, and comes back
            one step before it is needed. A CPU is its own host, so there is nothing to gain.
        memory: for "auto", how many bytes may be kept for `max_steps` steps, per example if the derivative is under
            `jax.vmap`. There is room for all these steps from the start, since XLA allocates the memory of a program
            before it runs. "checkpoint" keeps as many carries as fit, and enough for every step to run nine times at
            most. If nothing fits, the choice with the fewest bytes is taken.
        checkpoints: the number of carries that "checkpoint" keeps at a time. It uses no more than `max_steps`.
        inverse: for "inverse", maps the carry after a step to the carry before it. Carries that the body returns
            unchanged are taken to be the same before the step, whatever `inverse` returns for them.
        check_inverse: for debugging, the tolerance, relative and absolute, within which `inverse` must lead back to
            `init_val`. If it does not, reverse mode raises an error that states the difference.
        return_steps: whether to return a pair: the carry, and a named tuple `(taken, cut)` of the number of steps
            and whether `cond_fun` was still true. Without 64-bit types, 2**31 - 1 steps means that many or more.

    Returns:
        The carry after the last step. Differentiable in `init_val` and in all values that the functions close over:
        in forward mode and, with `max_steps`, in reverse mode and every order of both.

    Raises:
        TypeError, ValueError: as `jax.lax.while_loop`, with its messages.
        ValueError: `max_steps` is not given and a derivative in reverse mode goes through the loop.

    >>> import jax
    >>> def root(a):  # Newton's method, until it is good enough
    ...     return while_loop(lambda x: abs(x * x - a) > 1e-6 * a, lambda x: (x + a / x) / 2, a, max_steps=100)
    >>> print(f"{root(2.0):.4f} {jax.grad(root)(2.0):.4f}")
    1.4142 0.3536

    TensorFlow: `tf.while_loop`.
    """
    check_max_steps("while_loop", max_steps)
    mode = _mode_of("while_loop", residuals, checkpoints, inverse, max_steps, check_inverse, offload, memory)
    init_val = entering_loop(body_fun, init_val, max_steps)
    if jax.config.jax_disable_jit:
        try:
            return leaving_loop(_in_python(cond_fun, body_fun, init_val, max_steps, return_steps))
        except jax.errors.ConcretizationTypeError:
            pass  # as JAX's own: what vmap batches, say, is no Python bool
    try:
        return leaving_loop(_bound(_while_loop, (cond_fun, body_fun), (init_val,), max_steps, return_steps, mode))
    except TypeError as error:
        if ported := unpacked("while_loop", {"cond_fun": cond_fun, "body_fun": body_fun}, init_val):
            raise ported from error
        raise


@explained
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    max_steps: int | None = None,
    residuals: str = "auto",
    offload: bool = False,
    memory: int | None = None,
    checkpoints: int | None = None,
) -> Any:
    """Run `jax.lax.fori_loop`, differentiable in reverse also if the bounds are known only at run time.

    Args:
        lower: the first index, an integer that may be traced.
        upper: the index past the last one, likewise.
        body_fun: maps an index and the carry to the next carry.
        init_val: the initial carry, any pytree.
        unroll: how many steps to unroll, if both bounds are known.
        max_steps: an upper bound on `upper - lower`, needed in reverse mode if one of them is traced. No more steps
            are taken. Otherwise as for `while_loop`.
        residuals: as for `while_loop`, without "inverse". With known bounds "auto" is "tape".
        offload: as for `while_loop`.
        memory: as for `while_loop`.
        checkpoints: as for `while_loop`.

    Returns:
        The carry after the last step. Differentiable like the result of `while_loop`.

    >>> import jax
    >>> power = lambda x, n: fori_loop(0, n, lambda i, y: x * y, 1.0, max_steps=1000)
    >>> print(jax.jit(jax.grad(power))(2.0, 3))
    12.0
    """
    check_max_steps("fori_loop", max_steps)
    low, high = (_known_bound(b) for b in (lower, upper))
    known = low is not None and high is not None
    if known and max_steps is None:
        max_steps = max(high - low, 0)  # type: ignore[operator]
    mode = _mode_of("fori_loop", residuals, checkpoints, None, max_steps, None, offload, memory)
    init_val = entering_loop(lambda carry: body_fun(lower, carry), init_val, max_steps)
    if known and residuals in SCANNED and not offload and memory is None:
        if high - low > max_steps:  # type: ignore[operator]
            lower, upper = low, low + max_steps  # type: ignore[operator]
        if residuals != "recompute":
            return leaving_loop(lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll))
        options = (lower, upper, unroll)
        return leaving_loop(_bound(_fori_loop_of_known, (body_fun,), (init_val,), max_steps, False, mode, options))
    if jax.config.jax_disable_jit:
        try:
            return leaving_loop(_in_python(_below, _and_count(body_fun), (lower, upper, init_val), max_steps, False)[2])
        except jax.errors.ConcretizationTypeError:
            pass
    unroll = None if known else unroll
    return leaving_loop(_bound(_fori_loop, (body_fun,), (lower, upper, init_val), max_steps, False, mode, (unroll,)))


def scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    residuals: str = "auto",
    offload: bool = False,
    memory: int | None = None,
    checkpoints: int | None = None,
    inverse: Callable[[Any, Any], Any] | None = None,
    check_inverse: float | None = None,
) -> tuple[Any, Any]:
    """Run `jax.lax.scan`, with a choice of what is kept for reverse mode.

    Args:
        f: maps the carry and a slice of `xs` to the next carry and a slice of the second result.
        init: the initial carry, any pytree.
        xs: arrays of the same leading length, any pytree.
        length: the number of steps, if there are no `xs`.
        reverse: whether to go from the last slice to the first.
        unroll: how many steps to unroll.
        residuals: as for `while_loop`; "auto" is "tape".
        offload: as for `while_loop`.
        memory: as for `while_loop`.
        checkpoints: as for `while_loop`.
        inverse: for "inverse", maps the carry after a step and the slice of `xs` to the carry before it.
        check_inverse: as for `while_loop`.

    Returns:
        The last carry, and the stacked slices.

    >>> import jax.numpy as jnp
    >>> last, before = scan(lambda total, x: (total + x, total), jnp.float32(0), jnp.arange(4.0))
    >>> print(last, before)
    6.0 [0. 0. 1. 3.]
    """
    mode = _mode_of("scan", residuals, checkpoints, inverse, 0, check_inverse, offload, memory)
    steps = next((np.shape(x)[0] for x in jax.tree.leaves(xs) if np.ndim(x)), length)
    init = entering_loop(lambda carry: f(carry, jax.tree.map(lambda x: x[0], xs))[0], init, steps)
    if offload or memory is not None:
        return leaving_loop(_scan_by_rows(f, init, xs, length, reverse, residuals, offload=offload, memory=memory))
    if residuals == "recompute":
        return leaving_loop(_bound(_scan, (f,), (init, xs), None, False, mode, (length, reverse, unroll)))
    if residuals in SCANNED:
        return leaving_loop(lax.scan(f, init, xs, length, reverse, unroll))
    options = {"checkpoints": checkpoints, "inverse": inverse, "check_inverse": check_inverse}
    return leaving_loop(_scan_by_rows(f, init, xs, length, reverse, residuals, **options))


def _scan_by_rows(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    residuals: str,
    *,
    inverse: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Run a scan as a loop that reads rows of `xs` and writes rows of the second result."""
    # JAX's own scan says what does not fit, and of what shapes the results are.
    last, shapes = jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length, reverse), init, xs)
    if inverse is not None:
        row = jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), xs)
        _check_inverse("scan", jax.eval_shape(inverse, last, row), last)
    leaves = [*jax.tree.leaves(shapes), *jax.tree.leaves(xs)]
    n = leaves[0].shape[0] if leaves else int(length or 0)

    def at(i: Array) -> Array:
        return n - 1 - i if reverse else i

    def slice_of(xs: Any, i: Array) -> Any:
        return jax.tree.map(lambda x: ta_read(x, at(i), mode="drop"), xs)

    def body(state: Any) -> Any:
        i, carry, ys = state
        carry, y = f(carry, slice_of(xs, i))
        return i + 1, carry, jax.tree.map(lambda b, row: ta_write(b, at(i), row, mode="drop"), ys, y)

    def back(state: Any) -> Any:
        i, carry, ys = state
        return i - 1, inverse(carry, slice_of(xs, i - 1)), ys

    ys = jax.tree.map(lambda a: ta_empty(a.shape[0], a.shape[1:], a.dtype), shapes)
    _, carry, ys = while_loop(
        lambda state: state[0] < n,
        body,
        (jnp.int32(0), init, ys),
        max_steps=n,
        residuals=residuals,
        inverse=None if inverse is None else back,
        **options,
    )
    return carry, ys


def choice_of_residuals(
    body_fun: Callable[[Any], Any], init_val: Any, *, max_steps: int | None = None, memory: int | None = None
) -> Choice:
    """Return the choice of `residuals="auto"` for a `while_loop` with that body, if all of its carry is differentiated.

    Args:
        body_fun: maps the carry to the next one.
        init_val: the carry, or `jax.ShapeDtypeStruct`s of it.
        max_steps: as for `while_loop`.
        memory: as for `while_loop`.

    Returns:
        A named tuple `(residuals, reason, tape_bytes, undo_bytes, checkpoints)`: the bytes that each step would keep,
        and how many carries are kept if the choice is "checkpoint".

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import ta_write
    >>> def body(carry):  # the new row depends on all rows there are
    ...     i, ys = carry
    ...     return i + 1, ta_write(ys, i, jnp.tanh(jnp.dot(ys, ys)))
    >>> choice_of_residuals(body, (0, jnp.ones(1000))).residuals
    'undo'
    """
    check_max_steps("choice_of_residuals", max_steps)
    if memory is not None:
        _check_memory("choice_of_residuals", memory, "auto", False, max_steps)
    try:  # JAX's own loop says what does not fit
        init_val = jax.eval_shape(lambda x: x, init_val)
        jax.eval_shape(lambda x: lax.while_loop(_for_ever, body_fun, x), init_val)
    except TypeError as error:
        ported = unpacked("choice_of_residuals", {"body_fun": body_fun}, init_val)
        raise ported or TypeError(f"choice_of_residuals: {error}") from error
    leaves, tree = jax.tree.flatten(init_val)
    jaxpr = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(body_fun(jax.tree.unflatten(tree, leaves))))
    body, consts = _compat.lifted(jaxpr(*leaves))
    m, n = len(consts), len(leaves)
    varying = [jnp.issubdtype(a.dtype, jnp.inexact) for a in body.in_avals]
    moved = bodies.fixed_point(body, varying[:m], varying[m:], bodies.reached)
    linear = linearize(body, moved, [*varying[:m], *moved], [*[True] * m, *[False] * n])
    return choose_within(memory, max_steps or 0, linear, body, m, n)


def tf_while_loop(
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
    """Run `while_loop` with the arguments of `tf.while_loop`: functions of several variables.

    Args:
        cond: maps the variables, each an argument, to a bool: whether to take another step.
        body: maps the variables to a tuple or list of the next ones; a single one may also be returned by itself.
        loop_vars: a tuple or list of the initial variables. Each is a pytree, such as a `TensorArray`.
        shape_invariants: ignored: no shape of a JAX loop changes.
        parallel_iterations: ignored: XLA finds what can run at the same time.
        back_prop: whether the results are differentiated. If not, their derivatives are zero.
        swap_memory: whether the residuals of reverse mode are kept in host memory: `offload` of `while_loop`.
        maximum_iterations: an upper bound of the number of steps: an integer, which may be traced.
        name: of a scope around the loop.
        max_steps: as for `while_loop`. Only needed in reverse mode, if `maximum_iterations` is traced or not given.

    Returns:
        The variables after the last step, in a tuple or list as `loop_vars` is. Differentiable as `while_loop`.

    Raises:
        TypeError: `loop_vars` is no tuple or list, `body` gives another number of variables, or `maximum_iterations`
            is no integer.
        ValueError: `maximum_iterations` is known and negative.
        TypeError, ValueError: as `while_loop`.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import TensorArray
    >>> squares = TensorArray(jnp.int32, 5, element_shape=())
    >>> i, squares = tf_while_loop(lambda i, _: i < 5, lambda i, ta: (i + 1, ta.write(i, i * i)), (0, squares))
    >>> print(i, squares.stack())
    5 [ 0  1  4  9 16]

    TensorFlow: `tf.while_loop`.
    """
    if not isinstance(loop_vars, tuple | list):
        raise TypeError(f"tf_while_loop: loop_vars must be a tuple or list, not {type(loop_vars).__name__}")
    number = len(loop_vars)

    def step(variables: Any) -> Any:
        after = body(*variables)
        if not isinstance(after, tuple | list) and number == 1:
            after = (after,)
        if not isinstance(after, tuple | list) or len(after) != number:
            given = f"{len(after)}" if isinstance(after, tuple | list) else type(after).__name__
            raise TypeError(f"tf_while_loop: body must give {number} variables, but gives {given}")
        return tuple(after)

    _check_maximum_iterations(maximum_iterations)
    check_max_steps("tf_while_loop", max_steps)
    bound = None if maximum_iterations is None else _known_bound(maximum_iterations)
    if bound is not None:
        max_steps = bound if max_steps is None else min(bound, max_steps)
    options: dict[str, Any] = {"max_steps": max_steps, "offload": swap_memory}
    with jax.named_scope(name) if name else contextlib.nullcontext():
        if maximum_iterations is None or bound is not None:
            after = while_loop(lambda variables: cond(*variables), step, tuple(loop_vars), **options)
        else:
            _, after = while_loop(
                lambda state: (state[0] < maximum_iterations) & cond(*state[1]),
                lambda state: (state[0] + 1, step(state[1])),
                (jnp.zeros((), maximum_iterations.dtype), tuple(loop_vars)),
                **options,
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
        raise TypeError(f"tf_while_loop: maximum_iterations must be an integer, got {described}")
    if (known := _known_bound(given)) is not None and known < 0:
        raise ValueError(f"tf_while_loop: maximum_iterations must not be negative, got {known}")


@explained
def map_fn(fn: Callable[[Any], Any], elems: Any) -> Any:
    """Return `fn` of every slice of `elems` along the first axis, stacked.

    >>> import jax.numpy as jnp
    >>> map_fn(lambda x: x * x, jnp.arange(4.0))
    Array([0., 1., 4., 9.], dtype=float32)

    TensorFlow: `tf.map_fn`.
    """
    _, ys = lax.scan(lambda _, x: (None, fn(x)), None, elems)
    return ys


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

    Without an initializer, `elems[0]` is the initializer. The other arguments are as for `tf_while_loop`. An
    accumulator may hold a `TensorArray`, like the carry of `scan`.

    >>> import jax.numpy as jnp
    >>> foldl(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(123, dtype=int32)

    TensorFlow: `tf.foldl`.
    """
    return _fold("foldl", fn, elems, initializer, False, back_prop, swap_memory, name)


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
    >>> foldr(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(321, dtype=int32)

    TensorFlow: `tf.foldr`.
    """
    return _fold("foldr", fn, elems, initializer, True, back_prop, swap_memory, name)


@explained
def tf_scan(fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None, reverse: bool = False) -> Any:
    """Return all the accumulators of a fold, stacked. Without an initializer the first slice is the first of them.

    >>> import jax.numpy as jnp
    >>> tf_scan(lambda a, x: a + x, jnp.array([1, 2, 3]))
    Array([1, 3, 6], dtype=int32)

    TensorFlow: `tf.scan`.
    """
    start, rest, first = _initialized("tf_scan", elems, initializer, reverse)

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
    with jax.named_scope(name) if name else contextlib.nullcontext():
        last, _ = scan(lambda a, x: (fn(a, x), None), start, rest, reverse=reverse, offload=swap_memory)
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


# --- from a loop of JAX to one of ours -------------------------------------------------------------------------


def check_max_steps(op: str, max_steps: Any) -> None:
    if max_steps is None:
        return
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer):
        raise TypeError(f"{op}: max_steps must be a Python integer, got {max_steps!r}")
    if max_steps < 0:
        raise ValueError(f"{op}: max_steps must not be negative, got {max_steps}")


RESIDUALS = ("auto", "tape", "recompute", "checkpoint", "inverse", "undo")

#: The modes that JAX's own scan serves, and that may keep a tape.
SCANNED = ("auto", "tape", "recompute")


class _Carry(int):
    """The number of a carry."""


#: Maps the carry of the user's functions, a body and its consts to the mode, the body and the consts of a loop. JAX
#: makes a const of a value that a body returns unchanged. So the carry is given by its tree and its leaves, each the
#: number of a carry of the loop, or an array.
_Mode = Callable[[Any, Any, Any, Sequence[Array]], tuple[Any, Any, Sequence[Array]]]


def _mode_of(
    op: str,
    residuals: str,
    checkpoints: Any,
    inverse: Any,
    max_steps: int | None,
    check_inverse: Any = None,
    offload: Any = False,
    memory: Any = None,
) -> _Mode:
    if residuals not in RESIDUALS:
        raise ValueError(f"{op}: residuals must be one of {', '.join(RESIDUALS)}; got {residuals!r}")
    for name, given, where in (
        ("checkpoints", checkpoints, "checkpoint"),
        ("inverse", inverse, "inverse"),
        ("check_inverse", check_inverse, "inverse"),
    ):
        if given is not None and residuals != where:
            raise ValueError(f'{op}: {name} is for residuals="{where}", got residuals="{residuals}"')
    if not isinstance(offload, bool):
        raise TypeError(f"{op}: offload must be True or False, got {offload!r}")
    if offload and residuals not in SCANNED:
        raise ValueError(f'{op}: offload is for residuals {", ".join(SCANNED)}, got residuals="{residuals}"')
    if memory is not None:
        _check_memory(op, memory, residuals, offload, max_steps)
    taped, within = OnHost() if offload else None, Auto(None if memory is None else int(memory))
    if residuals == "auto":
        return lambda tree, leaves, body, consts: (taped or within, body, consts)
    if residuals == "tape":
        return lambda tree, leaves, body, consts: (taped, body, consts)
    if residuals == "recompute":
        return lambda tree, leaves, body, consts: (taped, _recomputed(body), consts)
    if max_steps is None:
        raise ValueError(f'{op}: residuals="{residuals}" needs max_steps')
    if residuals == "undo":
        return lambda tree, leaves, body, consts: (Undo(), body, consts)
    if residuals == "checkpoint":
        if isinstance(checkpoints, bool) or not isinstance(checkpoints, int) or checkpoints < 1:
            raise ValueError(f'{op}: residuals="checkpoint" needs checkpoints, a positive integer, got {checkpoints!r}')
        return lambda tree, leaves, body, consts: (Checkpoint(checkpoints), body, consts)
    if not callable(inverse):
        error = ValueError if inverse is None else TypeError
        raise error(f'{op}: residuals="inverse" needs inverse, a function from a carry to the one before it')

    def with_inverse(tree: Any, leaves: Any, body: Any, consts: Sequence[Array]) -> Any:
        back, own = _traced_inverse(op, inverse, tree, leaves, body)
        body = _with_more_consts(body, len(consts), tuple(map(jax.typeof, own)))
        tolerance = None if check_inverse is None else float(check_inverse)
        return Inverse(back, len(own), tolerance, _source()), body, [*consts, *own]

    return with_inverse


def _check_memory(op: str, memory: Any, residuals: str, offload: bool, max_steps: int | None) -> None:
    if isinstance(memory, bool) or not isinstance(memory, int | np.integer) or memory < 0:
        raise ValueError(f"{op}: memory must be a number of bytes, got {memory!r}")
    if residuals != "auto" or offload:
        given = "offload=True" if offload else f'residuals="{residuals}"'
        raise ValueError(f'{op}: memory is for residuals="auto", got {given}')
    if max_steps is None:
        raise ValueError(f"{op}: memory needs max_steps")


@_compat.cached
def _recomputed(body: Any) -> Any:
    """Return the body with a checkpoint: reverse mode keeps its operands and the rows that were read."""
    call = jax.checkpoint(bodies.function(body), policy=checkpoint_policies.save_reads)
    return jax.make_jaxpr(call)(*body.in_avals)


@_compat.cached
def _with_more_consts(body: Any, num_consts: int, more: Sequence[Any]) -> Any:
    """Add consts to a body, after its own, that it does not use."""
    call, types = bodies.function(body), list(body.in_avals)

    def f(*args: Array) -> list[Array]:
        return call(*args[:num_consts], *args[num_consts + len(more) :])

    return jax.make_jaxpr(f)(*types[:num_consts], *more, *types[num_consts:])


def _traced_inverse(
    op: str, inverse: Callable[[Any], Any], tree: Any, leaves: Sequence[Any], body: Any
) -> tuple[Any, Sequence[Array]]:
    """Return the jaxpr of the inverse of a body, and the values that it closes over.

    These include the leaves of the carry that are arrays.
    """
    types = [body.out_avals[x] if isinstance(x, _Carry) else jax.typeof(x) for x in leaves]
    _check_inverse(op, jax.eval_shape(inverse, jax.tree.unflatten(tree, types)), jax.tree.unflatten(tree, types))
    # The inverse is traced as the body of a loop of JAX, which traces a function once. That loop does not carry what
    # the function returns unchanged: so a value below is an array, or the number of a carry, before the step or
    # (negative) after it.
    jaxpr = jax.make_jaxpr(lambda carry: lax.while_loop(_for_ever, inverse, carry))(jax.tree.unflatten(tree, types))
    loops: list[tuple[Any, list[Any]]] = []

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive is jax_primitives.while_p:
            loops.append((eqn.params["body_jaxpr"], values))
            return [_Carry(~k) for k in range(len(eqn.outvars))]
        return values if any(isinstance(x, _Carry) for x in values) else bodies.bind(eqn, values)

    outs = bodies.interpret(jaxpr, leaves, equation, lambda x: x)
    # A value that the body returns unchanged is not a carry of the loop, whatever the inverse returns for it.
    outs = [out for x, out in zip(leaves, outs, strict=True) if isinstance(x, _Carry)]
    types = list(body.out_avals)
    if not loops:  # it returns all as it was
        return _composed(body, (), tuple(outs), tuple(types)), ()
    ((back, values),) = loops
    own = [x for x in values if not isinstance(x, _Carry)]
    places = tuple(x if isinstance(x, _Carry) else None for x in values)
    return _composed(back, places, tuple(outs), tuple(types), tuple(map(jax.typeof, own))), own


@_compat.cached
def _composed(back: Any, places: Sequence[Any], outs: Sequence[Any], types: Sequence[Any], own: Any = ()) -> Any:
    """Return the inverse as a function of what it closes over and of all carries, from the body of JAX's loop."""

    def f(own: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
        rest = iter(own)
        after = bodies.function(back)(*(next(rest) if k is None else carry[k] for k in places)) if places else []
        return [carry[k] if k >= 0 else after[~k] for k in outs]

    return jax.make_jaxpr(f)(list(own), list(types))


def _check_inverse(op: str, found: Any, wanted: Any) -> None:
    """Raise TypeError if an inverse does not return the types that the body returns."""

    def described(x: Any) -> str:
        leaves = ", ".join(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in jax.tree.leaves(x))
        return f"{jax.tree.structure(x)} of {leaves}"

    if described(found) != described(wanted):
        raise TypeError(
            f"{op}: inverse must give what body_fun gives, {described(wanted)}, but gives {described(found)}"
        )


def _for_ever(carry: Any) -> bool:
    return True


def _known_bound(bound: Any) -> int | None:
    """Return the bound as a Python integer; None if it is traced or no number, which JAX's own loop reports."""
    try:
        return int(bound)
    except (TypeError, ValueError, OverflowError):
        return None


def _source() -> str:
    """Return where the user called the loop, for messages."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("jax_tensorarray.", "jax.")):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# JAX's own loops trace the functions, promote weak types, and say what does not fit.


def _while_loop(cond_fun: Any, body_fun: Any, init: Any) -> Any:
    return lax.while_loop(cond_fun, body_fun, init)


def _fori_loop(body_fun: Any, lower: Any, upper: Any, init: Any, unroll: Any) -> Any:
    return lax.fori_loop(lower, upper, body_fun, init, unroll=unroll)


def _fori_loop_of_known(body_fun: Any, init: Any, lower: Any, upper: Any, unroll: Any) -> Any:
    return lax.fori_loop(lower, upper, body_fun, init, unroll=unroll)


def _scan(f: Any, init: Any, xs: Any, length: Any, reverse: Any, unroll: Any) -> Any:
    return lax.scan(f, init, xs, length, reverse, unroll)


def _trace(loop: Callable[..., Any], functions: Sequence[Any], types: Any, tree: Any, options: Sequence[Any]) -> Any:
    """Return the jaxpr of a loop of JAX, and the shapes of its results."""

    def flat(*leaves: Array) -> Any:
        return loop(*functions, *jax.tree.unflatten(tree, leaves), *options)

    with jax.disable_jit(False):
        return jax.make_jaxpr(flat, return_shape=True)(*types)


@_compat.cached
def _traces_of(body_fun: Any) -> Callable[..., Any]:
    """Return a `_trace` that caches its results for as long as the functions live, as JAX's loops do."""
    body = weakref.ref(body_fun)

    @_compat.cached
    def traced(cond_fun: Any, single: bool, loop: Any, types: Any, tree: Any, options: Sequence[Any]) -> Any:
        return _trace(loop, [body()] if single else [cond_fun, body()], types, tree, options)

    return traced


def _traced(loop: Callable[..., Any], functions: Sequence[Any], args: Any, options: Sequence[Any]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    try:
        types = tuple(map(jax.typeof, leaves))
    except TypeError:
        loop(*functions, *args, *options)  # says what is no array
        raise
    try:
        hash((tree, options, *map(weakref.ref, functions)))
    except TypeError:  # no function, say
        return _trace(loop, functions, types, tree, options)
    return _traces_of(functions[-1])(functions[0], len(functions) == 1, loop, types, tree, options)


def _bound(
    loop: Callable[..., Any],
    functions: Sequence[Any],
    args: Sequence[Any],
    max_steps: int | None,
    return_steps: bool,
    make_mode: _Mode,
    options: Sequence[Any] = (),
) -> Any:
    """Run a loop of JAX as ours. A scan of JAX remains a scan, with the body of the mode."""
    here = _compat.source_here()
    jaxpr, shape = _traced(loop, functions, args, tuple(options))
    end = []

    def equation(eqn: Any, operands: list[Array]) -> list[Array]:
        params = eqn.params
        if eqn.primitive is jax_primitives.scan_p:
            _, body, _ = make_mode(None, None, params["jaxpr"], ())
            with eqn.ctx.manager, here():
                return eqn.primitive.bind(*operands, **params | {"jaxpr": body})
        if eqn.primitive is not jax_primitives.while_p:
            return bodies.bind(eqn, operands)
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        known = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, jex.Literal)}
        known |= {v: _Carry(k) for k, v in enumerate(eqn.outvars)}
        leaves = [known[v] for v in _compat.opened(jaxpr).outvars]
        mode, body, consts = make_mode(jax.tree.structure(shape), leaves, body, operands[a:b])
        with here():
            outs, taken = while_(
                operands[:a],
                consts,
                operands[b:],
                cond=cond,
                body=body,
                mode=mode,
                max_steps=None if max_steps is None else int(max_steps),
                source=_source(),
                counts=return_steps or max_steps is not None,
            )
        if return_steps:
            (more,) = bodies.function(cond)(*operands[:a], *outs)
            end.append(Steps(taken, more))
        return outs

    outs = bodies.interpret(jaxpr, jax.tree.leaves(args), equation, lambda x: x)
    result = jax.tree.unflatten(jax.tree.structure(shape), outs)
    return (result, end[-1]) if return_steps else result


def _in_python(cond_fun: Any, body_fun: Any, carry: Any, max_steps: int | None, return_steps: bool) -> Any:
    """Run the loop under `jax.disable_jit`, as JAX runs its own: the functions may change NumPy arrays in place."""
    carry, taken = jax.tree.map(jnp.asarray, carry), 0
    while (max_steps is None or taken < max_steps) and cond_fun(carry):
        carry, taken = jax.tree.map(jnp.asarray, body_fun(carry)), taken + 1
    if not return_steps:
        return carry
    dtype = counting(max_steps)
    return carry, Steps(jnp.asarray(min(taken, jnp.iinfo(dtype).max), dtype), jnp.asarray(cond_fun(carry)))


def _below(state: Any) -> Any:
    return state[0] < state[1]


def _and_count(body_fun: Any) -> Callable[[Any], Any]:
    return lambda state: (state[0] + 1, state[1], body_fun(state[0], state[2]))
