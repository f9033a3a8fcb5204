"""Repair calls of functions too: `jit`, `checkpoint`, `custom_jvp`, `custom_vjp`, `shard_map`.

What a call specifies is kept: policies, derivative rules, specs. Loops inside of derivative rules are repaired as well.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jax_tensorarray import _compat
from jax_tensorarray._in_place.values import Value, as_written
from jax_tensorarray._loops import jaxprs
from jax_tensorarray._loops.jaxprs import flagged, merge
from jax_tensorarray.checkpoint_policies import save_reads

if TYPE_CHECKING:
    from jax_tensorarray._in_place.repair import Repair

Array = Any


def jit(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Inline the call, unless it has options.

    What is known of its operands is then known inside.
    """
    params = eqn.params
    if not jaxprs.has_default_options(params):
        return None
    return repair.evaluate(params["jaxpr"], operands)


def closed(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Evaluate the jaxpr that JAX has made of a body with refs."""
    return repair.evaluate(eqn.params["call_jaxpr"], operands)


def checkpoint(repair: "Repair", eqn: Any, operands: Sequence[Value], added: dict[int, Value]) -> list[Value] | None:
    """Keep rows that are read in addition to what the policy keeps: else each step keeps the buffers that it reads."""
    found = _compat.checkpoint_of(eqn)
    if found is None:
        return None
    inner, policy, prevent_cse = found
    policy = _with_rows(policy)
    if not isinstance(prevent_cse, bool):
        prevent_cse = (*prevent_cse, *[True] * len(added))
    inputs = as_written([*operands, *added.values()])
    f = repair.adding(inner, added)
    if "_prim" in eqn.params:
        return [Value(x) for x in jax.checkpoint(f, policy=policy, prevent_cse=prevent_cse)(*inputs)]
    jaxpr, consts = _compat.lifted(jax.make_jaxpr(f)(*map(jax.typeof, inputs)))
    if not isinstance(prevent_cse, bool):
        prevent_cse = (*[False] * len(consts), *prevent_cse)
    new = jaxpr if hasattr(inner, "consts") else _compat.opened(jaxpr)
    params = eqn.params | {"jaxpr": new, "policy": policy, "prevent_cse": prevent_cse}
    return [Value(x) for x in eqn.primitive.bind(*consts, *inputs, **params)]


def _with_rows(policy: Any) -> Any:
    def keeps(prim: Any, /, *args: Any, **params: Any) -> Any:
        kept = False if policy is None else policy(prim, *args, **params)
        return kept or save_reads(prim, *args, **params)

    return keeps


# --- derivatives of their own ----------------------------------------------------------------------------------
#
# JAX holds the rules as functions, which it calls with what it knows by then. So the derivative of the call is
# repaired instead: tracing it gives what the rule makes.


def custom_jvp(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value]:
    @jax.custom_jvp
    def f(*args: Array) -> list[Array]:
        return repair.function(eqn.params["call_jaxpr"], is_whole=True)(*args)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        nonzero = [not isinstance(t, SymbolicZero) for t in tangents]

        def derivative(primals: list[Array], dots: list[Array]) -> Any:
            def of(*some: Array) -> list[Array]:
                return jaxprs.bind(eqn, merge(some, nonzero, primals))

            outs, tangents = jax.jvp(of, flagged(primals, nonzero), dots)
            return outs, flagged(tangents, _are_inexact(outs))

        outs, found = repair.call(derivative, list(primals), flagged(tangents, nonzero))
        return outs, merge(found, _are_inexact(outs), _zeros(outs))

    f.defjvp(rule, symbolic_zeros=True)
    return [Value(x) for x in f(*as_written(operands))]


def custom_vjp(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    if eqn.params["symbolic_zeros"]:
        return None  # its rule asks which operands and results have derivatives, and only JAX knows

    @jax.custom_vjp
    def f(*args: Array) -> list[Array]:
        return repair.function(eqn.params["call_jaxpr"], is_whole=True)(*args)

    def forward(*args: Array) -> Any:
        nonzero = _are_inexact(args)

        def of(*args: Array) -> Any:
            def of_some(*some: Array) -> list[Array]:
                return jaxprs.bind(eqn, merge(some, nonzero, args))

            return jax.vjp(of_some, *flagged(args, nonzero))

        return repair.call(of, *args)

    def backward(pull: Callable[..., Any], cts: Sequence[Any]) -> tuple[Any, ...]:
        outs = [v.aval for v in eqn.outvars]

        def of(pull: Callable[..., Any], some: list[Array]) -> Any:
            return pull(merge(some, _are_inexact(outs), _zeros(outs)))

        found = repair.call(of, pull, flagged(cts, _are_inexact(outs)))
        nonzero = _are_inexact([v.aval for v in eqn.invars])
        return tuple(merge(found, nonzero, [None] * len(nonzero)))

    f.defvjp(forward, backward)
    return [Value(x) for x in f(*as_written(operands))]


def _are_inexact(arrays: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in arrays]


def _zeros(outs: Sequence[Any]) -> list[Any]:
    """Return the tangents of integers."""
    return [np.zeros(np.shape(x), jax.dtypes.float0) for x in outs]


# --- divided arguments -----------------------------------------------------------------------------------------


def shard_map(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value]:
    params = eqn.params
    f = jax.shard_map(
        repair.function(params["jaxpr"]),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return [Value(x) for x in f(*as_written(operands))]


INLINED = ("jit", "pjit", "closed_call", "eval_jaxpr")
OF_RULES = ("custom_jvp_call", "custom_vjp_call")

#: See `control.ADDING`.
ADDING: dict[str, Callable[["Repair", Any, Sequence[Value], dict[int, Value]], list[Value] | None]] = {
    p.name: checkpoint for p in _compat.CHECKPOINTS
}
RULES: dict[str, Callable[..., list[Value] | None]] = {
    "jit": jit,
    "pjit": jit,
    "closed_call": closed,
    "eval_jaxpr": closed,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "shard_map": shard_map,
    **ADDING,
}
