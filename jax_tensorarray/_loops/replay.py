"""`ta_replay`: the tangents of a loop that kept no tape. Its transpose visits the steps again, last to first.

The mode says how a step is found again: by inverting the one after it, by running on from a checkpoint, or by undoing
the writes of the steps after it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
from jax_tensorarray._loops.while_ import while_
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.empty import empty_like
from jax_tensorarray._ops.part import ta_write_part_p
from jax_tensorarray._ops.primitive import ROW_OPS, is_zero, to_front, with_axis
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.write import ta_write

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
        return _primal(self.body, (*self.no_lanes, *self.moved))

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
def _primal(body: Any, moved: Sequence[bool]) -> Any:
    """Return a body as `jax.linearize` runs it in the flagged inputs: with the first rule of each `custom_vjp`.

    A function with such rules cannot be differentiated in forward mode, but its derivative in reverse mode can.
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
# `extra` is what the mode needs besides.


def replay(
    loop: Replay,
    mode: Any,
    steps: Array,
    consts: Sequence[Array],
    init: Sequence[Array],
    extra: Sequence[Array],
    const_dots: Sequence[Array],
    carry_dots: Sequence[Array],
) -> list[Array]:
    return ta_replay_p.bind(steps, *consts, *init, *extra, *const_dots, *carry_dots, loop=loop, mode=mode)


def _split(operands: Sequence[Any], loop: Replay) -> tuple[Any, ...]:
    steps, *rest = operands
    consts, rest = rest[: loop.num_consts], rest[loop.num_consts :]
    init, rest = rest[: loop.num_carry], rest[loop.num_carry :]
    linear = sum(loop.moved)
    extra, dots = rest[: len(rest) - linear], rest[len(rest) - linear :]
    n = sum(loop.moved_consts)
    return steps, consts, init, extra, dots[:n], dots[n:]


def _abstract_eval(*avals: Any, loop: Replay, mode: Any) -> Any:
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


def _run(*operands: Array, loop: Replay, mode: Any) -> list[Array]:
    """Run primals and tangents together from the beginning, and return the tangents."""
    steps, consts, init, _, const_dots, carry_dots = _split(operands, loop)
    moved = [*loop.no_lanes, *loop.moved]
    joint = jaxprs.function(jaxprs.joint_jvp(loop.body, loop.num_consts, loop.num_carry, moved))

    def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
        return joint(*loop.first(k, steps), *rest)

    return counted(loop, step, steps, [*consts, *const_dots], [*init, *carry_dots], False)[loop.num_carry :]


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, loop: Replay, mode: Any) -> Any:
    # A derivative of a derivative: the loop of primals and tangents has a tape.
    moved = [not is_zero(t) for t in tangents]

    def f(*some: Array) -> list[Array]:
        return _run(*spread(some, moved, primals), loop=loop, mode=mode)

    return jax.jvp(f, chosen(primals, moved), chosen(tangents, moved))


def _transpose(cts: Sequence[Any], *operands: Any, loop: Replay, mode: Any) -> Any:
    steps, consts, init, extra, const_dots, carry_dots = _split(operands, loop)
    linear = [*const_dots, *carry_dots]
    known = [None] * (len(operands) - len(linear))
    if all(is_zero(ct) for ct in cts):
        return [*known, *(ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear)]
    zeros = [ad.instantiate_zeros(ad.Zero(t)) for t in map(_tangent_type, chosen(consts, loop.moved_consts))]
    const_cts, carry_cts = mode.pull_back(
        loop, steps, consts, init, extra, zeros, [ad.instantiate_zeros(c) for c in cts]
    )
    found = [*const_cts, *carry_cts]
    return [*known, *(ct if ad.is_undefined_primal(x) else None for x, ct in zip(linear, found, strict=True))]


def _tangent_type(x: Array) -> Any:
    return jax.typeof(x).to_tangent_aval()


def _batch(axis: Axis, args: Sequence[Array], dims: Sequence[Any], *, loop: Replay, mode: Any) -> Any:
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
    mode = mode.batched(axis, loop.lanes, flags[0], differ, consts, init)
    outs = replay(wide, mode, steps, consts, init, mode.batched_extra(extra), const_dots, carry_dots)
    return outs, [0] * len(outs)


_compat.lowers_its_bodies(ta_replay_p)
_compat.checked_as(ta_replay_p, _run)
ta_replay_p.def_impl(functools.partial(xla.apply_primitive, ta_replay_p))
ta_replay_p.def_effectful_abstract_eval(_abstract_eval)
mlir.register_lowering(ta_replay_p, mlir.lower_fun(_run, multiple_results=True))
rules.register(ta_replay_p, body_of=lambda params: params["loop"].body, jvp=_jvp, transpose=_transpose, batch=_batch)


# --- the modes -------------------------------------------------------------------------------------------------


class Mode:
    """A way to find steps again."""

    #: Whether a tape is kept after all, unless `instead_of` returns a better mode.
    tapes = False

    #: Whether that tape is in the memory of the host.
    offload = False

    #: Whether `batched` wants all of the carry batched.
    batches_all = False

    def instead_of(
        self, linear: Linearized, body: Any, num_before: int, num_carry: int, max_steps: int
    ) -> "Mode | None":
        return None

    def forward(
        self, loop: Callable[..., Any], cond: Any, body: Any, cond_consts: Any, consts: Any, carry: Any
    ) -> tuple[list[Array], Array, list[Array], "Mode"]:
        """Run the loop. Return the carry, the steps taken, what else `pull_back` needs, and the mode to call it on."""
        outs, steps = loop(cond_consts, consts, carry, cond=cond, body=body)
        return outs, steps, self.extra(outs), self

    def extra(self, outs: list[Array]) -> list[Array]:
        return []

    def batched(self, axis: Axis, lanes: int, own_ends: bool, differ: Sequence[bool], consts: Any, init: Any) -> "Mode":
        """Return the mode for a batch of examples that differ in the flagged consts and in all of the carry."""
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
class OnHost(Mode):
    """A tape in the memory of the host."""

    tapes = True
    offload = True


@dataclass(frozen=True)
class Inverse(Mode):
    """Finds the carry before a step by the user's inverse from the carry after it. `extra` is the carry at the end."""

    body: Any  #: maps *consts, *carry to the carry before, with lanes as the loop's body
    own_consts: int  #: how many consts at the end of the loop's are the inverse's
    tolerance: float | None  #: how far from the carry at the start the inverse may lead, if that is checked
    source: str  #: where the loop is, for the message

    batches_all = True

    def extra(self, outs: list[Array]) -> list[Array]:
        return outs

    def batched(
        self, axis: Axis, lanes: int, own_ends: bool, differ: Sequence[bool], consts: Any, init: Any
    ) -> "Inverse":
        m = len(consts) - self.own_consts
        types = map(jax.typeof, [*consts[m:], *init])
        return replace(self, body=all_batched(axis, self.body, lanes, own_ends, differ[m:], types))

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        n, m = loop.num_carry, len(consts)
        moved = (*loop.no_lanes, *loop.moved_consts[m - self.own_consts :], *loop.moved_carry)
        back = jaxprs.function(_primal(self.body, moved))

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, carry, cts = rest[:m], rest[m + 1 : m + 1 + n], rest[m + 1 + n :]
            before = back(*loop.first(k, steps), *consts[m - self.own_consts :], *carry)
            const_cts_, carry_cts_ = loop.pull_back(
                k, steps, consts, before, cts[: len(const_cts)], cts[len(const_cts) :]
            )
            return [k == 0, *before, *const_cts_, *carry_cts_]

        never = largest(steps) < 0
        at_start, *outs = counted(loop, step, steps, consts, [never, *extra, *const_cts, *carry_cts], True)
        if self.tolerance is not None:
            for k, (live, start, found) in enumerate(
                zip(live_carries(loop.body, loop.num_carry), init, outs, strict=False)
            ):
                if live:
                    jax.debug.callback(functools.partial(self.compare, k), at_start, start, found)
        cts = outs[n:]
        return cts[: len(const_cts)], cts[len(const_cts) :]

    def compare(self, k: int, at_start: Array, start: Array, found: Array) -> None:
        """Raise ValueError if the inverse did not lead back to the start of the loop.

        An example that has already ended in an outer loop takes no step back: its values have no meaning.
        """
        start, found = np.asarray(start), np.asarray(found)
        tolerance = self.tolerance or 0.0
        if not at_start or np.allclose(found, start, tolerance, tolerance, equal_nan=True):
            return
        off = np.max(np.abs(found - start)) if np.issubdtype(start.dtype, np.number) else "another value"
        raise ValueError(
            f"the loop at {self.source}: inverse is not the inverse of body_fun. Carried back from the end of the loop "
            f"to its start, carry number {k}, {start.dtype}{list(start.shape)}, is off by {off}"
        )


@dataclass(frozen=True)
class Checkpoint(Mode):
    """Runs the loop on from one of `slots` carries, which binomial checkpointing has placed."""

    slots: int

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        m, c = len(consts), len(const_cts)
        slots = max(1, min(self.slots, loop.max_steps))  # one for each step is all that there is to keep
        reach = _Reach(loop.max_steps)
        # Carries that a step does not read, such as rows of results, are not kept: they are written anew, to nowhere.
        live = live_carries(loop.body, loop.num_carry)

        def whole(kept: Sequence[Array]) -> list[Array]:
            return spread(kept, live, [_nowhere(x) for x in init])

        def advance(by: Array, start: Array, steps: Array, consts: Any, kept: Any) -> list[Array]:
            def step(k: Array, steps: Array, start: Array, *rest: Array) -> list[Array]:
                return loop.step(start + k, steps, rest[:m], rest[m:])

            carry = whole(kept)
            types = map(jax.typeof, [steps, start, *consts, *carry])
            body = jax.make_jaxpr(step)(counter(by), *types)
            outs = count(by, [steps, start, *consts], carry, body=body, max_steps=loop.max_steps, reverse=False)
            return chosen(outs, live)

        # Kept: the carries before steps positions[0] < ... < positions[top]. Steps from `end` on are done.
        def goes_on(*args: Array) -> list[Array]:
            return [args[0] > 0]

        n = sum(live)

        def step(steps: Array, *args: Array) -> list[Array]:
            consts, (end, top, positions, *rest) = args[:m], args[m:]
            kept, cts = rest[:n], rest[n:]
            start = ta_read(positions, top, mode="drop")
            length, free = end - start, slots - top
            by = jnp.where(length == 1, 0, jnp.where(free == 1, length - 1, reach.split(length, free)))
            pulls = (length == 1) | (free == 1)
            carry = advance(by, start, steps, consts, [ta_read(t, top, mode="drop") for t in kept])
            place = top + 1
            positions, *kept = (
                ta_write(t, place, x, where=~pulls, mode="drop")
                for t, x in zip([positions, *kept], [start + by, *carry], strict=True)
            )

            def pull(cts: list[Array]) -> list[Array]:
                const_cts, carry_cts = loop.pull_back(end - 1, steps, consts, whole(carry), cts[:c], cts[c:])
                return [*const_cts, *carry_cts]

            cts = lax.cond(pulls, pull, lambda cts: cts, list(cts))
            end = jnp.where(pulls, end - 1, end)
            top = jnp.where(pulls, jnp.where(start == end, jnp.maximum(top - 1, 0), top), place)
            return [end, top, positions, *kept, *cts]

        end = largest(steps)
        first = end * 0
        kept = [ta_write(empty_like(with_axis(jax.typeof(x), slots)), 0, x) for x in [first, *chosen(init, live)]]
        state = [end, first, *kept, *const_cts, *carry_cts]
        types = [*map(jax.typeof, state)]
        body = jax.make_jaxpr(step)(*map(jax.typeof, [steps, *consts]), *types)
        outs, _ = while_(
            [],
            [steps, *consts],
            state,
            cond=jax.make_jaxpr(goes_on)(*types),
            body=body,
            max_steps=min(2 * loop.max_steps + 1, _LIMIT),
            source="the checkpointed loop",
        )
        cts = outs[3 + n :]
        return cts[:c], cts[c:]


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


def _nowhere(x: Array) -> Array:
    return empty_like(jax.typeof(x)) if x.ndim else x


_LIMIT = np.iinfo(np.int32).max


class _Reach:
    """`reach(s, r)`: how many steps can be reversed with s carries kept if none is run more than r times over.

    It is the binomial coefficient of s + r over s (Griewank 1992), cut off at `max_steps`.
    """

    def __init__(self, max_steps: int) -> None:
        # Rows for the smaller of s and r, from 2 on, each as far as it is needed: a few times sqrt(max_steps) in all.
        enough = min(max_steps, _LIMIT)
        b = np.arange(2 + math.isqrt(2 * enough))
        rows = [(b + 1) * (b + 2) // 2]
        while rows[-1][min(len(rows) + 1, len(rows[-1]) - 1)] < enough:
            row = np.cumsum(rows[-1])
            rows.append(row[: 1 + np.searchsorted(row, enough)])
        sizes = np.array([len(row) for row in rows])
        self.last, self.first = sizes - 1, np.cumsum(sizes) - sizes
        self.table = np.minimum(np.concatenate(rows), _LIMIT).astype(np.int32)

    def __call__(self, s: Array, r: Array) -> Array:
        few, many = jnp.minimum(s, r), jnp.maximum(s, r)
        row = jnp.clip(few - 2, 0, len(self.first) - 1)
        last, first = jnp.asarray(self.last)[row], jnp.asarray(self.first)[row]
        found = jnp.asarray(self.table)[first + jnp.minimum(many, last)]
        return jnp.where(few < 2, jnp.where(few == 1, 1 + jnp.minimum(many, _LIMIT - 1), few == 0), found)

    def split(self, length: Array, free: Array) -> Array:
        """Return how far to run before the next carry is kept, for the fewest steps (Griewank and Walther 2000)."""
        most = int(self.last[0])

        def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            enough = self(free, middle) >= length
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        _, r = lax.fori_loop(0, most.bit_length(), halve, (length * 0 + 1, length * 0 + most))
        by = jnp.maximum(self(free, r - 2), length - self(free - 1, r))
        return jnp.clip(by, 1, length - 1).astype(length.dtype)
