"""`residuals.explain`: the residuals that each loop of a function stores for reverse mode, and why.

The loops of a jaxpr are visited, and the strategy of each is asked. Listening to JAX while it differentiates the
function tells less. A scan that has no choice is differentiated by JAX alone. An inner loop is differentiated several
times: JAX traces the body of a scan until it knows which tangents are nonzero, and `linearize` traces it once more. A
loop that is rewritten before has other equations, so a choice does not say whose it is. And a choice is compared with
the tape of plain JAX, which `in_place` never makes.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import jax
from jax.extend import source_info_util

from jax_tensorarray._in_place.repair import Repair, Request
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._loops.as_while import scan_as_while
from jax_tensorarray._loops.auto import Auto
from jax_tensorarray._loops.from_jax import check_max_steps
from jax_tensorarray._loops.linearize import Linearized, linearize
from jax_tensorarray._loops.strategy import Choice
from jax_tensorarray._loops.while_ import taped
from jax_tensorarray._types import Equation, bytes_of

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
        jaxpr = refs.as_arrays(jax.make_jaxpr(fun)(*args, **kwargs))
        loops = _loops(jaxpr, list(map(jaxprs.is_inexact, jaxpr.in_avals)))
        return [_choice(Repair(request), *loop) for loop in loops]

    return explained


#: A loop, which of its operands are differentiated, and the strategy that the rule around it has, if there is one.
_Loop = tuple[Equation, list[bool], Any]


def _loops(jaxpr: Any, flags: Sequence[bool], own: Any = None) -> list[_Loop]:
    """Return the loops that a derivative in the flagged inputs goes through, an outer loop first."""
    found: list[_Loop] = []

    def visit(eqn: Equation, operands: list[bool]) -> None:
        entry = registry.entry_of(eqn)
        if entry.kind == "loop":
            found.append((eqn, operands, own))
        # A counted loop of this library is a scan, and the rule around it has the strategy.
        of_loop = getattr(eqn.params.get("rule"), "strategy", None)
        for body in entry.bodies(eqn.params) if eqn.primitive.name != "custom_vjp_call" else ():
            consts, carry, xs = body.split(body.inputs(operands, False))
            if entry.kind == "loop":
                carry = registry.reached_in(body, operands)[: len(carry)]
            found.extend(_loops(body.jaxpr, [*consts, *carry, *xs], of_loop))

    registry.each_reached(jaxpr, flags, visit)
    return found


def _choice(repair: Repair, eqn: Equation, operands: list[bool], own: Any) -> Choice:
    """Return the choice of a loop that is differentiated in the flagged operands, and may have its `own` strategy."""
    loop = f"{eqn.primitive.name.removeprefix('ta_')} at {source_info_util.summarize(eqn.source_info)}"
    plain = _derivative(eqn, operands)
    may_have_bound = plain is not None or repair.request.max_steps is not None
    repaired = _derivative(*_loops(_repaired(repair, eqn), operands)[0][:2]) if may_have_bound else None
    if repaired is None:
        return Choice(residuals="none", reason=_NONE, tape_bytes=0, undo_bytes=None, loop=loop)
    linear, steps, strategy = repaired
    choice = (strategy or own or repair.request.residuals).choice(linear, linear.of[0], steps)
    kept = (repaired if plain is None else plain)[0].taped
    largest = max(kept, key=lambda t: bytes_of([t]), default=None)
    name = "" if largest is None else f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
    return replace(choice, tape_bytes=bytes_of(kept), loop=loop, steps=steps, largest=name)


def _repaired(repair: Repair, eqn: Equation) -> Any:
    """Return the jaxpr of an equation as `in_place` runs it."""
    types = [v.aval for v in eqn.invars]
    alone = jax.make_jaxpr(lambda *operands: jaxprs.bind(eqn, operands))(*types)
    return jax.make_jaxpr(repair.function(alone, is_whole=True))(*types)


def _derivative(eqn: Equation, operands: Sequence[bool]) -> tuple[Linearized, int, Any] | None:
    """Return the derivative of a step, the number of steps and the strategy. None if that number has no bound."""
    params, [loop] = eqn.params, registry.entry_of(eqn).bodies(eqn.params)
    consts, carry, xs = loop.split(loop.inputs(operands, False))
    carry = registry.reached_in(loop, list(operands))[: len(carry)]
    if eqn.primitive.name == "scan":
        _, step = scan_as_while(params["jaxpr"], loop.num_consts, loop.num_carry, params["length"], params["reverse"])
        ys = [jaxprs.is_inexact(a) for a in loop.jaxpr.out_avals[len(carry) :]]
        return linearize(step, [*consts, *xs], [False, *carry, *ys]), params["length"], None
    options = params.get("options")
    if eqn.primitive.name != "ta_while" or options.is_counted or not taped(options.max_steps):
        return None
    return linearize(params["body"], consts[loop.leading :], carry), options.max_steps, options.strategy
