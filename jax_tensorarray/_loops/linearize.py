"""Partial evaluation of one step of a loop: its linear part, and the residuals that a tape must store for it.

    y = ta_read(b, t - lags) * scale                     # a step
    # becomes the step, with `t` as its residual, since all steps share `lags` and `scale`, and the linear part
    dy = ta_read(db, t - lags) * scale

`jax.linearize` returns the values that the linear part needs. We compute a value once if all steps share it. If cheap
operations compute it from a smaller value, we recompute it: a broadcast, or an index or a mask, such as `t - lags` from
`t`. The tape stores all others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr, Primitive, Var

from jax_tensorarray import _compat, _gates
from jax_tensorarray._jaxprs import jaxprs, kinds, registry
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._ops.guard import ta_guard_p
from jax_tensorarray._ops.primitive import updates_rows
from jax_tensorarray._types import Array, Equation, bytes_of
from jax_tensorarray.checkpoint_policies import save_reads


class FromTape(NamedTuple):
    """A value that differs from step to step: the number of its tape."""

    number: int


class FromShared(NamedTuple):
    """A loop-invariant value: its number among the shared values."""

    number: int


class Constant(NamedTuple):
    """A literal of the program."""

    value: Any


class Recomputed(NamedTuple):
    """A value that we recompute from smaller ones: its equation."""

    eqn: Equation
    operands: "tuple[Source, ...]"


#: The source of a residual.
Source = FromTape | FromShared | Constant | Recomputed


@dataclass(frozen=True, eq=False)
class Linearized:
    """A body, and the derivative of one step."""

    whole: Any  #: the body, with all residuals after its results
    is_const: list[bool]  #: which inputs of the body are loop-invariant
    jaxpr: Jaxpr  #: the body, with the residuals for the tape after its results
    num_outs: int
    sources: "tuple[Source, ...]"  #: of every residual
    tree: Any  #: of the tangent function, whose leaves are the residuals
    shared: Any  #: maps the loop-invariant inputs to the loop-invariant residuals
    #: For each taped residual that is the tape of an inner loop: which residual is the number of its steps.
    steps: tuple[int | None, ...]
    tangent_types: list[Any]  #: of the consts and carries with tangents
    num_const_dots: int  #: how many of these belong to consts
    of: "tuple[Any, tuple[bool, ...], tuple[bool, ...]]"  #: the arguments of `linearize`

    @property
    def taped(self) -> list[Any]:
        """Types of the residuals for the tape, per step."""
        return list(self.jaxpr.out_avals)[self.num_outs :]

    def tangents(self, taped: Sequence[Array], shared: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        """Return the tangents after one step from the tangents before it."""
        recomputed: dict[int, Array] = {}

        def value(source: Source) -> Array:
            match source:
                case FromTape(n):
                    return taped[n]
                case FromShared(n):
                    return shared[n]
                case Constant(x):
                    return x
                case Recomputed(eqn, operands):
                    if id(eqn) not in recomputed:
                        (recomputed[id(eqn)],) = jaxprs.bind(eqn, list(map(value, operands)))
                    return recomputed[id(eqn)]

        return list(jax.tree.unflatten(self.tree, map(value, self.sources))(*tangents))

    @property
    def without_checkpoints(self) -> "Linearized | None":
        """The same body without the checkpoints that update rows and store at most reads, or None without such."""
        body, nonzero_consts, nonzero_carry = self.of
        if not jaxprs.any_equation(body, lambda eqn: registry.entry_of(eqn).kind == "checkpoint"):
            return None
        opened: list[bool] = []

        def opens(eqn: Equation) -> bool:
            opened.append(_updates_and_recomputes(eqn))
            return opened[-1]

        jaxpr = jax.make_jaxpr(registry.without_calls(body, without=opens))(*body.in_avals)
        return linearize(jaxpr, nonzero_consts, nonzero_carry) if any(opened) else None

    @property
    def residuals(self) -> list[Any]:
        """Types of all residuals."""
        return list(self.whole.out_avals)[self.num_outs :]

    @property
    def recomputes_most(self) -> bool:
        """Whether we recompute most bytes of the residuals, which JAX would store for each step.

        A broadcast counts as recomputed, also that of a loop-invariant number.
        """
        recomputed = {
            id(s.eqn): t for s, t in zip(self.sources, self.residuals, strict=True) if isinstance(s, Recomputed)
        }
        return bytes_of(recomputed.values()) > max(_gates.RECOMPUTED_SHARE * bytes_of(self.taped), _gates.LOGGED_BYTES)

    def tangents_for(self, carry: Sequence[bool]) -> list[bool]:
        """Return on which tangents those of the flagged carries depend after any number of steps."""
        residuals = self.residuals

        def f(residuals: list[Array], tangents: list[Array]) -> list[Array]:
            return list(jax.tree.unflatten(self.tree, residuals)(*tangents))

        return jaxprs.read_for(jax.make_jaxpr(f)(residuals, self.tangent_types), carry)[len(residuals) :]


def linearize(body: Any, nonzero_consts: Sequence[bool], nonzero_carry: Sequence[bool]) -> Linearized:
    """Linearize a body in the flagged consts and carries. Its inputs before the consts differ from step to step."""
    return _linearized(body, tuple(nonzero_consts), tuple(nonzero_carry))


@_compat.cached
def _linearized(body: Any, nonzero_consts: Sequence[bool], nonzero_carry: Sequence[bool]) -> Linearized:
    leading = [False] * (len(body.in_avals) - len(nonzero_consts) - len(nonzero_carry))
    nonzero = [*leading, *nonzero_consts, *nonzero_carry]
    is_const = [*leading, *[True] * len(nonzero_consts), *[False] * len(nonzero_carry)]
    call, tree = registry.without_calls(body), []

    def step(*args: Array) -> list[Array]:
        def at(*some: Array) -> tuple[list[Array], list[Array]]:
            outs = call(*merge(some, nonzero, args))
            return flagged(outs, nonzero_carry), outs

        _, derivative, outs = jax.linearize(at, *flagged(args, nonzero), has_aux=True)
        residuals, structure = jax.tree.flatten(derivative)
        tree.append(structure)
        return [*outs, *residuals]

    types = list(body.in_avals)
    jaxpr = jax.make_jaxpr(step)(*types)
    all_sources, num_outs = Sources(jaxpr, is_const), len(nonzero_carry)
    sources = tuple(map(all_sources.of, _compat.opened(jaxpr).outvars[num_outs:]))
    return Linearized(
        jaxpr,
        is_const,
        all_sources.with_outputs([*_compat.opened(jaxpr).outvars[:num_outs], *all_sources.taped]),
        num_outs,
        sources,
        tree[-1],
        all_sources.jaxpr_of_shared(),
        all_sources.steps(all_sources.taped),
        [t.to_tangent_aval() for t in flagged(types, nonzero)],
        sum(nonzero_consts),
        (body, tuple(nonzero_consts), tuple(nonzero_carry)),
    )


def _updates_and_recomputes(eqn: Equation) -> bool:
    """Return whether an equation is a checkpoint that updates rows and stores at most the rows it reads.

    Differentiation repeats the effects of a checkpoint, so one with effects does not count.
    """
    if registry.entry_of(eqn).kind != "checkpoint" or (parts := _compat.checkpoint_of(eqn.params)) is None:
        return False
    jaxpr, policy, _ = parts
    if eqn.effects or policy not in (None, save_reads, jax.checkpoint_policies.nothing_saveable):
        return False
    return jaxprs.any_equation(jaxpr, lambda e: updates_rows(e.primitive))


#: For each primitive with tapes among its results: a function of an equation that returns the tapes without batch axes,
#: and the number of their steps. Each loop of the library adds its own.
TAPES: dict[Primitive, Callable[[Any], tuple[Sequence[Var], Any]]] = {}


def tapes_among(outs: Sequence[Var], tapes: Sequence[tuple[Any, int]]) -> list[Var]:
    """Return the tapes without batch axes among the last results of a loop."""
    pairs = zip(outs[len(outs) - len(tapes) :], tapes, strict=True)
    return [v for v, (_, batch_dims) in pairs if not batch_dims]


class Sources:
    """Finds the sources of the values of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr, is_const: Sequence[bool]) -> None:
        self.closed, self.jaxpr, self.is_const = jaxpr, _compat.opened(jaxpr), is_const
        inner = self.jaxpr
        self.uses = Uses(jaxpr)
        self.unchanging = {*inner.constvars, *flagged(inner.invars, is_const)}
        for eqn in inner.eqns:
            is_invariant = all(isinstance(v, jex.Literal) or v in self.unchanging for v in read_by(eqn))
            # An equation that raises must not be evaluated for a loop of no steps.
            if is_invariant and not eqn.effects and not jaxprs.may_raise(eqn):
                self.unchanging.update(eqn.outvars)
        self.taped: dict[Any, int] = {}
        self.shared: dict[Any, int] = {}
        self.fewest: dict[Any, int] = {}  #: see `_fewest_bytes`

    def of(self, v: Any) -> Any:
        """Return the source of a variable."""
        v = self._same(v)
        if isinstance(v, jex.Literal):
            return Constant(v.val)
        eqn = self.uses.maker(v)
        is_repeated = eqn is not None and eqn.primitive is lax.broadcast_in_dim_p and len(eqn.invars) == 1
        if is_repeated or (v not in self.unchanging and self._is_cheap_from_less(v)):
            return Recomputed(eqn, tuple(map(self.of, eqn.invars)))
        if v in self.unchanging:
            return FromShared(self.shared.setdefault(v, len(self.shared)))
        return FromTape(self.taped.setdefault(v, len(self.taped)))

    def _same(self, v: Any) -> Any:
        """Return the first variable with the same value, or the literal."""
        while (eqn := self.uses.maker(v)) is not None:
            if eqn.primitive is ta_guard_p:
                v = eqn.invars[1]
            elif eqn.primitive.name in kinds.PASSES_ON:
                v = eqn.invars[eqn.outvars.index(v)]
            elif (part := self._part(eqn)) is not None:
                v = part
            else:
                break
        return v

    def _part(self, eqn: Equation) -> Any:
        """Return the operand of a concatenation that an equation slices out again, or None."""
        if eqn.primitive is not lax.slice_p or eqn.params["strides"] is not None:
            return None
        whole = self.uses.maker(self._same(eqn.invars[0]))
        if whole is None or whole.primitive is not lax.concatenate_p:
            return None
        axis, start = whole.params["dimension"], 0
        for part in whole.invars:
            begins = [start if k == axis else 0 for k in range(part.aval.ndim)]
            if (*begins,) == eqn.params["start_indices"] and part.aval.shape == eqn.outvars[0].aval.shape:
                return part
            start += part.aval.shape[axis]
        return None

    def _is_cheap_from_less(self, v: Any) -> bool:
        """Return whether cheap operations compute a value from fewer bytes that differ from step to step."""
        return _is_exact(v) and bytes_of([v.aval]) > max(_gates.KEPT_BYTES, self._fewest_bytes(v))

    def _fewest_bytes(self, v: Any) -> int:
        """Return from how many bytes per step cheap operations can recompute a value."""
        v = self._same(v)
        if isinstance(v, jex.Literal) or v in self.unchanging:
            return 0
        if v not in self.fewest:
            self.fewest[v] = bytes_of([v.aval])
            eqn = self.uses.maker(v)
            if eqn is not None and eqn.primitive.name in kinds.REPEATED and _is_exact(v):
                operands = {id(x): x for x in eqn.invars}.values()
                self.fewest[v] = min(self.fewest[v], sum(map(self._fewest_bytes, operands)))
        return self.fewest[v]

    def with_outputs(self, variables: Sequence[Any]) -> Any:
        """Return the jaxpr with these variables as its outputs."""

        def f(*args: Array) -> list[Array]:
            return jaxprs.interpret(self.closed, args, jaxprs.bind, outvars=variables)

        return jax.make_jaxpr(f)(*self.closed.in_avals)

    def jaxpr_of_shared(self) -> Any:
        """Return the jaxpr that computes the loop-invariant variables in `shared` from the invariant inputs."""
        inputs = flagged(self.jaxpr.invars, self.is_const)

        def f(*args: Array) -> list[Array]:
            return self.compute([*self.shared], dict(zip(inputs, args, strict=True)))

        return jax.make_jaxpr(f)(*(v.aval for v in inputs))

    def compute(self, variables: Sequence[Any], values: dict[Any, Array]) -> list[Array]:
        """Compute loop-invariant variables. `values` has the invariant inputs."""
        live, eqns = set(variables), []
        for eqn in reversed(self.jaxpr.eqns):
            if not live.isdisjoint(eqn.outvars):
                eqns.append(eqn)
                live.update(v for v in read_by(eqn) if not isinstance(v, jex.Literal))
        values = values | dict(zip(self.jaxpr.constvars, self.closed.consts, strict=True))
        for eqn in reversed(eqns):
            operands = [v.val if isinstance(v, jex.Literal) else values[v] for v in read_by(eqn)]
            outs = operands if eqn.primitive is ta_guard_p else jaxprs.bind(eqn, operands)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [values[v] for v in variables]

    def steps(self, taped: Iterable[Any]) -> tuple[int | None, ...]:
        """Return, for each variable that is an inner loop's tape, which other one is the number of steps, else None."""
        steps_of: dict[Any, Any] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive in TAPES:
                tapes, steps = TAPES[eqn.primitive](eqn)
                steps_of |= dict.fromkeys(tapes, steps)
        taped = list(taped)
        numbers = {v: k for k, v in enumerate(taped)}
        counters = [steps_of.get(v) for v in taped]
        return tuple(None if n is None or isinstance(n, jex.Literal) else numbers.get(n) for n in counters)


def _is_exact(v: Any) -> bool:
    """Return whether a value has integers or bools, and no symbolic size."""
    kinds = (jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(v.aval.dtype, kind) for kind in kinds) and isinstance(v.aval.size, int)


def read_by(eqn: Equation) -> Sequence[Any]:
    """Return the operands on which the value of an equation depends: only the second one of a guard."""
    return eqn.invars[1:] if eqn.primitive is ta_guard_p else eqn.invars
