"""Find what makes a loop quadratic: the whole buffers that it copies in every step."""

from jax_tensorarray.inspect._copies import LoopCopies, LoopCopy, loop_copies
from jax_tensorarray.inspect._explain import Explained, Explanation, explain
from jax_tensorarray.inspect._watch import LoopCopyError, Report, forbid_copies, watch

__all__ = [
    "Explained",
    "Explanation",
    "LoopCopies",
    "LoopCopy",
    "LoopCopyError",
    "Report",
    "explain",
    "forbid_copies",
    "loop_copies",
    "watch",
]
