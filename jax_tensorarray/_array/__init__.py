"""TensorArray: the class, and the representations of its rows.

`tensorarray` has the class. Its methods check their arguments and call `Rows`, the interface in `rows`. The
representations `stacked` and `ragged` implement it, and `making` has their constructors. Outside of `jit` both hold a
version of the rows in `history`. `in_loops` prepares arrays for loops, `checks` converts arguments, and `pytree` and
`flax` register the class with JAX and flax.
"""

from jax_tensorarray._array import pytree  # registers the class, also for pickle

__all__ = ["pytree"]
