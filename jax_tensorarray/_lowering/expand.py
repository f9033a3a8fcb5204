"""Inline scans, calls and loops of this library, so that row ops are only in `while`, `cond` and `shard_map`.

    b = scan(body, b, length=n)      b, _ = while(k < n, body, (b, 0))

A scan, a loop of this library or a primitive of another library becomes the jaxpr that JAX would trace when it lowers
the equation. A `jit` or a custom derivative becomes its equations, and a `checkpoint` a barrier and its equations. Then
the equations that compute an index are in the same jaxpr as the op. In a program for several devices, a `jit` with
options of its own stays. A guard becomes its operand: the two differ only in their derivatives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, kinds, registry
from jax_tensorarray._lowering.equations import Atom, Block, without_consts
from jax_tensorarray._ops.check import ta_check_p, without_mask
from jax_tensorarray._ops.guard import ta_guard_p
from jax_tensorarray._types import Equation

#: We inline a jaxpr of at most so many equations if it returns integers: they may be an index.
_SHORT = 100

#: We inline a call of at most so many equations, as of `jnp.where`: `slices` asks what makes and what reads an array.
_FEW = 10


class Expander:
    """Expands jaxprs, each one once."""

    def __init__(self, *, with_options: bool, platforms: Sequence[str]) -> None:
        self.with_options = with_options  #: whether to inline a `jit` with shardings of its own
        self.platforms = platforms
        self.needing: dict[int, tuple[Any, bool]] = {}  #: by the id of a jaxpr, with the jaxpr
        self.done: dict[int, tuple[Any, Any]] = {}

    def needs(self, jaxpr: Any) -> bool:
        """Return whether a jaxpr has an equation to expand."""
        inner = _compat.opened(jaxpr)
        if id(inner) not in self.needing:
            is_needed = any(map(self.needed_in, inner.eqns))
            self.needing[id(inner)] = inner, is_needed
        return self.needing[id(inner)][1]

    def needed_in(self, eqn: Equation) -> bool:
        if jaxprs.is_of_ours(eqn) or _is_uninitialised_number(eqn) or _is_short(eqn):
            return True
        return any(map(self.needs, jaxprs.jaxprs_in(eqn.params)))

    def jaxpr(self, jaxpr: Any) -> Any:
        """Return the expanded closed jaxpr."""
        if not self.needs(jaxpr):
            return jaxpr
        if id(jaxpr) not in self.done:
            block = Block(_compat.closed(jaxpr))
            for eqn in _compat.opened(jaxpr).eqns:
                self.equation(block, eqn)
            self.done[id(jaxpr)] = jaxpr, block.jaxpr()
        return self.done[id(jaxpr)][1]

    def equation(self, block: Block, eqn: Equation) -> None:
        """Add an equation to a block, or the equations that it expands to."""
        params, name = eqn.params, eqn.primitive.name
        if name in kinds.PASSES_ON:
            block.rename(eqn.outvars, map(block.read, eqn.invars))
        elif eqn.primitive is ta_guard_p:
            block.rename(eqn.outvars, [block.read(eqn.invars[1])])
        elif not self.needed_in(eqn):
            block.add(eqn)
        elif _is_uninitialised_number(eqn):
            aval = eqn.outvars[0].aval
            block.rename(eqn.outvars, [Literal(np.zeros((), aval.dtype)[()], aval)])
        elif name == "cond" and (branch := self._branch_of_platform(params)) is not None:
            self._inline(block, branch, eqn, eqn.invars[1:])
        elif name == "cond":
            block.add(eqn, params=params | {"branches": tuple(map(self.jaxpr, params["branches"]))})
        elif name == "while":
            bodies = {which: self.jaxpr(params[which]) for which in ("cond_jaxpr", "body_jaxpr")}
            block.add(eqn, params=params | bodies)
        elif name == "shard_map" and not _compat.can_name_axes():
            block.add(eqn)
        elif name == "shard_map":
            with _compat.naming_axes(params):
                body = self.jaxpr(_compat.closed(params["jaxpr"]))
            block.add(eqn, params=params | {"jaxpr": without_consts(body)})
        elif (inner := registry.inlined(eqn, with_options=self.with_options)) is not None:
            self._inline(block, inner, eqn, name=_name(eqn))
        elif registry.entry_of(eqn).kind == "rules" and "call_jaxpr" in params:
            self._inline(block, _compat.closed(params["call_jaxpr"]), eqn, name=_name(eqn))
        elif name == _compat.CHECKPOINT and "jaxpr" in params:
            self._checkpoint(block, eqn)
        elif (function := self._function(eqn)) is not None:
            self._inline(block, _traced(function, eqn), eqn, name=_name(eqn))
        elif name == "jit":
            block.add(eqn, params=params | {"jaxpr": self.jaxpr(params["jaxpr"])})
        else:
            block.add(eqn)

    def _branch_of_platform(self, params: dict[str, Any]) -> Any:
        """Return the branch that a `lax.platform_dependent` runs, or None for another `cond` or several platforms."""
        if not (of_branches := params.get("branches_platforms")) or len(self.platforms) != 1:
            return None
        runs = [platforms is None or self.platforms[0] in platforms for platforms in of_branches]
        return params["branches"][runs.index(True)] if any(runs) else None

    def _inline(
        self, block: Block, jaxpr: Any, eqn: Equation, operands: Sequence[Atom] | None = None, name: str = ""
    ) -> None:
        """Add the expanded equations of a closed jaxpr instead of an equation."""
        atoms = [block.read(v) for v in (eqn.invars if operands is None else operands)]
        visit = functools.partial(self.equation, block)
        block.rename(eqn.outvars, block.inlined(_compat.taken_apart(jaxpr), atoms, eqn, visit, name))

    def _checkpoint(self, block: Block, eqn: Equation) -> None:
        params, operands = eqn.params, [block.read(v) for v in eqn.invars]
        prevented = params["prevent_cse"]
        prevented = [prevented] * len(operands) if isinstance(prevented, bool) else list(prevented)
        if params["differentiated"] and any(prevented):
            some = jaxprs.flagged(operands, prevented)
            passed = block.call(_barrier, some, eqn)
            operands = jaxprs.merge(passed, prevented, operands)
        self._inline(block, _compat.closed(params["jaxpr"]), eqn, operands, "checkpoint")

    def _function(self, eqn: Equation) -> Callable[..., Sequence[Any]] | None:
        """Return the function that JAX traces when it lowers an equation, for any platform."""
        if eqn.primitive is ta_check_p:
            return (lambda *operands: [without_mask(*operands, **eqn.params)]) if len(eqn.invars) > 2 else None
        lowering = _compat.traced_lowering(eqn.primitive)
        return None if lowering is None else functools.partial(lowering.traced, **eqn.params)


def _is_uninitialised_number(eqn: Equation) -> bool:
    """Return whether an equation makes an uninitialised integer, such as the initial `ys` of a scan.

    It becomes 0, which has bounds, because it may be an index.
    """
    aval = eqn.outvars[0].aval if eqn.primitive.name in kinds.UNINITIALISED else None
    return aval is not None and aval.dtype in _INDICES and not aval.ndim


def _barrier(*operands: Any) -> Any:
    return jax.lax.optimization_barrier(operands)


def _is_short(eqn: Equation) -> bool:
    """Return whether an equation calls a few equations, or runs short jaxprs only and returns integers."""
    entry = registry.entry_of(eqn)
    longest = max((len(_compat.opened(body.jaxpr).eqns) for body in entry.bodies(eqn.params)), default=_SHORT + 1)
    if longest <= _FEW and entry.kind in ("inlined", "rules"):
        return True
    returned = (getattr(v.aval, "dtype", None) for v in eqn.outvars if not _compat.is_drop(v))
    return longest <= _SHORT and any(dtype in _INDICES for dtype in returned)


_INDICES = frozenset(map(np.dtype, ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")))


def _name(eqn: Equation) -> str:
    name = eqn.params.get("name")
    return f"jit({name})" if isinstance(name, str) else ""


def _traced(function: Callable[..., Sequence[Any]], eqn: Equation) -> Any:
    with _compat.at_source_of(eqn), eqn.ctx.manager, jaxprs.with_types_of(eqn):
        return jax.make_jaxpr(function)(*(v.aval for v in eqn.invars))


def expanded(jaxpr: Any, *, with_options: bool, platforms: Sequence[str] = ()) -> Any:
    """Return the closed jaxpr of a program, expanded for these platforms."""
    return Expander(with_options=with_options, platforms=platforms).jaxpr(jaxpr)
