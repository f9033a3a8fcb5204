"""Make equations one by one, without tracing, which takes many times as long."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, Var  # type: ignore[attr-defined]
from jax.extend.source_info_util import SourceInfo
from jax.interpreters import partial_eval as pe

from jax_tensorarray._compat.jaxprs import opened
from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Equation

__all__ = ["eliminates_dead_code", "frame_of", "is_drop", "made_jaxpr", "new_variable", "within"]


def new_variable(aval: Any) -> Any:
    """Return a new variable of a type."""
    return Var(aval)


def is_drop(v: Any) -> bool:
    """Return whether a variable is an unused result. Only the name of its class shows it.

    If JAX changes the name, an unused result counts as a used one.
    """
    return type(v).__name__ == "DropVar"


def eliminates_dead_code(
    primitive: Primitive, rule: Callable[[Sequence[bool], Equation], tuple[list[bool], Any]]
) -> None:
    """Register a rule for dead code elimination, from the live results and an equation.

    The rule returns the live operands and the new equation. In 0.12 JAX's own rules also get flags of the operands.
    """

    def of_jax(live: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
        eqn = args[-1]
        return rule(live, eqn) if any(live) or eqn.effects else ([False] * len(eqn.invars), None)

    pe.dce_rules[primitive] = of_jax


def made_jaxpr(
    like: Jaxpr,
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Equation],
    constvars: Sequence[Any],
    consts: Sequence[Any],
) -> Any:
    """Return a closed jaxpr with the effects and the names of another one."""
    inner = opened(like)
    same = len(inner.invars) == len(invars) and len(inner.outvars) == len(outvars)
    info = inner.debug_info if same else inner.debug_info.with_unknown_names()
    changes = {
        "constvars": list(constvars),
        "invars": list(invars),
        "outvars": list(outvars),
        "eqns": list(eqns),
        "debug_info": info,
    }
    if hasattr(inner, "consts"):  # since 0.11 they are in the jaxpr itself
        return inner.replace(**changes, consts=list(consts))
    return ClosedJaxpr(inner.replace(**changes), list(consts))


def within(eqn: Equation, outer: Equation, name: str = "", *, has_line: bool = True) -> Any:
    """Return the source info for an equation of a jaxpr that replaces another equation.

    With `has_line` it has a line of its own, otherwise that of the other equation.
    """
    inner, around = eqn.source_info, outer.source_info
    stack = around.name_stack.extend(name) if name else around.name_stack
    return SourceInfo((has_line and inner.traceback) or around.traceback, stack + inner.name_stack)


def frame_of(info: Any) -> tuple[str, int, int] | None:
    """Return file, line and column of the innermost frame of the user. Private. Without it no frame is known."""
    if _user_frame is None:
        return None
    frame = _user_frame[0](info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line, frame.start_column)


_user_frame = private_names("source_info_util", "user_frame")
