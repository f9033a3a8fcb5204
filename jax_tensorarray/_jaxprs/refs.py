"""Discharge refs (`jax.new_ref`), for `in_place` before it looks for rows, and in loops of this library.

    ref[i] = jnp.sin(ref[j])
    # becomes
    b = b.at[i].set(jnp.sin(b[j]))

JAX does so too before it compiles, but only after differentiation, where every read of a ref keeps all of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._types import Equation

Array = jax.Array


def as_arrays(jaxpr: Jaxpr) -> Any:
    """Return a closed jaxpr in which the refs that it creates are arrays. Refs among its inputs stay."""
    if not _compat.makes_refs(_compat.opened(jaxpr)) or jaxprs.any_equation(jaxpr, _is_rule_with_refs):
        return jaxpr
    try:
        return _compat.discharged(jaxpr)
    except NotImplementedError:  # some primitive in it has no such form
        return jaxpr


def _is_rule_with_refs(eqn: Equation) -> bool:
    """Return whether this is a `custom_vjp` with refs: as arrays, its result could not be differentiated."""
    return eqn.primitive is jax_primitives.custom_vjp_call_p and _compat.makes_refs(eqn)


def on_arrays(bind: Callable[..., Any], is_a_ref: Sequence[bool]) -> Callable[..., list[Array]]:
    """Return a function that takes arrays instead of refs, and returns their final contents after the results."""

    def f(*args: Array) -> list[Array]:
        given: list[Any] = [jax.new_ref(x) if flag else x for x, flag in zip(args, is_a_ref, strict=True)]
        outs = bind(*given)
        return [*outs, *(jax.freeze(x) for x, flag in zip(given, is_a_ref, strict=True) if flag)]

    return f
