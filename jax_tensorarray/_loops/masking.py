"""Predication of a step of a loop: an example that has finished keeps its carry, and writes no row.

    b = lax.select(active, ta_write(b, i, x), b)             # touches all rows
    # becomes
    b = ta_write(b, i, x, where=active)

The other values of a finished example do not matter, because a select keeps its carry. For buffers, a select would
touch all rows. So we follow each buffer of the carry through the body, and mask the row ops that make its versions.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.axis import Axis, axes
from jax_tensorarray._jaxprs.jaxprs import flagged
from jax_tensorarray._loops.host import ta_host_read_p
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.guard import ta_guard
from jax_tensorarray._ops.primitive import NOOP_OPERANDS, ROW_OPS, no_mask_reaches, updates_rows
from jax_tensorarray._ops.starts import positions_of
from jax_tensorarray._types import Array, Equation


def step_of_active(
    body: Any, active: Array, consts: Sequence[Array], carry: Sequence[Array], batched: Sequence[bool]
) -> list[Array]:
    """Return the carry after a step of `body(*consts, *carry)` if `active`, else the old carry.

    `batched` flags the inputs of the body that have a batch axis.
    """
    n = len(consts)
    inputs = [
        MaskedValue(x, None if k < n else k - n, is_batched, True, is_invariant=k < n)
        for k, (x, is_batched) in enumerate(zip([*consts, *carry], batched, strict=True))
    ]
    outs = Masker(active).evaluate(body, inputs)
    return [
        out.array if out.carry == k else lax.select(active, out.array, old)
        for k, (out, old) in enumerate(zip(outs, carry, strict=True))
    ]


def batched_body(
    axis: Axis,
    body: Any,
    pred_batched: bool,
    consts_batched: Sequence[bool],
    carry_batched: Sequence[bool],
    types: Sequence[Any],
) -> Any:
    """Return the body of a `ta_while` for a batch. The flagged consts and carries have a batch axis.

    `types` are the types of its consts and carries. If the predicate is batched, the body first takes the flags of
    active examples.
    """
    batched = [*consts_batched, *carry_batched]
    call, num_consts = jaxprs.function(body), len(consts_batched)
    leading = list(body.in_avals)[: len(body.in_avals) - len(batched)]  # flags of active examples of outer batches
    if not pred_batched:
        step = axis.vmap(call, [*[None] * len(leading), *axes(batched)], axes(carry_batched))
        return jax.make_jaxpr(step)(*leading, *types)
    if not leading:

        def call(active: Array, *rest: Array) -> list[Array]:
            return step_of_active(body, active, rest[:num_consts], rest[num_consts:], batched)

    active = jax.ShapeDtypeStruct((axis.size, *(leading[0].shape if leading else ())), jnp.bool_)
    return jax.make_jaxpr(axis.vmap(call, [0, *axes(batched)], 0))(active, *types)


def every_branch(branches: Sequence[Any], index: Array, operands: Sequence[Array]) -> list[Array]:
    """Return the results of the branch of an index. Under `jax.vmap`, all examples run all branches."""
    inputs = [MaskedValue(x, k, True, True) for k, x in enumerate(operands)]
    return [x.array for x in Masker(np.True_).all_branches(branches, index, inputs)]


class MaskedValue(NamedTuple):
    """A value in the body of a loop."""

    array: Array
    carry: int | None = None  #: the carry of which it is a version
    batched: bool = False  #: whether it has a batch axis
    is_input: bool = False  #: whether it is an input of the step
    is_linear: bool = False  #: whether it is the tangent of an input
    is_invariant: bool = False  #: whether it is the same in every step

    @classmethod
    def constant(cls, x: Array) -> "MaskedValue":
        return cls(x, is_invariant=True)


class Masker:
    """Evaluates jaxprs, and touches rows only if `active`."""

    def __init__(self, active: Array | np.bool) -> None:
        self.active: Any = active

    def evaluate(self, jaxpr: Jaxpr, inputs: Sequence[MaskedValue]) -> list[MaskedValue]:
        return jaxprs.interpret(jaxpr, inputs, self.equation, MaskedValue.constant)

    def equation(self, eqn: Equation, operands: list[MaskedValue]) -> list[MaskedValue]:
        if eqn.effects or not all(x.is_invariant for x in operands):
            return self.masked(eqn, operands)
        # XLA runs a loop or an update that is the same in every step once, unless a mask that differs is in it.
        is_once = eqn.primitive.name in LOOPS or updates_rows(eqn.primitive)
        run = self.unmasked if is_once and not jaxprs.may_raise(eqn) else self.masked
        return [x._replace(is_invariant=True) for x in run(eqn, operands)]

    def masked(self, eqn: Equation, operands: list[MaskedValue]) -> list[MaskedValue]:
        p, params = eqn.primitive, eqn.params
        if p in ROW_OPS:
            return self.row_op(p, params, operands)
        if p in NOOP_OPERANDS:
            out = p.bind(*NOOP_OPERANDS[p](self.active, *(x.array for x in operands)), **params)
            updates = jnp.shape(out) == jnp.shape(operands[0].array)
            return [MaskedValue(out, operands[0].carry if updates else None, True)]
        if p is ta_host_read_p:
            (tape, step) = (x.array for x in operands)
            row = p.bind(tape, step, **params)
            return [MaskedValue(jnp.where(self.active, row, jnp.zeros_like(row)), None, True)]
        if p is ta_check_p:
            index, size, *where = (x.array for x in operands)
            active = jnp.broadcast_to(self.active, jnp.shape(index))
            return _values([p.bind(index, size, functools.reduce(jnp.logical_and, where, active), **params)], True)
        checks_rows = any(map(jaxprs.checks_rows, jaxprs.jaxprs_in(params)))
        has_buffer = any(x.carry is not None or (x.is_input and jnp.ndim(x.array)) for x in operands)  # perhaps
        if checks_rows or has_buffer:
            outs = self.run(eqn, operands)
            if outs is not None:
                return outs
        with no_mask_reaches() if checks_rows else contextlib.nullcontext():
            return self.unmasked(eqn, operands)

    def unmasked(self, eqn: Equation, operands: list[MaskedValue]) -> list[MaskedValue]:
        operands = [self.guard(x) for x in operands]
        return _values(jaxprs.bind(eqn, [x.array for x in operands]), any(x.batched for x in operands))

    def guard(self, x: MaskedValue) -> MaskedValue:
        """Guard an input of the step: its derivative is zero if the example is not active.

        In a finished example, the derivative may be infinite, and infinity times zero is NaN. A shared input has one
        derivative for all examples. We guard it only if it is a scalar, which is cheap to repeat.
        """
        if not (x.is_input and jaxprs.is_inexact(jax.typeof(x.array)) and (x.batched or not jnp.ndim(x.array))):
            return x
        if x.is_linear:
            return x._replace(array=lax.select(self.active, x.array, jnp.zeros_like(x.array)))
        return MaskedValue(ta_guard(self.active, x.array), x.carry, True)

    def row_op(self, p: Any, params: Any, operands: list[MaskedValue]) -> list[MaskedValue]:
        rows = len(ROW_OPS[p].operands) - 1  # all but `where`
        arrays = [x.array for x in operands]
        where = jnp.broadcast_to(self.active, positions_of(arrays[1], params["index_dims"]))
        if len(operands) > rows:
            where &= arrays[rows]
        out = p.bind(*arrays[:rows], where, **params)
        if not ROW_OPS[p].in_place:
            return [MaskedValue(out, None, True)]
        new, *old = out if p.multiple_results else [out]
        return [MaskedValue(new, operands[0].carry, True), *_values(old, True)]

    def run(self, eqn: Equation, operands: list[MaskedValue]) -> list[MaskedValue] | None:
        """Run an equation with masked jaxprs. Return None if we cannot."""
        inner, entry = registry.inlined(eqn, with_options=True), registry.entry_of(eqn)
        if inner is not None:
            return self.evaluate(inner, operands)
        if eqn.primitive.name in LOOPS:
            return LOOPS[eqn.primitive.name](self, eqn, operands)
        if entry.kind == "divided":
            return None
        bodies, first = entry.bodies(eqn.params), int(entry.kind == "branches")
        if first and operands[0].batched:
            index, *rest = operands
            carries = [x.carry for x in rest]
            # Two versions of one buffer cannot both pass from branch to branch.
            rest = [x if carries.count(x.carry) == 1 else x._replace(carry=None) for x in rest]
            return self.all_branches([body.jaxpr for body in bodies], self.guard(index).array, rest)
        change = _Masking(self.active, operands[first:])
        outs = entry.rebuild(eqn, [x.array for x in operands], change)
        return None if outs is None else change.values(outs)

    def all_branches(self, branches: Sequence[Any], index: Array, operands: list[MaskedValue]) -> list[MaskedValue]:
        """Run all branches, one after the other on the same buffers. Only the branch of the index writes rows."""
        index = jnp.clip(index, 0, len(branches) - 1)
        results: list[list[MaskedValue]] = []
        for b, branch in enumerate(branches):
            outs = Masker(self.active & (index == b)).evaluate(branch, operands)
            results.append(outs)
            if b == 0:
                slots = self.slots(outs, branches[1:], operands)
            versions = {v: outs[slot] for v, slot in slots.items() if outs[slot].carry == v}
            operands = [versions.get(x.carry, x) for x in operands]
        joined = _joined([x.array for x in results[-1]], results)
        return [
            x if x.carry is not None else MaskedValue(_select(index, [r.array for r in choices]), None, True)
            for x, choices in zip(joined, zip(*results, strict=True), strict=True)
        ]

    def slots(
        self, first: Sequence[MaskedValue], others: Sequence[Any], operands: list[MaskedValue]
    ) -> dict[int | None, int]:
        """Return which result of a branch is the version of each carry for the next branch.

        If the first branch returns two versions of a carry, choose the result for which all branches return one.
        """
        results, carries = [first], [x.carry for x in first if x.carry is not None]
        if len(carries) > len(set(carries)):
            change = _Masking(self.active, operands)
            for branch in others:
                change.traced(branch, [self.active, *(x.array for x in operands)])
            results += map(change.outside, change.results)
        joined = _joined([x.array for x in first], results)
        return {x.carry: slot for slot, x in enumerate(joined) if x.carry is not None}

    def scan(self, eqn: Equation, operands: list[MaskedValue]) -> list[MaskedValue]:
        entry = registry.ENTRIES["scan"]
        [loop] = entry.bodies(eqn.params)
        consts, carry, xs = loop.split(operands)
        start = [x if x.carry is not None else self.guard(x) for x in carry]
        followed = [MaskedValue(x.array, k, True) for k, x in enumerate(start)]
        xs = _values([self.guard(x).array for x in xs], True)
        change = _MaskedSteps(self.active, [*(x._replace(carry=None) for x in consts), *followed, *xs])
        outs = entry.rebuild(eqn, [x.array for x in change.inputs], change)
        assert outs is not None
        numbers = [x.carry if change.carries[k] == k else None for k, x in enumerate(carry)]
        n = len(carry)
        return [*(MaskedValue(x, v, True) for x, v in zip(outs[:n], numbers, strict=True)), *_values(outs[n:], True)]


class _MaskedSteps(registry.Change):
    """Masks the body of a scan. `inputs` are those of a step, where each carry is a version of itself."""

    def __init__(self, active: Array, inputs: Sequence[MaskedValue]) -> None:
        self.active, self.inputs = active, inputs
        self.carries: list[int | None] = []  #: for each result, the carry of which it is a version

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        outs = Masker(self.active).evaluate(jaxpr, _with_arrays(self.inputs, args))
        self.carries = [x.carry for x in outs]
        return [x.array for x in outs]


class _Masking(registry.Change):
    """Masks the jaxprs of an equation, in which `carry` is the number of an operand that is a version of a carry.

    In an inactive example, the derivative of such a result is that of the operand, whatever the rule returns.
    """

    takes_some = False

    def __init__(self, active: Array, operands: Sequence[MaskedValue]) -> None:
        self.before = [active]
        self.like = [x if x.carry is None else x._replace(carry=k) for k, x in enumerate(operands)]
        self.carries = [x.carry for x in operands]
        self.results: list[list[MaskedValue]] = []  #: the results of each jaxpr, with types as arrays

    def body(self, jaxpr: Jaxpr, *operands: Array) -> list[Array]:
        active, *args = operands
        outs = Masker(active).evaluate(jaxpr, _with_arrays(self.like, args))
        self.results.append(_with_arrays(outs, [jax.typeof(x.array) for x in outs]))
        return [x.array for x in outs]

    def values(self, outs: Sequence[Array]) -> list[MaskedValue]:
        """Return the results of the equation."""
        first, *others = self.results
        return self.outside(_joined(outs, self.results) if others else _with_arrays(first, outs))

    def outside(self, values: Sequence[MaskedValue]) -> list[MaskedValue]:
        return [x if x.carry is None else x._replace(carry=self.carries[x.carry]) for x in values]

    def carries_of(self, values: Sequence[MaskedValue]) -> list[int | None]:
        """Return, for each inexact value, the operand of which it is a version."""
        return [x.carry for x in flagged(values, registry.are_inexact([x.array for x in values]))]

    def jvp(self, f: Callable[..., Any], primals: list[Array], dots: list[Array], nonzero: list[bool]) -> Any:
        active, *args = primals
        # The tangent of operand k is a version of ~k.
        linear = [
            x._replace(carry=None if x.carry is None else ~x.carry, batched=True, is_linear=True)
            for x in _with_arrays(flagged(self.like, nonzero[1:]), dots)
        ]
        inputs = [MaskedValue(active), *_with_arrays(self.like, args), *linear]
        leaves, _ = _evaluated(active, f, (primals, dots), inputs)
        old = {x.carry: x.array for x in inputs}
        outs = [_selected(active, x, of.carry, old) for x, of in zip(leaves, self.results[0], strict=False)]
        tangents = zip(leaves[len(outs) :], self.carries_of(self.results[0]), strict=True)
        return outs, [_selected(active, x, None if k is None else ~k, old) for x, k in tangents]

    def forward(self, f: Callable[..., Any], *operands: Array) -> Any:
        active, *args = operands
        inputs = [MaskedValue(active), *_with_arrays(self.like, args)]
        leaves, tree = _evaluated(active, f, operands, inputs)
        old = {x.carry: x.array for x in inputs}
        outs = [_selected(active, x, of.carry, old) for x, of in zip(leaves, self.results[0], strict=False)]
        return outs, jax.tree.unflatten(tree, [x.array for x in leaves])[1]

    def backward(
        self, f: Callable[..., Any], before: Sequence[Array], residuals: Any, cts: list[Array]
    ) -> tuple[list[Array], Any]:
        numbers, old = self.carries_of(self.results[0]), dict[int | None, Array]()
        for k, ct in zip(numbers, cts, strict=True):
            old[k] = old[k] + ct if k in old else ct
        inputs = [MaskedValue(x, None, True, True) for x in (*jax.tree.leaves(residuals), *cts)]
        for n, k in enumerate(numbers, len(inputs) - len(cts)):
            inputs[n] = inputs[n]._replace(carry=k if numbers.count(k) == 1 else None)
        leaves, tree = _evaluated(before[0], f, (residuals, cts), inputs)
        operands = flagged(range(len(self.like)), registry.are_inexact([x.array for x in self.like]))
        _, log = jax.tree.unflatten(tree, [x.array for x in leaves])
        return [_selected(before[0], x, k, old) for x, k in zip(leaves, operands, strict=False)], log


def _with_arrays(values: Sequence[MaskedValue], arrays: Sequence[Array]) -> list[MaskedValue]:
    return [x._replace(array=a) for x, a in zip(values, arrays, strict=True)]


def _evaluated(
    active: Array, f: Callable[..., Any], args: Any, inputs: Sequence[MaskedValue]
) -> tuple[list[MaskedValue], Any]:
    """Return the masked leaves of `f(*args)`, and their tree. `inputs` are the leaves of the arguments."""
    jaxpr, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    return Masker(active).evaluate(jaxpr, inputs), jax.tree.structure(shape)


def _selected(active: Array, x: MaskedValue, carry: int | None, old: dict[int | None, Array]) -> Array:
    """Return the new version of a carry if `active`, else the old one, or zeros without one."""
    if carry is None or x.carry == carry:
        return x.array
    return lax.select(active, x.array, old[carry] if carry in old else jnp.zeros_like(x.array))


def _values(arrays: Sequence[Array], batched: bool) -> list[MaskedValue]:
    return [MaskedValue(x, None, batched) for x in arrays]


def results_of_loop(outs: Sequence[Array], carry: Sequence[MaskedValue]) -> list[MaskedValue]:
    """Return the results of a masked loop. The first ones are versions of `carry`."""
    numbers = [*(x.carry for x in carry), *[None] * (len(outs) - len(carry))]
    return [MaskedValue(x, k, True) for x, k in zip(outs, numbers, strict=True)]


def _joined(outs: Sequence[Array], results: Sequence[Sequence[MaskedValue]]) -> list[MaskedValue]:
    """Return the results of a conditional. A result is a version of a carry if it is in all branches: a join.

    If two results are versions of one carry, we follow neither.
    """
    numbers = [{x.carry for x in choices} for choices in zip(*results, strict=True)]
    agreed = [v.pop() if len(v) == 1 else None for v in numbers]
    return [MaskedValue(out, None if agreed.count(k) > 1 else k, True) for out, k in zip(outs, agreed, strict=True)]


def _select(index: Array, choices: Sequence[Array]) -> Array:
    cases = reversed(range(len(choices) - 1))
    return functools.reduce(lambda out, k: jnp.where(index == k, choices[k], out), cases, choices[-1])


#: How to mask each loop: a function of a `Masker`, an equation and its operands. Our loops add theirs.
LOOPS: dict[str, Callable[[Masker, Any, list[MaskedValue]], list[MaskedValue]]] = {"scan": Masker.scan}
