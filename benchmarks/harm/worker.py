"""What a process measures. It runs everything in the thread that calls: CPU time of another is counted late."""

from collections.abc import Sequence

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)

from benchmarks.harm.measure import Effort, Row, rows_of
from benchmarks.harm.programs import PROGRAMS


def rows(number: int, variants: Sequence[str], effort: Effort) -> list[Row] | str:
    """What is measured of a program, or its name if it needs a library that is not installed."""
    try:
        return list(rows_of(PROGRAMS[number], variants, effort))
    except ImportError:
        return PROGRAMS[number].name
