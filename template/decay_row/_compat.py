"""Access to parts of JAX without a documented name, each with its reason. Nothing else may depend on such a name."""

from typing import Any

import jax
from jax import lax


def varying_alike(*operands: Any) -> tuple[Any, ...]:
    """Return the operands, each varying over all axes of a `shard_map` over which at least one of them varies.

    JAX's own primitives do this by themselves. The type of an array says over which axes it varies, in an attribute
    without a documented name. Where a version lacks it, `shard_map` needs `check_vma=False`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return operands
    axes: list[frozenset[Any]] = [getattr(_manual(x), "varying", frozenset()) for x in operands]
    missing = [tuple(sorted(frozenset().union(*axes) - own, key=str)) for own in axes]
    return tuple(lax.pcast(x, m, to="varying") if m else x for x, m in zip(operands, missing, strict=True))


def _manual(x: Any) -> Any:
    return getattr(jax.typeof(x), "mat", None)
