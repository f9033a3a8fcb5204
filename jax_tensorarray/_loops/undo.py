"""Undo steps of a loop: restore the buffers by putting back the rows that each step overwrote (see `log`).

    b = ta_write(b, i, jnp.sin(ta_read(b, j)))          # a step; the log keeps its row `i` from before
    # reverse mode, from the last step to the first; `ct` is the cotangent of `b`
    b = ta_write(b, i, kept)
    ct, row = ta_swap(ct, i, 0)
    ct = ta_add(ct, j, row * jnp.cos(ta_read(b, j)))

While we restore the overwritten rows, every version of a buffer exists for a moment. So residuals that are such
versions cost nothing. Small residuals are kept on a tape. Large ones are recomputed from the versions, or kept if that
takes too long.
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
from jax_tensorarray._loops.guard import ta_guard_p
from jax_tensorarray._loops.linearize import Linearized, Sources, read_by
from jax_tensorarray._loops.log import BufferVersion, Log
from jax_tensorarray._loops.recording import recorded
from jax_tensorarray._loops.replay import Replay, all_batched, counted
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.tapes import play_back
from jax_tensorarray._loops.while_ import Loop
from jax_tensorarray._ops.empty import empty_like
from jax_tensorarray._ops.primitive import ROW_OPS, once_checked, updates_rows, with_axis
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation, bytes_of

Array = jax.Array


@dataclass(frozen=True, eq=False)
class Plan:
    """The values to keep of a step, and the function that undoes the step."""

    jaxpr: Jaxpr  #: the body, which returns the kept values after its results
    num_outs: int
    steps: tuple[int | None, ...]  #: of the kept values, as for `record`
    shared: Any  #: maps the inputs that are the same in every step to the shared values that `back` takes
    #: `back(step, *tapes, *shared, *const_dots, *buffers_after, *carry_dots) -> (*buffers_before, *carry_dots_after)`
    back: Any
    after: tuple[int, ...]  #: which carries after the step are the buffers
    saves_buffers: bool  #: whether a tape would keep buffers, or values computed from them
    work: float  #: how many operations on numbers it takes to compute again what is not kept

    @property
    def kept(self) -> list[Any]:
        """Types of the kept values."""
        return list(self.jaxpr.out_avals)[self.num_outs :]

    @property
    def bytes(self) -> int:
        return bytes_of(self.kept)


def plan(linear: Linearized, max_steps: int, *, keeps_costly: bool = True) -> Plan:
    """Plan to undo the steps of a loop that takes `max_steps` at most.

    With `keeps_costly`, large values that take long to compute are kept and not recomputed.
    """
    planned = _Planning(linear, max_steps, keeps_costly).plan()
    opened = linear.without_checkpoints if planned.saves_buffers else None
    if opened is not None:
        # A checkpoint recomputes a step from a copy of its buffers. This plan updates the buffers and undoes that.
        for keeps_small in (True, False):
            other = _Planning(opened, max_steps, keeps_costly, keeps_small).plan()
            if other.bytes <= _gates.OPENED_SHARE * planned.bytes:
                return replace(other, saves_buffers=True)
    return planned


class _Planning:
    """Chooses the values to keep of a step."""

    def __init__(self, linear: Linearized, max_steps: int, keeps_costly: bool, keeps_small: bool = True) -> None:
        self.linear, self.keeps_costly, self.num_outs, self.max_steps = linear, keeps_costly, linear.num_outs, max_steps
        self.log = Log()
        self.used: dict[Any, list[bool]] = {}
        self.trace()
        self.find_buffers()
        buffers = bytes_of([linear.whole.out_avals[r] for r in self.slot_of])
        entries = [n for r in self.slot_of for n in self.chain_of[r] if not self.log.entries[n].of_loop]
        rows = bytes_of([v.aval for n in entries for v in self.rows[n]])
        small = max(rows, buffers // max_steps if max_steps else 0) if keeps_small else 0
        self.limit = max(_gates.KEPT_BYTES, small)
        self.kept: dict[Any, None] = {}  # variables, in their order
        #: The equations to evaluate again, by number, and which of their results are used.
        self.made: dict[int, frozenset[int]] = {}
        #: By equation, which of these results are versions of buffers that it updates.
        self.updated: dict[int, list[int]] = {}

    def trace(self) -> None:
        """Trace the linearized body with a log, and find the variables of the log, the residuals and the versions."""
        n, num_inputs = self.num_outs, len(self.linear.whole.in_avals)

        def step(*args: Array) -> list[Array]:
            self.log = log = Log()
            held = [*[None] * (num_inputs - n), *map(BufferVersion, range(n))]
            inputs = list(zip(args, held, strict=True))
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
        #: The versions that variables are. A dummy is one for residuals only.
        self.versions: dict[Any, BufferVersion] = dict(
            zip(inner.invars[num_inputs - n :], map(BufferVersion, range(n)), strict=True)
        )
        for v, (_, version) in zip(rest, self.log.versions, strict=True):
            if _is_variable(v):
                self.versions.setdefault(v, version)
        self.eqn_of = {v: k for k, eqn in enumerate(inner.eqns) for v in eqn.outvars}
        # The outputs are only there to be traced. Large ones that nothing reads are pruned.
        read = (*self.body_outs, *(v for eqn in inner.eqns for v in eqn.invars))
        self.is_read = set(filter(_is_variable, read))

    def find_buffers(self) -> None:
        """Find the buffers that can be restored: after the step each is in a place of one of them."""
        held = [v if v is not None and not v.has_holes and v.root >= 0 else None for _, v in self.outs[: self.num_outs]]
        slot_of: dict[int, int] = {}
        for slot, version in enumerate(held):
            if version is not None and self.body_outs[slot].aval.ndim:
                here = slot_of.get(version.root)
                if here is None or slot == version.root:
                    slot_of[version.root] = slot

        def closed(slot_of: dict[int, int]) -> tuple[dict[int, int], None]:
            places = set(slot_of.values())  # a buffer needs a place before and after the step
            return {r: s for r, s in slot_of.items() if r in places and s in slot_of}, None

        self.slot_of, _ = jaxprs.fixed_point(slot_of, closed)
        self.chain_of = {r: held[s].since for r, s in self.slot_of.items()}  # type: ignore[union-attr]

    def version(self, v: Any, *, is_residual: bool = False) -> BufferVersion | None:
        """Return the version of a variable, if it exists at some time while a step is undone."""
        held = self.versions.get(v)
        if held is None or held.root not in self.slot_of:
            return None
        if held.has_holes and not (is_residual and v not in self.is_read):
            return None
        chain = self.chain_of[held.root]
        return held if chain[: len(held.since)] == held.since else None

    def itself(self, v: Any) -> Any:
        """Return the variable that has the same value."""
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
        return not _is_variable(v) or v in self.sources.unchanging or self.version(v) is not None

    # --- what to keep ------------------------------------------------------------------------------------------

    def keep(self, v: Any) -> None:
        """Make a variable known when the step is undone."""
        v = self.itself(v)
        if self.is_known(v):
            return
        kept, made = dict(self.kept), dict(self.made)
        if (
            self.is_small(v)
            or not self.can_make(v, kept, made)
            or self.size(kept) >= self.size(self.kept) + self.size([v])
        ):
            self.kept[v] = None
        else:
            self.kept, self.made = kept, made

    def keep_less(self) -> None:
        """Instead of the large values, keep those that they can be computed from, if these take less."""
        large = [v for v in self.kept if not self.is_small(v)]
        kept = {v: None for v in self.kept if self.is_small(v)}
        made = dict(self.made)
        for v in large:
            if v not in kept and not self.can_make(v, kept, made):
                kept[v] = None
        if self.size(kept) < self.size(self.kept):
            self.kept, self.made = kept, made

    def return_updated(self) -> None:
        """Return also the newer versions of the buffers that equations update when they are evaluated again.

        Putting rows back then restores the older versions, as after a step. Otherwise XLA would copy these.
        """
        for k in self.made:
            eqn = self.inner.eqns[k]
            if not list(jaxprs.jaxprs_in(eqn.params)):
                continue
            older = [(v.root, v.since) for x in eqn.invars if _is_variable(x) and (v := self.version(x)) is not None]
            for n, v in enumerate(eqn.outvars):
                version, more = self.version(v), self.made[k] | {n}
                if version is None or not any(
                    root == version.root and since == version.since[: len(since)] != version.since
                    for root, since in older
                ):
                    continue
                is_updated = _num_updates(eqn, self.made[k]) == _num_updates(eqn, more)
                if is_updated and all(self.is_known(x) for x in self.operands(k, more)):
                    self.made[k] = more
                    self.updated.setdefault(k, []).append(n)

    def is_known(self, v: Any) -> bool:
        """Return whether a variable is known when the step is undone."""
        return self.is_free(v) or v in self.kept or self.is_made(v, self.made)

    def can_make(self, v: Any, kept: dict[Any, None], made: dict[int, frozenset[int]]) -> bool:
        """Return whether a variable can be recomputed. Add its equations to `made`, and what these need to `kept`."""
        k = self.eqn_of.get(v)
        if k is None or not self.is_repeatable(self.inner.eqns[k]):
            return False
        if self.is_made(v, made):
            return True
        made[k] = made.get(k, frozenset()) | {self.inner.eqns[k].outvars.index(v)}
        for x in self.operands(k, made[k]):
            if self.is_free(x) or x in kept:
                continue
            if self.is_small(x) or not self.can_make(x, kept, made):
                kept[x] = None
        return True

    def is_made(self, v: Any, made: dict[int, frozenset[int]]) -> bool:
        k = self.eqn_of.get(v)
        return k in made and self.inner.eqns[k].outvars.index(v) in made[k]

    def operands(self, k: int, results: frozenset[int]) -> list[Any]:
        """Return the variables that some results of an equation depend on."""
        eqn = self.inner.eqns[k]
        if not list(jaxprs.jaxprs_in(eqn.params)):
            return self.variables(read_by(eqn))
        if (k, results) not in self.used:
            _, self.used[k, results] = _part_of(eqn, results)
        return self.variables(flagged(eqn.invars, self.used[k, results]))

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
        used = {version.root for v in residuals if (version := self.version(v, is_residual=True)) is not None}
        for v in residuals:
            if self.version(v, is_residual=True) is None:
                self.keep(v)
        self.keep_less()
        self.return_updated()
        operands = self.variables([x for k, results in self.made.items() for x in self.operands(k, results)])
        used |= {version.root for v in operands if (version := self.version(v)) is not None}
        roots = self.orbits(used)
        rows = self.variables([v for r in roots for n in self.chain_of[r] for v in self.rows[n]])
        self.kept |= dict.fromkeys(v for v in rows if v not in self.sources.unchanging)
        shared = [v for v in dict.fromkeys([*residuals, *operands, *rows]) if v in self.sources.unchanging]
        self.sources.shared = {v: k for k, v in enumerate(shared)}
        kept, order = list(self.kept), self.in_order()
        kept_types, steps, num_const_dots = [v.aval for v in kept], self.sources.steps(kept), self.linear.num_const_dots

        def back(*args: Array) -> list[Array]:
            rest = iter(args)

            def some(n: int) -> list[Array]:
                return [next(rest) for _ in range(n)]

            number = next(rest)
            values = dict(zip(kept, play_back(some(len(kept)), number, steps, kept_types), strict=True))
            values |= zip(shared, some(len(shared)), strict=True)
            const_dots = some(num_const_dots)
            buffers = dict(zip(roots, some(len(roots)), strict=True))  # by the place where they are after the step
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
                """Find all older versions of a buffer from this one."""
                versions[root, since] = buffer
                for k in reversed(range(len(since))):
                    rows = list(map(value, self.rows[since[k]]))
                    buffer = versions[root, since[:k]] = self.log.entries[since[k]].put_back(buffer, rows, None)

            for r in roots:
                put_back(r, self.chain_of[r], buffers[self.slot_of[r]])
            for k in order:
                eqn = self.inner.eqns[k]
                needed = set(self.operands(k, self.made[k]))
                operands = [
                    value(v) if not _is_variable(v) or self.itself(v) in needed else empty_like(v.aval)
                    for v in eqn.invars
                ]
                for n, x in enumerate(_again(eqn, operands)):
                    version = self.version(eqn.outvars[n], is_residual=True)
                    if version is None:
                        values.setdefault(eqn.outvars[n], x)
                    elif n in self.updated.get(k, ()):  # it was made in the memory of the version before it
                        put_back(version.root, version.since, x)
            tangents = jax.tree.unflatten(self.linear.tree, list(map(value, self.residuals)))(*const_dots, *dots)
            return [*(versions[r, ()] for r in roots), *tangents]

        types = self.linear.tangent_types
        buffers = [self.linear.whole.out_avals[r] for r in roots]
        tapes, of_shared = [with_axis(t, self.max_steps) for t in kept_types], [v.aval for v in shared]
        inputs = [jnp.int32(0), *tapes, *of_shared, *types[:num_const_dots], *buffers, *types[num_const_dots:]]
        return Plan(
            self.giving(self.body_outs, kept),
            self.num_outs,
            steps,
            self.sources.giving_shared(),
            jaxprs.pruned(jax.make_jaxpr(back)(*inputs)),
            tuple(roots),
            bool(roots),
            sum(work(e) for k in self.made for e in self.again(k)),
        )

    def again(self, k: int) -> list[Equation]:
        """Return an equation that is evaluated again, or those inside of it that its results for use depend on."""
        eqn = self.inner.eqns[k]
        return list(_part_of(eqn, self.made[k])[0].eqns) if list(jaxprs.jaxprs_in(eqn.params)) else [eqn]

    def in_order(self) -> list[int]:
        """Order the equations to evaluate again: updates of buffers come early.

        What else reads these buffers is then computed from what was restored after the update, and XLA need not copy.
        """
        order: dict[int, None] = {}

        def add(k: int) -> None:
            makers = {self.eqn_of[v] for v in self.operands(k, self.made[k]) if self.is_made(v, self.made)}
            for maker in sorted(makers - order.keys()):
                add(maker)
            order.setdefault(k)

        for k in [*sorted(self.updated), *sorted(self.made)]:
            add(k)
        return list(order)

    def orbits(self, roots: set[int]) -> list[int]:
        """Return the buffers to restore for these: all that have been in their places."""
        all_roots, _ = jaxprs.fixed_point(roots, lambda roots: (roots | {self.slot_of[r] for r in roots}, None))
        return sorted(all_roots)

    def giving(self, outs: Sequence[Any], kept: Sequence[Any]) -> Any:
        """Return the jaxpr with these results and kept values as its outputs, without reads that are not needed.

        XLA computes in float32 between equations in bfloat16. A value that is kept is rounded, so the step uses the
        rounded value too. Otherwise an `exp(x - m)` that is recomputed from a kept `x` does not match the kept sum of
        such values. `jax.checkpoint` rounds what it saves in the same way.
        """
        pruned = jaxprs.pruned(self.sources.giving([*outs, *kept]))
        inner = _compat.opened(pruned)
        read = (*inner.outvars, *(v for eqn in inner.eqns for v in eqn.invars))
        used = set(filter(_is_variable, read))
        rounded = {v for v in inner.outvars[len(outs) :] if _is_variable(v) and _is_narrow(v.aval.dtype)}

        def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
            if eqn.primitive is ta_swap_p and eqn.outvars[1] not in used:
                return [ta_write_p.bind(*operands, **eqn.params), None]
            results = jaxprs.bind(eqn, operands)
            if eqn.primitive in ROW_OPS:  # its rows are from memory
                return results
            return [_rounded(x) if v in rounded else x for v, x in zip(eqn.outvars, results, strict=True)]

        def f(*args: Array) -> list[Array]:
            return jaxprs.interpret(pruned, args, equation)

        return jax.make_jaxpr(f)(*pruned.in_avals)


def _is_variable(v: Any) -> bool:
    return not isinstance(v, jex.Literal)


def _is_narrow(dtype: Any) -> bool:
    """Return whether XLA may compute in a wider type between equations of this one."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _rounded(x: Array) -> Array:
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _part_of(eqn: Equation, results: Iterable[int]) -> tuple[Jaxpr, list[bool]]:
    """Return a jaxpr of some results of an equation, and which operands these depend on."""

    def f(*operands: Array) -> list[Array]:
        outs = jaxprs.bind(eqn, operands)
        return [outs[k] for k in sorted(results)]

    inner = _compat.opened(jax.make_jaxpr(f)(*(v.aval for v in eqn.invars)))
    part, used = pe.dce_jaxpr(inner, [True] * len(inner.outvars))
    return part, list(used)


def _num_updates(eqn: Equation, results: Iterable[int]) -> int:
    """Return how many row ops update buffers to make some results of an equation."""

    def updates_in(jaxpr: Jaxpr) -> int:
        return sum(updates_rows(e.primitive) or sum(map(updates_in, jaxprs.jaxprs_in(e.params))) for e in jaxpr.eqns)

    return updates_in(_part_of(eqn, results)[0])


def work(eqn: Equation) -> float:
    """Return how many operations on numbers an equation does, or infinity if that is not known."""
    name, params = eqn.primitive.name, eqn.params
    inner = list(jaxprs.jaxprs_in(params))
    if inner:
        times = params["options"].max_steps if name == "ta_while" else params.get("length", 1)
        if name in ("while", "ta_replay") or times is None:
            return math.inf
        return times * sum(work(e) for jaxpr in inner for e in jaxpr.eqns)
    sizes = [math.prod(v.aval.shape) for v in _moved(eqn) if hasattr(v.aval, "shape")]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * sizes[-1] * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        return 2 * sizes[-1] * sizes[1] / max(1, eqn.outvars[0].aval.shape[params["dimension_numbers"].out_spec[1]])
    if name in kinds.SLOW:
        return math.inf
    return max(sizes, default=0) * (_OF_FUNCTION if name in kinds.TRANSCENDENTAL else 1)


def _moved(eqn: Equation) -> Sequence[Any]:
    """Return the operands and results of which an equation reads or writes all elements: of a buffer it may be rows."""
    if kinds.is_read(eqn):
        return eqn.outvars
    if updates(eqn):
        return eqn.invars[1:]
    return [*eqn.invars, *eqn.outvars]


#: How many operations an element of a function such as `exp` takes.
_OF_FUNCTION = 20


def _may_run_again(eqn: Equation) -> bool:
    """Return whether an equation may be evaluated a second time."""
    if eqn.primitive in ROW_OPS:
        return True
    if eqn.effects or "callback" in eqn.primitive.name:
        return False
    return all(_may_run_again(e) for jaxpr in jaxprs.jaxprs_in(eqn.params) for e in jaxpr.eqns)


def _again(eqn: Equation, operands: list[Array]) -> list[Array]:
    """Evaluate an equation again. Its index has been checked the first time."""
    if eqn.primitive in ROW_OPS:
        out = eqn.primitive.bind(*operands, **once_checked(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]
    return jaxprs.bind(eqn, operands)


def undone(loop: Loop, again: Replay, plan: Plan, then: Strategy) -> tuple[list[Array], Array, list[Array], Strategy]:
    """Run a loop by a plan. Its own derivatives keep what `then` says."""
    kept = loop._replace(options=replace(loop.options, strategy=then))
    outs, steps, _, tapes = recorded(kept, plan.jaxpr, plan.num_outs, plan.steps)
    rewind = Rewind(plan.back, plan.shared, again.nonzero_consts, len(tapes), len(plan.after))
    return outs, steps, [*(outs[k] for k in plan.after), *tapes], rewind


@dataclass(frozen=True)
class Rewind(Strategy):
    """Undoes steps by a plan. `extra` is the buffers after the loop, and the tapes."""

    back: Any  #: as in a plan; takes first which examples are active, if the predicate was batched after the plan
    shared: Any
    nonzero_consts: tuple[bool, ...]
    num_tapes: int
    num_buffers: int
    batch_dims: int = 0  #: added to the predicate after the plan was made

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
        buffers, tapes = [True] * n, [False] * self.num_tapes  # a tape that nothing reads is dropped
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
        known = t + len(shared)

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, buffers, cts = rest[:known], rest[known : known + n], rest[known + n :]
            active = [jnp.any(k < steps, axis=older)] if self.batch_dims else []

            before: list[list[Array]] = []

            # A const that is returned too has a transpose that starts from its running cotangent: reads add in place.
            def linear(const_dots: list[Array], carry_dots: list[Array]) -> tuple[list[Array], list[Array]]:
                outs = back(*active, k, *consts, *const_dots, *buffers, *carry_dots)
                before.append(outs[:n])  # these do not depend on what is transposed
                return const_dots, outs[n:]

            types = list(map(jax.typeof, cts))
            transposed = jax.linear_transpose(linear, types[:c], types[c:])
            const_cts, carry_cts = transposed((list(cts[:c]), list(cts[c:])))
            return [*before[-1], *const_cts, *carry_cts]

        outs = counted(loop, step, steps, [*tapes, *shared], [*buffers, *const_cts, *carry_cts], True)
        return outs[n : n + c], outs[n + c :]
