"""Pickle a function under `in_place` by its name, or as the plain function and the options."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def reduced(decorated: Any, decorator: Callable[..., Any], fun: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return what pickle keeps of a decorated function: its global name, or how to make it of the plain function.

    Pickle stores a function as its name, under which a module has the decorated one. Cloudpickle stores the functions
    of the main program by their code, since another process has no such program.
    """
    if _is_global(decorated) and not (decorated.__module__ == "__main__" and _stores_code()):
        return decorated.__qualname__
    return _decorated, (decorator, fun, dict(options))


def _decorated(decorator: Callable[..., Any], fun: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    return decorator(fun, **options)


def _is_global(x: Any) -> bool:
    """Return whether `x` is found by its module and name."""
    try:
        module = importlib.import_module(x.__module__)
        return functools.reduce(getattr, x.__qualname__.split("."), module) is x
    except (AttributeError, ImportError):
        return False


def _stores_code() -> bool:
    """Return whether cloudpickle, or a copy of it in another library, is storing an object now."""
    frame = sys._getframe()
    while frame is not None:
        if "cloudpickle" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
