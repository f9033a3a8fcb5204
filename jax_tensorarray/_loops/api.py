"""The loops that users call: drop-in for those of `jax.lax`, and differentiable in reverse."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat, checkpoint_policies
from jax_tensorarray._loops import bodies
from jax_tensorarray._loops.replay import Checkpoint, Inverse
from jax_tensorarray._loops.undo import Auto, Choice, Undo, choose
from jax_tensorarray._loops.while_ import while_
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write

Array = Any


class Steps(NamedTuple):
    """How a loop ended: the number of steps it took, and whether `max_steps` cut it short."""

    taken: Any
    cut: Any


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    residuals: str = "auto",
    checkpoints: int | None = None,
    inverse: Callable[[Any], Any] | None = None,
    return_steps: bool = False,
) -> Any:
    """`jax.lax.while_loop` that is differentiable in reverse, at the cost of the steps taken.

    Under `jax.grad` and its kin each step records what its derivative needs, on a tape with room for `max_steps` that
    takes no time and no memory before it is written; so 500 steps cost the same whatever `max_steps` is. Under
    `jax.vmap` every example ends by itself, and buffers that are updated by rows (a `TensorArray`, or an array and the
    row ops) are never copied.

    Args:
        cond_fun: from the carry to a bool: whether to take another step.
        body_fun: from the carry to the next one, of the same structure, shapes and dtypes.
        init_val: the carry to start with, any pytree. TensorArrays need a known `element_shape`.
        max_steps: an upper bound of the number of steps. It is needed in reverse mode. The loop ends there even if
            `cond_fun` says to go on.
        residuals: what is kept of each step for reverse mode.

            - "tape": all that its derivative needs.
            - "recompute": the carry, and the rows that were read; everything else is computed again.
            - "checkpoint": nothing. In the whole, `checkpoints` carries are, and the loop runs on from them as often
              as it must; they are placed so that the fewest steps are run (binomial checkpointing).
            - "inverse": nothing. `inverse` finds the carry before a step from the one after it.
            - "undo": the rows that the step overwrote, and those carries that are not updated by rows. For bodies
              that use a whole buffer in each step, of which a tape would hold T copies.
            - "auto": "undo" where a tape would hold whole buffers that the body updates by rows, else "tape".
              `choice_of_residuals` says which.
        checkpoints: the number of carries that "checkpoint" keeps at a time.
        inverse: for "inverse", a function from the carry after a step to the carry before it.
        return_steps: whether to return a pair: the carry, and a named tuple `(taken, cut)` of the number of steps
            and whether `cond_fun` would have gone on.

    Returns:
        The carry after the last step. Differentiable in `init_val` and in all that the functions close over, in
        forward mode and, with `max_steps`, in reverse mode and every order of both.

    Raises:
        TypeError, ValueError: what `jax.lax.while_loop` raises, with its messages.
        ValueError: `max_steps` is not given and the loop is differentiated in reverse.

    >>> import jax
    >>> def root(a):  # Newton's method, until it is good enough
    ...     return while_loop(lambda x: abs(x * x - a) > 1e-6 * a, lambda x: (x + a / x) / 2, a, max_steps=100)
    >>> print(f"{root(2.0):.4f} {jax.grad(root)(2.0):.4f}")
    1.4142 0.3536

    TensorFlow: `tf.while_loop`.
    """
    _check_max_steps("while_loop", max_steps)
    body_fun, mode = _for_residuals("while_loop", body_fun, residuals, checkpoints, inverse, max_steps)
    if jax.config.jax_disable_jit:
        return _in_python(cond_fun, body_fun, init_val, max_steps, return_steps)
    # JAX's own loop traces the functions, promotes weak types, and says what does not fit.
    traced = jax.make_jaxpr(lambda init: lax.while_loop(cond_fun, body_fun, init), return_shape=True)
    return _bound(traced, (init_val,), max_steps, return_steps, mode)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    residuals: str = "auto",
    checkpoints: int | None = None,
) -> Any:
    """`jax.lax.fori_loop` that is differentiable in reverse, with bounds known only at run time too.

    Args:
        lower: the first index, an integer that may be traced.
        upper: the index past the last one, likewise.
        body_fun: from an index and the carry to the next carry.
        init_val: the carry to start with, any pytree.
        max_steps: an upper bound of `upper - lower`, needed in reverse mode if one of them is traced. No more steps
            are taken.
        residuals: as for `while_loop`, but "inverse". With known bounds "auto" is "tape".
        checkpoints: as for `while_loop`.

    Returns:
        The carry after the last step. Differentiable as that of `while_loop`.

    >>> import jax
    >>> power = lambda x, n: fori_loop(0, n, lambda i, y: x * y, 1.0, max_steps=1000)
    >>> print(jax.jit(jax.grad(power))(2.0, 3))
    12.0
    """
    _check_max_steps("fori_loop", max_steps)
    low, high = (_known_bound(b) for b in (lower, upper))
    known = low is not None and high is not None
    if known and max_steps is None:
        max_steps = max(high - low, 0)  # type: ignore[operator]
    body_fun, mode = _for_residuals("fori_loop", body_fun, residuals, checkpoints, None, max_steps)
    if known and (mode is None or residuals == "auto"):
        return lax.fori_loop(low, min(high, low + max_steps), body_fun, init_val)  # type: ignore[operator,type-var]
    if jax.config.jax_disable_jit:
        raise NotImplementedError("fori_loop: traced bounds need jit")
    traced = jax.make_jaxpr(lambda low, high, init: lax.fori_loop(low, high, body_fun, init), return_shape=True)
    return _bound(traced, (jnp.asarray(lower), jnp.asarray(upper), init_val), max_steps, False, mode)


def scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    residuals: str = "auto",
    checkpoints: int | None = None,
    inverse: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan`, with a choice of what is kept for reverse mode.

    Args:
        f: from the carry and a slice of `xs` to the next carry and a slice of the second result.
        init: the carry to start with, any pytree.
        xs: arrays of the same leading length, any pytree.
        length: the number of steps, if there are no `xs`.
        reverse: whether to go from the last slice to the first.
        unroll: how many steps to unroll.
        residuals: as for `while_loop`; "auto" is "tape".
        checkpoints: as for `while_loop`.
        inverse: for "inverse", a function from the carry after a step and the slice of `xs` to the carry before it.

    Returns:
        The last carry, and the stacked slices.

    >>> import jax.numpy as jnp
    >>> last, before = scan(lambda total, x: (total + x, total), jnp.float32(0), jnp.arange(4.0))
    >>> print(last, before)
    6.0 [0. 0. 1. 3.]
    """
    f, mode = _for_residuals("scan", f, residuals, checkpoints, inverse, 0)
    if mode is None or residuals == "auto":
        return lax.scan(f, init, xs, length, reverse, unroll)
    return _scan_by_rows(f, init, xs, length, reverse, residuals, checkpoints, inverse)


def _scan_by_rows(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    residuals: str,
    checkpoints: Any,
    inverse: Any,
) -> tuple[Any, Any]:
    """A scan as a loop that reads rows of `xs` and writes rows of the second result."""
    # JAX's own scan says what does not fit, and of what shapes the results are.
    _, shapes = jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length, reverse), init, xs)
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
        checkpoints=checkpoints,
        inverse=None if inverse is None else back,
    )
    return carry, ys


def choice_of_residuals(body_fun: Callable[[Any], Any], init_val: Any) -> Choice:
    """What `residuals="auto"` chooses for a `while_loop` with that body, if all of its carry is differentiated.

    Args:
        body_fun: from the carry to the next one.
        init_val: the carry, or `jax.ShapeDtypeStruct`s of it.

    Returns:
        A named tuple `(residuals, reason, tape_bytes, undo_bytes)`, with the bytes that each step would keep.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import ta_write
    >>> def body(carry):  # the new row depends on all rows there are
    ...     i, ys = carry
    ...     return i + 1, ta_write(ys, i, jnp.tanh(jnp.dot(ys, ys)))
    >>> choice_of_residuals(body, (0, jnp.ones(1000))).residuals
    'undo'
    """
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda x: x, init_val))
    jaxpr = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(body_fun(jax.tree.unflatten(tree, leaves))))
    body, consts = _compat.lifted(jaxpr(*leaves))
    m, n = len(consts), len(leaves)
    varying = [jnp.issubdtype(a.dtype, jnp.inexact) for a in body.in_avals]
    moved = bodies.fixed_point(body, varying[:m], varying[m:], inexact=True)
    linear = bodies.linearize(body, moved, [*varying[:m], *moved], [*[True] * m, *[False] * n])
    return choose(linear, body, m, n)


def map_fn(fn: Callable[[Any], Any], elems: Any) -> Any:
    """`fn` of every slice of `elems` along the first axis, stacked.

    >>> import jax.numpy as jnp
    >>> map_fn(lambda x: x * x, jnp.arange(4.0))
    Array([0., 1., 4., 9.], dtype=float32)

    TensorFlow: `tf.map_fn`.
    """
    _, ys = lax.scan(lambda _, x: (None, fn(x)), None, elems)
    return ys


def foldl(fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None) -> Any:
    """`fn(...fn(fn(initializer, elems[0]), elems[1])..., elems[-1])`; without one, `elems[0]` is the initializer.

    >>> import jax.numpy as jnp
    >>> foldl(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(123, dtype=int32)

    TensorFlow: `tf.foldl`.
    """
    return _fold("foldl", fn, elems, initializer, False)[0]


def foldr(fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None) -> Any:
    """`foldl` from the last slice to the first.

    >>> import jax.numpy as jnp
    >>> foldr(lambda a, x: 10 * a + x, jnp.array([1, 2, 3]))
    Array(321, dtype=int32)

    TensorFlow: `tf.foldr`.
    """
    return _fold("foldr", fn, elems, initializer, True)[0]


def tf_scan(fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None, reverse: bool = False) -> Any:
    """All the accumulators of a fold, stacked. Without an initializer the first slice is the first of them.

    >>> import jax.numpy as jnp
    >>> tf_scan(lambda a, x: a + x, jnp.array([1, 2, 3]))
    Array([1, 3, 6], dtype=int32)

    TensorFlow: `tf.scan`.
    """
    return _fold("tf_scan", fn, elems, initializer, reverse)[1]


def _fold(op: str, fn: Callable[[Any, Any], Any], elems: Any, initializer: Any, reverse: bool) -> tuple[Any, Any]:
    def step(a: Any, x: Any) -> tuple[Any, Any]:
        a = fn(a, x)
        return a, a

    if initializer is not None:
        return lax.scan(step, initializer, elems, reverse=reverse)
    elems = jax.tree.map(jnp.asarray, elems)
    if any(x.ndim == 0 or x.shape[0] == 0 for x in jax.tree.leaves(elems)):
        raise ValueError(f"{op}: without an initializer there must be at least one slice in elems")
    first, rest = (-1, slice(None, -1)) if reverse else (0, slice(1, None))
    start = jax.tree.map(lambda x: x[first], elems)
    last, after = lax.scan(step, start, jax.tree.map(lambda x: x[rest], elems), reverse=reverse)

    def joined(x: Array, xs: Array) -> Array:
        return jnp.concatenate([xs, x[None]] if reverse else [x[None], xs])

    return last, jax.tree.map(joined, start, after)


# --- from a loop of JAX to one of ours -------------------------------------------------------------------------


def _check_max_steps(op: str, max_steps: Any) -> None:
    if max_steps is None:
        return
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer):
        raise TypeError(f"{op}: max_steps must be a Python integer, got {max_steps!r}")
    if max_steps < 0:
        raise ValueError(f"{op}: max_steps must not be negative, got {max_steps}")


RESIDUALS = ("auto", "tape", "recompute", "checkpoint", "inverse", "undo")


def _for_residuals(
    op: str, body: Callable[..., Any], residuals: str, checkpoints: Any, inverse: Any, max_steps: int | None
) -> tuple[Callable[..., Any], "_Mode | None"]:
    """The body, and how a loop with it finds its steps again in reverse mode."""
    if residuals not in RESIDUALS:
        raise ValueError(f"{op}: residuals must be one of {', '.join(RESIDUALS)}; got {residuals!r}")
    for name, given, where in (("checkpoints", checkpoints, "checkpoint"), ("inverse", inverse, "inverse")):
        if given is not None and residuals != where:
            raise ValueError(f'{op}: {name} is for residuals="{where}", got residuals="{residuals}"')
    if residuals == "recompute":
        return jax.checkpoint(body, policy=checkpoint_policies.save_reads), None
    if residuals == "tape":
        return body, None
    if residuals == "auto":
        return body, lambda tree, body, consts: (Auto(), body, consts)
    return body, _mode_of(op, residuals, checkpoints, inverse, max_steps)


_Mode = Callable[[Any, Any, Any], Any]


def _mode_of(op: str, residuals: str, checkpoints: Any, inverse: Any, max_steps: Any) -> _Mode:
    """A function that makes the mode of a loop, and its body and consts, from the tree of its carry."""
    if max_steps is None:
        raise ValueError(f'{op}: residuals="{residuals}" needs max_steps')
    if residuals == "undo":
        return lambda tree, body, consts: (Undo(), body, consts)
    if residuals == "checkpoint":
        if isinstance(checkpoints, bool) or not isinstance(checkpoints, int) or checkpoints < 1:
            raise ValueError(f'{op}: residuals="checkpoint" needs checkpoints, a positive integer, got {checkpoints!r}')
        return lambda tree, body, consts: (Checkpoint(checkpoints), body, consts)
    if inverse is None:
        raise ValueError(f'{op}: residuals="inverse" needs inverse, a function from a carry to the one before it')

    def with_inverse(tree: Any, body: Any, consts: Sequence[Array]) -> Any:
        types = body.out_avals
        flat = jax.make_jaxpr(lambda *carry: jax.tree.leaves(inverse(jax.tree.unflatten(tree, carry))))
        back = flat(*bodies.abstract(types))
        found = [(a.shape, a.dtype) for a in back.out_avals]
        if found != [(a.shape, a.dtype) for a in types]:
            raise TypeError(
                f"{op}: inverse must give what body_fun gives, {[a.str_short() for a in types]}, but gives "
                f"{[a.str_short() for a in back.out_avals]}"
            )
        inner, own = _compat.lifted(back)
        call, n = bodies.function(body), len(consts)
        consts_types = bodies.abstract(body.in_avals)[:n]

        def with_more_consts(*args: Array) -> list[Array]:
            return call(*args[:n], *args[n + len(own) :])

        body = jax.make_jaxpr(with_more_consts)(
            *consts_types, *map(jax.typeof, own), *bodies.abstract(body.in_avals)[n:]
        )
        return Inverse(inner, len(own)), body, [*consts, *own]

    return with_inverse


def _known_bound(bound: Any) -> int | None:
    """The bound as a Python integer; None if it is traced, or no integer, which JAX's own loop says."""
    if isinstance(bound, jax.core.Tracer | bool | np.bool_) or not hasattr(bound, "__index__"):
        return None
    return int(bound.__index__())


def _source() -> str:
    """Where the user called, for messages."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("jax_tensorarray.", "jax.")):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _bound(
    traced: Callable[..., Any],
    args: Sequence[Any],
    max_steps: int | None,
    return_steps: bool,
    make_mode: _Mode | None = None,
) -> Any:
    """Run the jaxpr that `traced` makes of `args`, with our loop in the place of JAX's."""
    jaxpr, shape = traced(*args)
    end = []

    def equation(eqn: Any, operands: list[Array]) -> list[Array]:
        if eqn.primitive is not jax_primitives.while_p:
            return bodies.bind(eqn, operands)
        params = eqn.params
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond, body, consts, mode = params["cond_jaxpr"], params["body_jaxpr"], operands[a:b], None
        if make_mode is not None:
            mode, body, consts = make_mode(jax.tree.structure(shape), body, consts)
        outs, taken = while_(
            operands[:a],
            consts,
            operands[b:],
            cond=cond,
            body=body,
            mode=mode,
            max_steps=None if max_steps is None else int(max_steps),
            source=_source(),
        )
        if return_steps:
            (more,) = bodies.function(cond)(*operands[:a], *outs)
            end.append(Steps(taken, more))
        return outs

    outs = bodies.interpret(jaxpr, [*map(jnp.asarray, jax.tree.leaves(args))], equation, lambda x: x)
    result = jax.tree.unflatten(jax.tree.structure(shape), outs)
    return (result, end[-1]) if return_steps else result


def _in_python(cond_fun: Any, body_fun: Any, carry: Any, max_steps: int | None, return_steps: bool) -> Any:
    """The loop under `jax.disable_jit`, as JAX runs its own."""
    taken = 0
    while (max_steps is None or taken < max_steps) and cond_fun(carry):
        carry, taken = body_fun(carry), taken + 1
    return (carry, Steps(jnp.int32(taken), jnp.asarray(cond_fun(carry)))) if return_steps else carry
