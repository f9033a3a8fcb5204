"""From a loop of JAX to one of ours: JAX traces the functions, promotes weak types, and says what does not fit."""

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

from jax_tensorarray import _compat, checkpoint_policies
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._loops.auto import Auto
from jax_tensorarray._loops.checkpoint import Checkpoint
from jax_tensorarray._loops.inverse import Inverse
from jax_tensorarray._loops.replay import OnHost
from jax_tensorarray._loops.undo import Undo
from jax_tensorarray._loops.while_ import OF_WHILE_LOOP, Bound, WhileOptions, counting, while_

Array = Any


class Steps(NamedTuple):
    """How a loop ended: the number of steps it took, and whether `max_steps` cut it short."""

    taken: Any
    cut: Any


def check_max_steps(op: str, max_steps: Any) -> None:
    if max_steps is None:
        return
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer):
        raise TypeError(f"{op}: max_steps must be a Python integer, got {max_steps!r}")
    if max_steps < 0:
        raise ValueError(f"{op}: max_steps must not be negative, got {max_steps}")


RESIDUALS = ("auto", "tape", "recompute", "checkpoint", "inverse", "undo")

#: The `residuals` that JAX's own scan serves, and that may keep a tape.
SCANNED = ("auto", "tape", "recompute")


class _Carry(int):
    """The number of a carry."""


#: Maps the carry of the user's functions, a body and its consts to the strategy, the body and the consts of a loop. JAX
#: makes a const of a value that a body returns unchanged. So the carry is given by its tree and its leaves, each the
#: number of a carry of the loop, or an array.
_MakeStrategy = Callable[[Any, Any, Any, Sequence[Array]], tuple[Any, Any, Sequence[Array]]]


def strategy_of(
    op: str,
    residuals: str,
    checkpoints: Any,
    inverse: Any,
    max_steps: int | None,
    check_inverse: Any = None,
    offload: Any = False,
    memory: Any = None,
) -> _MakeStrategy:
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
        check_memory(op, memory, residuals, offload, max_steps)
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


def check_memory(op: str, memory: Any, residuals: str, offload: bool, max_steps: int | None) -> None:
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
    call = jax.checkpoint(jaxprs.function(body), policy=checkpoint_policies.save_reads)
    return jax.make_jaxpr(call)(*body.in_avals)


@_compat.cached
def _with_more_consts(body: Any, num_consts: int, more: Sequence[Any]) -> Any:
    """Add consts to a body, after its own, that it does not use."""
    call, types = jaxprs.function(body), list(body.in_avals)

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
    check_inverse_type(op, jax.eval_shape(inverse, jax.tree.unflatten(tree, types)), jax.tree.unflatten(tree, types))
    # The inverse is traced as the body of a loop of JAX, which traces a function once. That loop does not carry what
    # the function returns unchanged: so a value below is an array, or the number of a carry, before the step or
    # (negative) after it.
    jaxpr = jax.make_jaxpr(lambda carry: lax.while_loop(for_ever, inverse, carry))(jax.tree.unflatten(tree, types))
    loops: list[tuple[Any, list[Any]]] = []

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive is jax_primitives.while_p:
            loops.append((eqn.params["body_jaxpr"], values))
            return [_Carry(~k) for k in range(len(eqn.outvars))]
        return values if any(isinstance(x, _Carry) for x in values) else jaxprs.bind(eqn, values)

    outs = jaxprs.interpret(jaxpr, leaves, equation, lambda x: x)
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
        after = jaxprs.function(back)(*(next(rest) if k is None else carry[k] for k in places)) if places else []
        return [carry[k] if k >= 0 else after[~k] for k in outs]

    return jax.make_jaxpr(f)(list(own), list(types))


def check_inverse_type(op: str, found: Any, wanted: Any) -> None:
    """Raise TypeError if an inverse does not return the types that the body returns."""

    def described(x: Any) -> str:
        leaves = ", ".join(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in jax.tree.leaves(x))
        return f"{jax.tree.structure(x)} of {leaves}"

    if described(found) != described(wanted):
        raise TypeError(
            f"{op}: inverse must return what body_fun returns, {described(wanted)}, but returns {described(found)}"
        )


def for_ever(carry: Any) -> bool:
    return True


def as_value(bound: Any) -> Any:
    """Return the bound; as an array if it is a symbolic dimension of `jax.export`."""
    return jnp.asarray(bound) if is_symbolic_dim(bound) else bound


def known_bound(bound: Any) -> int | None:
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


def lax_while_loop(cond_fun: Any, body_fun: Any, init: Any) -> Any:
    return lax.while_loop(cond_fun, body_fun, init)


def lax_fori_loop(body_fun: Any, lower: Any, upper: Any, init: Any, unroll: Any) -> Any:
    return lax.fori_loop(lower, upper, body_fun, init, unroll=unroll)


def lax_known_fori_loop(body_fun: Any, init: Any, lower: Any, upper: Any, unroll: Any) -> Any:
    return lax.fori_loop(lower, upper, body_fun, init, unroll=unroll)


def lax_scan(f: Any, init: Any, xs: Any, length: Any, reverse: Any, unroll: Any) -> Any:
    return lax.scan(f, init, xs, length, reverse, unroll)


#: Whether a loop of JAX is traced to become one of ours, which `in_place` need not look at yet. It is a part of the key
#: in JAX's caches of traced functions.
becomes_ours = jax.make_user_context(False)


def _trace(loop: Callable[..., Any], functions: Sequence[Any], types: Any, tree: Any, options: Sequence[Any]) -> Any:
    """Return the jaxpr of a loop of JAX, and the shapes of its results."""

    def flat(*leaves: Array) -> Any:
        return loop(*functions, *jax.tree.unflatten(tree, leaves), *options)

    with jax.disable_jit(False), becomes_ours(True):
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


def bind_loop(
    loop: Callable[..., Any],
    functions: Sequence[Any],
    args: Sequence[Any],
    max_steps: int | None,
    return_steps: bool,
    make_strategy: _MakeStrategy,
    options: Sequence[Any] = (),
    bound: Bound = OF_WHILE_LOOP,
) -> Any:
    """Run a loop of JAX as ours. A scan of JAX remains a scan, with the body of the strategy."""
    here = _compat.source_here()
    jaxpr, shape = _traced(loop, functions, args, tuple(options))
    end = []

    def equation(eqn: Any, operands: list[Array]) -> list[Array]:
        params = eqn.params
        if eqn.primitive is jax_primitives.scan_p:
            _, body, _ = make_strategy(None, None, params["jaxpr"], ())
            with eqn.ctx.manager, here():
                return eqn.primitive.bind(*operands, **params | {"jaxpr": body})
        if eqn.primitive is not jax_primitives.while_p:
            return jaxprs.bind(eqn, operands)
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        known = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, jex.Literal)}
        known |= {v: _Carry(k) for k, v in enumerate(eqn.outvars)}
        leaves = [known[v] for v in _compat.opened(jaxpr).outvars]
        strategy, body, consts = make_strategy(jax.tree.structure(shape), leaves, body, operands[a:b])
        with here():
            options = WhileOptions(
                None if max_steps is None else int(max_steps),
                _source(),
                strategy=strategy,
                counts=return_steps or max_steps is not None,
                bound=bound,
            )
            outs, taken = while_(operands[:a], consts, operands[b:], cond=cond, body=body, options=options)
        if return_steps:
            (more,) = jaxprs.function(cond)(*operands[:a], *outs)
            end.append(Steps(taken, more))
        return outs

    outs = jaxprs.interpret(jaxpr, jax.tree.leaves(args), equation, lambda x: x)
    result = jax.tree.unflatten(jax.tree.structure(shape), outs)
    return (result, end[-1]) if return_steps else result


def in_python(cond_fun: Any, body_fun: Any, carry: Any, max_steps: int | None, return_steps: bool) -> Any:
    """Run the loop under `jax.disable_jit`, as JAX runs its own: the functions may change NumPy arrays in place."""
    carry, taken = jax.tree.map(jnp.asarray, carry), 0
    while (max_steps is None or taken < max_steps) and cond_fun(carry):
        carry, taken = jax.tree.map(jnp.asarray, body_fun(carry)), taken + 1
    if not return_steps:
        return carry
    dtype = counting(max_steps)
    return carry, Steps(jnp.asarray(min(taken, jnp.iinfo(dtype).max), dtype), jnp.asarray(cond_fun(carry)))


def below(state: Any) -> Any:
    return state[0] < state[1]


def and_count(body_fun: Any) -> Callable[[Any], Any]:
    return lambda state: (state[0] + 1, state[1], body_fun(state[0], state[2]))
