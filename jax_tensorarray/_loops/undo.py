"""Undo steps of a loop: restore the buffers by putting back the rows that each step overwrote (see `log`).

    b = ta_write(b, i, jnp.sin(ta_read(b, j)))          # a step; the log stores the `old` row `i`
    # reverse mode, from the last step to the first; `ct` is the cotangent of `b`
    b = ta_write(b, i, old)
    ct, row = ta_swap(ct, i, 0)
    ct = ta_add(ct, j, row * jnp.cos(ta_read(b, j)))

While we restore the overwritten rows, every version of a buffer exists for a moment. So residuals that are such
versions cost nothing. We store small residuals on a tape. We recompute large ones from the versions, or store them if
recomputing takes too long.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval as pe

from jax_tensorarray import _compat, _gates
from jax_tensorarray._jaxprs import jaxprs, kinds
from jax_tensorarray._jaxprs.axis import Axis, axes
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._jaxprs.uses import updates
from jax_tensorarray._loops.linearize import Linearized, Sources, read_by
from jax_tensorarray._loops.log import BufferVersion, Log
from jax_tensorarray._loops.recording import recorded
from jax_tensorarray._loops.replay import Replay, all_batched, counted
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.tapes import play_back
from jax_tensorarray._loops.while_ import Loop
from jax_tensorarray._ops.empty import empty_like
from jax_tensorarray._ops.guard import ta_guard_p
from jax_tensorarray._ops.primitive import ROW_OPS, once_checked, updates_rows, with_axis
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Equation, bytes_of


@dataclass(frozen=True, eq=False)
class Plan:
    """The values to store of a step, and the function that undoes the step."""

    jaxpr: Jaxpr  #: the body, with the stored values after its results
    num_outs: int
    steps: tuple[int | None, ...]  #: of the stored values, as for `record`
    shared: Any  #: maps the loop-invariant inputs to the shared values that `back` takes
    #: `back(step, *tapes, *shared, *const_dots, *buffers_after, *carry_dots) -> (*buffers_before, *carry_dots_after)`
    back: Any
    after: tuple[int, ...]  #: which carries are the buffers after the step
    saves_buffers: bool  #: whether a tape would store buffers, or values computed from them
    work: float  #: the number of operations on numbers for the recomputed values

    @property
    def stored(self) -> list[Any]:
        """Types of the stored values."""
        return list(self.jaxpr.out_avals)[self.num_outs :]

    @property
    def bytes(self) -> int:
        return bytes_of(self.stored)


def plan(linear: Linearized, max_steps: int, *, keeps_costly: bool = True) -> Plan:
    """Plan to undo the steps of a loop that takes `max_steps` at most.

    With `keeps_costly`, store large values that take long to compute, and do not recompute them.
    """
    planned = _Planning(linear, max_steps, keeps_costly).plan()
    opened = linear.without_checkpoints if planned.saves_buffers else None
    if opened is not None:
        # A checkpoint recomputes a step on a copy of its buffers. This plan updates the buffers, and undoes the
        # updates.
        for keeps_small in (True, False):
            other = _Planning(opened, max_steps, keeps_costly, keeps_small).plan()
            if other.bytes <= _gates.OPENED_SHARE * planned.bytes:
                return replace(other, saves_buffers=True)
    return planned


class _Planning:
    """Chooses the values to store of a step."""

    def __init__(self, linear: Linearized, max_steps: int, keeps_costly: bool, keeps_small: bool = True) -> None:
        self.linear, self.keeps_costly, self.num_outs, self.max_steps = linear, keeps_costly, linear.num_outs, max_steps
        self.log = Log()
        self.live_operands: dict[Any, list[bool]] = {}  #: by equation and results
        self.trace()
        self.find_buffers()
        buffers = bytes_of([linear.whole.out_avals[r] for r in self.slot_of])
        entries = [n for r in self.slot_of for n in self.chain_of[r] if not self.log.entries[n].of_loop]
        rows = bytes_of([v.aval for n in entries for v in self.rows[n]])
        small = max(rows, buffers // max_steps if max_steps else 0) if keeps_small else 0
        self.limit = max(_gates.KEPT_BYTES, small)
        self.stored: dict[Any, None] = {}  #: variables, in their order
        #: The equations to evaluate again, by number, and their live results.
        self.recomputed: dict[int, frozenset[int]] = {}
        #: For each of these, the results that are versions of buffers which it updates.
        self.updated: dict[int, list[int]] = {}

    def trace(self) -> None:
        """Trace the linearized body with a log, and find the variables of the log, the residuals and the versions."""
        n, num_inputs = self.num_outs, len(self.linear.whole.in_avals)

        def step(*args: Array) -> list[Array]:
            self.log = log = Log()
            versions = [*[None] * (num_inputs - n), *map(BufferVersion, range(n))]
            inputs = list(zip(args, versions, strict=True))
            self.outs = log.evaluate(self.linear.whole, inputs)
            rows = [x for entry in log.entries for x in entry.rows]
            return [*(x for x, _ in self.outs), *rows, *(x for x, _ in log.versions)]

        jaxpr = jax.make_jaxpr(step)(*self.linear.whole.in_avals)
        inner = _compat.opened(jaxpr)
        self.sources, self.inner = Sources(jaxpr, self.linear.is_const), inner
        rest = iter(inner.outvars)
        outs = [next(rest) for _ in self.outs]
        self.body_outs, self.residuals = outs[:n], outs[n:]
        self.rows = [[next(rest) for _ in entry.rows] for entry in self.log.entries]
        #: The versions of variables. A version with holes counts for residuals only.
        self.versions: dict[Any, BufferVersion] = dict(
            zip(inner.invars[num_inputs - n :], map(BufferVersion, range(n)), strict=True)
        )
        for v, (_, version) in zip(rest, self.log.versions, strict=True):
            if _is_variable(v):
                self.versions.setdefault(v, version)
        self.eqn_of = {v: k for k, eqn in enumerate(inner.eqns) for v in eqn.outvars}
        # The other outputs are only for the trace, and do not count as reads.
        read = (*self.body_outs, *(v for eqn in inner.eqns for v in eqn.invars))
        self.is_read = set(filter(_is_variable, read))

    def find_buffers(self) -> None:
        """Find the buffers that we can restore. After the step, each is in a carry that was one of them before."""
        versions = [v for _, v in self.outs[: self.num_outs]]
        slot_of: dict[int, int] = {}
        for slot, version in enumerate(versions):
            if version is None or version.has_holes or version.root < 0:
                continue
            if self.body_outs[slot].aval.ndim:
                here = slot_of.get(version.root)
                if here is None or slot == version.root:
                    slot_of[version.root] = slot

        def closed(slot_of: dict[int, int]) -> tuple[dict[int, int], None]:
            slots = set(slot_of.values())  # a buffer needs a slot before and after the step
            return {r: s for r, s in slot_of.items() if r in slots and s in slot_of}, None

        self.slot_of, _ = jaxprs.fixed_point(slot_of, closed)
        self.chain_of = {r: versions[s].since for r, s in self.slot_of.items()}  # type: ignore[union-attr]

    def version(self, v: Any, *, is_residual: bool = False) -> BufferVersion | None:
        """Return the version of a variable, if that exists at some time while we undo a step."""
        version = self.versions.get(v)
        if version is None or version.root not in self.slot_of:
            return None
        if version.has_holes and not (is_residual and v not in self.is_read):
            return None
        chain = self.chain_of[version.root]
        return version if chain[: len(version.since)] == version.since else None

    def itself(self, v: Any) -> Any:
        """Return the operand of guards: it has the same value."""
        while _is_variable(v) and v in self.eqn_of:
            eqn = self.inner.eqns[self.eqn_of[v]]
            if eqn.primitive is not ta_guard_p:
                break
            v = eqn.invars[1]
        return v

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """Return the variables among the values, each once."""
        return [v for v in dict.fromkeys(map(self.itself, filter(_is_variable, values))) if _is_variable(v)]

    def is_free(self, v: Any) -> bool:
        """Return whether a value costs nothing: a literal, a loop-invariant value, or a version of a buffer."""
        return not _is_variable(v) or v in self.sources.unchanging or self.version(v) is not None

    # --- stored and recomputed values
    # ------------------------------------------------------------------------------------------

    def keep(self, v: Any) -> None:
        """Plan to store or recompute a variable."""
        v = self.itself(v)
        if self.is_known(v):
            return
        stored, recomputed = dict(self.stored), dict(self.recomputed)
        if (
            self.is_small(v)
            or not self.can_recompute(v, stored, recomputed)
            or self.size(stored) >= self.size(self.stored) + self.size([v])
        ):
            self.stored[v] = None
        else:
            self.stored, self.recomputed = stored, recomputed

    def store_less(self) -> None:
        """Instead of the large values, store values from which we can recompute them, if these take less memory."""
        large = [v for v in self.stored if not self.is_small(v)]
        stored = {v: None for v in self.stored if self.is_small(v)}
        recomputed = dict(self.recomputed)
        for v in large:
            if v not in stored and not self.can_recompute(v, stored, recomputed):
                stored[v] = None
        if self.size(stored) < self.size(self.stored):
            self.stored, self.recomputed = stored, recomputed

    def return_updated(self) -> None:
        """Make recomputed equations also return the newer versions of the buffers that they update.

        Putting rows back then restores the older versions, as after a step. Otherwise XLA would copy the older ones.
        """
        for k in self.recomputed:
            eqn = self.inner.eqns[k]
            if not list(jaxprs.jaxprs_in(eqn.params)):
                continue
            older = [(v.root, v.since) for x in eqn.invars if _is_variable(x) and (v := self.version(x)) is not None]
            for n, v in enumerate(eqn.outvars):
                version, more = self.version(v), self.recomputed[k] | {n}
                if version is None or not any(
                    root == version.root and since == version.since[: len(since)] != version.since
                    for root, since in older
                ):
                    continue
                is_updated = _num_updates(eqn, self.recomputed[k]) == _num_updates(eqn, more)
                if is_updated and all(self.is_known(x) for x in self.operands(k, more)):
                    self.recomputed[k] = more
                    self.updated.setdefault(k, []).append(n)

    def is_known(self, v: Any) -> bool:
        """Return whether the value of a variable is known while we undo a step."""
        return self.is_free(v) or v in self.stored or self.is_recomputed(v, self.recomputed)

    def can_recompute(self, v: Any, stored: dict[Any, None], recomputed: dict[int, frozenset[int]]) -> bool:
        """Return whether we can recompute a variable. Add its equations to `recomputed`, their operands to `stored`."""
        k = self.eqn_of.get(v)
        if k is None or not self.is_repeatable(self.inner.eqns[k]):
            return False
        if self.is_recomputed(v, recomputed):
            return True
        recomputed[k] = recomputed.get(k, frozenset()) | {self.inner.eqns[k].outvars.index(v)}
        for x in self.operands(k, recomputed[k]):
            if self.is_free(x) or x in stored:
                continue
            if self.is_small(x) or not self.can_recompute(x, stored, recomputed):
                stored[x] = None
        return True

    def is_recomputed(self, v: Any, recomputed: dict[int, frozenset[int]]) -> bool:
        k = self.eqn_of.get(v)
        return k in recomputed and self.inner.eqns[k].outvars.index(v) in recomputed[k]

    def operands(self, k: int, results: frozenset[int]) -> list[Any]:
        """Return the variables on which some results of an equation depend."""
        eqn = self.inner.eqns[k]
        if not list(jaxprs.jaxprs_in(eqn.params)):
            return self.variables(read_by(eqn))
        if (k, results) not in self.live_operands:
            _, self.live_operands[k, results] = _part_of(eqn, results)
        return self.variables(flagged(eqn.invars, self.live_operands[k, results]))

    def is_small(self, v: Any) -> bool:
        return self.size([v]) <= self.limit

    def size(self, variables: Any) -> int:
        return bytes_of([v.aval for v in variables])

    def is_repeatable(self, eqn: Equation) -> bool:
        if not _may_run_again(eqn):
            return False
        return not self.keeps_costly or work(eqn) <= _gates.REPEATED_WORK * self.size(eqn.outvars)

    # --- the plan ----------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        residuals = self.variables(self.residuals)
        restored = {version.root for v in residuals if (version := self.version(v, is_residual=True)) is not None}
        for v in residuals:
            if self.version(v, is_residual=True) is None:
                self.keep(v)
        self.store_less()
        self.return_updated()
        operands = self.variables([x for k, results in self.recomputed.items() for x in self.operands(k, results)])
        restored |= {version.root for v in operands if (version := self.version(v)) is not None}
        roots = self.orbits(restored)
        rows = self.variables([v for r in roots for n in self.chain_of[r] for v in self.rows[n]])
        self.stored |= dict.fromkeys(v for v in rows if v not in self.sources.unchanging)
        shared = [v for v in dict.fromkeys([*residuals, *operands, *rows]) if v in self.sources.unchanging]
        self.sources.shared = {v: k for k, v in enumerate(shared)}
        stored, order = list(self.stored), self.in_order()
        stored_types, steps = [v.aval for v in stored], self.sources.steps(stored)
        num_const_dots = self.linear.num_const_dots

        def back(*args: Array) -> list[Array]:
            rest = iter(args)

            def some(n: int) -> list[Array]:
                return [next(rest) for _ in range(n)]

            number = next(rest)
            values = dict(zip(stored, play_back(some(len(stored)), number, steps, stored_types), strict=True))
            values |= zip(shared, some(len(shared)), strict=True)
            const_dots = some(num_const_dots)
            buffers = dict(zip(roots, some(len(roots)), strict=True))  # by the slot after the step
            dots = list(rest)

            versions: dict[tuple[int, tuple[int, ...]], Array] = {}

            def value(v: Any) -> Array:
                v = self.itself(v)
                if not _is_variable(v) or v in values:
                    return values[v] if _is_variable(v) else v.val
                version = self.version(v, is_residual=True)
                assert version is not None
                return versions[version.root, version.since]

            def put_back(root: int, since: tuple[int, ...], buffer: Array) -> None:
                """Restore all older versions of a buffer from this one."""
                versions[root, since] = buffer
                for k in reversed(range(len(since))):
                    rows = list(map(value, self.rows[since[k]]))
                    buffer = versions[root, since[:k]] = self.log.entries[since[k]].put_back(buffer, rows, None)

            for r in roots:
                put_back(r, self.chain_of[r], buffers[self.slot_of[r]])
            for k in order:
                eqn = self.inner.eqns[k]
                live = set(self.operands(k, self.recomputed[k]))
                operands = [
                    value(v) if not _is_variable(v) or self.itself(v) in live else empty_like(v.aval)
                    for v in eqn.invars
                ]
                for n, x in enumerate(_again(eqn, operands)):
                    version = self.version(eqn.outvars[n], is_residual=True)
                    if version is None:
                        values.setdefault(eqn.outvars[n], x)
                    elif n in self.updated.get(k, ()):  # the equation has updated the version before it in place
                        put_back(version.root, version.since, x)
            tangents = jax.tree.unflatten(self.linear.tree, list(map(value, self.residuals)))(*const_dots, *dots)
            return [*(versions[r, ()] for r in roots), *tangents]

        types = self.linear.tangent_types
        buffers = [self.linear.whole.out_avals[r] for r in roots]
        tapes, of_shared = [with_axis(t, self.max_steps) for t in stored_types], [v.aval for v in shared]
        inputs = [jnp.int32(0), *tapes, *of_shared, *types[:num_const_dots], *buffers, *types[num_const_dots:]]
        return Plan(
            self.body_with(stored),
            self.num_outs,
            steps,
            self.sources.jaxpr_of_shared(),
            jaxprs.pruned(jax.make_jaxpr(back)(*inputs)),
            tuple(roots),
            bool(roots),
            sum(work(e) for k in self.recomputed for e in self.equations_of(k)),
        )

    def equations_of(self, k: int) -> list[Equation]:
        """Return a recomputed equation, or the equations inside of it on which its live results depend."""
        eqn = self.inner.eqns[k]
        return list(_part_of(eqn, self.recomputed[k])[0].eqns) if list(jaxprs.jaxprs_in(eqn.params)) else [eqn]

    def in_order(self) -> list[int]:
        """Order the recomputed equations. Updates of buffers come early.

        Then we restore the buffers before other equations read them, and XLA need not copy.
        """
        order: dict[int, None] = {}

        def add(k: int) -> None:
            operands = self.operands(k, self.recomputed[k])
            makers = {self.eqn_of[v] for v in operands if self.is_recomputed(v, self.recomputed)}
            for maker in sorted(makers - order.keys()):
                add(maker)
            order.setdefault(k)

        for k in [*sorted(self.updated), *sorted(self.recomputed)]:
            add(k)
        return list(order)

    def orbits(self, roots: set[int]) -> list[int]:
        """Return the buffers to restore for these: all in their orbits under the permutation of a step."""
        all_roots, _ = jaxprs.fixed_point(roots, lambda roots: (roots | {self.slot_of[r] for r in roots}, None))
        return sorted(all_roots)

    def body_with(self, stored: Sequence[Any]) -> Any:
        """Return the body with the stored values after its results, without dead reads.

        XLA computes in float32 between equations in bfloat16. A stored value is rounded, so the step must use the
        rounded value too. Otherwise an `exp(x - m)` that we recompute from a stored `x` does not match the stored sum
        of such values. `jax.checkpoint` rounds the values that it saves in the same way.
        """
        pruned = jaxprs.pruned(self.sources.with_outputs([*self.body_outs, *stored]))
        inner = _compat.opened(pruned)
        read = (*inner.outvars, *(v for eqn in inner.eqns for v in eqn.invars))
        live = set(filter(_is_variable, read))
        rounded = {v for v in inner.outvars[self.num_outs :] if _is_variable(v) and _is_narrow(v.aval.dtype)}

        def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
            if eqn.primitive is ta_swap_p and eqn.outvars[1] not in live:
                return [ta_write_p.bind(*operands, **eqn.params), None]
            results = jaxprs.bind(eqn, operands)
            if eqn.primitive in ROW_OPS:  # its rows are in memory, so they are rounded
                return results
            return [_rounded(x) if v in rounded else x for v, x in zip(eqn.outvars, results, strict=True)]

        def f(*args: Array) -> list[Array]:
            return jaxprs.interpret(pruned, args, equation)

        return jax.make_jaxpr(f)(*pruned.in_avals)


def _is_variable(v: Any) -> bool:
    return not isinstance(v, jex.Literal)


def _is_narrow(dtype: Any) -> bool:
    """Return whether XLA may compute in a wider type between equations of this type."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _rounded(x: Array) -> Array:
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _part_of(eqn: Equation, results: Iterable[int]) -> tuple[Jaxpr, list[bool]]:
    """Return a jaxpr of some results of an equation, and on which operands they depend."""

    def f(*operands: Array) -> list[Array]:
        outs = jaxprs.bind(eqn, operands)
        return [outs[k] for k in sorted(results)]

    inner = _compat.opened(jax.make_jaxpr(f)(*(v.aval for v in eqn.invars)))
    part, live = pe.dce_jaxpr(inner, [True] * len(inner.outvars))
    return part, list(live)


def _num_updates(eqn: Equation, results: Iterable[int]) -> int:
    """Return how many row ops update buffers for some results of an equation."""

    def updates_in(jaxpr: Jaxpr) -> int:
        return sum(updates_rows(e.primitive) or sum(map(updates_in, jaxprs.jaxprs_in(e.params))) for e in jaxpr.eqns)

    return updates_in(_part_of(eqn, results)[0])


def work(eqn: Equation) -> float:
    """Return the number of operations on numbers in an equation, or infinity if that is unknown."""
    name, params = eqn.primitive.name, eqn.params
    inner = list(jaxprs.jaxprs_in(params))
    if inner:
        times = params["options"].max_steps if name == "ta_while" else params.get("length", 1)
        if name in ("while", "ta_replay") or times is None:
            return math.inf
        return times * sum(work(e) for jaxpr in inner for e in jaxpr.eqns)
    sizes = [math.prod(v.aval.shape) for v in _accessed(eqn) if hasattr(v.aval, "shape")]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * sizes[-1] * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        return 2 * sizes[-1] * sizes[1] / max(1, eqn.outvars[0].aval.shape[params["dimension_numbers"].out_spec[1]])
    if name in kinds.SLOW:
        return math.inf
    return max(sizes, default=0) * (_OF_FUNCTION if name in kinds.TRANSCENDENTAL else 1)


def _accessed(eqn: Equation) -> Sequence[Any]:
    """Return the operands and results that an equation reads or writes as a whole, so no buffer of a row op."""
    if kinds.is_read(eqn):
        return eqn.outvars
    if updates(eqn):
        return eqn.invars[1:]
    return [*eqn.invars, *eqn.outvars]


#: The number of operations for one element of a function such as `exp`.
_OF_FUNCTION = 20


def _may_run_again(eqn: Equation) -> bool:
    """Return whether an equation may be evaluated a second time."""
    if eqn.primitive in ROW_OPS:
        return True
    if eqn.effects or "callback" in eqn.primitive.name:
        return False
    return all(_may_run_again(e) for jaxpr in jaxprs.jaxprs_in(eqn.params) for e in jaxpr.eqns)


def _again(eqn: Equation, operands: list[Array]) -> list[Array]:
    """Evaluate an equation again. The forward loop has checked its index."""
    if eqn.primitive in ROW_OPS:
        out = eqn.primitive.bind(*operands, **once_checked(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]
    return jaxprs.bind(eqn, operands)


def undone(loop: Loop, again: Replay, plan: Plan, then: Strategy) -> tuple[list[Array], Array, list[Array], Strategy]:
    """Run a loop by a plan. Its own derivatives have the strategy `then`."""
    loop = loop._replace(options=replace(loop.options, strategy=then))
    outs, steps, _, tapes = recorded(loop, plan.jaxpr, plan.num_outs, plan.steps)
    rewind = Rewind(plan.back, plan.shared, again.nonzero_consts, len(tapes), len(plan.after))
    return outs, steps, [*(outs[k] for k in plan.after), *tapes], rewind


@dataclass(frozen=True)
class Rewind(Strategy):
    """Undoes steps by a plan. `extra` is the buffers after the loop, and the tapes."""

    back: Any  #: as in a plan. After a batch of the predicate it first takes the active examples
    shared: Any
    nonzero_consts: tuple[bool, ...]
    num_tapes: int
    num_buffers: int
    batch_dims: int = 0  #: batch axes of the predicate that are newer than the plan

    def batched(
        self, axis: Axis, pred_batched: bool, consts_batched: Sequence[bool], consts: Any, init: Any
    ) -> "Rewind":
        shared_batched = axis.batched_outputs(self.shared, consts_batched)
        shared = axis.vmap(jaxprs.function(self.shared), axes(consts_batched), axes(shared_batched))
        dots_batched = flagged(consts_batched, self.nonzero_consts)
        flags = [False, *[True] * self.num_tapes, *shared_batched, *dots_batched]
        flags += [True] * len(self.back.out_avals)
        types = list(self.back.in_avals)[int(self.batch_dims > 0) :]
        types = [with_axis(t, axis.size) if flag else t for t, flag in zip(types, flags, strict=True)]
        num_consts = len(types) - len(self.back.out_avals)
        back = all_batched(axis, self.back, pred_batched, flags[:num_consts], types)
        shared_jaxpr = jax.make_jaxpr(shared)(*map(jax.typeof, consts))
        return replace(self, back=back, shared=shared_jaxpr, batch_dims=self.batch_dims + pred_batched)

    def with_tangents(
        self, consts: Sequence[bool], carry: Sequence[bool], extra: list[bool]
    ) -> tuple[Strategy, list[bool]]:
        n, first, num_shared = self.num_buffers, 1 + int(self.batch_dims > 0), len(self.shared.out_avals)
        buffers, tapes = [True] * n, [False] * self.num_tapes  # no tape without reads
        inputs = [*[True] * first, *tapes, *[True] * num_shared, *consts, *buffers, *carry]
        back, live = jaxprs.part_of(self.back, (*buffers, *carry), tuple(inputs))
        tapes = live[first : first + self.num_tapes]
        nonzero = tuple(merge(consts, self.nonzero_consts, [False] * len(self.nonzero_consts)))
        return replace(self, back=back, nonzero_consts=nonzero, num_tapes=sum(tapes)), [*buffers, *tapes]

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        n, c, t = self.num_buffers, len(const_cts), self.num_tapes
        buffers, tapes, shared = extra[:n], extra[n:], jaxprs.function(self.shared)(*consts)
        back = jaxprs.function(self.back)
        older = tuple(range(self.batch_dims, loop.batch_dims))
        num_inputs = t + len(shared)

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, buffers, cts = rest[:num_inputs], rest[num_inputs : num_inputs + n], rest[num_inputs + n :]
            active = [jnp.any(k < steps, axis=older)] if self.batch_dims else []

            before: list[list[Array]] = []

            # The step returns its consts, so that the transpose starts from their running cotangents: reads add in
            # place.
            def linear(const_dots: list[Array], carry_dots: list[Array]) -> tuple[list[Array], list[Array]]:
                outs = back(*active, k, *consts, *const_dots, *buffers, *carry_dots)
                before.append(outs[:n])  # these do not depend on the tangents
                return const_dots, outs[n:]

            types = list(map(jax.typeof, cts))
            transposed = jax.linear_transpose(linear, types[:c], types[c:])
            const_cts, carry_cts = transposed((list(cts[:c]), list(cts[c:])))
            return [*before[-1], *const_cts, *carry_cts]

        outs = counted(loop, step, steps, [*tapes, *shared], [*buffers, *const_cts, *carry_cts], True)
        return outs[n : n + c], outs[n + c :]
