"""Find what makes a loop quadratic: the whole buffers that it copies in every step."""

from jax_tensorarray.doctor._arguments import ArgumentCopy
from jax_tensorarray.doctor._copies import LoopCopies, LoopCopy, loop_copies
from jax_tensorarray.doctor._explain import Explained, Explanation, explain
from jax_tensorarray.doctor._growth import Growth, GrowthError, forbid_growth, growth
from jax_tensorarray.doctor._kept import Kept
from jax_tensorarray.doctor._passes import passes
from jax_tensorarray.doctor._report import Report
from jax_tensorarray.doctor._watch import LoopCopyError, forbid_copies, watch

__all__ = [
    "ArgumentCopy",
    "Explained",
    "Explanation",
    "Growth",
    "GrowthError",
    "Kept",
    "LoopCopies",
    "LoopCopy",
    "LoopCopyError",
    "Report",
    "explain",
    "forbid_copies",
    "forbid_growth",
    "growth",
    "loop_copies",
    "passes",
    "watch",
]
