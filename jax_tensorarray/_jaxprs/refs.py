"""Discharge refs (`jax.new_ref`): in `in_place`, before it looks for rows, and in loops of this library.

    ref[i] = jnp.sin(ref[j])
    # becomes
    b = b.at[i].set(jnp.sin(b[j]))

JAX also discharges refs before it compiles, but after differentiation. Then every read has the whole ref as a residual.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._types import Array, Equation


def as_arrays(jaxpr: Jaxpr) -> Any:
    """Return a closed jaxpr in which the refs that it creates are arrays. Refs among its inputs stay."""
    if not _compat.makes_refs(_compat.opened(jaxpr)) or jaxprs.any_equation(jaxpr, _is_rule_with_refs):
        return jaxpr
    try:
        return _compat.discharged(jaxpr)
    except NotImplementedError:  # JAX has no rule for some primitive
        return jaxpr


def _is_rule_with_refs(eqn: Equation) -> bool:
    """Return whether this is a `custom_vjp` with refs. After discharge it would have no derivative."""
    return eqn.primitive is jax_primitives.custom_vjp_call_p and _compat.makes_refs(eqn)


def on_arrays(bind: Callable[..., Any], is_a_ref: Sequence[bool]) -> Callable[..., list[Array]]:
    """Return a function with arrays instead of refs. It returns their final contents after the results."""

    def f(*args: Array) -> list[Array]:
        refs: list[Any] = [jax.new_ref(x) if flag else x for x, flag in zip(args, is_a_ref, strict=True)]
        outs = bind(*refs)
        return [*outs, *(jax.freeze(x) for x, flag in zip(refs, is_a_ref, strict=True) if flag)]

    return f
