"""Undoing the writes of a step: its buffers are restored by putting back the rows that it overwrote."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._loops.replay import Replay, all_batched, counted
from jax_tensorarray._loops.rules import Axis
from jax_tensorarray._loops.strategy import Strategy, Tape
from jax_tensorarray._loops.tapes import avals_of, record, tapes_for
from jax_tensorarray._loops.while_ import Loop
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.part import ta_write_part_p
from jax_tensorarray._ops.primitive import ROW_OPS, with_axis
from jax_tensorarray._ops.read import ta_read, ta_read_p
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p

Array = Any

#: The row ops that update their buffer.
_UPDATES = [p for p, call in ROW_OPS.items() if call.in_place]


@dataclass(frozen=True)
class Logged:
    """A body that also returns what it overwrites, and the body that puts it back.

    `jaxpr` maps the arguments of the body to its results, followed by the rows of the log. `restore` maps these rows
    and the carries flagged in `rewound`, after the step, to the same carries before it.
    """

    jaxpr: Any
    restore: Any
    rewound: tuple[bool, ...]


#: An array, and the carry that it is a version of.
_Value = tuple[Array, int | None]


class _Log:
    """Evaluates a body and keeps the rows that its row ops overwrite in the buffers of the carry."""

    def __init__(self) -> None:
        self.rows: list[Array] = []
        self.undo: list[tuple[int, int, Any]] = []  # (carry, number of rows of the log, parameters of a write)
        self.refused: dict[int, str] = {}  # carries that cannot be rewound, and why

    def evaluate(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        return jaxprs.interpret(jaxpr, inputs, self.equation, lambda x: (x, None))

    def equation(self, eqn: Any, inputs: list[_Value]) -> Iterable[_Value]:
        p, operands, held = eqn.primitive, [x for x, _ in inputs], [k for _, k in inputs]
        if p in _UPDATES and held[0] is not None:
            return self.update(p, eqn.params, operands, held[0])
        if any(k is not None for k in held):
            inner, change = registry.inlined(eqn, with_options=True), _Logging(held)
            if inner is not None:
                return self.evaluate(inner, inputs)
            entry = registry.entry_of(eqn)
            is_straight = entry.kind == "checkpoint" or p is jax_primitives.custom_jvp_call_p
            outs = entry.rebuild(eqn, operands, change) if is_straight else None
            if outs is not None:
                n = len(change.carries)
                self.rows += outs[n:]
                self.undo += change.log.undo
                self.refused |= change.log.refused
                return zip(outs[:n], change.carries, strict=True)
        for k, x in zip(held, operands, strict=True):
            if k is not None and _updates(eqn, jnp.shape(x), x.dtype):
                self.refused[k] = f"{p.name} updates it"
        return [(x, None) for x in jaxprs.bind(eqn, operands)]

    def update(self, p: Any, params: Any, operands: list[Array], k: int) -> list[_Value]:
        buffer, index, value, *where = operands
        if p in (ta_write_p, ta_swap_p):
            new, old = ta_swap_p.bind(buffer, index, value, *where, **params)
            outs = [new, old] if p is ta_swap_p else [new]
        else:
            old = ta_read_p.bind(buffer, index, *where, **params | {"reverse": False})
            outs = [p.bind(buffer, index, value, *where, **params)]
        self.rows += [index, old, *where]
        # Rows are put back in the opposite order: for duplicates, what the first one overwrote stays.
        self.undo.append((k, 2 + len(where), params | {"mode": "drop", "reverse": not params["reverse"]}))
        return [(x, None if n else k) for n, x in enumerate(outs)]


class _Logging(registry.Change):
    """A jaxpr in an equation, which returns its log after its results.

    The tangents of the log are read from those of the operands: the first row that is overwritten at a place was there
    before. All others are overwritten again when the step is undone.
    """

    def __init__(self, held: Sequence[int | None]) -> None:
        self.held = held

    def body(self, jaxpr: Any, *args: Array) -> list[Array]:
        self.jaxpr, self.log = jaxpr, _Log()
        found = self.log.evaluate(jaxpr, list(zip(args, self.held, strict=True)))
        self.carries = [k for _, k in found]
        return [*(x for x, _ in found), *self.log.rows]

    def jvp(self, f: Callable[..., Any], primals: list[Array], dots: list[Array], nonzero: list[bool]) -> Any:
        outs, found = f(primals, dots)
        log = self.body(self.jaxpr, *primals)[len(outs) :]

        def read(*some: Array) -> list[Array]:
            operands, rows, found = merge(some, nonzero, primals), iter(log), []
            for k, n, params in self.log.undo:
                index, old, *where = itertools.islice(rows, n)
                if jnp.issubdtype(old.dtype, jnp.inexact):
                    buffer = operands[self.held.index(k)]
                    found.append(ta_read_p.bind(buffer, index, *where, **params | {"reverse": False}))
            return found

        return [*outs, *log], [*found, *jax.jvp(read, flagged(primals, nonzero), dots)[1]]


def _updates(eqn: Any, shape: Any, dtype: Any) -> bool:
    """Return whether an equation updates rows of a buffer of that type, or runs one that does."""
    if eqn.primitive in (*_UPDATES, ta_write_part_p, ta_clear_p):
        return eqn.invars[0].aval.shape == shape and eqn.invars[0].aval.dtype == dtype
    inner = (e for jaxpr in jaxprs.jaxprs_in(eqn.params) for e in jaxpr.eqns)
    return any(_updates(e, shape, dtype) for e in inner)


def log(body: Any) -> tuple[Logged, dict[int, str]]:
    """Return the body with a log, and the reason for each carry that cannot be rewound."""
    found: list[Any] = []
    num_carry = len(body.out_avals)

    def step(*args: Array) -> list[Array]:
        entries = _Log()
        carries = [None] * (len(body.in_avals) - num_carry) + list(range(num_carry))
        outs = entries.evaluate(body, list(zip(args, carries, strict=True)))
        found.append((entries, [k for _, k in outs]))
        return [*(x for x, _ in outs), *entries.rows]

    jaxpr = jax.make_jaxpr(step)(*body.in_avals)
    entries, after = found[-1]
    rewound = [k == before and k not in entries.refused for k, before in enumerate(after)]
    for k, _, _ in entries.undo:
        if not rewound[k]:
            entries.refused.setdefault(k, "the body gives another buffer in its place")
    place = {k: n for n, k in enumerate(k for k in range(num_carry) if rewound[k])}
    undo = entries.undo

    def restore(*args: Array) -> list[Array]:
        rows, buffers = args[: len(args) - len(place)], list(args[len(args) - len(place) :])
        end = len(rows)
        for k, n, params in reversed(undo):
            (index, old, *where), end = rows[end - n : end], end - n
            if k in place:
                buffers[place[k]] = ta_write_p.bind(buffers[place[k]], index, old, *where, **params)
        return buffers

    rows = list(jaxpr.out_avals)[num_carry:]
    types = [*rows, *(a for a, r in zip(body.out_avals, rewound, strict=True) if r)]
    return Logged(jaxpr, jax.make_jaxpr(restore)(*types), tuple(rewound)), entries.refused


@dataclass(frozen=True)
class Undo(Strategy):
    """Let a loop keep the rows that each step overwrites, and the carries that are not updated by rows: "undo".

    This is for bodies that use a whole buffer in each step. A tape would hold T copies of it.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import Undo, fori_loop, ta_write
    >>> whole = lambda x: fori_loop(0, 2, lambda i, b: ta_write(b, i, jnp.dot(b, b)), x, residuals=Undo()).sum()
    >>> jax.grad(whole)(jnp.array([1.0, 2.0]))
    Array([22., 48.], dtype=float32)
    """

    def forward(self, loop: Loop) -> tuple[list[Array], Array, list[Array], Strategy]:
        options, carry, n = loop.options, loop.carry, len(loop.carry)
        logged, refused = log(loop.body)
        for k, why in refused.items():
            raise ValueError(
                f'the loop at {options.source}: residuals="undo" cannot rewind carry number {k}, '
                f'{jax.typeof(carry[k]).str_short()}: {why}. Use residuals="tape" or Checkpoint(16)'
            )
        call, predicate = jaxprs.function(logged.jaxpr), jaxprs.function(loop.cond)
        inputs, num_cond_inputs = len(loop.body.in_avals), len(loop.cond.in_avals)
        kept = [not r for r in logged.rewound]
        rows = list(logged.jaxpr.out_avals)[n:]

        def goes_on(*args: Array) -> list[Array]:
            return predicate(*args[:num_cond_inputs])

        def step(*args: Array) -> list[Array]:
            k, tapes = args[inputs], args[inputs + 1 :]
            outs = call(*args[:inputs])
            return [*outs[:n], k + 1, *record(tapes, k, [*flagged(args[inputs - n : inputs], kept), *outs[n:]])]

        tapes = tapes_for([*map(jax.typeof, flagged(carry, kept)), *rows], options.max_steps)  # type: ignore[arg-type]
        types = [jax.ShapeDtypeStruct((), jnp.int32), *avals_of(tapes)]
        outs, steps = loop._replace(
            carry=[*carry, jnp.int32(0)],
            cond=jax.make_jaxpr(goes_on)(*loop.cond.in_avals, *types),
            body=jax.make_jaxpr(step)(*loop.body.in_avals, *types),
            options=replace(options, tapes=tapes, strategy=Tape()),  # derivatives of this loop keep a tape
        ).run()
        buffers, recorded = flagged(outs[:n], logged.rewound), outs[n + 1 :]
        return outs[:n], steps, [*buffers, *recorded], Rewind(logged.restore, logged.rewound, len(rows))


@dataclass(frozen=True)
class Rewind(Strategy):
    """Restores the buffers before a step by putting rows back. `extra` is the buffers after the loop, and the tapes."""

    restore: Any
    rewound: tuple[bool, ...]
    num_rows: int
    batch_dims: int = 0  #: added to the predicate after the log was made: `restore` takes first which are active

    def batched(self, axis: Axis, pred_batched: bool, consts_batched: Any, consts: Any, init: Any) -> "Rewind":
        types = self.restore.in_avals[int(self.batch_dims > 0) :]
        types = [with_axis(t, axis.size) for t in types]
        restore = all_batched(axis, self.restore, pred_batched, [True] * self.num_rows, types)
        return replace(self, restore=restore, batch_dims=self.batch_dims + pred_batched)

    def batched_extra(self, extra: Sequence[Array]) -> list[Array]:
        n = sum(self.rewound)
        return [*extra[:n], *(jnp.moveaxis(t, 0, 1) for t in extra[n:])]

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        n, m, c = sum(self.rewound), len(consts), len(const_cts)
        tapes = extra[n:]
        num_kept = len(tapes) - self.num_rows
        restore = jaxprs.function(self.restore)

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, rest = rest[:m], rest[m:]
            tapes, rest = rest[: num_kept + self.num_rows], rest[num_kept + self.num_rows :]
            buffers, cts = rest[:n], rest[n:]
            rows = [ta_read(t, k, mode="drop") for t in tapes]
            older = tuple(range(self.batch_dims, loop.batch_dims))
            active = [jnp.any(k < steps, axis=older)] if self.batch_dims else []
            before = restore(*active, *rows[num_kept:], *buffers)
            rest_of_carry = iter(rows[:num_kept])
            carry = merge(before, self.rewound, [None if r else next(rest_of_carry) for r in self.rewound])
            const_cts, carry_cts = loop.pull_back(k, steps, consts, carry, cts[:c], cts[c:])
            return [*before, *const_cts, *carry_cts]

        outs = counted(loop, step, steps, [*consts, *tapes], [*extra[:n], *const_cts, *carry_cts], True)
        return outs[n : n + c], outs[n + c :]
