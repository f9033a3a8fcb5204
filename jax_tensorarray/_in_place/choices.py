"""`residuals.explain`: the residuals that each loop of a function stores for reverse mode, and why."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import jax
from jax.extend import source_info_util

from jax_tensorarray._in_place import control
from jax_tensorarray._in_place.repair import Repair, Request
from jax_tensorarray._in_place.values import Value
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._loops.as_while import scan_as_while
from jax_tensorarray._loops.auto import Auto, Choice, choose_within
from jax_tensorarray._loops.from_jax import check_max_steps
from jax_tensorarray._loops.linearize import Linearized, linearize
from jax_tensorarray._loops.while_ import taped
from jax_tensorarray._types import Equation, bytes_of

Array = jax.Array

_P = ParamSpec("_P")

_NONE = "a while_loop has no derivative in reverse mode without max_steps"


def explain(
    fun: Callable[_P, Any], *, max_steps: int | None = None, memory: int | None = None
) -> Callable[_P, list[Choice]]:
    """Return a function that tells which values reverse mode stores for every loop in `fun`.

    It takes the arguments of `fun`, or `jax.ShapeDtypeStruct`s of them, and runs nothing. It treats the loops of plain
    JAX as `in_place` does, and takes all floats among the arguments to be differentiated.

    Args:
        fun: a function that JAX can trace, with loops of JAX or of this library.
        max_steps: as for `in_place`: an upper bound on the steps of every `lax.while_loop`.
        memory: as for `Auto`.

    Returns:
        A function that returns a `Choice` for each loop that a derivative goes through, an outer loop before those
        inside of it.

    Raises:
        TypeError: `fun` is not callable, or `max_steps` is not an integer.
        ValueError: `max_steps` is negative, or `memory` is not a number of bytes.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.residuals import explain
    >>> def f(ys):  # each row depends on all rows there are
    ...     return jax.lax.fori_loop(0, 100, lambda i, ys: ys.at[i].set(jnp.tanh(ys.T @ ys[:, 0])), ys)
    >>> [choice] = explain(f)(jnp.ones((100, 100)))
    >>> choice.residuals, choice.steps, choice.largest
    ('undo', 100, 'float32[100,100]')
    """
    if not callable(fun):
        raise TypeError(f"residuals.explain: fun must be callable, got {fun!r}")
    check_max_steps("residuals.explain", max_steps)
    request = Request(max_steps, Auto(memory))

    @functools.wraps(fun)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> list[Choice]:
        return _choices(Repair(request), refs.as_arrays(jax.make_jaxpr(fun)(*args, **kwargs)), memory)

    return explained


def _choices(repair: Repair, jaxpr: Any, memory: int | None) -> list[Choice]:
    """Return the choices of the loops in a jaxpr, an outer loop first."""
    found: list[Choice] = []

    def visit(eqn: Equation, operands: list[bool], own: Any = None) -> None:
        entry = registry.entry_of(eqn)
        if entry.kind == "loop":
            found.append(_choice(repair, eqn, operands, memory, own))
        # A counted loop of this library is a scan, and the rule around it has the strategy.
        of_loop = getattr(eqn.params.get("rule"), "strategy", None)
        visit_inside = visit if of_loop is None else functools.partial(visit, own=of_loop)
        for body in entry.bodies(eqn.params) if eqn.primitive.name != "custom_vjp_call" else ():
            consts, carry, xs = body.split(body.inputs(operands, False))
            if entry.kind == "loop":
                carry = registry.reached_in(body, operands)[: len(carry)]
            registry.each_reached(body.jaxpr, [*consts, *carry, *xs], visit_inside)

    registry.each_reached(jaxpr, [jaxprs.is_inexact(a) for a in jaxpr.in_avals], visit)
    return found


def _choice(repair: Repair, eqn: Equation, operands: list[bool], memory: int | None, own: Any) -> Choice:
    """Return the choice of a loop that is differentiated in the flagged operands, and may have its `own` strategy."""
    loop = f"{eqn.primitive.name.removeprefix('ta_')} at {source_info_util.summarize(eqn.source_info)}"
    plain = _linearized(eqn, operands)
    if plain is None and repair.request.max_steps is None:
        return Choice(residuals="none", reason=_NONE, tape_bytes=0, undo_bytes=None, loop=loop)
    found: list[tuple[Any, list[bool]]] = []

    def visit(inner: Any, operands: list[bool]) -> None:
        if registry.entry_of(inner).kind == "loop":
            found.append((inner, operands))
        else:
            for body in registry.entry_of(inner).bodies(inner.params):
                registry.each_reached(body.jaxpr, body.inputs(operands, False), visit)

    registry.each_reached(_repaired(repair, eqn), operands, visit)
    eqn, operands = found[0]
    parts = _parts(eqn)
    linear = _linearized(eqn, operands)
    if parts is None or linear is None:
        return Choice(residuals="none", reason=_NONE, tape_bytes=0, undo_bytes=None, loop=loop)
    body, steps, strategy = parts
    strategy = own if strategy is None else strategy
    kept = linear if plain is None else plain
    largest = max(kept.taped, key=lambda t: bytes_of([t]), default=None)
    if strategy is not None and not isinstance(strategy, Auto):
        name = type(strategy).__name__
        choice = Choice(residuals=name, reason="the loop says so", tape_bytes=0, undo_bytes=None)
    else:
        choice, _ = choose_within(memory if strategy is None else strategy.memory, steps, linear, body)
    name = "" if largest is None else f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
    return replace(choice, tape_bytes=bytes_of(kept.taped), loop=loop, steps=steps, largest=name)


def _repaired(repair: Repair, eqn: Equation) -> Any:
    """Return the jaxpr of an equation as `in_place` runs it."""

    def f(*operands: Array) -> list[Array]:
        rule = control.RULES.get(eqn.primitive.name)
        if rule is None or not repair.finds_in(eqn):
            return jaxprs.bind(eqn, operands)
        return [x.array for x in rule(repair, eqn, [Value.given(x) for x in operands], {})]

    return jax.make_jaxpr(f)(*(v.aval for v in eqn.invars))


def _parts(eqn: Equation) -> tuple[Any, int, Any] | None:
    """Return the body of a loop as of a `ta_while`, its steps and its strategy. None if their number has no bound."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        [body] = registry.entry_of(eqn).bodies(params)
        _, step = scan_as_while(params["jaxpr"], body.num_consts, body.num_carry, params["length"], params["reverse"])
        return step, params["length"], None
    if eqn.primitive.name != "ta_while" or not taped(params["options"].max_steps):
        return None
    return params["body"], params["options"].max_steps, params["options"].strategy


def _linearized(eqn: Equation, operands: Sequence[bool]) -> Linearized | None:
    """Return the derivative of a step; None if the number of the steps has no bound."""
    parts = _parts(eqn)
    if parts is None:
        return None
    [loop] = registry.entry_of(eqn).bodies(eqn.params)
    consts, carry, xs = loop.split(loop.inputs(operands, False))
    carry = registry.reached_in(loop, list(operands))[: len(carry)]
    if eqn.primitive.name == "scan":
        ys = [jaxprs.is_inexact(a) for a in loop.jaxpr.out_avals[len(carry) :]]
        return linearize(parts[0], [*consts, *xs], [False, *carry, *ys])
    return linearize(parts[0], consts[loop.leading :], carry)
