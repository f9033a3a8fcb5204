"""Rewrite loops before a program differentiates them.

    in_place(jax.grad(loss))      # JAX would differentiate the loops in `loss` as they are written
    # treats these loops as
    jax.grad(in_place(loss))

A derivative that plain JAX has made of a loop keeps all versions of a buffer, or masks of whole buffers. Rules cannot
remove these later. JAX offers only one place to come first, through which every loop enters a program: the `bind` of
its primitive. While no function is being rewritten, `bind` behaves as usual, but for scans of no steps: see
`_never_run`.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat, _contexts, _faults
from jax_tensorarray._in_place import control
from jax_tensorarray._in_place.repair import Repair, Request
from jax_tensorarray._in_place.values import Value, is_weak, with_type
from jax_tensorarray._jaxprs import jaxprs, refs, registry
from jax_tensorarray._loops import host


def _repairing(primitive: Primitive) -> Callable[..., Any]:
    usual = primitive.bind

    @functools.wraps(usual)
    def bind(*args: Any, **params: Any) -> Any:
        if primitive is jax_primitives.scan_p and not params["length"] and jaxprs.has_ours(params["jaxpr"]):
            return usual(*args, **params | {"jaxpr": _never_run(params)})
        request = _contexts.repairs_first.value
        if request is None or _contexts.becomes_ours.value or not any(map(_compat.is_differentiated, args)):
            return usual(*args, **params)
        are_refs = [isinstance(x, jax.Ref) for x in args]
        if any(are_refs) or any(map(_compat.makes_refs, jaxprs.jaxprs_in(params))):
            return _with_refs(primitive, functools.partial(usual, **params), args, are_refs, request)
        variables = {id(x): SimpleNamespace(aval=jax.typeof(x)) for x in args}
        operands = [variables[id(x)] for x in args]
        loop = SimpleNamespace(primitive=primitive, params=params, invars=operands, outvars=())
        repair = Repair(request)
        if not repair.finds_in(loop):
            return usual(*args, **params)
        with _contexts.repairs_first(None):
            [body] = registry.ENTRIES[primitive.name].bodies(params)
            try:
                outs = control.RULES[primitive.name](repair, loop, list(map(Value, args)), {})
            except Exception as error:
                return _faults.instead(error, lambda: usual(*args, **params), strict=request.strict)
            return [with_type(x, weak=is_weak(of)).array for x, of in zip(outs, body.jaxpr.out_avals, strict=True)]

    return bind


def _never_run(params: dict[str, Any]) -> Any:
    """Return a body without row ops for a scan of no steps.

    JAX's derivative takes what no step changes out of the loop, and there a row op raises.
    """
    consts, carries = _compat.scan_counts(params)
    jaxpr = params["jaxpr"]

    def body(*args: Any) -> list[Any]:
        carry = zip(args[consts : consts + carries], jaxpr.out_avals[:carries], strict=True)
        same = [with_type(Value(x), weak=is_weak(of)).array for x, of in carry]
        return [*same, *map(host.zeros, jaxpr.out_avals[carries:])]

    return jax.make_jaxpr(body)(*jaxpr.in_avals)


def _with_refs(
    primitive: Primitive, loop: Callable[..., Any], args: Sequence[Any], are_refs: Sequence[bool], request: Request
) -> Any:
    """Run a loop over refs on their contents, and store the results in the refs that it writes."""
    repair = Repair(request)
    given = [x[...] if flag else x for x, flag in zip(args, are_refs, strict=True)]
    with _contexts.repairs_first(None):
        plain = jax.make_jaxpr(refs.on_arrays(loop, are_refs))(*given)
        jaxpr = refs.as_arrays(plain)
        if jaxpr is plain or not repair.finds(jaxpr):
            return loop(*args)
        outs = repair.function(jaxpr, is_whole=True)(*given)
    [eqn] = (eqn for eqn in _compat.opened(plain).eqns if eqn.primitive is primitive)
    count = len(outs) - sum(are_refs)
    ends = iter(outs[count:])
    for ref, is_ref, is_written in zip(args, are_refs, _compat.writes_refs(eqn), strict=True):
        end = next(ends) if is_ref else None
        if is_written:
            ref[...] = end
    return outs[:count]


def binds() -> list[_compat.Replacement]:
    """Return what routes the loops of JAX through this module."""
    loops = jax_primitives.scan_p, jax_primitives.while_p
    return [_compat.Replacement(primitive, "bind", _repairing(primitive)) for primitive in loops]
