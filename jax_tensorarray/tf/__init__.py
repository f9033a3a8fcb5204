"""The names of TensorFlow, with its arguments in its order: a port begins with `from jax_tensorarray import tf`."""

from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray.tf import nest
from jax_tensorarray.tf._loops import foldl, foldr, map_fn, scan, while_loop

__all__ = ["TensorArray", "foldl", "foldr", "map_fn", "nest", "scan", "while_loop"]
