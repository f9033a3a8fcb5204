"""`jax.checkpoint`: what its policies are asked about, and how its equations look."""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive, primitives

from jax_tensorarray._compat.private import private_names

Array = jax.Array


def asks_policies(primitive: Primitive) -> None:
    """Have `jax.checkpoint` ask its policy whether to save the results of `primitive`.

    The next implementation of `jax.checkpoint`, now under JAX_REMAT3, asks only about primitives that have a rule in
    a private table. Without it `save_reads` saves nothing under that setting, and each step keeps whole buffers.
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
        kept: Any = ()
        if is_saved(decision):
            kept = results = jax.tree.map(reduce_precision, results)

        def again(kept: Any, *operands: Array) -> Any:
            made = run(*operands)
            return made if isinstance(kept, tuple) and not kept else jax.tree.map(with_tangent_of, kept, made)

        if jax.__version_info__ < (0, 12):
            return results, functools.partial(again, kept)
        return results, kept, again

    rules[primitive] = rule


def is_saved(decision: Any) -> bool:
    """Return whether a policy's answer means "save". Only the name of its class says so in public."""
    return decision is True or type(decision).__name__ == "SaveableType"


#: The name of the primitive that `jax.checkpoint` makes. Under JAX_REMAT3 it is "call_hi_primitive", for others too.
CHECKPOINT = primitives.remat_p.name


def checkpoint_of(params: dict[str, Any]) -> tuple[Any, Any, bool | tuple[bool, ...]] | None:
    """Return the jaxpr, the policy and `prevent_cse` of a checkpoint from its parameters; None if it is none.

    Under JAX_REMAT3 they are attributes of an object, which has no `prevent_cse` before 0.11.
    """
    params = vars(params["_prim"]) if "_prim" in params else params
    if "jaxpr" not in params or "policy" not in params:
        return None
    return params["jaxpr"], params["policy"], params.get("prevent_cse", True)
