"""HiJAX primitives, which JAX binds by one primitive, `HiPrim` (until 0.10 `VJPHiPrimitive`)."""

from typing import Any

from jax.experimental import hijax

from jax_tensorarray._types import Equation

_BASE: Any = getattr(hijax, "HiPrim" if hasattr(hijax, "HiPrim") else "VJPHiPrimitive")


def has_linearization(eqn: Equation) -> bool:
    """Return whether `jax.linearize` has a rule for an equation: a HiJAX primitive may have one for `jax.vjp` only.

    JAX's own loops use that rule under `jax.vjp`. A loop of this library always linearizes a step.
    """
    hi = eqn.params.get("_prim")
    return not isinstance(hi, _BASE) or type(hi).lin is not _BASE.lin


def name_of_primitive(eqn: Equation) -> str:
    """Return the author's name of a primitive."""
    hi = eqn.params.get("_prim")
    return type(hi).__name__ if isinstance(hi, _BASE) else str(eqn.primitive.name)
