"""What reverse mode stores of the steps of a loop: the values of `residuals=`."""

from jax_tensorarray._in_place.choices import explain
from jax_tensorarray._loops.auto import Auto, Undo
from jax_tensorarray._loops.checkpoint import Checkpoint
from jax_tensorarray._loops.inverse import Inverse
from jax_tensorarray._loops.recompute import Recompute
from jax_tensorarray._loops.strategy import Strategy, Tape

__all__ = ["Auto", "Checkpoint", "Inverse", "Recompute", "Strategy", "Tape", "Undo", "explain"]
