"""The default bound that `growing` gives to arrays and loops, and how a full one asks for more."""

import jax

#: The present bound while such a function is traced, else None. JAX's caches of traced functions know it.
bound = jax.make_user_context(None)

#: Stands in the text of each error that a larger bound cures.
CURED = "the bound of growing"


class NeedsMoreError(ValueError):
    """What is traced needs a larger bound, which is known before it runs."""


def needs_more(what: str) -> NeedsMoreError:
    return NeedsMoreError(f"{what} ({CURED} is {bound.value})")
