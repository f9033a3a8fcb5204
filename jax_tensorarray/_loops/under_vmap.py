"""`jax.vmap` of JAX's own `cond`, `switch` and `while_loop` if their predicates differ from example to example.

JAX runs all branches, and the steps of finished examples, and selects between the results: of a buffer, all rows. Here
rows are written only for the examples that take a branch or go on, so the results are the same and no buffer is
selected. A conditional or loop without row ops, or with effects, is left to JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import batching

from jax_tensorarray._loops import jaxprs, masking, rules
from jax_tensorarray._loops.while_ import while_

Array = Any


def _cond(axis: rules.Axis, args: Sequence[Array], dims: Sequence[Any], *, branches: Any, **_: Any) -> Any:
    def every_branch(index: Array, *operands: Array) -> list[Array]:
        return masking.every_branch(branches, index, operands)

    return axis.vmap(every_branch, dims, 0)(*args), [0] * len(branches[0].out_avals)


def _while(
    axis: rules.Axis,
    args: Sequence[Array],
    dims: Sequence[Any],
    *,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
) -> Any:
    def loop(*args: Array) -> list[Array]:
        n = cond_nconsts + body_nconsts
        consts, carry = (args[:cond_nconsts], args[cond_nconsts:n]), args[n:]
        source = "a lax.while_loop under jax.vmap"
        return while_(*consts, carry, cond=cond_jaxpr, body=body_jaxpr, max_steps=None, source=source, counts=False)[0]

    return axis.vmap(loop, dims, 0)(*args), [0] * len(body_jaxpr.out_avals)


def _cond_differs(axis: rules.Axis, batched: Sequence[bool], **_: Any) -> bool:
    return batched[0]


def _while_differs(
    axis: rules.Axis,
    batched: Sequence[bool],
    *,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
) -> bool:
    n = cond_nconsts + body_nconsts
    of_cond, of_body, carry = batched[:cond_nconsts], batched[cond_nconsts:n], batched[n:]
    carry = jaxprs.fixed_point(body_jaxpr, of_body, carry, axis.differing)
    (differs,) = axis.differing(cond_jaxpr, [*of_cond, *carry])
    return differs


def _is_ours(params: dict[str, Any]) -> bool:
    """Return whether rows are read or written inside, and nothing else is done than to compute and to communicate."""
    bodies = list(jaxprs.jaxprs_in(params))
    effects = {effect for jaxpr in bodies for effect in jaxpr.effects}
    if "branches_platforms" in params or any(type(effect).__name__ != "NamedAxisEffect" for effect in effects):
        return False
    return any(map(jaxprs.has_row_ops, bodies))


def _let_come_here(
    primitive: Primitive, rule: Callable[..., Any], differs: Callable[..., bool], body_of: Callable[[Any], Any]
) -> None:
    table = batching.fancy_primitive_batchers
    jaxs_own, ours = table[primitive], rules.batching_rule(primitive, rule, body_of)

    def batch(axis_data: Any, args: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
        axis = rules.Axis(axis_data.name, axis_data.size, axis_data.spmd_name)
        is_ours = _is_ours(params) and differs(axis, [d is not None for d in dims], **params)
        return (ours if is_ours else jaxs_own)(axis_data, args, dims, **params)

    table[primitive] = batch


def install() -> None:
    """Have `jax.vmap` of JAX's own control flow try these rules first."""
    _let_come_here(jax_primitives.cond_p, _cond, _cond_differs, lambda params: params["branches"][0])
    _let_come_here(jax_primitives.while_p, _while, _while_differs, lambda params: params["body_jaxpr"])
