"""TensorArray: the class, and what holds its rows.

`tensorarray` has the class, whose methods check what users pass and forward it to `Rows`, the interface in `rows`. Each
representation implements it, `stacked` and `ragged`, and `making` makes them. Outside of `jit` both hold a version of
the rows that `history` keeps. `in_loops` prepares arrays for loops, `checks` converts what users pass, and `pytree` and
`flax` let JAX and flax take arrays apart.
"""

from jax_tensorarray._array import pytree  # registers the class, also for an array that is unpickled

__all__ = ["pytree"]
