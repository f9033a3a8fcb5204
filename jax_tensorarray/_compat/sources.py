"""Places in the source of a program: of equations, and of the frames of this package."""

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
    """Return a context in which what is traced has the place in the source of an equation.

    In the functions that JAX jits itself, such as `jnp.where`, equations have no line of the user's. They keep that of
    the call, which is where we are. Private. Without it the result of a loop or `in_place` seems to come from where
    these are called.
    """
    if _source_info is None:
        return contextlib.nullcontext()
    user_context, current_name_stack, current, is_users = _source_info
    info = eqn.source_info
    codes, _ = info.traceback.raw_frames() if info.traceback else ((), ())
    is_known = any(is_users(code.co_filename) for code in codes)
    return user_context(
        info.traceback if is_known else current().traceback, name_stack=current_name_stack() + info.name_stack
    )


def source_here() -> Callable[[], Any]:
    """Remember where the user is: return a function that gives a context for tracing at that place in the source.

    JAX keeps the innermost frames of a stack: deep in a loop, none of the user's. Private. Without it a loop has no
    line.
    """
    if _source_info is None:
        return contextlib.nullcontext
    user_context, _, current, _ = _source_info
    return functools.partial(user_context, current().traceback)


def placed_as(fun: Any) -> Callable[[_F], _F]:
    """Return a decorator for a function of ours that calls `fun`: JAX's errors then name the user's function and line.

    JAX looks for both in `__wrapped__`. The signature remains that of our function, whose arguments JAX names.
    """

    def placed(ours: _F) -> _F:
        if callable(fun):  # else JAX's loop says what is wrong
            ours.__signature__ = inspect.signature(ours)  # type: ignore[attr-defined]
            ours.__wrapped__ = fun  # type: ignore[attr-defined]
        return ours

    return placed


def hide_own_frames() -> None:
    """Have JAX pass over the frames of this package as over its own: in source locations and in tracebacks.

    Our hooks are below every program that is lowered, and would be the innermost line of each of its functions. Without
    the second, private name our frames stay in the tracebacks that JAX filters.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    source_info_util.register_exclusion(package + os.sep)
    private = private_names("traceback_util", "register_exclusion")
    if private is not None:
        private[0](package)
