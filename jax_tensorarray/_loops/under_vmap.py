"""`jax.vmap` of JAX's own `cond`, `switch` and `while_loop` with batched predicates.

    b = select(p, ta_write(b, i, x), b)           # JAX: all branches run, and a select touches all rows
    # becomes
    b = ta_write(b, i, x, where=p)

JAX runs all branches, and steps of finished examples, and selects among the results. By `masking` we write rows only in
the examples that take a branch or go on. The results are the same, without a select of buffers. We leave to JAX a
conditional or loop without row ops or with effects, and `lax.platform_dependent`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import batching

from jax_tensorarray import _compat, _faults
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.axis import Axis, axes
from jax_tensorarray._loops import masking, rules
from jax_tensorarray._loops.while_ import Loop, of_jax
from jax_tensorarray._ops.primitive import no_mask_reaches
from jax_tensorarray._types import Array


def _cond(axis: Axis, args: Sequence[Array], batched: Sequence[bool], *, branches: Any, **_: Any) -> Any:
    def every_branch(index: Array, *operands: Array) -> list[Array]:
        return masking.every_branch(branches, index, operands)

    return axis.vmap(every_branch, axes(batched), 0)(*args), [True] * len(branches[0].out_avals)


def _while(axis: Axis, args: Sequence[Array], batched: Sequence[bool], **params: Any) -> Any:
    ours = of_jax(params, "a lax.while_loop under jax.vmap")

    def loop(*args: Array) -> list[Array]:
        return Loop(*ours["options"].split(args), **ours).bind()

    return axis.vmap(loop, axes(batched), 0)(*args), [True] * len(params["body_jaxpr"].out_avals)


def _has_batched_index(axis: Axis, batched: Sequence[bool], **_: Any) -> bool:
    return batched[0]


def _has_batched_predicate(axis: Axis, batched: Sequence[bool], **params: Any) -> bool:
    ours = of_jax(params, "")
    of_cond, of_body, carry = ours["options"].split(batched)
    carry = jaxprs.after_any_steps(carry, lambda carry: axis.batched_outputs(ours["body"], [*of_body, *carry]))
    (pred_batched,) = axis.batched_outputs(ours["cond"], [*of_cond, *carry])
    return pred_batched


def _is_ours(params: dict[str, Any]) -> bool:
    """Return whether a loop or conditional has no effects besides communication, and no branch for a platform."""
    return "branches_platforms" not in params and all(map(_compat.only_communicates, jaxprs.jaxprs_in(params)))


def _batching_rule(
    primitive: Primitive, rule: Callable[..., Any], has_batched_pred: Callable[..., bool]
) -> _compat.Replacement:
    table = batching.fancy_primitive_batchers
    jax_rule, our_rule = table[primitive], rules.batching_rule(primitive, rule)

    def batch(axis_data: Any, args: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
        axis = Axis(axis_data.name, axis_data.size, axis_data.spmd_name)
        has_rows = any(map(jaxprs.checks_rows, jaxprs.jaxprs_in(params)))
        if not has_rows or not has_batched_pred(axis, [d is not None for d in dims], **params):
            return jax_rule(axis_data, args, dims, **params)
        if _is_ours(params):
            try:
                return our_rule(axis_data, args, dims, **params)
            except Exception as error:
                return _faults.instead(error, lambda: jax_rule(axis_data, args, dims, **params))
        with no_mask_reaches():
            return jax_rule(axis_data, args, dims, **params)

    return _compat.Replacement(table, primitive, batch)


def batching_rules() -> list[_compat.Replacement]:
    """Return rules for JAX's own control flow. Without row ops, they call JAX's rules."""
    return [
        _batching_rule(jax_primitives.cond_p, _cond, _has_batched_index),
        _batching_rule(jax_primitives.while_p, _while, _has_batched_predicate),
    ]
