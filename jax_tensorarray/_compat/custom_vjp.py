"""The rules of a `custom_vjp`, and the logs that they return."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tensorarray._types import Equation

Array = jax.Array


class CustomVJPRules:
    """The rules of a `custom_vjp` call. Zeros are `SymbolicZero`s for those that ask what has derivatives.

    `jax.vjp` of the call would refuse cotangents of another dtype than the results', which JAX passes on between rules.

    Private: how JAX calls them. Without it such a call stays as it is.
    """

    def __init__(self, eqn: Equation) -> None:
        params = eqn.primitive.get_bind_params(eqn.params)
        (_, self._forward, self._backward), self._trees = params["subfuns"], params["out_trees"]

    def forward(self, primals: Sequence[Array], has_tangent: Sequence[bool]) -> tuple[list[Array], list[Array]]:
        """Return the results and the residuals for `backward`."""
        results = list(self._forward.call_wrapped(*itertools.chain(*zip(primals, has_tangent, strict=True))))
        _, tree, passed_on = self._trees()
        num_made = tree.num_leaves - sum(k is not None for k in passed_on)
        made, outs = iter(results[:num_made]), results[num_made:]
        return outs, [next(made) if k is None else primals[k] for k in passed_on]

    def backward(self, kept: Sequence[Array], cts: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the cotangents of the operands, and what the rule logs. Some of the cotangents are symbolic zeros."""
        results = self._backward.call_wrapped(*kept, *cts)
        cts, log = results if isinstance(results, tuple) else (results, None)  # from 0.11 on a log follows them
        return list(cts), log


def custom_vjp_rules(eqn: Equation) -> CustomVJPRules | None:
    """Return the rules of a `custom_vjp` call; None if JAX calls them in another way."""
    try:
        rules = CustomVJPRules(eqn)
    except (AttributeError, KeyError, ValueError):
        return None
    # A rule that is given accumulators is also a function of cotangents, but as such does not know which are wanted.
    takes_accumulators = hasattr(getattr(rules._backward, "f", None), "call_with_accums")
    return None if takes_accumulators and eqn.params["symbolic_zeros"] else rules


def define_vjp(f: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, Any]]) -> None:
    """Set the rules of a `custom_vjp`, which ask what has derivatives. `backward` returns cotangents and a log.

    JAX has such logs since 0.12.
    """
    if hasattr(f, "defvjp_with_logs"):
        f.defvjp_with_logs(forward, backward, symbolic_zeros=True)
    else:
        f.defvjp(forward, lambda *args: backward(*args)[0], symbolic_zeros=True)


def log_of(pull: Any, cts: Any) -> dict[str, Any]:
    """Return what rules of `custom_vjp`s log while `pull`, made by `jax.vjp`, is applied. JAX has logs since 0.12."""
    return dict(pull.with_logs(cts)[1]) if hasattr(pull, "with_logs") else {}
