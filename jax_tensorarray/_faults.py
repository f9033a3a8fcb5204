"""Errors of this library in programs that it rewrites: the original program runs, with a warning."""

import functools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

#: An error that this library raises on purpose begins with the name of one of its functions, classes or variables.
_ON_PURPOSE = re.compile(
    r"(in_place|growing|(tf\.)?\w*(loop|scan|fold[lr])|ta_\w+|Auto|Checkpoint|Inverse|Recompute|Tape|Undo): "
    r"|JAX_TENSORARRAY_"
)


#: Types of errors that nobody raises on purpose.
_INTERNAL = KeyError, IndexError, StopIteration, AssertionError, AttributeError, UnboundLocalError


class Fault(RuntimeError):
    """An error of this library in a rule that JAX calls, such as the derivative of a loop."""


def named(rule: Callable[..., _T], what: str) -> Callable[..., _T]:
    """Return a rule whose internal errors are a `Fault`."""

    @functools.wraps(rule)
    def f(*args: Any, **params: Any) -> _T:
        try:
            return rule(*args, **params)
        except _INTERNAL as error:
            if getattr(error, _OF_USER, False):
                raise
            raise Fault(
                f"jax_tensorarray: {what} failed with {type(error).__name__}: {error}. This is a fault of "
                "jax_tensorarray, not of the program. Without in_place, or with residuals='tape', it does not occur. "
                "Please report it with the program."
            ) from error

    return f


_OF_USER = "_jax_tensorarray_of_user"


def call_user(fun: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call a function of the user. Its errors are not faults."""
    try:
        return fun(*args, **kwargs)
    except _INTERNAL as error:
        setattr(error, _OF_USER, True)
        raise


def instead(error: Exception, unchanged: Callable[[], _T], *, strict: bool = False) -> _T:
    """Return the results of the unchanged program after an error in its rewrite, and warn.

    If the unchanged program raises an error, the program is wrong, and we raise that. We raise an error again that the
    library raised on purpose, such as one about an option. If `strict`, we raise every error again.
    """
    result = unchanged()
    if _ON_PURPOSE.match(str(error)):
        raise error
    if strict:
        error.add_note(
            "jax_tensorarray could not rewrite a program, and in_place(..., strict=True) raises the error. This is a "
            "fault of jax_tensorarray, not of the program. Please report it with the program."
        )
        raise error
    warn(error)
    return result


def warn(error: Exception) -> None:
    """Warn that an error is a fault of this library."""
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" in {os.path.basename(frame.filename)}:{frame.lineno}" if frame else ""
    warnings.warn(
        "jax_tensorarray could not rewrite a program, which runs as it is written. This is a fault of jax_tensorarray, "
        f"not of the program: {type(error).__name__}: {error}{where}. Please report it with the program.",
        RuntimeWarning,
        stacklevel=level_of_user(),
    )


def level_of_user() -> int:
    """Return the stack level of the user's code, for a warning from the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jax_tensorarray"):
        level, frame = level + 1, frame.f_back
    return level
