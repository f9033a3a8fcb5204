"""`ta_replay`: the tangents of a loop without a tape. Its transpose visits the steps again, from the last to the first.

    dy = ta_replay(f, steps, x, dx)                      # the tangent of `for k in range(steps): x = f(x)`
    # its transpose is
    for k in reversed(range(steps)):
        x = the carry before step k                      # from the strategy
        ct = vjp(f, x)(ct)

A strategy reconstructs the carry: by an inverse of the step, by running on from a checkpoint, or by undoing the writes
of later steps.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.axis import Axis
from jax_tensorarray._jaxprs.jaxprs import flagged, merge
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._loops import masking, rules
from jax_tensorarray._loops.linearize import linearize
from jax_tensorarray._loops.rules import Pruned, with_batch_axis
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.tapes import largest
from jax_tensorarray._loops.while_ import count, counter
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.part import ta_write_part_p
from jax_tensorarray._ops.primitive import ROW_OPS, is_zero
from jax_tensorarray._types import Array


@dataclass(frozen=True)
class Replay:
    """A loop whose steps a strategy visits again. The fields and the strategy are the parameters of `ta_replay`."""

    body: Any  #: of a `ta_while`
    batch_dims: int  #: of its predicate
    num_consts: int
    nonzero: tuple[bool, ...]  #: which consts and carries have tangents
    max_steps: int

    @property
    def num_carry(self) -> int:
        return len(self.nonzero) - self.num_consts

    @property
    def nonzero_consts(self) -> tuple[bool, ...]:
        return self.nonzero[: self.num_consts]

    @property
    def nonzero_carry(self) -> tuple[bool, ...]:
        return self.nonzero[self.num_consts :]

    def batched(
        self, axis: Axis, pred_batched: bool, consts_batched: Sequence[bool], consts: Any, init: Any
    ) -> "Replay":
        body = all_batched(axis, self.body, pred_batched, consts_batched, map(jax.typeof, [*consts, *init]))
        return replace(self, body=body, batch_dims=self.batch_dims + pred_batched)

    def step(self, k: Array, steps: Array, consts: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
        """Return the carry after step `k`."""
        return jaxprs.function(self.primal)(*self.leading(k, steps), *consts, *carry)

    @property
    def primal(self) -> Any:
        """The body for steps that are run and not pulled back. It has derivatives, too."""
        return primal_body(self.body, self.nonzero)

    def leading(self, k: Array, steps: Array) -> list[Array]:
        """Return the inputs of the body before its consts in step `k`: the active examples, for a batched predicate."""
        return [k < steps] if self.batch_dims else []

    def pull_back(
        self, k: Array, steps: Array, consts: Any, carry: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        """Return the cotangents of the consts, added to the running ones, and of the carry before step `k`."""

        def after(consts: list[Array], carry: list[Array]) -> list[Array]:
            return jaxprs.function(self.body)(*self.leading(k, steps), *consts, *carry)

        return self._pulled_back(after, consts, carry, const_cts, carry_cts)

    def pull_back_by_tape(
        self, steps: Array, consts: Sequence[Array], init: Sequence[Array], const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        """Do the same as the `pull_back` of a strategy, by a loop with a tape that has every derivative."""

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            return jaxprs.function(self.body)(*self.leading(k, steps), *rest)

        def after(consts: list[Array], carry: list[Array]) -> list[Array]:
            return counted(self, step, steps, consts, carry, False)

        return self._pulled_back(after, consts, init, const_cts, carry_cts)

    def _pulled_back(
        self, after: Callable[..., list[Array]], consts: Any, carry: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        """Return the cotangents of the consts, added to `const_cts`, and of the carry before `after`."""

        def f(some_consts: list[Array], some_carry: list[Array]) -> tuple[list[Array], list[Array]]:
            outs = after(merge(some_consts, self.nonzero_consts, consts), merge(some_carry, self.nonzero_carry, carry))
            return some_consts, flagged(outs, self.nonzero_carry)

        _, pull = jax.vjp(f, flagged(consts, self.nonzero_consts), flagged(carry, self.nonzero_carry))
        return pull((list(const_cts), list(carry_cts)))


@_compat.cached
def primal_body(body: Any, nonzero: Sequence[bool]) -> Any:
    """Return a body with the forward rule of each `custom_vjp`, from `jax.linearize` in the flagged last inputs.

    JAX cannot differentiate a `custom_vjp` in forward mode, but it can differentiate the forward rule.
    """
    if not jaxprs.any_equation(body, lambda eqn: eqn.primitive is jax_primitives.custom_vjp_call_p):
        return body
    call = registry.without_calls(body)
    nonzero = [*[False] * (len(body.in_avals) - len(nonzero)), *nonzero]

    def step(*args: Array) -> list[Array]:
        def at(*some: Array) -> tuple[list[Array], list[Array]]:
            outs = call(*merge(some, nonzero, args))
            return outs, outs

        return jax.linearize(at, *flagged(args, nonzero), has_aux=True)[2]

    return jaxprs.pruned(jax.make_jaxpr(step)(*body.in_avals))


ta_replay_p = Primitive("ta_replay")

# Operands: steps, *consts, *init, *extra, *const_tangents, *carry_tangents. Results: tangents of the carry at the end.
# `extra` are further operands of the strategy.


def bind(operands: Sequence[Any], loop: Replay, strategy: Strategy) -> list[Array]:
    return ta_replay_p.bind(*operands, **vars(loop), strategy=strategy)


def _split(operands: Sequence[Any], loop: Replay) -> tuple[Any, ...]:
    steps, *rest = operands
    consts, rest = rest[: loop.num_consts], rest[loop.num_consts :]
    init, rest = rest[: loop.num_carry], rest[loop.num_carry :]
    linear = sum(loop.nonzero)
    extra, dots = rest[: len(rest) - linear], rest[len(rest) - linear :]
    n = sum(loop.nonzero_consts)
    return steps, consts, init, extra, dots[:n], dots[n:]


def _abstract_eval(*avals: Any, strategy: Strategy, **loop: Any) -> Any:
    return list(_split(avals, Replay(**loop))[5]), loop["body"].effects


def all_batched(axis: Axis, body: Any, pred_batched: bool, consts_batched: Sequence[bool], types: Any) -> Any:
    """Return the body for a batch. The flagged consts and the whole carry have a batch axis."""
    carry_batched = [True] * len(body.out_avals)
    return masking.batched_body(axis, body, pred_batched, consts_batched, carry_batched, list(types))


def counted(
    loop: Replay, step: Callable[..., Any], steps: Array, consts: Sequence[Array], carry: Sequence[Array], reverse: bool
) -> list[Array]:
    """Return the carry after `step(k, steps, *consts, *carry)` for every k."""
    types = map(jax.typeof, [steps, *consts, *carry])
    # The derivative of a step does not need the last write of the step. XLA would not remove that write, because it may
    # raise, and copy the buffer for it. But it did not raise in the forward loop, so we remove it.
    body = jaxprs.pruned(jax.make_jaxpr(step)(counter(largest(steps)), *types))
    return count(largest(steps), [steps, *consts], carry, body=body, max_steps=loop.max_steps, reverse=reverse)


def _run(*operands: Array, strategy: Strategy, **params: Any) -> list[Array]:
    """Run primals and tangents together from the beginning, and return the tangents."""
    loop = Replay(**params)
    steps, consts, init, _, const_dots, carry_dots = _split(operands, loop)
    joint = jaxprs.function(jaxprs.joint_jvp(loop.body, loop.nonzero_consts, loop.nonzero_carry))

    def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
        return joint(*loop.leading(k, steps), *rest)

    return counted(loop, step, steps, [*consts, *const_dots], [*init, *carry_dots], False)[loop.num_carry :]


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    # A second derivative: the loop of primals and tangents has a tape.
    nonzero = [not is_zero(t) for t in tangents]
    return jaxprs.jvp_of_some(functools.partial(_run, **params), primals, nonzero, flagged(tangents, nonzero))


def _pruned_for(live: Sequence[bool], num_operands: int, *, strategy: Strategy, **params: Any) -> Pruned:
    """Return the loop of the tangents on which the live results depend."""
    loop = Replay(**params)
    num_primals, num_dots = num_operands - sum(loop.nonzero), sum(loop.nonzero_consts)
    if all(live):
        return Pruned([True] * num_operands, list(live), {**params, "strategy": strategy}, loop.body.effects)
    tangents = linearize(loop.body, loop.nonzero_consts, loop.nonzero_carry).tangents_for(live)
    smaller = replace(loop, nonzero=tuple(merge(tangents, loop.nonzero, [False] * len(loop.nonzero))))
    _, _, _, extra, _, _ = _split([True] * num_operands, loop)
    strategy, extra = strategy.with_tangents(tangents[:num_dots], tangents[num_dots:], extra)
    operands = [*[True] * (num_primals - len(extra)), *extra, *tangents]
    return Pruned(operands, tangents[num_dots:], {**vars(smaller), "strategy": strategy}, loop.body.effects)


def _transpose(cts: Sequence[Any], *operands: Any, strategy: Strategy, **params: Any) -> Any:
    loop = Replay(**params)
    steps, consts, init, extra, const_dots, carry_dots = _split(operands, loop)
    linear = [*const_dots, *carry_dots]
    no_cts = [None] * (len(operands) - len(linear))
    types = [jax.typeof(x).to_tangent_aval() for x in flagged(consts, loop.nonzero_consts)]
    zeros = [ad.instantiate_zeros(ad.Zero(t)) for t in types]
    const_cts, carry_cts = strategy.pull_back(
        loop, steps, consts, init, extra, zeros, [ad.instantiate_zeros(c) for c in cts]
    )
    linear_cts = [*const_cts, *carry_cts]
    return [*no_cts, *(ct if ad.is_undefined_primal(x) else None for x, ct in zip(linear, linear_cts, strict=True))]


def _batch(axis: Axis, args: Sequence[Array], batched: Sequence[bool], *, strategy: Strategy, **params: Any) -> Any:
    loop = Replay(**params)
    steps, consts, init, extra, const_dots, carry_dots = _split(args, loop)
    pred_batched, consts_batched, *others_batched, const_dots_batched, carry_dots_batched = _split(batched, loop)

    def batched_as(xs: Sequence[Array], batched: Sequence[bool], out_flags: Sequence[bool]) -> list[Array]:
        return with_batch_axis(xs, batched, out_flags, axis.size)

    # Examples may share consts, if they share the tangents, and the number of steps. All other operands are batched.
    either = merge(const_dots_batched, loop.nonzero_consts, [False] * len(consts))
    either = [value or dot for value, dot in zip(consts_batched, either, strict=True)]
    consts = batched_as(consts, consts_batched, either)
    const_dots = batched_as(const_dots, const_dots_batched, flagged(either, loop.nonzero_consts))
    init, extra, carry_dots = (
        batched_as(xs, flags, [True] * len(xs))
        for xs, flags in zip([init, extra, carry_dots], [*others_batched, carry_dots_batched], strict=True)
    )
    strategy = strategy.batched(axis, pred_batched, either, consts, init)
    loop = loop.batched(axis, pred_batched, either, consts, init)
    operands = [steps, *consts, *init, *extra, *const_dots, *carry_dots]
    outs = bind(operands, loop, strategy)
    return outs, [True] * len(outs)


rules.register(
    ta_replay_p,
    run=_run,
    abstract_eval=_abstract_eval,
    bodies=lambda params: [registry.Body(params["body"])],
    pruned_for=_pruned_for,
    batch=_batch,
    jvp=_jvp,
    transpose=_transpose,
)


def live_carries(body: Any) -> list[bool]:
    """Return which carries a strategy must store: all but buffers of which the body only writes rows."""
    uses = Uses(jaxprs.pruned(body))
    inner = uses.jaxpr

    def only_written(v: Any, out: Any) -> bool:
        of_v = uses.of(v)
        while v is not out:
            if len(of_v) != 1 or of_v[0].operand != 0 or of_v[0].eqn is None or of_v[0].eqn.primitive not in _WRITES:
                return False
            v = of_v[0].eqn.outvars[0]
            of_v = uses.of(v)
        return len(of_v) == 1  # its only use is this output

    pairs = zip(inner.invars[len(inner.invars) - len(inner.outvars) :], inner.outvars, strict=True)
    return [not (v.aval.ndim and only_written(v, out)) for v, out in pairs]


#: Linear ops that return only a newer version of a buffer. Their derivatives do not depend on the contents of the
#: buffer.
_WRITES = (
    ta_write_part_p,
    ta_clear_p,
    *(p for p, of in ROW_OPS.items() if of.results == ("buffer",) and p in ad.primitive_transposes),
)
