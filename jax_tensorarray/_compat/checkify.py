"""Rules of `checkify` and `jet`, for primitives of this package."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jax_tensorarray._compat.private import private_names
from jax_tensorarray._types import Array


def checked_as(primitive: Primitive, run: Callable[..., Any]) -> None:
    """Make `checkify` check `run(*operands, **params)` instead of `primitive`.

    JAX has no public way for this. Without it checkify finds no error in our loops.
    """

    def rule(check: Callable[..., Any], error: Any, enabled: Any, operands: Sequence[Array], params: Any) -> Any:
        jaxpr = jax.make_jaxpr(functools.partial(run, **params))(*map(jax.typeof, operands))
        return check(jaxpr, enabled, error, *operands)

    _add_rule(primitive, rule)


def checked_inside(primitive: Primitive, name: str, run: Callable[..., Sequence[Array]]) -> None:
    """Make `checkify` check the jaxpr in the parameter `name` of `primitive`.

    `run(jaxpr, operands, errors_in, errors_out, **params)` runs the jaxpr with checks. Its first `errors_in` operands
    and first `errors_out` results are the parts of an error. JAX has no public way for this. Without it checkify finds
    no error in functions with custom derivatives.
    """

    def rule(check: Callable[..., Any], error: Any, enabled: Any, operands: Sequence[Array], params: Any) -> Any:
        checked = functools.partial(check, params[name], enabled)
        jaxpr, (new_error, outs) = jax.make_jaxpr(checked, return_shape=True)(error, *operands)
        parts = jax.tree.leaves(error)
        results = run(jaxpr, [*parts, *operands], len(parts), len(jax.tree.leaves(new_error)), **params)
        return jax.tree.unflatten(jax.tree.structure((new_error, outs)), results)

    _add_rule(primitive, rule)


def checked_besides(
    primitive: Primitive,
    checks: Callable[..., None],
    params_then: Callable[[Any, Sequence[Array], Any], Any] = lambda enabled, operands, params: params,
) -> None:
    """Make `checkify` also check `checks(enabled, *operands, **params)`, and ignore its results.

    `enabled` are the checks that the user wants. The primitive gets the parameters `params_then(enabled, operands,
    params)`. JAX has no public way for this. Without it checkify finds no index out of range.
    """

    def rule(check: Callable[..., Any], error: Any, enabled: Any, operands: Sequence[Array], params: Any) -> Any:
        run = functools.partial(checks, enabled, **params)
        jaxpr = jax.make_jaxpr(lambda *operands: run(*operands))(*map(jax.typeof, operands))
        error, _ = check(jaxpr, enabled, error, *operands)
        return error, primitive.bind(*operands, **params_then(enabled, operands, params))

    _add_rule(primitive, rule)


def _add_rule(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register a rule of `checkify`: a function of `check`, the error, the enabled checks, operands and parameters.

    `check(jaxpr, enabled, error, *operands)` returns the error after a jaxpr, and its results.
    """
    private = private_names("checkify", "error_checks", "checkify_jaxpr")
    if private is None:
        return
    rules, check = private

    def of_checkify(*args: Any, **params: Any) -> Any:
        # The operands come after the error and the enabled checks. Since jax 0.11, the numbers of errors come first.
        first = 1 + next(k for k, x in enumerate(args) if isinstance(x, frozenset))
        *numbers, error, enabled = args[:first]
        return rule(functools.partial(check, *numbers), error, enabled, args[first:], params)

    rules[primitive] = of_checkify


def expanded_as(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Make `jax.experimental.jet` expand `primitive` by `rule(primals, series, **params)`.

    The module is public, but its table of rules is not documented. Without it jet has no rule for our ops.
    """
    if _jet_rules is not None:
        _jet_rules[primitive] = rule


try:
    from jax.experimental import jet as _jet

    _jet_rules: dict[Primitive, Any] | None = getattr(_jet, "jet_rules", None)
except ImportError:
    _jet_rules = None
