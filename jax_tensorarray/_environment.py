"""Read variables of the environment that have a few allowed values."""

import os
from collections.abc import Sequence


def value_of(variable: str, allowed: Sequence[str], default: str) -> str:
    """Return the value of a variable, or the default if it is unset or empty.

    Raises:
        ValueError: the value is none of the allowed ones. The message lists them.
    """
    value = os.environ.get(variable) or default
    if value not in allowed:
        raise ValueError(f"{variable} must be one of {', '.join(allowed)}, got {value!r}")
    return value
