"""Rewrite primitives of other libraries that JAX lowers by tracing a function.

    y = equinox_op[...] x
    # becomes
    y = equinox_op[in_place_jaxpr={...}] x     # another primitive of that name

Until the lowering JAX sees only the primitive, with the library's rules for derivatives and batches: often the library
has the primitive for these rules. So we replace the equation by one of another primitive. JAX lowers it by the
rewritten function, and its other rules rewrite and run those of the library.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._jaxprs.registry import Change
from jax_tensorarray._ops.primitive import is_zero
from jax_tensorarray._types import Array, Equation

#: JAX lowers its original_params primitives. Those of this library have entries in `registry`.
_NOT_FOREIGN = ("jax", "jax_tensorarray")


def lowered_as(eqn: Equation) -> dict[str, Any]:
    """Return the closed jaxprs that JAX lowers an equation to, by platform; "" is any other platform.

    Return none if the primitive is not of another library, has no such function for this platform, or has effects.
    """
    if eqn.effects or not (functions := _functions(eqn.primitive)):
        return {}
    here = jax.default_backend()
    names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
    if functions.get(next((name for name in names if name in functions), "")) is None:
        return {}
    types = tuple(v.aval for v in eqn.invars)
    traced: dict[str, Any] = {}
    with eqn.ctx.manager:
        for platform, function in functions.items():
            jaxpr = None if function is None else _jaxpr(eqn.primitive, function, types, eqn.params)
            if jaxpr is not None and _shapes(jaxpr.out_avals) == _shapes([v.aval for v in eqn.outvars]):
                traced[platform] = jaxpr
    return traced


def _functions(primitive: Primitive) -> dict[str, _compat.Traceable | None]:
    """Return the function that JAX traces for each platform: None for functions of JAX and of this library."""
    lowerings = _compat.traceable_lowerings(primitive)
    return {platform: None if f is None or not _is_foreign(f.fun) else f for platform, f in lowerings.items()}


def _is_foreign(fun: Any) -> bool:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return (getattr(fun, "__module__", None) or "").split(".")[0] not in _NOT_FOREIGN


def _jaxpr(primitive: Primitive, function: _compat.Traceable, types: tuple[Any, ...], params: dict[str, Any]) -> Any:
    key = (primitive, function, types, tuple(params.items()))
    try:
        hash(key)
    except TypeError:
        return _traced(*key)
    return _traced_once(*key)


def _traced(primitive: Primitive, function: _compat.Traceable, types: Any, params: Any) -> Any:
    """Return the closed jaxpr of a function, or None if tracing fails here: then JAX raises, or can lower it."""
    try:
        return jax.make_jaxpr(functools.partial(function.traced, **dict(params)))(*types)
    except Exception:
        return None


_traced_once = _compat.cached(_traced)


def _shapes(types: Sequence[Any]) -> list[Any]:
    return [(getattr(t, "shape", None), getattr(t, "dtype", None)) for t in types]


def rebuild(eqn: Equation, operands: Sequence[Array], change: Change) -> list[Array]:
    """Run an equation with changed jaxprs for its lowering, on the platforms that have one."""
    traced = {platform: change.traced(jaxpr, operands) for platform, jaxpr in lowered_as(eqn).items()}
    functions = {
        platform: jaxprs.function(traced[platform]) if platform in traced else _plain(eqn)
        for platform in _compat.traceable_lowerings(eqn.primitive)
    }
    if functions.keys() == {""}:
        jaxpr = traced[""]
    else:
        default = functions.pop("", _plain(eqn))
        jaxpr = jax.make_jaxpr(lambda *args: lax.platform_dependent(*args, default=default, **functions))(*operands)
    return list(_bind_replacement(eqn.primitive, operands, eqn.params, jaxpr=jaxpr, change=change))


def _plain(eqn: Equation) -> Callable[..., list[Array]]:
    return lambda *args: jaxprs.bind(eqn, args)


# --- the other primitive ------------------------------------------------------------------------------
#
# It has the parameters of the library's primitive, and these two.

_JAXPR, _CHANGE = "in_place_jaxpr", "in_place_change"


def _bind_replacement(
    original: Primitive, operands: Sequence[Array], params: dict[str, Any], *, jaxpr: Jaxpr, change: Change
) -> Sequence[Array]:
    primitive = _replacement(original)
    for table, rule in (
        (ad.primitive_jvps, _jvp),
        (ad.primitive_transposes, _transpose),
        (batching.fancy_primitive_batchers, _batch),
    ):
        if original in table:
            table.setdefault(primitive, functools.partial(rule, original))
    outs = primitive.bind(*operands, **params, **{_JAXPR: jaxpr, _CHANGE: change})
    return outs if original.multiple_results else [outs]


@functools.cache
def _replacement(original: Primitive) -> Primitive:
    """Return the primitive that replaces another one. It has the same name, which JAX's errors show."""
    primitive = Primitive(original.name)
    primitive.multiple_results = original.multiple_results
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(
        lambda *types, **params: original.abstract_eval(*types, **_of_original(params))
    )
    mlir.register_lowering(primitive, mlir.lower_fun(_run))
    _compat.lowers_its_bodies(primitive)
    return primitive


def _of_original(params: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in params.items() if name not in (_JAXPR, _CHANGE)}


def _run(*args: Array, **params: Any) -> list[Array]:
    return jaxprs.function(params[_JAXPR])(*args)


def _all(original: Primitive, results: Any) -> list[Any]:
    return list(results) if original.multiple_results else [results]


def _jvp(original: Primitive, primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    rule, original_params, change = ad.primitive_jvps[original], _of_original(params), params[_CHANGE]
    nonzero = [not is_zero(t) for t in tangents]
    zeros: list[Any] = []

    def derivative(primals: Sequence[Array], dots: Sequence[Array]) -> Any:
        outs, tangents_out = rule(tuple(primals), tuple(merge(dots, nonzero, tangents)), **original_params)
        tangents_out = _all(original, tangents_out)
        zeros[:] = [t if is_zero(t) else None for t in tangents_out]
        return _all(original, outs), [t for t in tangents_out if not is_zero(t)]

    outs, dots = change.jvp(derivative, list(primals), flagged(tangents, nonzero), nonzero)
    tangents_out = merge(dots, [t is None for t in zeros], zeros)
    return (outs, tangents_out) if original.multiple_results else (outs[0], tangents_out[0])


def _transpose(original: Primitive, cts: Any, *operands: Any, **params: Any) -> list[Any]:
    rule, original_params, change = ad.primitive_transposes[original], _of_original(params), params[_CHANGE]
    cts = _all(original, cts)
    has_ct, is_primal = [not is_zero(ct) for ct in cts], [not ad.is_undefined_primal(x) for x in operands]
    others: list[Any] = []

    def transposed(some: Sequence[Array], some_operands: Sequence[Array]) -> list[Array]:
        every = merge(some, has_ct, cts)
        results = every if original.multiple_results else every[0]
        all_cts = rule(results, *merge(some_operands, is_primal, operands), **original_params)
        others[:] = [ct if ct is None or is_zero(ct) else _NONZERO for ct in all_cts]
        return [ct for ct in all_cts if not (ct is None or is_zero(ct))]

    nonzero = change.call(transposed, flagged(cts, has_ct), flagged(operands, is_primal))
    return merge(nonzero, [ct is _NONZERO for ct in others], others)


_NONZERO = object()


def _batch(original: Primitive, axis: Any, operands: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
    rule, original_params, change = batching.fancy_primitive_batchers[original], _of_original(params), params[_CHANGE]
    out_dims: list[Any] = []

    def batched(*operands: Array) -> list[Array]:
        outs, dims_out = rule(axis, operands, dims, **original_params)
        out_dims[:] = _all(original, dims_out)
        return _all(original, outs)

    outs = change.call(batched, *operands)
    return (outs, out_dims) if original.multiple_results else (outs[0], out_dims[0])
