"""Source lines: of equations, and of the frames of this package."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

from jax.extend import source_info_util

from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Equation

_F = TypeVar("_F", bound=Callable[..., Any])

_source_info = private_names("source_info_util", "user_context", "current_name_stack", "current", "is_user_filename")


def at_source_of(eqn: Equation) -> Any:
    """Return a context in which traced equations get the source line of an equation.

    In functions that JAX jits itself, such as `jnp.where`, equations have no line of the user. They get the line of the
    call, which is the current one. Private. Without it the equations of a loop or of `in_place` have the line of its
    call.
    """
    if _source_info is None:
        return contextlib.nullcontext()
    user_context, current_name_stack, current, is_users = _source_info
    info = eqn.source_info
    codes, _ = info.traceback.raw_frames() if info.traceback else ((), ())
    has_line = any(is_users(code.co_filename) for code in codes)
    return user_context(
        info.traceback if has_line else current().traceback, name_stack=current_name_stack() + info.name_stack
    )


def source_here() -> Callable[[], Any]:
    """Return a function that returns a context for tracing at the current line of the user.

    JAX stores only the innermost frames of a stack: deep in a loop, none of the user. Private. Without it a loop has no
    line.
    """
    if _source_info is None:
        return contextlib.nullcontext
    user_context, _, current, _ = _source_info
    return functools.partial(user_context, current().traceback)


def placed_as(fun: Any) -> Callable[[_F], _F]:
    """Return a decorator for a function of ours that calls `fun`: JAX's errors then have the name and line of `fun`.

    JAX reads both from `__wrapped__`. The signature stays that of our function, because JAX names its arguments.
    """

    def placed(ours: _F) -> _F:
        if callable(fun):  # otherwise JAX's loop raises its error
            ours.__signature__ = inspect.signature(ours)  # type: ignore[attr-defined]
            ours.__wrapped__ = fun  # type: ignore[attr-defined]
        return ours

    return placed


def hide_own_frames() -> None:
    """Make JAX skip the frames of this package like its own: in source locations and in tracebacks.

    Our hooks are in the stack of every lowering, and would be the innermost line of each function. Without the second,
    private name our frames stay in the tracebacks that JAX filters.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    source_info_util.register_exclusion(package + os.sep)
    private = private_names("traceback_util", "register_exclusion")
    if private is not None:
        private[0](package)
