"""The errors with which an array or a loop makes `growing` try a larger bound."""

from jax_tensorarray import _contexts

#: A part of the text of each error that a larger bound cures.
CURED = "the bound of growing"


class NeedsMoreError(ValueError):
    """A program needs a larger bound, and tracing shows it."""


def needs_more(what: str) -> NeedsMoreError:
    return NeedsMoreError(f"{what} ({CURED} is {_contexts.bound.value})")
