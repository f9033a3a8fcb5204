"""`jax.checkpoint`: the primitives in its policies, and the parameters of its equations."""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive, primitives

from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Array


def asks_policies(primitive: Primitive) -> None:
    """Make `jax.checkpoint` ask its policy whether to save the results of `primitive`.

    The next implementation of `jax.checkpoint`, now under JAX_REMAT3, asks only about primitives with a rule in a
    private table. Without it `save_reads` saves nothing under that setting, and each step stores whole buffers.
    """
    private = private_names("interpreters.remat", "rules", "reduce_precision")
    merging = private_names("ad_checkpoint", "primal_left_tangent_right")
    if private is None or merging is None:
        return
    rules, reduce_precision = private
    (with_tangent_of,) = merging

    def rule(trace: Any, *operands: Array, **params: Any) -> Any:
        run = functools.partial(primitive.bind, **params)
        results = run(*operands)
        policy = getattr(trace, "policy", trace)  # 0.10 passes the policy itself
        decision = policy is not None and policy(primitive, *map(jax.typeof, operands), **params)
        saved: Any = ()
        if is_saved(decision):
            saved = results = jax.tree.map(reduce_precision, results)

        def again(saved: Any, *operands: Array) -> Any:
            recomputed = run(*operands)
            is_nothing = isinstance(saved, tuple) and not saved
            return recomputed if is_nothing else jax.tree.map(with_tangent_of, saved, recomputed)

        if jax.__version_info__ < (0, 12):
            return results, functools.partial(again, saved)
        return results, saved, again

    rules[primitive] = rule


def is_saved(decision: Any) -> bool:
    """Return whether a policy answers "save". Only the name of its class is public."""
    return decision is True or type(decision).__name__ == "SaveableType"


#: The name of the primitive of `jax.checkpoint`. Under JAX_REMAT3 it is "call_hi_primitive", which has other uses, too.
CHECKPOINT = primitives.remat_p.name


def checkpoint_of(params: dict[str, Any]) -> tuple[Any, Any, bool | tuple[bool, ...]] | None:
    """Return the jaxpr, the policy and `prevent_cse` of a checkpoint from its parameters, or None for others.

    Under JAX_REMAT3 they are attributes of an object, which has no `prevent_cse` before 0.11.
    """
    params = vars(params["_prim"]) if "_prim" in params else params
    if "jaxpr" not in params or "policy" not in params:
        return None
    return params["jaxpr"], params["policy"], params.get("prevent_cse", True)
