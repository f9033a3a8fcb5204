"""Programs, a module for each family."""

from benchmarks.harm.program import PROGRAMS
from benchmarks.harm.programs import (  # noqa: F401
    buffers,
    graphs,
    learning,
    linear_algebra,
    reports,
    sequences,
    shared,
    simulations,
    sorting,
    tables,
    views,
    whole_arrays,
)

__all__ = ["PROGRAMS"]
