"""Read variables of the environment that have a few allowed values."""

import os
from collections.abc import Sequence


def value_of(variable: str, allowed: Sequence[str], default: str) -> str:
    """Return the value of a variable. One that is unset or empty has the default.

    Raises:
        ValueError: the value is none of the allowed ones. The message lists them.
    """
    found = os.environ.get(variable) or default
    if found not in allowed:
        raise ValueError(f"{variable} must be one of {', '.join(allowed)}, got {found!r}")
    return found
