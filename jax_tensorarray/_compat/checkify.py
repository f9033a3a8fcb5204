"""Rules of `checkify` and `jet`, for primitives of this package."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_tensorarray._compat.private import private_names

Array = jax.Array


def checked_as(primitive: Primitive, run: Callable[..., Any]) -> None:
    """Let `checkify` look for errors in what `primitive` runs: `run(*operands, **params)`.

    There is no public way to say so. Without it checkify finds no error in our loops.
    """
    private = private_names("checkify", "error_checks", "checkify_jaxpr")
    if private is None:
        return
    rules, check = private

    def rule(*args: Any, **params: Any) -> Any:
        (*numbers, error, enabled), operands = _split(args)
        jaxpr = jax.make_jaxpr(functools.partial(run, **params))(*map(jax.typeof, operands))
        return check(*numbers, jaxpr, enabled, error, *operands)

    rules[primitive] = rule


def checked_inside(primitive: Primitive, name: str, run: Callable[..., Sequence[Array]]) -> None:
    """Let `checkify` look for errors in the jaxpr that `primitive` has as the parameter `name`.

    The jaxpr with checks, and its operands, are run by `run(jaxpr, operands, given, found, **params)`. An error is its
    first `given` operands and its first `found` results. There is no public way to say so. Without it checkify finds
    no error in functions with a derivative of their own.
    """
    private = private_names("checkify", "error_checks", "checkify_jaxpr")
    if private is None:
        return
    rules, check = private

    def rule(*args: Any, **params: Any) -> Any:
        (*numbers, error, enabled), operands = _split(args)
        checked = functools.partial(check, *numbers, params[name], enabled)
        jaxpr, (found, outs) = jax.make_jaxpr(checked, return_shape=True)(error, *operands)
        given = jax.tree.leaves(error)
        results = run(jaxpr, [*given, *operands], len(given), len(jax.tree.leaves(found)), **params)
        return jax.tree.unflatten(jax.tree.structure((found, outs)), results)

    rules[primitive] = rule


def _split(args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split the arguments of a rule: the operands come after the error and the enabled checks.

    Since jax 0.11 the numbers of errors come before these.
    """
    first = 1 + next(k for k, x in enumerate(args) if isinstance(x, frozenset))
    return args[:first], args[first:]


def checked_besides(
    primitive: Primitive,
    checks: Callable[..., None],
    params_then: Callable[[Any, Sequence[Array], Any], Any] = lambda enabled, operands, params: params,
) -> None:
    """Let `checkify` look for errors in what `checks(enabled, *operands, **params)` runs, whose results are not used.

    `enabled` are the checks that the user asks for. The primitive itself is bound with what `params_then(enabled,
    operands, params)` returns. There is no public way to say so. Without it checkify finds no index out of range.
    """
    private = private_names("checkify", "error_checks", "checkify_jaxpr")
    if private is None:
        return
    rules, check = private

    def rule(*args: Any, **params: Any) -> Any:
        (*numbers, error, enabled), operands = _split(args)
        run = functools.partial(checks, enabled, **params)
        jaxpr = jax.make_jaxpr(lambda *operands: run(*operands))(*map(jax.typeof, operands))
        error, _ = check(*numbers, jaxpr, enabled, error, *operands)
        return error, primitive.bind(*operands, **params_then(enabled, operands, params))

    rules[primitive] = rule


def expanded_as(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Let `jax.experimental.jet` expand `primitive` by `rule(primals, series, **params)`.

    The module is public, its table of rules is not documented. Without it jet knows none of our ops.
    """
    if _jet_rules is not None:
        _jet_rules[primitive] = rule


try:
    from jax.experimental import jet as _jet

    _jet_rules: dict[Primitive, Any] | None = getattr(_jet, "jet_rules", None)
except ImportError:
    _jet_rules = None
