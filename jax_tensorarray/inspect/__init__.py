"""Find what makes a loop quadratic: the whole buffers that it copies in every step."""

from jax_tensorarray.inspect._copies import LoopCopies, LoopCopy, loop_copies
from jax_tensorarray.inspect._watch import LoopCopyError, Report, forbid_copies, watch

__all__ = ["LoopCopies", "LoopCopy", "LoopCopyError", "Report", "forbid_copies", "loop_copies", "watch"]
