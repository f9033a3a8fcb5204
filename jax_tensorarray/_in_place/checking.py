"""`in_place(f, check=True)`: differential testing. Run `f` as it is written too, and compare.

Two programs run side by side from the same arguments. `in_place_both` copies each argument for the two programs, and
`in_place_same` compares their results and returns those of the rewritten program. Both primitives are linear, and each
is the transpose of the other. So forward mode compares the tangents of the results, reverse mode compares the
cotangents of the arguments, and this holds for each order of derivative, under `jax.vmap` and `jax.jit` too.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._ops.primitive import is_zero
from jax_tensorarray._types import Array, Equation


@dataclass(frozen=True)
class Leaves:
    """The arrays that are compared, as errors name them."""

    fun: str  #: the name of the function
    names: tuple[str, ...]  #: such as "result['loss']"
    of: str = ""  #: "the tangent of ", "the cotangent of "; empty for the values
    differentiates: bool = True  #: whether derivatives are compared too

    def tangents(self, flags: Sequence[bool]) -> "Leaves":
        return replace(self, names=tuple(flagged(self.names, flags)), of=_TANGENT + self.of)

    def cotangents(self, flags: Sequence[bool]) -> "Leaves":
        """Return the flagged leaves of the transpose. That of a tangent is a cotangent."""
        return replace(self, names=tuple(flagged(self.names, flags)), of=_COTANGENT + self.of.removeprefix(_TANGENT))


_TANGENT, _COTANGENT = "the tangent of ", "the cotangent of "


def tolerance_of(dtype: Any) -> tuple[float, float]:
    """Return by how much floats may differ: relative to the largest element of an array, and in any case.

    The relative tolerance is the square root of the machine epsilon, which is half of the digits: 3.5e-4 for float32
    and 1.5e-8 for float64. `in_place` may add up floats in another order. The absolute tolerance is the epsilon itself.
    """
    eps = float(jnp.finfo(dtype).eps)
    return eps**0.5, eps


def tolerance_for(wanted: Any, dtype: Any, xp: Any) -> Any:
    """Return by how much an array of this dtype may differ from the wanted one, in `numpy` or `jax.numpy`."""
    relative, absolute = tolerance_of(dtype)
    sizes = xp.abs(wanted)
    return relative * xp.max(xp.where(xp.isfinite(sizes), sizes, 0), initial=0) + absolute


def is_near(found: Any, wanted: Any, tolerance: Any, xp: Any) -> Any:
    """Return which elements of two arrays of floats agree."""
    return (found == wanted) | (xp.isnan(found) & xp.isnan(wanted)) | (xp.abs(found - wanted) <= tolerance)


def compared(
    fun: Callable[..., Any],
    rewritten: Callable[..., list[Array]],
    plain: Jaxpr,
    operands: Sequence[Array],
    operands_of_plain: Sequence[Array],
    names_of_arguments: Sequence[str],
    names_of_results: Sequence[str],
    *,
    differentiates: bool,
) -> list[Array]:
    """Return the results of the rewritten function, compared with those of the jaxpr.

    The last operands are the arguments. Refs among the operands are those of the rewritten function. The other one has
    refs of its own, and their contents are compared in the end. Without `differentiates` only values are compared.
    """
    name, arrays = getattr(fun, "__name__", "f"), list(operands)
    for x in operands_of_plain:  # they may close over others
        if not any(x is y for y in arrays):
            arrays.append(x)
    around, n = len(operands) - len(names_of_arguments), len(operands)
    closed_over = [f"closed-over array {k}" for k in range(around + len(arrays) - n)]
    names = [*closed_over[:around], *names_of_arguments, *closed_over[around:]]
    are_refs = [isinstance(x, jax.Ref) for x in arrays]
    has_tangent = [not is_ref and jaxprs.is_inexact(x) for x, is_ref in zip(arrays, are_refs, strict=True)]
    mine = others = flagged(arrays, has_tangent)
    if differentiates and mine:
        leaves = Leaves(name, tuple(flagged(names, has_tangent)))
        mine, others = _halves(in_place_both_p.bind(*mine, leaves=leaves))
    elif not differentiates:
        others = list(map(lax.stop_gradient, others))
    mine, others = merge(mine, has_tangent, arrays), merge(others, has_tangent, arrays)
    chosen = [next(k for k, y in enumerate(arrays) if x is y) for x in operands_of_plain]
    refs_of_plain = [are_refs[k] for k in chosen]
    given = [others[k][...] if are_refs[k] else others[k] for k in chosen]
    wanted = refs.on_arrays(lambda *xs: Silent().body(plain, *xs), refs_of_plain)(*given)
    outs = rewritten(*mine[:n])
    written = [k for k in chosen if are_refs[k]]
    ends = [arrays[k][...] for k in written]
    all_names = [*names_of_results, *(f"the contents of {names[k]}" for k in written)]
    got = in_place_same_p.bind(*outs, *ends, *wanted, leaves=Leaves(name, tuple(all_names), "", differentiates))
    for k, end in zip(written, got[len(outs) :], strict=True):
        arrays[k][...] = end
    return list(got[: len(outs)])


# --- names -----------------------------------------------------------------------------------------------------


def names_of_arguments(fun: Callable[..., Any], given: Any, named: Any, is_array: Callable[[Any], bool]) -> list[str]:
    """Return the name of each array in the arguments, such as `argument x['w']`."""
    try:
        parameters = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = []
    for path, leaf in jax.tree_util.tree_flatten_with_path((given, named))[0]:
        if is_array(leaf):
            kind, which, *rest = path
            key = which.idx if kind.idx == 0 else which.key
            known = parameters[key] if kind.idx == 0 and key < len(parameters) else key
            names.append(f"argument {known}{jax.tree_util.keystr(tuple(rest))}")
    return names


#: Stands for a leaf that was passed in, which `Results` keeps as None.
_MISSING = object()


def names_of_results(results: Any) -> list[str]:
    """Return the name of each array in `arguments.Results`, such as `result['loss']`."""
    leaves = [_MISSING if x is None else x for x in results.fixed.all_leaves(results.arrays)]
    paths, _ = jax.tree_util.tree_flatten_with_path(results.fixed.tree.unflatten(leaves))
    others = {k for k, _ in results.fixed.leaves}
    return [
        f"result{jax.tree_util.keystr(path[1:])}" if path[0].idx == 0 else "a change of an argument"
        for k, (path, _) in enumerate(paths)
        if k not in others
    ]


# --- the program as it is written, without effects -------------------------------------------------------------


class Silent(registry.Change):
    """Runs jaxprs without the effects that are seen outside, such as what `jax.debug.print` prints."""

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        return jaxprs.interpret(jaxpr, args, self._equation)

    def call(self, f: Callable[..., Any], *args: Any) -> Any:
        jaxpr, out = jax.make_jaxpr(f, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(out), self.body(jaxpr, *jax.tree.leaves(args)))

    def _equation(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        inner = list(jaxprs.jaxprs_in(eqn.params))
        entry = registry.entry_of(eqn)
        if not any(map(_may_be_seen, (eqn, *inner))):
            return jaxprs.bind(eqn, operands)
        call = registry.inlined(eqn, with_options=True)
        if call is not None:
            return self.body(call, *operands)
        outs = entry.rebuild(eqn, operands, self)
        if outs is not None:
            return outs
        if not _compat.has_callbacks(eqn):
            return jaxprs.bind(eqn, operands)
        if eqn.outvars or inner:
            raise TypeError(
                f"in_place: check=True runs the program twice, but `{_compat.name_of_primitive(eqn)}` has an effect "
                "and returns a value. Use jax.pure_callback if the function may be called twice, or leave out check."
            )
        return []


def _may_be_seen(x: Any) -> bool:
    """Return whether a jaxpr or an equation may have an effect, perhaps in a rule for derivatives."""
    if _compat.has_callbacks(x):
        return True
    if hasattr(x, "primitive"):
        return registry.entry_of(x).kind == "rules"
    return jaxprs.any_equation(x, lambda eqn: registry.entry_of(eqn).kind == "rules")


# --- two primitives, each the transpose of the other -----------------------------------------------------------


def _halves(xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    half = len(xs) // 2
    return list(xs[:half]), list(xs[half:])


def _instantiated(tangents: Sequence[Any]) -> list[Array]:
    return list(map(ad.instantiate_zeros, tangents))


def _is_none(tangent: Any) -> bool:
    return is_zero(tangent) or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _both_jvp(primals: Sequence[Array], tangents: Sequence[Any], *, leaves: Leaves) -> Any:
    outs = in_place_both_p.bind(*primals, leaves=leaves)
    flags = [not _is_none(t) for t in tangents]
    if not any(flags):
        return outs, [*tangents, *tangents]
    found = in_place_both_p.bind(*flagged(tangents, flags), leaves=leaves.tangents(flags))
    return outs, [x for half in _halves(found) for x in merge(half, flags, tangents)]


def _both_transpose(cts: Sequence[Any], *operands: Any, leaves: Leaves) -> list[Any]:
    first, second = _halves(cts)
    flags = [not (_is_none(a) and _is_none(b)) for a, b in zip(first, second, strict=True)]
    if not any(flags):
        return first
    found = in_place_same_p.bind(
        *_instantiated(flagged(first, flags)),
        *_instantiated(flagged(second, flags)),
        leaves=leaves.cotangents(flags),
    )
    return merge(found, flags, first)


def _same_jvp(primals: Sequence[Array], tangents: Sequence[Any], *, leaves: Leaves) -> Any:
    outs = in_place_same_p.bind(*primals, leaves=leaves)
    first, second = _halves(tangents)
    if not leaves.differentiates:
        return outs, first
    flags = [not (_is_none(a) and _is_none(b)) for a, b in zip(first, second, strict=True)]
    if not any(flags):
        return outs, first
    found = in_place_same_p.bind(
        *_instantiated(flagged(first, flags)),
        *_instantiated(flagged(second, flags)),
        leaves=leaves.tangents(flags),
    )
    return outs, merge(found, flags, first)


def _same_transpose(cts: Sequence[Any], *operands: Any, leaves: Leaves) -> list[Any]:
    flags = [not _is_none(ct) for ct in cts]
    if not any(flags):
        return [*cts, *cts]
    found = in_place_both_p.bind(*flagged(cts, flags), leaves=leaves.cotangents(flags))
    return [x for half in _halves(found) for x in merge(half, flags, cts)]


def _both_batch(args: Sequence[Array], dims: Sequence[Any], *, leaves: Leaves) -> Any:
    return in_place_both_p.bind(*args, leaves=leaves), [*dims, *dims]


def _same_batch(args: Sequence[Array], dims: Sequence[Any], *, leaves: Leaves) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    pairs = list(zip(*_halves(args), *_halves(dims), strict=True))
    flags = [not d is e is None for _, _, d, e in pairs]

    def at_front(x: Array, d: Any) -> Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

    first = [at_front(x, d) if flag else x for (x, _, d, _), flag in zip(pairs, flags, strict=True)]
    second = [at_front(y, e) if flag else y for (_, y, _, e), flag in zip(pairs, flags, strict=True)]
    return in_place_same_p.bind(*first, *second, leaves=leaves), [0 if flag else None for flag in flags]


def _compare(*operands: Array, leaves: Leaves) -> list[Array]:
    """Return the first half of the operands. Raise an error while running if the second half differs."""
    first, second = _halves(operands)
    found = [_difference(a, b) for a, b in zip(first, second, strict=True) if a.size]
    names = [name for name, a in zip(leaves.names, first, strict=True) if a.size]
    shapes = [_data(a).shape for a in first if a.size]
    if not found:
        return first

    def tell(found: Any) -> None:
        io_callback(lambda found: _raise(replace(leaves, names=tuple(names)), shapes, found), None, found)

    counts = jnp.stack([count for count, *_ in found])
    lax.cond(jnp.any(counts > 0), tell, lambda found: None, found)
    return first


def _data(x: Array) -> Array:
    """Return an array of numbers that are compared: of keys their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.float32) if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating) else x


def _on_each_device(x: Array) -> Array:
    """Return an array whose type does not say that devices divide it. JAX flattens no others."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))


def _difference(a: Array, b: Array) -> list[Array]:
    """Return how many elements differ, the number of the first one, its two values, and the tolerance."""
    of = a.dtype
    a, b = _on_each_device(_data(a)).ravel(), _on_each_device(_data(b)).ravel()
    if jnp.issubdtype(a.dtype, jnp.inexact):
        tolerance = tolerance_for(b, of, jnp)
        is_same = is_near(a, b, tolerance, jnp)
    else:
        tolerance, is_same = jnp.float32(0), a == b
    k = jnp.argmin(is_same)
    return [jnp.sum(~is_same, dtype=jnp.int32), k, a[k], b[k], tolerance]


class CheckError(RuntimeError):
    """A result of a program that `in_place` has rewritten differs from that of the program as it is written."""


def _raise(leaves: Leaves, shapes: Sequence[tuple[int, ...]], found: Any) -> None:
    for name, shape, (count, k, a, b, tolerance) in zip(leaves.names, shapes, found, strict=True):
        if count:
            place = ", ".join(map(str, np.unravel_index(int(k), shape)))
            element, size = f" at [{place}]" if shape else "", int(np.prod(shape))
            a, b = np.asarray(a)[()], np.asarray(b)[()]
            others = f"{int(count)} of {size} elements differ. " if size > 1 else ""
            raise CheckError(
                f"in_place: check=True: {leaves.of}{name} of {leaves.fun}{element} is {a} as in_place has rewritten "
                f"the function, but {b} as it is written. The tolerance is {float(tolerance):.3g}. {others}If this is "
                "not rounding that the program amplifies, it is a fault of jax_tensorarray: please report it with the "
                "program. in_place(..., enabled=False) runs the function as it is written."
            )


in_place_both_p = Primitive("in_place_both")
in_place_same_p = Primitive("in_place_same")

for _p, _type, _jvp, _transpose, _batch in (
    (in_place_both_p, lambda *xs, leaves: [*xs, *xs], _both_jvp, _both_transpose, _both_batch),
    (in_place_same_p, lambda *xs, leaves: _halves(xs)[0], _same_jvp, _same_transpose, _same_batch),
):
    _p.multiple_results = True
    _p.def_impl(lambda *args, p=_p, **params: xla.apply_primitive(p, *args, **params))
    _p.def_abstract_eval(_type)
    ad.primitive_jvps[_p] = _jvp
    ad.primitive_transposes[_p] = _transpose
    batching.primitive_batchers[_p] = _batch

mlir.register_lowering(in_place_both_p, lambda ctx, *xs, leaves: [*xs, *xs])
mlir.register_lowering(in_place_same_p, mlir.lower_fun(_compare, multiple_results=True))
