"""Lower a loop of JAX to one of ours: JAX traces the functions, promotes weak types, and raises its errors.

lax.while_loop(cond_fun, body_fun, init_val)
# becomes, with the jaxprs of JAX's loop
ta_while[cond body] init_val
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.extend import core as jex
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat, _contexts
from jax_tensorarray._jaxprs import jaxprs, refs
from jax_tensorarray._loops import choosing
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.while_ import OF_WHILE_LOOP, Bound, Loop, WhileOptions, copied, steps_dtype
from jax_tensorarray._ops.primitive import varying_over
from jax_tensorarray._types import Array, Equation


class Steps(NamedTuple):
    """How a loop ended: the number of steps it took, and whether `max_steps` cut it short."""

    taken: Array
    cut: Array


def check_max_steps(op: str, max_steps: Any) -> None:
    if max_steps is None:
        return
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer):
        raise TypeError(f"{op}: max_steps must be a Python integer, got {max_steps!r}")
    if max_steps < 0:
        raise ValueError(f"{op}: max_steps must not be negative, got {max_steps}")


class Carry(int):
    """The number of a carry."""


def for_ever(carry: Any) -> bool:
    return True


def as_value(bound: Any) -> Any:
    """Return the bound. Convert a symbolic dimension of `jax.export` to an array."""
    return jnp.asarray(bound) if is_symbolic_dim(bound) else bound


def known_bound(bound: Any) -> int | None:
    """Return the bound as a Python integer. Return None if it is traced, or no number: then JAX raises its error."""
    try:
        return int(bound)
    except (TypeError, ValueError, OverflowError):
        return None


def _source() -> str:
    """Return the line of the user that calls the loop, for messages."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("jax_tensorarray.", "jax.")):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def lax_fori_loop(body_fun: Any, lower: Any, upper: Any, init: Any, unroll: Any) -> Any:
    return lax.fori_loop(lower, upper, body_fun, init, unroll=unroll)


def lax_known_fori_loop(body_fun: Any, init: Any, lower: Any, upper: Any, unroll: Any) -> Any:
    return lax.fori_loop(lower, upper, body_fun, init, unroll=unroll)


def _trace(loop: Callable[..., Any], functions: Sequence[Any], types: Any, tree: Any, options: Sequence[Any]) -> Any:
    """Return the jaxpr of a loop of JAX, and the shapes of its results."""

    def flat(*leaves: Array) -> Any:
        return loop(*functions, *jax.tree.unflatten(tree, leaves), *options)

    with jax.disable_jit(False), _contexts.becomes_ours(True):
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*types)
    return refs.as_arrays(jaxpr), shape


@_compat.cached
def _traces_of(body_fun: Any) -> Callable[..., Any]:
    """Return a `_trace` that caches its results as long as the functions live, like JAX's loops."""
    body = weakref.ref(body_fun)

    @_compat.cached
    def traced(cond_fun: Any, single: bool, loop: Any, types: Any, tree: Any, options: Any, kinds: Any) -> Any:
        return _trace(loop, [body()] if single else [cond_fun, body()], types, tree, options)

    return traced


def _traced(loop: Callable[..., Any], functions: Sequence[Any], args: Any, options: Sequence[Any]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    try:
        types = tuple(map(jax.typeof, leaves))
    except TypeError:
        loop(*functions, *args, *options)  # raises an error that names the argument
        raise
    try:
        hash((tree, options, *map(weakref.ref, functions)))
    except TypeError:  # such as an argument that is no function
        return _trace(loop, functions, types, tree, options)
    kinds = tuple(map(type, options))  # `unroll=True == 1`, but they mean different loops
    return _traces_of(functions[-1])(functions[0], len(functions) == 1, loop, types, tree, options, kinds)


def bind_loop(
    loop: Callable[..., Any],
    functions: Sequence[Any],
    args: Sequence[Any],
    max_steps: int | None,
    strategy: Strategy,
    options: Sequence[Any] = (),
    bound: Bound = OF_WHILE_LOOP,
    return_steps: bool = False,
    error: str = "",
) -> Any:
    """Run a loop of JAX as one of ours. A scan remains a scan of JAX at least until it is differentiated."""
    here, source = _compat.source_here(), _source()
    jaxpr, shape = _traced(loop, functions, args, tuple(options))
    while not bound.has_types_of_jax and (of_mesh := _varying_as_predicates(jaxpr, args)) is not None:
        args = of_mesh
        jaxpr, shape = _traced(loop, functions, args, tuple(options))
    if return_steps and any(map(_asks_with_effects, _compat.opened(jaxpr).eqns)):
        return _with_its_end(functions, args, shape, max_steps, strategy, bound, error)
    end = []

    def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
        params = eqn.params
        if eqn.primitive is jax_primitives.scan_p:
            prepared, body, _ = strategy.prepare(params["jaxpr"], (), None, (), source)
            with eqn.ctx.manager, here():
                return choosing.bind(eqn.replace(params=params | {"jaxpr": body}), operands, prepared)
        if eqn.primitive is not jax_primitives.while_p:
            return jaxprs.bind(eqn, operands)
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        values = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, jex.Literal)}
        values |= {v: Carry(k) for k, v in enumerate(eqn.outvars)}
        leaves = [values[v] for v in _compat.opened(jaxpr).outvars]
        prepared, body, consts = strategy.prepare(body, operands[a:b], jax.tree.structure(shape), leaves, source)
        with here():
            most, returns_steps = None if max_steps is None else int(max_steps), return_steps or max_steps is not None
            options = WhileOptions(
                most, source, strategy=prepared, returns_steps=returns_steps, bound=bound, error=error
            )
            outs, taken = Loop(operands[:a], consts, operands[b:], cond, body, options).run()
        if return_steps:
            (more,) = jaxprs.function(cond)(*map(copied, operands[:a]), *outs)
            end.append(Steps(taken, more))
        return outs

    outs = jaxprs.interpret(jaxpr, jax.tree.leaves(args), equation)
    result = jax.tree.unflatten(jax.tree.structure(shape), outs)
    return (result, end[-1]) if return_steps else result


def _varying_as_predicates(jaxpr: Any, args: Any) -> Any:
    """Make the arguments of a loop vary over all axes of a mesh over which its number of steps varies.

    Return None if they do already. JAX types the carry after the loop as the same on all devices, because JAX's loop
    has no reverse mode. Reverse mode would then sum the cotangent over the devices at the wrong place.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return None
    axes = [_compat.varying_axes(t) for t in map(jax.typeof, jax.tree.leaves(args))]
    for eqn in _compat.opened(jaxpr).eqns:
        if eqn.primitive is jax_primitives.while_p:
            (active,) = _compat.closed(eqn.params["cond_jaxpr"]).out_avals
            over = _compat.varying_axes(active)
            if any(over - of_leaf for of_leaf in axes):
                return jax.tree.map(functools.partial(varying_over, axes=over), args)
    return None


def _asks_with_effects(eqn: Equation) -> bool:
    return eqn.primitive is jax_primitives.while_p and _compat.has_callbacks(eqn.params["cond_jaxpr"])


def _with_its_end(
    functions: Sequence[Any], args: Any, shape: Any, max_steps: int | None, strategy: Strategy, bound: Bound, error: str
) -> Any:
    """Run a loop that carries the value of its condition, and evaluates it once before each step and at the end."""
    (cond_fun, body_fun), (init,) = functions, args

    def body(state: Any) -> Any:
        carry = body_fun(state[1])
        return cond_fun(carry), carry

    init = jax.tree.map(lambda x, of: x if isinstance(x, jax.Ref) else jnp.asarray(x, of.dtype), init, shape)
    start, functions = (cond_fun(init), init), (lambda state: state[0], body)
    (more, carry), steps = bind_loop(
        lax.while_loop, functions, (start,), max_steps, strategy.of_second(), (), bound, True, error
    )
    return carry, Steps(steps.taken, more)


def in_python(cond_fun: Any, body_fun: Any, carry: Any, max_steps: int | None, return_steps: bool, error: str) -> Any:
    """Run the loop under `jax.disable_jit`, like JAX: the functions may change NumPy arrays in place."""
    carry, taken = jax.tree.map(jnp.asarray, carry), 0
    while (more := cond_fun(carry)) and (max_steps is None or taken < max_steps):
        carry, taken = jax.tree.map(jnp.asarray, body_fun(carry)), taken + 1
    if more and error:
        raise ValueError(error)
    if not return_steps:
        return carry
    dtype = steps_dtype(max_steps)
    return carry, Steps(jnp.asarray(min(taken, jnp.iinfo(dtype).max), dtype), jnp.asarray(more))
