"""Jaxprs, open and closed, and the effects and refs in them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # type: ignore[attr-defined]

from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Equation

Array = jax.Array


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the results of a function of a jaxpr and hashable values, for as long as the jaxpr lives.

    JAX wraps its own transformations of jaxprs in this: it knows the settings that tracing depends on. Without it,
    derivatives of loops outside of jit are compiled in every call.
    """
    private = private_names("util", "weakref_lru_cache")
    return function if private is None else private[0](function)


def opened(jaxpr: Jaxpr) -> Any:
    """Return the jaxpr without its consts: control flow of 0.10 holds a ClosedJaxpr; later ones are both in one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def replaced(jaxpr: Jaxpr, **changes: Any) -> Any:
    """Return the jaxpr, closed or not, with other equations, inputs or outputs."""
    new = opened(jaxpr).replace(**changes)
    return new if opened(jaxpr) is jaxpr else jaxpr.replace(jaxpr=new)


def closed(jaxpr: Jaxpr) -> Any:
    """Return the jaxpr with its consts: before 0.11 some equations hold one without, and have no place for them."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def lifted(jaxpr: Jaxpr) -> tuple[Any, list[Array]]:
    """Return the jaxpr that takes its consts as its first inputs, and those consts."""
    inner = opened(jaxpr)
    if not jaxpr.consts:
        return jaxpr, []
    consts = list(jaxpr.consts)
    return closed(inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])), consts


def closed_over(traced: Any) -> list[Array]:
    """Return the tracers that a traced function has closed over: its first operands.

    No public name gives them. Without it `in_place` leaves such a function as it is.
    """
    return list(getattr(traced, "_consts", ()))


@cached
def known_part(jaxpr: Jaxpr, unknown: Sequence[bool], forced: Sequence[bool] = ()) -> tuple[Any, list[bool]]:
    """Return the jaxpr of the outputs that do not depend on unknown inputs, and flags of the others and the `forced`.

    Public since 0.11. Without it everything is unknown, and loops may demand a max_steps that they do not need.
    """
    private = private_names("interpreters.partial_eval", "partial_eval_jaxpr_nounits")
    if private is None:
        return jaxpr, [True] * len(jaxpr.out_avals)
    known, _, unknown_outs, *_ = private[0](jaxpr, list(unknown), list(forced) or False)
    inner = opened(known)
    outvars = inner.outvars[: len(unknown_outs) - sum(unknown_outs)]  # the others are for the unknown part
    return replaced(known, outvars=outvars, debug_info=inner.debug_info.with_unknown_names()), list(unknown_outs)


def name_of_function(jaxpr: Jaxpr) -> str:
    """Return the name of the function that was traced, which is not documented. Without it the result is empty."""
    return getattr(getattr(opened(jaxpr), "debug_info", None), "func_name", None) or ""


def has_callbacks(x: Any) -> bool:
    """Return whether it would be visible to evaluate a jaxpr or an equation once more: by effects that are not on refs.

    The types of effects are private; those of refs say which input they belong to, and those of named axes are none.
    """
    return any(not hasattr(e, "input") and type(e).__name__ != "NamedAxisEffect" for e in x.effects)


def has_ordered_effects(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr has effects that happen in their order. Only the name of an effect says so in public.

    If JAX changes the name, a condition of a batched loop with such effects runs twice per step.
    """
    return any(str(effect).startswith("Ordered") for effect in jaxpr.effects)


def has_unordered_io(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr does input or output in no order. Only the name of the effect says so in public.

    If JAX changes the name, such a loop runs also for examples of a batch that have ended, where JAX raises.
    """
    return any(str(effect) == "IO" for effect in jaxpr.effects)


def only_communicates(jaxpr: Jaxpr) -> bool:
    """Return whether all effects of a jaxpr are uses of a named axis. Only their class says so, by its name.

    If JAX changes the name, JAX itself batches loops and conditionals that communicate, with copies of buffers.
    """
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)


def makes_refs(x: Any) -> bool:
    """Return whether a jaxpr or an equation makes and drops refs. Private. Without it `in_place` leaves them."""
    private = private_names("core", "InternalMutableArrayEffect")
    return private is not None and any(isinstance(effect, private[0]) for effect in x.effects)


def discharged(jaxpr: Jaxpr) -> Any:
    """Return the same closed jaxpr with those refs as arrays, as JAX has it before it compiles.

    Private. Without it `in_place` leaves refs.
    """
    private = private_names("state.discharge", "discharge_state")
    return jaxpr if private is None else private[0](jaxpr, should_discharge=False, lower=False)


def writes_refs(eqn: Equation) -> list[bool]:
    """Return which operands of an equation are refs that it writes. The names in its effects are private."""
    written = {effect.input for effect in eqn.effects if getattr(effect, "name", "") in ("Write", "Accum")}
    return [not isinstance(v, Literal) and v in written for v in eqn.invars]
