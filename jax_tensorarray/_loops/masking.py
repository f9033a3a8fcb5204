"""One step of a loop body for an example that may have finished: it keeps its carry, and writes no row.

A finished example is one for which `active` is False. What it computes does not matter, since its carry is selected;
but a select between two buffers touches all of their rows. So a buffer of the carry is followed through the body: as
long as each of its versions comes from the one before by row ops, these are told to skip the finished examples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._loops import bodies
from jax_tensorarray._ops.add import ta_add_p
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p

Array = Any

#: Which carry a value is a version of, or None.
Version = int | None

#: Number of operands of a row op before `where`.
_ROW_OPS = {ta_read_p: 2, ta_write_p: 3, ta_add_p: 3, ta_swap_p: 3}


def step(
    body: Any, active: Array, consts: Sequence[Array], carry: Sequence[Array], varying: Sequence[bool]
) -> list[Array]:
    """The carry after a step of `body(*consts, *carry)` if `active`, and as it was if not.

    `varying` says which inputs of the body differ from example to example.
    """
    none: list[Version] = [None] * len(consts)
    outs, versions = _Masked(active).evaluate(body, [*consts, *carry], [*none, *range(len(carry))], varying)
    return [
        out if version == k else jnp.where(active, out, old)
        for k, (out, version, old) in enumerate(zip(outs, versions, carry, strict=True))
    ]


class _Masked:
    """Evaluates jaxprs in which no row is touched unless `active`."""

    def __init__(self, active: Array) -> None:
        self.active = active

    def evaluate(
        self, jaxpr: Any, args: Sequence[Array], versions: Sequence[Version], varying: Sequence[bool]
    ) -> tuple[list[Array], list[Version]]:
        """The outputs, and of which carry each is a version."""

        def equation(eqn: Any, found: list[tuple[Array, Version, bool]]) -> Any:
            vary = [v for _, _, v in found]
            outs, kept = self.equation(eqn, [x for x, _, _ in found], [version for _, version, _ in found], vary)
            return [(x, version, any(vary) or version is not None) for x, version in zip(outs, kept, strict=True)]

        inputs = list(zip(args, versions, varying, strict=True))
        outs = bodies.interpret(jaxpr, inputs, equation, lambda x: (x, None, False))
        return [x for x, _, _ in outs], [version for _, version, _ in outs]

    def equation(
        self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]
    ) -> tuple[Sequence[Array], list[Version]]:
        p, params = eqn.primitive, eqn.params
        if p in _ROW_OPS:
            return self.row_op(p, params, operands, held)
        if p is ta_clear_p:
            buffer, start, stop = operands
            return [p.bind(buffer, start, jnp.where(self.active, stop, start), **params)], [held[0]]
        if any(version is not None for version in held):
            rule = _RULES.get(p.name)
            if rule is not None:
                return rule(self, eqn, operands, held, varying)
        outs = bodies.bind(eqn, operands)
        return outs, [None] * len(outs)

    def row_op(
        self, p: Any, params: Any, operands: list[Array], held: list[Version]
    ) -> tuple[Sequence[Array], list[Version]]:
        rows = _ROW_OPS[p]
        where = jnp.broadcast_to(self.active, jnp.shape(operands[1]))
        if len(operands) > rows:
            where &= operands[rows]
        out = p.bind(*operands[:rows], where, **params)
        if p is ta_read_p:
            return [out], [None]
        return (out, [held[0], None]) if p.multiple_results else ([out], [held[0]])

    def call(self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]) -> Any:
        return self.evaluate(eqn.params["jaxpr"], operands, held, varying)

    def checkpoint(self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]) -> Any:
        jaxpr, kept = eqn.params["jaxpr"], []

        def f(active: Array, *operands: Array) -> Sequence[Array]:
            outs, versions = _Masked(active).evaluate(_compat.closed(jaxpr), operands, held, varying)
            kept.append(versions)
            return outs

        f = jax.checkpoint(f, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
        outs = f(self.active, *operands)
        return outs, kept[-1]

    def cond(self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]) -> Any:
        index, *operands = operands
        held, branches = held[1:], eqn.params["branches"]
        if varying[0]:
            several = [v for v in {*held} if v is not None and held.count(v) > 1]
            if several:  # two versions of a buffer: neither can be passed from branch to branch
                held = [None if v in several else v for v in held]
            return self.all_branches(branches, index, operands, held, varying[1:])
        kept: list[list[Version]] = []

        def masked(branch: Any) -> Callable[..., Any]:
            def f(active: Array, *operands: Array) -> list[Array]:
                outs, versions = _Masked(active).evaluate(branch, operands, held, varying[1:])
                kept.append(versions)
                return outs

            return f

        outs = lax.switch(index, [masked(b) for b in branches], self.active, *operands)
        return outs, _agreed(kept)

    def all_branches(
        self, branches: Sequence[Any], index: Array, operands: list[Array], held: list[Version], varying: list[bool]
    ) -> tuple[list[Array], list[Version]]:
        """Every example goes through all branches, and writes in its own only: a buffer from one to the next."""
        index = jnp.clip(index, 0, len(branches) - 1)
        results, kept, passed = [], [], list(operands)
        for b, branch in enumerate(branches):
            outs, versions = _Masked(self.active & (index == b)).evaluate(branch, passed, held, varying)
            results.append(outs)
            kept.append(versions)
            newest = {version: out for out, version in zip(outs, versions, strict=True) if version is not None}
            passed = [x if version is None else newest.get(version, x) for x, version in zip(passed, held, strict=True)]
        versions = _agreed(kept)
        outs = []
        for version, choices in zip(versions, zip(*results, strict=True), strict=True):
            outs.append(choices[-1] if version is not None else _select(index, choices))
        return outs, versions

    def scan(self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]) -> Any:
        params = eqn.params
        num_consts, num_carry = _compat.scan_counts(params)
        body = params["jaxpr"]
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        xs = operands[num_consts + num_carry :]
        own: list[Version] = [None] * num_consts + list(range(num_carry)) + [None] * len(xs)
        kept = []

        def f(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            outs, versions = self.evaluate(body, [*consts, *carry, *xs], own, [True] * len(own))
            kept.append(versions)
            return outs[:num_carry], outs[num_carry:]

        carry, ys = lax.scan(f, carry, xs, params["length"], params["reverse"], params["unroll"])
        before = held[num_consts : num_consts + num_carry]
        after = [v if kept[-1][k] == k else None for k, v in enumerate(before)]
        return [*carry, *ys], [*after, *[None] * len(ys)]

    def count(self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]) -> Any:
        steps, *rest = operands
        outs = eqn.primitive.bind(jnp.where(self.active, steps, 0), *rest, **eqn.params)
        kept = held[1 + eqn.params["num_consts"] :]  # no step, no change
        return outs, [*kept, *[None] * (len(outs) - len(kept))]

    def while_(self, eqn: Any, operands: list[Array], held: list[Version], varying: list[bool]) -> Any:
        from jax_tensorarray._loops.while_ import while_

        params, ours = eqn.params, "source" in eqn.params
        cond = params["cond" if ours else "cond_jaxpr"]
        predicate = bodies.function(cond)

        def goes_on(active: Array, *args: Array) -> list[Array]:
            return [active & predicate(*args)[0]]

        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outs, steps = while_(
            [self.active, *operands[:a]],
            operands[a:b],
            operands[b:],
            cond=jax.make_jaxpr(goes_on)(jax.ShapeDtypeStruct((), jnp.bool_), *bodies.abstract(cond.in_avals)),
            body=params["body" if ours else "body_jaxpr"],
            max_steps=params["max_steps"] if ours else None,
            source=params["source"] if ours else "an inner lax.while_loop",
            lanes=params["lanes"] if ours else 0,
            mode=params["mode"] if ours else None,
            tapes=params["tapes"] if ours else (),
        )
        if not ours:
            return outs, held[b:]
        return [*outs, steps], [*held[b:], *[None] * (len(outs) + 1 - len(held[b:]))]


def _agreed(kept: Sequence[Sequence[Version]]) -> list[Version]:
    """Of which carry the outputs are versions, whichever branch is taken. Of two versions of one, neither is."""
    agreed = [versions[0] if len(set(versions)) == 1 else None for versions in zip(*kept, strict=True)]
    return [None if agreed.count(version) > 1 else version for version in agreed]


def _select(index: Array, choices: Sequence[Array]) -> Array:
    out = choices[-1]
    for k in reversed(range(len(choices) - 1)):
        out = jnp.where(index == k, choices[k], out)
    return out


#: How primitives that run jaxprs pass the buffers on. Through others a buffer is selected as a whole.
_RULES: dict[str, Callable[..., Any]] = {
    jax_primitives.jit_p.name: _Masked.call,
    jax_primitives.remat_p.name: _Masked.checkpoint,
    jax_primitives.cond_p.name: _Masked.cond,
    jax_primitives.scan_p.name: _Masked.scan,
    jax_primitives.while_p.name: _Masked.while_,
    "ta_while": _Masked.while_,
    "ta_count": _Masked.count,
}
