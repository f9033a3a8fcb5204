"""Reverse mode by the user's inverse of the body: compute the carry before a step from the carry after it.

    for k in range(n): x = f(x)
    # reverse mode, with nothing stored; `ct` is the cotangent of `x`
    for k in reversed(range(n)): x = inverse(x); ct = vjp(f, x)(ct)

The loop stores no residuals. We differentiate a step at the carry that the inverse returns.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.axis import Axis
from jax_tensorarray._loops.from_jax import Carry, for_ever
from jax_tensorarray._loops.replay import Replay, all_batched, counted, live_carries, primal_body
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._loops.tapes import largest
from jax_tensorarray._loops.while_ import Loop
from jax_tensorarray._types import Array, Equation


@dataclass(frozen=True)
class Inverse(Strategy):
    """Store nothing: in a `while_loop` or `scan`, `f` computes the carry before a step from the carry after it.

    Args:
        f: maps the carry after a step to the carry before it; for `scan`, this carry and the slice of `xs`. Carries
            that the body returns unchanged are the same before the step, whatever `f` returns for them.
        check: for debugging, whether `f` must lead from the end of the loop back to its start. If it does not, reverse
            mode raises an error that states the difference. True allows half the digits of each dtype, a number is a
            tolerance, relative and absolute.

    Raises:
        TypeError, ValueError: `f` is not a function, or `check` is neither a bool nor a number of at least 0.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import scan
    >>> from jax_tensorarray.residuals import Inverse
    >>> back = Inverse(lambda total, x: total / x, check=True)
    >>> product = lambda xs: scan(lambda total, x: (total * x, None), 1.0, xs, residuals=back)[0]
    >>> jax.grad(product)(jnp.array([2.0, 4.0]))
    Array([4., 2.], dtype=float32)
    """

    f: Callable[..., Any]
    check: bool | float = False

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise TypeError(f"Inverse: f must be a function from a carry to the one before it, got {self.f!r}")
        if not isinstance(self.check, Real) or self.check < 0:
            raise ValueError(f"Inverse: check must be True, False or a tolerance, got {self.check!r}")

    def prepare(self, body: Any, consts: Any, tree: Any, leaves: Any, source: str) -> tuple[Strategy, Any, Any]:
        back, closed_over = _traced(self.f, tree, leaves, body)
        types = () if self.check is False else body.out_avals
        tolerances = (_half_the_digits(a.dtype) if self.check is True else float(self.check) for a in types)
        body = jaxprs.with_more_consts(body, len(consts), tuple(map(jax.typeof, closed_over)))
        return Inverted(back, len(closed_over), tuple(tolerances), source), body, [*consts, *closed_over]

    def of_second(self) -> Strategy:
        # The condition is true before every step.
        return replace(self, f=lambda state: (jnp.ones_like(state[0]), self.f(state[1])))


def _half_the_digits(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) ** 0.5 if jnp.issubdtype(dtype, jnp.inexact) else 0.0


@dataclass(frozen=True)
class Inverted(Strategy):
    """Computes the carry before a step by the user's inverse. `extra` is the carry at the end."""

    #: Maps *consts, *carry to the carry before. If the predicate is batched, it first takes the active examples.
    body: Any
    inverse_consts: int  #: how many of the loop's last consts the inverse uses
    tolerances: tuple[float, ...]  #: the largest difference of each carry from the initial one; empty without a check
    source: str  #: the line of the loop, for the message

    batches_all = True

    def forward(self, loop: Loop, again: Replay) -> tuple[list[Array], Array, list[Array], Strategy]:
        outs, steps = loop.run()
        return outs, steps, outs, self

    def batched(self, axis: Axis, pred_batched: bool, consts_batched: Any, consts: Any, init: Any) -> "Inverted":
        m = len(consts) - self.inverse_consts
        types = map(jax.typeof, [*consts[m:], *init])
        return replace(self, body=all_batched(axis, self.body, pred_batched, consts_batched[m:], types))

    def pull_back(
        self, loop: Replay, steps: Array, consts: Any, init: Any, extra: Any, const_cts: Any, carry_cts: Any
    ) -> tuple[list[Array], list[Array]]:
        n, m = loop.num_carry, len(consts)
        nonzero = (*loop.nonzero_consts[m - self.inverse_consts :], *loop.nonzero_carry)
        back = jaxprs.function(primal_body(self.body, nonzero))

        def step(k: Array, steps: Array, *rest: Array) -> list[Array]:
            consts, carry, cts = rest[:m], rest[m + 1 : m + 1 + n], rest[m + 1 + n :]
            before = back(*loop.leading(k, steps), *consts[m - self.inverse_consts :], *carry)
            const_cts_, carry_cts_ = loop.pull_back(
                k, steps, consts, before, cts[: len(const_cts)], cts[len(const_cts) :]
            )
            return [k == 0, *before, *const_cts_, *carry_cts_]

        no_step = largest(steps) < 0
        at_start, *outs = counted(loop, step, steps, consts, [no_step, *extra, *const_cts, *carry_cts], True)
        carries = zip(live_carries(loop.body), self.tolerances, init, outs, strict=False)
        for k, (live, tolerance, start, back_at_start) in enumerate(carries):
            if live:
                jax.debug.callback(functools.partial(self.compare, k, tolerance), at_start, start, back_at_start)
        cts = outs[n:]
        return cts[: len(const_cts)], cts[len(const_cts) :]

    def compare(self, k: int, tolerance: float, at_start: Array, first: Array, last: Array) -> None:
        """Raise ValueError if the inverse does not lead back to the initial carry.

        If an example has ended in an outer loop, it takes no step back, and its values have no meaning.
        """
        start, end = np.asarray(first), np.asarray(last)
        if not at_start or np.allclose(end, start, tolerance, tolerance, equal_nan=True):
            return
        off = np.max(np.abs(end - start)) if jnp.issubdtype(start.dtype, jnp.number) else "another value"
        raise ValueError(
            f"the loop at {self.source}: inverse is not the inverse of body_fun. Carried back from the end of the loop "
            f"to its start, carry number {k}, {start.dtype}{list(start.shape)}, is off by {off}"
        )


def _traced(inverse: Callable[[Any], Any], tree: Any, leaves: Sequence[Any], body: Any) -> tuple[Any, Sequence[Array]]:
    """Return the jaxpr of the inverse, and its free variables, including the leaves of the carry that are arrays."""
    types = [body.out_avals[x] if isinstance(x, Carry) else jax.typeof(x) for x in leaves]
    carry = jax.tree.unflatten(tree, types)
    check_inverse_type("while_loop", jax.eval_shape(inverse, carry), carry)
    # We trace the inverse as the body of a loop of JAX, which traces a function once. That loop does not carry a leaf
    # that the function returns unchanged. So a value below is an array, or the number of a carry: before the step or,
    # if negative, after it.
    jaxpr = jax.make_jaxpr(lambda carry: lax.while_loop(for_ever, inverse, carry))(carry)
    loops: list[tuple[Any, list[Any]]] = []

    def equation(eqn: Equation, values: list[Any]) -> list[Any]:
        if eqn.primitive is jax_primitives.while_p:
            loops.append((eqn.params["body_jaxpr"], values))
            return [Carry(~k) for k in range(len(eqn.outvars))]
        return values if any(isinstance(x, Carry) for x in values) else jaxprs.bind(eqn, values)

    outs = jaxprs.interpret(jaxpr, leaves, equation)
    # A value that the body returns unchanged is not a carry of the loop, whatever the inverse returns for it.
    outs = [out for x, out in zip(leaves, outs, strict=True) if isinstance(x, Carry)]
    types = list(body.out_avals)
    if not loops:  # the inverse returns all leaves unchanged
        return _composed(body, (), tuple(outs), tuple(types)), ()
    ((back, values),) = loops
    closed_over = [x for x in values if not isinstance(x, Carry)]
    numbers = tuple(x if isinstance(x, Carry) else None for x in values)
    return _composed(back, numbers, tuple(outs), tuple(types), tuple(map(jax.typeof, closed_over))), closed_over


@_compat.cached
def _composed(
    back: Any, numbers: Sequence[Any], outs: Sequence[Any], types: Sequence[Any], closed_over: Any = ()
) -> Any:
    """Return the inverse as a function of its free variables and of all carries, from the body of JAX's loop."""

    def f(closed_over: Sequence[Array], carry: Sequence[Array]) -> list[Array]:
        rest = iter(closed_over)
        after = jaxprs.function(back)(*(next(rest) if k is None else carry[k] for k in numbers)) if numbers else []
        return [carry[k] if k >= 0 else after[~k] for k in outs]

    return jax.make_jaxpr(f)(list(closed_over), list(types))


def check_inverse_type(op: str, returned: Any, expected: Any) -> None:
    """Raise TypeError if an inverse does not return the types that the body returns."""

    def described(x: Any) -> str:
        leaves = ", ".join(f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in jax.tree.leaves(x))
        return f"{jax.tree.structure(x)} of {leaves}"

    if described(returned) != described(expected):
        raise TypeError(
            f"{op}: inverse must return what body_fun returns, {described(expected)}, but returns {described(returned)}"
        )
