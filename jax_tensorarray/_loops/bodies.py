"""What the loops do with the jaxprs of their bodies, by public transformations of JAX only."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

Array = Any


def function(jaxpr: Any) -> Callable[..., list[Array]]:
    """The function of flat arguments that a closed jaxpr is."""
    call: Callable[..., list[Array]] = jex.jaxpr_as_fun(jaxpr)
    return call


def bind(eqn: Any, operands: Sequence[Array]) -> list[Array]:
    """The results of one equation of a jaxpr."""
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def interpret(
    jaxpr: Any, args: Sequence[Any], equation: Callable[[Any, list[Any]], Iterable[Any]], known: Callable[[Array], Any]
) -> list[Any]:
    """Evaluate a jaxpr in values of any kind: `equation` gives those of an equation's results from those of its
    operands, and `known` that of a constant.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    values = dict(zip(inner.constvars, map(known, jaxpr.consts), strict=True))
    values.update(zip(inner.invars, args, strict=True))

    def read(v: Any) -> Any:
        return known(v.val) if isinstance(v, jex.Literal) else values[v]

    for eqn in inner.eqns:
        values.update(zip(eqn.outvars, equation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in inner.outvars]


def chosen(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def spread(values: Sequence[Any], flags: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """`others`, with `values` in the flagged places."""
    rest = iter(values)
    return [next(rest) if flag else other for flag, other in zip(flags, others, strict=True)]


def reached(jaxpr: Any, flags: Sequence[bool], *, inexact: bool) -> list[bool]:
    """Which outputs depend on a flagged input; with `inexact`, by a path of floats and complex numbers only."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    marked = {id(v) for v, flag in zip(inner.invars, flags, strict=True) if flag}

    def counts(v: Any) -> bool:
        return not inexact or jnp.issubdtype(getattr(v.aval, "dtype", jnp.float32), jnp.inexact)

    for eqn in inner.eqns:
        if any(id(v) in marked for v in eqn.invars):
            marked |= {id(v) for v in eqn.outvars if counts(v)}
    return [id(v) in marked for v in inner.outvars]


def fixed_point(body: Any, consts: Sequence[bool], carry: Sequence[bool], *, inexact: bool) -> list[bool]:
    """Which carries depend on a flagged input after any number of steps."""
    carry = list(carry)
    while True:
        after = reached(body, [*consts, *carry], inexact=inexact)
        wider = [a or b for a, b in zip(carry, after, strict=True)]
        if wider == carry:
            return wider
        carry = wider


@dataclass(frozen=True)
class Linearized:
    """A body together with the derivative of one step of it.

    `jaxpr` maps what the body takes to what it gives, followed by the residuals that differ from step to step.
    """

    jaxpr: Any
    num_outs: int
    sources: tuple[tuple[str, Any], ...]  #: of every residual: ("taped", number) or ("given", number of an input)
    tree: Any  #: of the tangent function, whose leaves are the residuals

    @property
    def taped(self) -> list[Any]:
        """Types of the residuals to be kept for every step."""
        return list(self.jaxpr.out_avals)[self.num_outs :]

    def tangents(self, taped: Sequence[Array], given: Callable[[int], Array], tangents: Sequence[Array]) -> list[Array]:
        """Tangents after one step from those before it."""
        leaves = [taped[n] if kind == "taped" else given(n) for kind, n in self.sources]
        return list(jax.tree.unflatten(self.tree, leaves)(*tangents))


def linearize(body: Any, varying: Sequence[bool], moved: Sequence[bool], fixed: Sequence[bool]) -> Linearized:
    """Linearize a body in the inputs flagged `moved`, for the outputs flagged `varying`.

    Residuals that are inputs flagged `fixed`, the same in every step, are not kept.
    """
    call, tree = function(body), []

    def step(*args: Array) -> list[Array]:
        def at(*some: Array) -> tuple[list[Array], list[Array]]:
            outs = call(*spread(some, moved, args))
            return chosen(outs, varying), outs

        _, derivative, outs = jax.linearize(at, *chosen(args, moved), has_aux=True)
        residuals, structure = jax.tree.flatten(derivative)
        tree.append(structure)
        return [*outs, *residuals]

    jaxpr = jax.make_jaxpr(step)(*abstract(body.in_avals))
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    num_outs = len(varying)
    inputs = {id(v): k for k, (v, f) in enumerate(zip(inner.invars, fixed, strict=True)) if f}
    kept: dict[int, int] = {}
    sources: list[tuple[str, Any]] = []
    positions = []
    for k, v in enumerate(inner.outvars[num_outs:], num_outs):
        if id(v) in inputs:
            sources.append(("given", inputs[id(v)]))
            continue
        if id(v) not in kept:
            kept[id(v)] = len(kept)
            positions.append(k)
        sources.append(("taped", kept[id(v)]))
    whole = function(jaxpr)

    def selected(*args: Array) -> list[Array]:
        outs = whole(*args)
        return [*outs[:num_outs], *(outs[k] for k in positions)]

    return Linearized(jax.make_jaxpr(selected)(*abstract(body.in_avals)), num_outs, tuple(sources), tree[-1])


def abstract(avals: Sequence[Any]) -> list[Any]:
    """Arguments to trace with, of those types."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]


def joint_jvp(body: Any, num_consts: int, num_carry: int, moved: Sequence[bool]) -> Any:
    """The body that takes tangents after its consts and after its carry, and gives those of the carry too.

    `moved` says which of its inputs have tangents.
    """
    call, first = function(body), len(moved) - num_consts - num_carry
    moved_consts, moved_carry = sum(moved[first:-num_carry]), moved[len(moved) - num_carry :]
    types = abstract(body.in_avals)
    tangents = [t.to_tangent_aval() for t in chosen(body.in_avals, moved)]

    def step(*args: Array) -> list[Array]:
        before, rest = args[:first], args[first:]
        consts, rest = rest[:num_consts], rest[num_consts:]
        const_dots, rest = rest[:moved_consts], rest[moved_consts:]
        carry, carry_dots = rest[:num_carry], rest[num_carry:]
        inputs = [*before, *consts, *carry]

        def at(*some: Array) -> tuple[list[Array], list[Array]]:
            outs = call(*spread(some, moved, inputs))
            return chosen(outs, moved_carry), outs

        _, dots, outs = jax.jvp(at, chosen(inputs, moved), [*const_dots, *carry_dots], has_aux=True)
        return [*outs, *dots]

    split = first + num_consts
    return jax.make_jaxpr(step)(
        *types[:split], *abstract(tangents[:moved_consts]), *types[split:], *abstract(tangents[moved_consts:])
    )
