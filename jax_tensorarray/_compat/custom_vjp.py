"""The rules of a `custom_vjp`, and their logs."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax_tensorarray._types import Array, Equation


class CustomVJPRules:
    """The rules of a `custom_vjp` call. With `symbolic_zeros`, a rule gets `SymbolicZero`s.

    `jax.vjp` of the call would refuse cotangents of another dtype than the results. Between rules, JAX allows them.

    JAX's calls of the rules are private. Without them we do not rewrite such a call.
    """

    def __init__(self, eqn: Equation) -> None:
        params = eqn.primitive.get_bind_params(eqn.params)
        (_, self._forward, self._backward), self._trees = params["subfuns"], params["out_trees"]

    def forward(self, primals: Sequence[Array], has_tangent: Sequence[bool]) -> tuple[list[Array], list[Array]]:
        """Return the results and the residuals for `backward`."""
        results = list(self._forward.call_wrapped(*itertools.chain(*zip(primals, has_tangent, strict=True))))
        _, tree, forwarded = self._trees()
        num_residuals = tree.num_leaves - sum(k is not None for k in forwarded)
        residuals, outs = iter(results[:num_residuals]), results[num_residuals:]
        return outs, [next(residuals) if k is None else primals[k] for k in forwarded]

    def backward(self, residuals: Sequence[Array], cts: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the cotangents of the operands, and the log of the rule. Some cotangents are symbolic zeros."""
        results = self._backward.call_wrapped(*residuals, *cts)
        cts, log = results if isinstance(results, tuple) else (results, None)  # from 0.11 on a log follows them
        return list(cts), log


def custom_vjp_rules(eqn: Equation) -> CustomVJPRules | None:
    """Return the rules of a `custom_vjp` call, or None if JAX calls them in another way."""
    try:
        rules = CustomVJPRules(eqn)
    except (AttributeError, KeyError, ValueError):
        return None
    # A rule that takes accumulators is also a function of cotangents. Then it does not know which ones JAX needs.
    takes_accumulators = hasattr(getattr(rules._backward, "f", None), "call_with_accums")
    return None if takes_accumulators and eqn.params["symbolic_zeros"] else rules


def define_vjp(f: Any, forward: Callable[..., Any], backward: Callable[..., tuple[Any, Any]]) -> None:
    """Set the rules of a `custom_vjp`, with `symbolic_zeros`. `backward` returns cotangents and a log.

    JAX has such logs since 0.12.
    """
    if hasattr(f, "defvjp_with_logs"):
        f.defvjp_with_logs(forward, backward, symbolic_zeros=True)
    else:
        f.defvjp(forward, lambda *args: backward(*args)[0], symbolic_zeros=True)


def log_of(pull: Any, cts: Any) -> dict[str, Any]:
    """Return the logs of rules of `custom_vjp`s in `pull`, the result of `jax.vjp`. JAX has logs since 0.12."""
    return dict(pull.with_logs(cts)[1]) if hasattr(pull, "with_logs") else {}
