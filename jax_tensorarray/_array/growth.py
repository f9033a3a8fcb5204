"""The errors by which an array or a loop asks `growing` for a larger bound."""

from jax_tensorarray import _contexts

#: Stands in the text of each error that a larger bound cures.
CURED = "the bound of growing"


class NeedsMoreError(ValueError):
    """The traced program needs a larger bound, which is known before it runs."""


def needs_more(what: str) -> NeedsMoreError:
    return NeedsMoreError(f"{what} ({CURED} is {_contexts.bound.value})")
