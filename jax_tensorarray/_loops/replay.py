"""`ta_replay`: the tangents of a loop that kept no tape. Its transpose visits the steps again, last to first.

The strategy says how a step is found again: by inverting the one after it, by running on from a checkpoint, or by
undoing the writes of the steps after it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad, mlir, xla

from jax_tensorarray import _compat
from jax_tensorarray._loops import jaxprs, masking, rules
from jax_tensorarray._loops.count import count, counter
from jax_tensorarray._loops.jaxprs import chosen, spread
from jax_tensorarray._loops.linearize import Linearized
from jax_tensorarray._loops.rules import Axis, widened
from jax_tensorarray._loops.tapes import largest
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.part import ta_write_part_p
from jax_tensorarray._ops.primitive import ROW_OPS, is_zero, to_front

Array = Any


@dataclass(frozen=True)
class Replay:
    """A loop whose steps can be visited again. It has the body of a `ta_while` with `lanes` of examples."""

    body: Any
    lanes: int
    num_consts: int
    moved: tuple[bool, ...]  #: which consts and carries have tangents
    max_steps: int

    @property
    def num_carry(self) -> int:
        return len(self.moved) - self.num_consts

    @property
    def moved_consts(self) -> tuple[bool, ...]:
        return self.moved[: self.num_consts]

    @property
    def moved_carry(self) -> tuple[bool, ...]:
        return self.moved[self.num_consts :]

    def batched(
        self, axis: Axis, own_ends: bool, differ: Sequence[bool], consts: Sequence[Array], init: Sequence[Array]
    ) -> "Replay":
        body = all_batched(axis, self.body, self.lanes, own_ends, differ, map(jax.typeof, [*consts, *init]))
        return replace(self, body=body, lanes=self.lanes + own_ends)

    def step(self, k: Array, steps: Array, consts: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
        """Return the carry after step `k`, for the examples that take it."""
        return jaxprs.function(self.primal)(*self.first(k, steps), *consts, *carry)

    @property
    def primal(self) -> Any:
        """The body for steps that are only run. These may be differentiated again."""
        return primal_body(self.body, (*self.no_lanes, *self.moved))

    @property
    def no_lanes(self) -> list[bool]:
        """Flags of what the body takes before its consts: it has no derivative."""
        return [False] * int(self.lanes > 0)

    def first(self, k: Array, steps: Array) -> list[Array]:
        return [k < steps] if self.lanes else []

    def pull_back(
        self,
        k: Array,
        steps: Array,
        consts: Sequence[Array],
        carry: Sequence[Array],
        const_cts: Sequence[Array],
        carry_cts: Sequence[Array],
    ) -> tuple[list[Array], list[Array]]:
        """Return the cotangents of the consts, added to the running ones, and of the carry before step `k`."""

        def f(moved_consts: list[Array], moved_carry: list[Array]) -> tuple[list[Array], list[Array]]:
            outs = jaxprs.function(self.body)(
                *self.first(k, steps),
                *spread(moved_consts, self.moved_consts, consts),
                *spread(moved_carry, self.moved_carry, carry),
            )
            return moved_consts, chosen(outs, self.moved_carry)

        _, pull = jax.vjp(f, chosen(consts, self.moved_consts), chosen(carry, self.moved_carry))
        return pull((list(const_cts), list(carry_cts)))


@_compat.cached
def primal_body(body: Any, moved: Sequence[bool]) -> Any:
    """Return a body as `jax.linearize` runs it in the flagged inputs: with the first rule of each `custom_vjp`.

    A function with such rules cannot be differentiated in forward strategy, but its derivative in reverse strategy can.
    """
    if not jaxprs.any_equation(body, lambda eqn: eqn.primitive is jax_primitives.custom_vjp_call_p):
        return body
    call = jaxprs.inlined(body)

    def step(*args: Array) -> list[Array]:
        def at(*some: Array) -> tuple[list[Array], list[Array]]:
            outs = call(*spread(some, moved, args))
            return outs, outs

        return jax.linearize(at, *chosen(args, moved), has_aux=True)[2]

    return jaxprs.pruned(jax.make_jaxpr(step)(*body.in_avals))


ta_replay_p = Primitive("ta_replay")
ta_replay_p.multiple_results = True

# Operands: steps, *consts, *init, *extra, *const_tangents, *carry_tangents. Results: tangents of the carry at the end.
# `extra` is what the strategy needs besides.


def replay(
    loop: Replay,
    strategy: Any,
    steps: Array,
    consts: Sequence[Array],
    init: Sequence[Array],
    extra: Sequence[Array],
    const_dots: Sequence[Array],
    carry_dots: Sequence[Array],
) -> list[Array]:
    return ta_replay_p.bind(steps, *consts, *init, *extra, *const_dots, *carry_dots, loop=loop, strategy=strategy)


def _split(operands: Sequence[Any], loop: Replay) -> tuple[Any, ...]:
    steps, *rest = operands
    consts, rest = rest[: loop.num_consts], rest[loop.num_consts :]
    init, rest = rest[: loop.num_carry], rest[loop.num_carry :]
    linear = sum(loop.moved)
    extra, dots = rest[: len(rest) - linear], rest[len(rest) - linear :]
    n = sum(loop.moved_consts)
    return steps, consts, init, extra, dots[:n], dots[n:]


def _abstract_eval(*avals: Any, loop: Replay, strategy: Any) -> Any:
    return list(_split(avals, loop)[5]), loop.body.effects


def all_batched(axis: Axis, body: Any, lanes: int, own_ends: bool, differ: Sequence[bool], types: Any) -> Any:
    """Return the body for a batch of examples that differ in the flagged consts and in all of the carry."""
    wide = [True] * len(body.out_avals)
    return masking.batched_body(axis, body, lanes, own_ends, [*differ, *wide], wide, list(types))


def counted(
    loop: Replay, step: Callable[..., Any], steps: Array, consts: Sequence[Array], carry: Sequence[Array], reverse: bool
) -> list[Array]:
    """Return the carry after `step(k, steps, *consts, *carry)` for every k."""
    types = map(jax.typeof, [steps, *consts, *carry])
    # Going back, a step is run again for its derivative, which does not need its last write. XLA would keep the write,
    # since it may raise, and copy the buffer for it. But it did not raise when the loop went forward.
    body = jaxprs.pruned(jax.make_jaxpr(step)(counter(largest(steps)), *types))
    outs: list[Array] = count(
        largest(steps), [steps, *consts], carry, body=body, max_steps=loop.max_steps, reverse=reverse
    )
    return outs


def _run(*operands: Array, loop: Replay, strategy: Any) -> list[Array]:
    """Run primals and tangents together from the beginning, and return the tangents."""
    steps, consts, init, _, const_dots, carry_dots = _split(operands, loop)
    moved = [*loop.no_lanes, *loop.moved]
    joint = jaxprs.function(jaxprs.joint_jvp(loop.body, loop.num_consts, loop.num_carry, moved))

    def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
        return joint(*loop.first(k, steps), *rest)

    return counted(loop, step, steps, [*consts, *const_dots], [*init, *carry_dots], False)[loop.num_carry :]


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, loop: Replay, strategy: Any) -> Any:
    # A derivative of a derivative: the loop of primals and tangents has a tape.
    moved = [not is_zero(t) for t in tangents]

    def f(*some: Array) -> list[Array]:
        return _run(*spread(some, moved, primals), loop=loop, strategy=strategy)

    return jax.jvp(f, chosen(primals, moved), chosen(tangents, moved))


def _transpose(cts: Sequence[Any], *operands: Any, loop: Replay, strategy: Any) -> Any:
    steps, consts, init, extra, const_dots, carry_dots = _split(operands, loop)
    linear = [*const_dots, *carry_dots]
    known = [None] * (len(operands) - len(linear))
    if all(is_zero(ct) for ct in cts):
        return [*known, *(ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear)]
    zeros = [ad.instantiate_zeros(ad.Zero(t)) for t in map(_tangent_type, chosen(consts, loop.moved_consts))]
    const_cts, carry_cts = strategy.pull_back(
        loop, steps, consts, init, extra, zeros, [ad.instantiate_zeros(c) for c in cts]
    )
    found = [*const_cts, *carry_cts]
    return [*known, *(ct if ad.is_undefined_primal(x) else None for x, ct in zip(linear, found, strict=True))]


def _tangent_type(x: Array) -> Any:
    return jax.typeof(x).to_tangent_aval()


def _batch(axis: Axis, args: Sequence[Array], dims: Sequence[Any], *, loop: Replay, strategy: Any) -> Any:
    size = axis.size
    args = [x if d is None else to_front(x, d, size) for x, d in zip(args, dims, strict=True)]
    flags = _split([d is not None for d in dims], loop)
    steps, consts, *rest = _split(args, loop)
    # Examples share the consts whose tangents they share, and perhaps the number of steps. All else is their own.
    dots_differ = spread(flags[4], loop.moved_consts, [False] * len(consts))
    differ = [value or dot for value, dot in zip(flags[1], dots_differ, strict=True)]

    def own(xs: Sequence[Array], batched: Sequence[bool], wanted: Sequence[bool]) -> list[Array]:
        return widened(xs, batched, wanted, size)

    consts = own(consts, flags[1], differ)
    const_dots = own(rest[2], flags[4], chosen(differ, loop.moved_consts))
    init, extra, carry_dots = (own(rest[k], flags[2 + k], [True] * len(rest[k])) for k in (0, 1, 3))
    wide = loop.batched(axis, flags[0], differ, consts, init)
    strategy = strategy.batched(axis, loop.lanes, flags[0], differ, consts, init)
    outs = replay(wide, strategy, steps, consts, init, strategy.batched_extra(extra), const_dots, carry_dots)
    return outs, [0] * len(outs)


_compat.lowers_its_bodies(ta_replay_p)
_compat.checked_as(ta_replay_p, _run)
ta_replay_p.def_impl(functools.partial(xla.apply_primitive, ta_replay_p))
ta_replay_p.def_effectful_abstract_eval(_abstract_eval)
mlir.register_lowering(ta_replay_p, mlir.lower_fun(_run, multiple_results=True))
rules.register(ta_replay_p, body_of=lambda params: params["loop"].body, jvp=_jvp, transpose=_transpose, batch=_batch)


# --- the strategies --------------------------------------------------------------------------------------------


class Strategy:
    """A way to find steps again."""

    #: Whether a tape is kept after all, unless `instead_of` returns a better strategy.
    tapes = False

    #: Whether that tape is in the memory of the host.
    offload = False

    #: Whether `batched` wants all of the carry batched.
    batches_all = False

    def instead_of(
        self, linear: Linearized, body: Any, num_before: int, num_carry: int, max_steps: int
    ) -> "Strategy | None":
        return None

    def forward(
        self, loop: Callable[..., Any], cond: Any, body: Any, cond_consts: Any, consts: Any, carry: Any
    ) -> tuple[list[Array], Array, list[Array], "Strategy"]:
        """Run the loop. Return the carry, the steps taken, what else `pull_back` needs, and whose `pull_back` it is."""
        outs, steps = loop(cond_consts, consts, carry, cond=cond, body=body)
        return outs, steps, self.extra(outs), self

    def extra(self, outs: list[Array]) -> list[Array]:
        return []

    def batched(
        self, axis: Axis, lanes: int, own_ends: bool, differ: Sequence[bool], consts: Any, init: Any
    ) -> "Strategy":
        """Return the strategy for a batch of examples that differ in the flagged consts and in all of the carry."""
        return self

    def batched_extra(self, extra: list[Array]) -> list[Array]:
        """Return `extra`, whose batch axis is the first, as `pull_back` of a batched loop expects it."""
        return extra

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        """Return the cotangents of the consts, added to the given ones, and of the carry before the loop.

        `carry_cts` are the cotangents of the carry after the loop.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class OnHost(Strategy):
    """A tape in the memory of the host."""

    tapes = True
    offload = True


def live_carries(body: Any, num_carry: int) -> list[bool]:
    """Return which carries must be kept: all but buffers to which the body does nothing but write rows."""
    inner = _compat.opened(jaxprs.pruned(body))
    users: dict[Any, list[tuple[Any, int]]] = {}
    for eqn in inner.eqns:
        for place, v in enumerate(eqn.invars):
            if not isinstance(v, jex.Literal):
                users.setdefault(v, []).append((eqn, place))

    def only_written(v: Any, out: Any) -> bool:
        while v is not out:
            uses = users.get(v, [])
            if len(uses) != 1 or uses[0][1] != 0 or uses[0][0].primitive not in _WRITES or v in inner.outvars:
                return False
            v = uses[0][0].outvars[0]
        return not users.get(v) and list(inner.outvars).count(v) == 1

    pairs = zip(inner.invars[len(inner.invars) - num_carry :], inner.outvars, strict=True)
    return [not (v.aval.ndim and only_written(v, out)) for v, out in pairs]


#: Ops that return a newer version of a buffer and nothing else, and are linear, so that they have a transpose. The
#: contents of the rows make no difference, not even to the derivative.
_WRITES = (
    ta_write_part_p,
    ta_clear_p,
    *(p for p, call in ROW_OPS.items() if call.results == ("buffer",) and p in ad.primitive_transposes),
)
