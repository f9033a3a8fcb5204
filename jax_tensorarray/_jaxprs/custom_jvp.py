"""`ta_custom_jvp`: a function with a derivative rule. `jax.vmap` gives its results and tangents the same batch axes.

With a `jax.custom_jvp`, `jax.vmap` takes the batch axes of the results from the function. If JAX differentiates the
batched function later, such as in the body of a scan, the derivative rule may use other axes, or batch results that the
function shares among all examples. Then the loop around it, or the transpose of the loop, raises an error (jax 0.10.2
to 0.12). In this primitive the function decides which results have a batch axis, always axis 0, and the rule follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.axis import Axis, axes, names_axis
from jax_tensorarray._jaxprs.jaxprs import flagged, is_any_zero, merge
from jax_tensorarray._ops.primitive import is_zero, nonzero_transpose, to_front, zero_tangent
from jax_tensorarray._types import Array, Equation


class Rule:
    """The derivative of a function, `call`, which is a closed jaxpr."""

    def jvp(self, call: Any, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        """Return the results and their tangents.

        Some tangents are a `SymbolicZero`. Those of integers may be zeros of the dtype float0.
        """
        raise NotImplementedError

    def batched(self, axis: Axis, call: Any, operands: Sequence[bool], results: Sequence[bool]) -> "Rule":
        """Return the rule for all examples. The flagged operands and results of `call` have a batch axis."""
        raise NotImplementedError

    def of_some(self, results: Sequence[bool]) -> "Rule":
        """Return the rule for the function of the flagged results."""
        raise NotImplementedError

    def checked(self, call: Any, errors_in: int, errors_out: int) -> "Rule":
        """Return the rule for a `call` with the parts of an error as its first operands and results."""
        raise NotImplementedError


class OfCall(Rule):
    """The derivatives of the call, evaluated by other equations, also after `jax.vmap` of the call."""

    def jvp(self, call: Any, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        return jaxprs.jvp_with_zeros(lambda *args: self.evaluate(call, args), primals, tangents)

    def evaluate(self, call: Any, args: Sequence[Array]) -> list[Array]:
        """Return the results of the jaxpr, with other derivatives."""
        raise NotImplementedError

    def batched(self, axis: Axis, call: Any, operands: Sequence[bool], results: Sequence[bool]) -> Rule:
        return self

    def of_some(self, results: Sequence[bool]) -> Rule:
        return self

    def checked(self, call: Any, errors_in: int, errors_out: int) -> Rule:
        return self


@dataclass(frozen=True, eq=False)
class As(Rule):
    """The derivatives of another function that computes the same.

    `jax.vmap` batches that function before we differentiate it, as JAX does without a rule. The other order fails:
    `jax.vmap` of a linear `cond` with a predicate per example has no transpose.
    """

    g: Callable[..., Sequence[Array]]

    def jvp(self, call: Any, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        return jaxprs.jvp_with_zeros(self.g, primals, tangents)

    def batched(self, axis: Axis, call: Any, operands: Sequence[bool], results: Sequence[bool]) -> Rule:
        return As(axis.vmap_to(self.g, operands, results))

    def of_some(self, results: Sequence[bool]) -> Rule:
        return As(lambda *args: flagged(self.g(*args), results))

    def checked(self, call: Any, errors_in: int, errors_out: int) -> Rule:
        return As(lambda *args: [*jaxprs.function(call)(*args)[:errors_out], *self.g(*args[errors_in:])])


@dataclass(frozen=True, eq=False)
class By(Rule):
    """A rule of a user: a function of primals and tangents."""

    rule: Callable[[Sequence[Array], Sequence[Any]], Any]

    def jvp(self, call: Any, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        return self.rule(primals, tangents)

    def batched(self, axis: Axis, call: Any, operands: Sequence[bool], results: Sequence[bool]) -> Rule:
        types = list(call.in_avals)

        def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
            nonzero = [not isinstance(t, SymbolicZero) for t in tangents]
            zeros = [SymbolicZero(t.to_tangent_aval()) for t in types]
            has_dot: list[bool] = []

            def of_one(*args: Array) -> list[Array]:
                outs, dots = self.rule(args[: len(types)], merge(args[len(types) :], nonzero, zeros))
                has_dot[:] = [not is_any_zero(dot) for dot in dots]
                return [*outs, *(dot if there else jnp.float32(0) for dot, there in zip(dots, has_dot, strict=True))]

            of_all = axis.vmap_to(of_one, [*operands, *flagged(operands, nonzero)], [*results, *results])
            every = of_all(*primals, *flagged(tangents, nonzero))
            outs, dots = every[: len(results)], every[len(results) :]
            return outs, [dot if there else zero_tangent(x) for x, dot, there in zip(outs, dots, has_dot, strict=True)]

        return By(rule)

    def of_some(self, results: Sequence[bool]) -> Rule:
        return By(lambda primals, tangents: [flagged(x, results) for x in self.rule(primals, tangents)])

    def checked(self, call: Any, errors_in: int, errors_out: int) -> Rule:
        def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
            error = jaxprs.function(call)(*primals)[:errors_out]
            outs, dots = self.rule(primals[errors_in:], tangents[errors_in:])
            return [*error, *outs], [*map(zero_tangent, error), *dots]

        return By(rule)


# Operands and results are those of `call_jaxpr`.
ta_custom_jvp_p = Primitive("ta_custom_jvp")
ta_custom_jvp_p.multiple_results = True


def with_rule(jaxpr: Jaxpr, operands: Sequence[Array], rule: Rule) -> list[Array]:
    """Run a closed jaxpr with the derivative of a rule. Only with a rule `OfCall` may its consts be tracers."""
    if isinstance(rule, OfCall):
        jaxpr, consts = _compat.lifted(jaxpr)
        operands = [*consts, *operands]
    outs: list[Array] = ta_custom_jvp_p.bind(*operands, call_jaxpr=jaxpr, rule=rule)
    return outs


def by(jaxpr: Jaxpr, operands: Sequence[Array], rule: Callable[[Sequence[Array], Sequence[Any]], Any]) -> list[Array]:
    """Run a closed jaxpr, whose consts may be tracers, with a rule of primals and tangents."""
    jaxpr, consts = _compat.lifted(jaxpr)
    n = len(consts)
    of_all = By(lambda primals, tangents: rule(primals[n:], tangents[n:])) if n else By(rule)
    return with_rule(jaxpr, [*consts, *operands], of_all)


def differentiated_as(g: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with the derivatives of `g`. Both compute the same."""

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)

        def flat(*leaves: Array) -> list[Array]:
            return jax.tree.leaves(g(*jax.tree.unflatten(tree, leaves)))

        jaxpr, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), with_rule(jaxpr, leaves, As(flat)))

    return call


def _run(*operands: Array, call_jaxpr: Any, rule: Rule) -> list[Array]:
    return jaxprs.function(call_jaxpr)(*operands)


def _abstract_eval(*avals: Any, call_jaxpr: Any, rule: Rule) -> Any:
    return list(call_jaxpr.out_avals), call_jaxpr.effects


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, call_jaxpr: Any, rule: Rule) -> Any:
    zeros = [SymbolicZero(t.aval) if is_zero(t) else t for t in tangents]
    outs, dots = rule.jvp(call_jaxpr, primals, zeros)
    return list(outs), [zero_tangent(x) if is_any_zero(dot) else dot for x, dot in zip(outs, dots, strict=True)]


def _transpose(cts: Sequence[Any], *operands: Any, call_jaxpr: Any, rule: Rule) -> Any:
    linear = [ad.is_undefined_primal(x) for x in operands]
    has_ct = [not is_zero(ct) for ct in cts]

    def f(*some: Array) -> list[Array]:
        return flagged(_run(*merge(some, linear, operands), call_jaxpr=call_jaxpr, rule=rule), has_ct)

    transposed = jax.linear_transpose(f, *(x.aval for x in flagged(operands, linear)))
    return merge(transposed(flagged(cts, has_ct)), linear, [None] * len(operands))


def _batch(axis_data: Any, args: Sequence[Array], dims: Sequence[Any], *, call_jaxpr: Any, rule: Rule) -> Any:
    axis, flags = Axis(axis_data.name, axis_data.size, axis_data.spmd_name), [d is not None for d in dims]
    if not any(flags) and not names_axis(axis.name, [call_jaxpr]):
        outs = ta_custom_jvp_p.bind(*args, call_jaxpr=call_jaxpr, rule=rule)
        return outs, [None] * len(outs)
    args = [x if d is None else to_front(x, d, axis.size) for x, d in zip(args, dims, strict=True)]
    batched = axis.batched_outputs(call_jaxpr, flags)
    call = axis.vmap_to(jaxprs.function(call_jaxpr), flags, batched)
    of_all = rule.batched(axis, call_jaxpr, flags, batched)
    return with_rule(jax.make_jaxpr(call)(*args), args, of_all), axes(batched)


def _without_unused(live: Sequence[bool], eqn: Equation) -> tuple[list[bool], Any]:
    call, rule = eqn.params["call_jaxpr"], eqn.params["rule"]
    call, operands = jaxprs.part_of(call, tuple(live), (True,) * len(eqn.invars))  # the rule may use all operands
    params = {"call_jaxpr": call, "rule": rule if all(live) else rule.of_some(live)}
    return operands, eqn.replace(outvars=flagged(eqn.outvars, live), params=params, effects=call.effects)


def _checked(
    jaxpr: Jaxpr, operands: Sequence[Array], errors_in: int, errors_out: int, *, call_jaxpr: Any, rule: Rule
) -> Any:
    """Run the call under `checkify`.

    JAX's rule for a `jax.custom_jvp` returns as many parts of an error as it gets. So it fails in the derivative of
    `jax.jit` or `jax.checkpoint` of a call that adds some (jax 0.10.2 to 0.12).
    """
    return with_rule(jaxpr, operands, rule.checked(jaxpr, errors_in, errors_out))


_compat.lowers_its_bodies(ta_custom_jvp_p)
_compat.checked_inside(ta_custom_jvp_p, "call_jaxpr", _checked)
ta_custom_jvp_p.def_impl(_run)
ta_custom_jvp_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[ta_custom_jvp_p] = _jvp
ad.primitive_transposes[ta_custom_jvp_p] = nonzero_transpose(_transpose)
batching.fancy_primitive_batchers[ta_custom_jvp_p] = _batch
_compat.eliminates_dead_code(ta_custom_jvp_p, _without_unused)
mlir.register_lowering(ta_custom_jvp_p, mlir.lower_fun(_run, multiple_results=True))
