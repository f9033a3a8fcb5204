"""Loops that are differentiated in reverse at the cost of the steps they took."""

from jax_tensorarray._loops import derivatives  # registers the rules of `ta_while`

__all__ = ["derivatives"]
