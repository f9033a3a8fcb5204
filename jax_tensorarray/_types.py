"""What every folder asks of the types of arrays."""

from collections.abc import Iterable
from typing import Any

INT32_MAX = 2**31 - 1


def bytes_of(types: Iterable[Any]) -> int:
    """Return the size in bytes of arrays of these types."""
    return sum(t.size * t.dtype.itemsize for t in types)
