"""Look up names that JAX keeps private."""

import importlib
from typing import Any


def private_names(module: str, *names: str) -> list[Any] | None:
    """Return those private names of JAX, or None if this version lacks one."""
    try:
        source = importlib.import_module(f"jax._src.{module}")
        return [getattr(source, name) for name in names]
    except (ImportError, AttributeError):
        return None
