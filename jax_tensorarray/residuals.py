"""The values of `residuals=`: each says which values of a loop's steps reverse mode stores."""

from jax_tensorarray._in_place.choices import explain
from jax_tensorarray._loops.auto import Auto, Undo
from jax_tensorarray._loops.checkpoint import Checkpoint
from jax_tensorarray._loops.inverse import Inverse
from jax_tensorarray._loops.recompute import Recompute
from jax_tensorarray._loops.strategy import Choice, Strategy, Tape

__all__ = ["Auto", "Checkpoint", "Choice", "Inverse", "Recompute", "Strategy", "Tape", "Undo", "explain"]
