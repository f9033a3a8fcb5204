"""Make the same program with a quarter of the steps, and with arrays that are a quarter as long.

A program is compiled for shapes, and its function cannot be traced for others: it may have closed over arrays. So its
jaxpr is evaluated in other shapes. Only their length tells which axes are as long as the loop, so a program is skipped
if that may be chance: if the loop is short, or if an array has two axes of that length. Only what a loop stacks may
have two.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._jaxprs.kinds import MOVES, WHOLE
from jax_tensorarray._types import Equation

#: A loop of fewer steps may have as many as an array has rows or columns by chance.
_FEWEST = 32

#: An axis belongs to a loop if its length is the number of steps, or differs by so much: `fori_loop(1, len(x), ...)`.
_NEAR = 2

#: Parameters of primitives that say how long axes are.
_SIZES = {"shape", "new_sizes", "slice_sizes", "limit_indices", "length", "sizes", "dimension_size", "axis_size"}


class _Unknown(Exception):
    """The program with fewer steps is not known."""


def quartered(jaxpr: Jaxpr) -> tuple[Any, int, int] | None:
    """Return a program with a quarter of the steps, how many it had, and how many it has.

    It computes something else, at the cost that the program has for a smaller problem. None if that is not safely
    known: all of its outermost scans must have the same length, give or take a few steps, and no array but what they
    stack may have two such axes. A `while` beside the scans stays, with constants and arrays of the new sizes.
    """
    lengths = [eqn.params["length"] for eqn in outermost(jaxpr) if eqn.primitive.name == "scan"]
    steps = max(lengths, default=0)
    if steps < _FEWEST or any(steps - n > _NEAR for n in lengths):
        return None
    for multiples in (False, True):  # `x.reshape(-1)` has a multiple of the steps
        try:
            return _Resized(steps, multiples).jaxpr(jaxpr), steps, steps // 4
        except Exception:  # whatever it is, shapes no longer fit together
            continue
    return None


def computes_with_all_rows(jaxpr: Jaxpr, steps: int) -> bool:
    """Return whether the steps of a loop compute with arrays that have an axis as long as the loop.

    They multiply, sum or sort one, or compute their next state from all of a state. Then their time grows with it,
    whatever is done.
    """

    def is_whole(eqn: Equation) -> bool:
        name = eqn.primitive.name
        return (name in WHOLE or name.startswith(("reduce_", "cum"))) and any(map(is_long, eqn.invars))

    def is_long(v: Any) -> bool:
        return any(abs(n - steps) <= _NEAR for n in getattr(v.aval, "shape", ()))

    def evolves(jaxpr: Jaxpr, of_state: Sequence[bool]) -> tuple[bool, list[bool]]:
        """Return whether a long array is computed from all of the state, and which outputs are made of it."""
        inner = _compat.opened(jaxpr)
        made = {v for v, flag in zip(inner.invars, of_state, strict=True) if flag and is_long(v)}
        for eqn in inner.eqns:
            flags = [not isinstance(v, Literal) and v in made for v in eqn.invars]
            long = [v for v in eqn.outvars if is_long(v)]
            if not any(flags) or not long:
                continue
            called = registry.inlined(eqn, with_options=True)
            if called is not None:
                is_evolving, outs = evolves(called, flags)
                made.update(v for v, flag in zip(eqn.outvars, outs, strict=True) if flag)
            else:
                is_evolving = eqn.primitive.name not in MOVES and not [*jaxprs.jaxprs_in(eqn.params)]
                made.update(long)
            if is_evolving:
                return True, []
        return False, [not isinstance(v, Literal) and v in made for v in inner.outvars]

    for body in (body for loop in outermost(jaxpr) for body in registry.entry_of(loop).bodies(loop.params)):
        consts, carry, xs = body.split(_compat.opened(body.jaxpr).invars)
        flags = [*[False] * len(consts), *[True] * len(carry), *[False] * len(xs)]
        if jaxprs.any_equation(body.jaxpr, is_whole) or evolves(body.jaxpr, flags)[0]:
            return True
    return False


def outermost(jaxpr: Jaxpr) -> list[Any]:
    """Return the loops that are in no other loop, also those with a dynamic trip count."""
    loops = []
    for eqn in _compat.opened(jaxpr).eqns:
        if registry.entry_of(eqn).kind == "loop":
            loops.append(eqn)
        else:
            loops += [loop for inner in jaxprs.jaxprs_in(eqn.params) for loop in outermost(inner)]
    return loops


class _Resized:
    def __init__(self, steps: int, multiples: bool) -> None:
        self.steps, self.multiples = steps, multiples
        self.stacked: set[tuple[int, ...]] = set()

    def size(self, n: int) -> int:
        if abs(n - self.steps) <= _NEAR:
            return n - self.steps + self.steps // 4
        if self.multiples and n > self.steps and n % self.steps == 0:
            return n // self.steps * (self.steps // 4)
        return n

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        if sum(abs(n - self.steps) <= _NEAR for n in shape) > 1 and tuple(shape) not in self.stacked:
            raise _Unknown
        return tuple(map(self.size, shape))

    def jaxpr(self, jaxpr: Jaxpr) -> Any:
        """Return a closed jaxpr in other shapes."""
        types = [jax.ShapeDtypeStruct(self.shape(a.shape), a.dtype, weak_type=a.weak_type) for a in jaxpr.in_avals]
        return jax.make_jaxpr(lambda *args: jaxprs.interpret(jaxpr, args, self.equation, self.constant))(*types)

    def constant(self, x: Any) -> Any:
        x = np.asarray(x) if not isinstance(x, jax.Array) else x
        if x.ndim == 0 and np.issubdtype(x.dtype, np.integer):
            return x.dtype.type(self.size(int(x)))  # a bound
        return x[tuple(map(slice, self.shape(x.shape)))]

    def equation(self, eqn: Equation, operands: list[Any]) -> list[Any]:
        inner = registry.inlined(eqn, with_options=True)
        if inner is not None:
            return jaxprs.interpret(inner, operands, self.equation, self.constant)
        params = {name: self.parameter(name, x) for name, x in eqn.params.items()}
        if eqn.primitive.name == "reshape" and operands[0].size != math.prod(params["new_sizes"]):
            raise _Unknown  # JAX says so only when it lowers it
        outs = jaxprs.bind(eqn.replace(params=params), operands)
        if eqn.primitive.name == "scan":  # what it stacks has the axis of its steps, and its own ones
            for v in eqn.outvars[_compat.scan_counts(eqn.params)[1] :]:
                self.shape(v.aval.shape[1:])
                self.stacked.add(v.aval.shape)
        if any(out.shape != self.shape(v.aval.shape) for out, v in zip(outs, eqn.outvars, strict=True)):
            raise _Unknown
        return outs

    def parameter(self, name: str, x: Any) -> Any:
        if type(x) is tuple:  # no named one, such as dimension numbers
            return tuple(self.parameter(name, each) for each in x)
        if hasattr(_compat.opened(x), "eqns"):
            return self.inner(x)
        return self.size(x) if name in _SIZES and isinstance(x, int) else x

    def inner(self, jaxpr: Jaxpr) -> Any:
        new = self.jaxpr(_compat.closed(jaxpr))
        if hasattr(jaxpr, "consts"):
            return new
        if new.consts:
            raise _Unknown
        return _compat.opened(new)
