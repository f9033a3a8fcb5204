"""Register a loop by one call. We trace each of its rules once per body, and evaluate the trace.

A rule returns new loops with new bodies. Outside of jit, JAX compiles an equation once for its parameters. So for the
same loop, a rule must return the same objects as bodies: they are in the trace, which we keep as long as the body.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jax_tensorarray import _compat, _faults
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.axis import Axis, axes, names_axis
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._loops import linearize, masking
from jax_tensorarray._ops.primitive import is_zero, nonzero_transpose, run_alone, to_front, zero_tangent
from jax_tensorarray._types import Array, Equation


def with_batch_axis(xs: Sequence[Array], batched: Sequence[bool], out_flags: Sequence[bool], size: int) -> list[Array]:
    """Add a batch axis to the `xs` that lack it, if they are flagged in `out_flags`."""
    return [
        jnp.broadcast_to(x, (size, *jnp.shape(x))) if out and not is_batched else x
        for x, is_batched, out in zip(xs, batched, out_flags, strict=False)
    ]


class Pruned(NamedTuple):
    """A loop with fewer operands and results, which are flagged, its parameters and its effects."""

    operands: list[bool]
    results: list[bool]
    params: dict[str, Any]
    effects: Any

    def equation(self, eqn: Equation) -> Any:
        """Return the equation of this loop from that of the whole loop."""
        invars, outvars = flagged(eqn.invars, self.operands), flagged(eqn.outvars, self.results)
        return eqn.replace(invars=invars, outvars=outvars, params=self.params, effects=self.effects)


#: Prunes a loop, from the flags of the live results, the number of its operands, and its parameters.
PrunedFor = Callable[..., Pruned]


def _without_unused(pruned_for: PrunedFor) -> Callable[[Sequence[bool], Equation], tuple[list[bool], Any]]:
    """Return the rule for dead code elimination."""

    def rule(live: Sequence[bool], eqn: Equation) -> tuple[list[bool], Any]:
        part = pruned_for(live, len(eqn.invars), **eqn.params)
        return part.operands, part.equation(eqn)

    return rule


def _transpose_of_pruned(pruned_for: PrunedFor, transpose: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a transpose to results without cotangents: remove them from the loop first.

    The transpose would use zeros for them, and zero times infinity is NaN.
    """

    def rule(cts: Sequence[Any], *operands: Any, **params: Any) -> Any:
        part = pruned_for([not is_zero(ct) for ct in cts], len(operands), **params)
        operand_cts = transpose(flagged(cts, part.results), *flagged(operands, part.operands), **part.params)
        return merge(
            operand_cts, part.operands, [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
        )

    return rule


def register(
    primitive: Primitive,
    *,
    run: Callable[..., Any],
    abstract_eval: Callable[..., Any],
    bodies: Callable[[dict[str, Any]], list[registry.Body]],
    pruned_for: PrunedFor,
    batch: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    run_checked: Callable[..., Any] | None = None,
    known_part: Callable[..., Pruned | None] = lambda unknown, **params: None,
    tapes: Callable[[Equation], tuple[Sequence[Var], Any]] | None = None,
    mask: Callable[..., list[masking.MaskedValue]] | None = None,
) -> None:
    """Register a loop: all rules of its primitive, in JAX and in this library.

    Args:
        primitive: the primitive. Its parameters have the jaxpr of a step.
        run: the loop in plain JAX, a function of its operands and parameters, for evaluation and lowering.
        abstract_eval: maps types and parameters to the types of the results and the effects.
        bodies: the entry of the registry, from the parameters.
        pruned_for: see `PrunedFor`. Dead code elimination uses it, and so does the transpose.
        batch: see `batching_rule`.
        jvp: the derivative, from primals and tangents.
        transpose: the transpose, from the cotangents and operands that `pruned_for` leaves.
        run_checked: the loop that `checkify` checks, if it is not `run`.
        known_part: maps flags of the unknown operands, and parameters, to the loop of the results that do not depend on
            them, or to None.
        tapes: maps an equation to the tapes among its results and the number of their steps: see `linearize`.
        mask: the function by which a `Masker` runs an equation of the loop: see `masking`. Only loops with it take part
            in policies of `jax.checkpoint`.
    """
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(run_alone, primitive))
    primitive.def_effectful_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    _compat.lowers_its_bodies(primitive)
    _compat.checked_as(primitive, run if run_checked is None else run_checked)
    _compat.eliminates_dead_code(primitive, _without_unused(pruned_for))
    rule = _faults.named(batching_rule(primitive, batch), f"jax.vmap of a {_name(primitive)}")
    batching.fancy_primitive_batchers[primitive] = rule
    registry.ENTRIES[primitive.name] = registry.Entry("rules" if mask is None else "loop", bodies)
    ad.primitive_jvps[primitive] = _faults.named(_jvp(jvp, primitive), f"the derivative of a {_name(primitive)}")
    of_pruned = _transpose(_transpose_of_pruned(pruned_for, transpose), primitive)
    ad.primitive_transposes[primitive] = _faults.named(of_pruned, f"the gradient of a {_name(primitive)}")
    if tapes is not None:
        linearize.TAPES[primitive] = tapes
    if mask is not None:
        _compat.asks_policies(primitive)
        pe.custom_partial_eval_rules[primitive] = functools.partial(_partial_eval, primitive, known_part)
        rule = functools.partial(_partial_eval_in_checkpoint, known_part)
        pe.partial_eval_jaxpr_custom_rules[primitive] = rule
        masking.LOOPS[primitive.name] = mask


def _name(primitive: Primitive) -> str:
    return primitive.name.removeprefix("ta_")


def _body(primitive: Primitive, params: dict[str, Any]) -> Any:
    return registry.ENTRIES[primitive.name].bodies(params)[0].jaxpr


def _types(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(jax.typeof, values))


def _jvp(rule: Callable[..., Any], primitive: Primitive) -> Callable[..., Any]:
    @_compat.cached
    def traced(body: Any, params: Any, types: Sequence[Any], nonzero: Sequence[bool]) -> tuple[Any, list[bool]]:
        has_tangent = []

        def f(primals: list[Array], dots: list[Array]) -> list[Array]:
            outs, tangents = rule(primals, merge(dots, nonzero, [zero_tangent(x) for x in primals]), **dict(params))
            has_tangent.append([not is_zero(t) for t in tangents])
            return [*outs, *flagged(tangents, has_tangent[-1])]

        n = len(nonzero)
        return jax.make_jaxpr(f)(list(types[:n]), list(types[n:])), has_tangent[-1]

    def jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
        nonzero = tuple(not is_zero(t) for t in tangents)
        dots = flagged(tangents, nonzero)
        jaxpr, has_tangent = traced(_body(primitive, params), tuple(params.items()), _types([*primals, *dots]), nonzero)
        results = jaxprs.function(jaxpr)(*primals, *dots)
        outs = results[: len(has_tangent)]
        return outs, merge(results[len(has_tangent) :], has_tangent, [zero_tangent(x) for x in outs])

    return jvp


def _transpose(rule: Callable[..., Any], primitive: Primitive) -> Callable[..., Any]:
    @_compat.cached
    def traced(
        body: Any, params: Any, types: Sequence[Any], zero: Sequence[Any], linear: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        kinds = []

        def f(cts: list[Array], primals: list[Array]) -> list[Array]:
            all_cts = merge(cts, [z is None for z in zero], [None if z is None else ad.Zero(z) for z in zero])
            undefined = [None if t is None else ad.UndefinedPrimal(t) for t in linear]
            operands = merge(primals, [t is None for t in linear], undefined)
            results = rule(all_cts, *operands, **dict(params))
            kinds.append([ct if ct is None or is_zero(ct) else True for ct in results])
            return [ct for ct, kind in zip(results, kinds[-1], strict=True) if kind is True]

        n = sum(z is None for z in zero)
        return jax.make_jaxpr(f)(list(types[:n]), list(types[n:])), kinds[-1]

    def transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> Any:
        zero = tuple(ct.aval if is_zero(ct) else None for ct in cts)
        linear = tuple(x.aval if ad.is_undefined_primal(x) else None for x in operands)
        arrays = [ct for ct in cts if not is_zero(ct)] + [x for x in operands if not ad.is_undefined_primal(x)]
        jaxpr, kinds = traced(_body(primitive, params), tuple(params.items()), _types(arrays), zero, linear)
        return merge(jaxprs.function(jaxpr)(*arrays), [kind is True for kind in kinds], kinds)

    return nonzero_transpose(transpose)


def _partial_eval(
    primitive: Primitive, known_part: Callable[..., Pruned | None], trace: Any, *tracers: Any, **params: Any
) -> Any:
    """Run the known part of a loop, and trace the whole loop for the other results."""
    unknown = [not t.is_known() for t in tracers]
    part = known_part(unknown, **params) if any(unknown) else None
    # With all operands known this runs the loop.
    outs = trace.default_process_primitive(primitive, tracers, params)
    if part is None:
        return outs
    known_outs = primitive.bind(*(t.pval.get_known() for t in flagged(tracers, part.operands)), **part.params)
    return merge(known_outs, part.results, outs)


def _partial_eval_in_checkpoint(
    known_part: Callable[..., Pruned | None],
    policy: Any,
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    eqn: Equation,
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Apply the rule of `jax.checkpoint` for primitives without a rule, except for effects.

    JAX would save all results of a loop with effects, and drop results that only a `jax.debug.callback` uses.
    """
    n = len(eqn.outvars)
    residuals = [v for v, there in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    if any(unknown):
        part = known_part(unknown, **eqn.params)
        if part is None:
            return None, eqn, [True] * n, [True] * n, residuals
        return part.equation(eqn), eqn, [not is_known for is_known in part.results], [True] * n, residuals
    decision = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    if _compat.is_saved(decision):
        return eqn, None, [False] * n, [False] * n, []
    return eqn, eqn, [False] * n, [True] * n, residuals


def batching_rule(primitive: Primitive, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a batching rule of JAX from a rule that we trace once per body.

    `rule(axis, args, batched, **params)` returns the results and flags of the batched ones. Batch axes come first.
    """

    @_compat.cached
    def traced(body: Any, axis: Axis, params: Any, types: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
        out_axes = []

        def f(*args: Array) -> Any:
            args = tuple(x if d is None else to_front(x, d, axis.size) for x, d in zip(args, dims, strict=True))
            outs, batched = rule(axis, args, [d is not None for d in dims], **dict(params))
            out_axes.append(axes(batched))
            return outs

        return jax.make_jaxpr(f)(*types), out_axes[-1]

    def batch(axis_data: Any, args: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
        axis = Axis(axis_data.name, axis_data.size, axis_data.spmd_name)
        if all(d is None for d in dims) and not names_axis(
            axis.name, [_body(primitive, params), *jaxprs.jaxprs_in(params)]
        ):
            outs = primitive.bind(*args, **params)
            return outs, [None] * len(outs)
        jaxpr, out_dims = traced(_body(primitive, params), axis, tuple(params.items()), _types(args), tuple(dims))
        return jaxprs.function(jaxpr)(*args), out_dims

    return batch
