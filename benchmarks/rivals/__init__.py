"""Every rival, by environment. A module here has `prepare(case, rival, derivative, T, row)` and `versions()`."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Unsupported(Exception):
    """A rival cannot do a case, which is a result and not a failure."""


class Prepared(NamedTuple):
    """A case that is ready to be timed."""

    run: Callable[[], Any]  # returns when the work is done
    answer: Callable[[Any], list[Any]]  # NumPy arrays, from what `run` returns
    compile: Callable[[], float] | None = None  # seconds of one more compilation, from nothing
    compiles_on_call: bool = False
    compile_seconds: float | None = None
    temp_bytes: int | None = None
    copies: int | None = None  # of at least a whole buffer, in the loops of the optimised HLO
    resident: bool = True  # whether what a run adds to the process says anything
