"""The passes over the jaxpr of a program, in their order."""

from collections.abc import Sequence
from typing import Any

from jax_tensorarray._lowering import expand


def rewritten(jaxpr: Any, platforms: Sequence[str] = (), is_compiled_next: bool = False, divided: bool = False) -> Any:
    """Return the program as it is lowered for these platforms. One without ops of ours is left as it is."""
    if not expand.needs_passes(jaxpr):
        return jaxpr
    return expand.expanded(jaxpr, with_options=not divided)
