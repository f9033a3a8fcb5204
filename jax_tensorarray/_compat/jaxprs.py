"""Jaxprs, open and closed, and the effects and refs in them."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # type: ignore[attr-defined]

from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Array, Equation


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of a jaxpr and hashable values as long as the jaxpr lives.

    JAX uses this cache for its own transformations of jaxprs: its key has the settings of tracing. Without it, each
    call of a derivative of a loop outside of jit compiles again.
    """
    private = private_names("util", "weakref_lru_cache")
    return function if private is None else private[0](function)


def opened(jaxpr: Jaxpr) -> Any:
    """Return the jaxpr without its consts: control flow of 0.10 has a ClosedJaxpr. Since 0.11 the two types are one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def replaced(jaxpr: Jaxpr, **changes: Any) -> Any:
    """Return the jaxpr, closed or not, with other equations, inputs or outputs."""
    new = opened(jaxpr).replace(**changes)
    return new if opened(jaxpr) is jaxpr else jaxpr.replace(jaxpr=new)


def closed(jaxpr: Jaxpr) -> Any:
    """Return the jaxpr with consts: before 0.11 some equations have a jaxpr without."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def lifted(jaxpr: Jaxpr) -> tuple[Any, list[Array]]:
    """Return the jaxpr that takes its consts as its first inputs, and those consts."""
    inner = opened(jaxpr)
    if not jaxpr.consts:
        return jaxpr, []
    consts = list(jaxpr.consts)
    return closed(inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])), consts


def closed_over(traced: Any) -> list[Array]:
    """Return the free variables of a traced function, which are tracers: its first operands.

    Private. Without them `in_place` does not rewrite such a function.
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
    part, _, unknown_outs, *_ = private[0](jaxpr, list(unknown), list(forced) or False)
    inner = opened(part)
    outvars = inner.outvars[: len(unknown_outs) - sum(unknown_outs)]  # the others are for the unknown part
    return replaced(part, outvars=outvars, debug_info=inner.debug_info.with_unknown_names()), list(unknown_outs)


def name_of_function(jaxpr: Jaxpr) -> str:
    """Return the name of the traced function. It is not documented. Without it the result is empty."""
    return getattr(getattr(opened(jaxpr), "debug_info", None), "func_name", None) or ""


def has_callbacks(x: Any) -> bool:
    """Return whether users can see another evaluation of a jaxpr or equation: by effects besides those on refs.

    The types of effects are private. Effects on refs have an input, and those of named axes are not visible.
    """
    return any(not hasattr(e, "input") and type(e).__name__ != "NamedAxisEffect" for e in x.effects)


def has_ordered_effects(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr has ordered effects. Only the name of an effect shows it.

    If JAX changes the name, a condition of a batched loop with such effects runs twice per step.
    """
    return any(str(effect).startswith("Ordered") for effect in jaxpr.effects)


def has_unordered_io(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr has unordered input or output. Only the name of the effect shows it.

    If JAX changes the name, such a loop also runs for examples that have ended, and JAX would raise.
    """
    return any(str(effect) == "IO" for effect in jaxpr.effects)


def only_communicates(jaxpr: Jaxpr) -> bool:
    """Return whether all effects of a jaxpr are uses of a named axis. Only the name of their class shows it.

    If JAX changes the name, JAX itself batches loops and conditionals that communicate, with copies of buffers.
    """
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)


def makes_refs(x: Any) -> bool:
    """Return whether a jaxpr or an equation creates refs. Private. Without it `in_place` does not rewrite them."""
    private = private_names("core", "InternalMutableArrayEffect")
    return private is not None and any(isinstance(effect, private[0]) for effect in x.effects)


def discharged(jaxpr: Jaxpr) -> Any:
    """Return the same closed jaxpr with those refs as arrays, like JAX before it compiles.

    Private. Without it `in_place` does not rewrite refs.
    """
    private = private_names("state.discharge", "discharge_state")
    return jaxpr if private is None else private[0](jaxpr, should_discharge=False, lower=False)


def writes_refs(eqn: Equation) -> list[bool]:
    """Return which operands of an equation are refs that it writes. The names in its effects are private."""
    written = {effect.input for effect in eqn.effects if getattr(effect, "name", "") in ("Write", "Accum")}
    return [not isinstance(v, Literal) and v in written for v in eqn.invars]
