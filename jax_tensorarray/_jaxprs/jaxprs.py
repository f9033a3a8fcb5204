"""Operations on jaxprs."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex
from jax.extend.core import Jaxpr
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from jax_tensorarray import _compat
from jax_tensorarray._ops import primitive
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.primitive import ROW_OPS, varying_alike, zero_tangent
from jax_tensorarray._types import Array, Equation

Facts = TypeVar("Facts")
Result = TypeVar("Result")


def function(jaxpr: Jaxpr) -> Callable[..., list[Array]]:
    """Return a closed jaxpr as a function of flat arguments.

    The arguments may vary over more axes of a mesh than the inputs of the jaxpr, like predicates of a batch in a
    `shard_map`.
    """
    call: Callable[..., list[Array]] = jex.jaxpr_as_fun(jaxpr)

    def f(*args: Array) -> list[Array]:
        if jax.sharding.get_abstract_mesh().empty:
            return call(*args)
        return interpret(jaxpr, args, bind)

    return f


class Traced:
    """A function of arrays, traced once. It returns any pytree."""

    def __init__(self, f: Callable[..., Any], types: Sequence[Any]) -> None:
        self.jaxpr, self.outs = jax.make_jaxpr(f, return_shape=True)(*types)

    def __call__(self, *args: Array) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.outs), function(self.jaxpr)(*args))

    @property
    def forwarded(self) -> list[int | None]:
        """For each result, the number of the argument that the function returns there, or None."""
        inner = _compat.opened(self.jaxpr)
        numbers = {v: k for k, v in enumerate(inner.invars)}
        return [None if isinstance(v, jex.Literal) else numbers.get(v) for v in inner.outvars]


class ValueNumbers:
    """Numbers values by keys that define them: values of one number are equal. This is hash-consing."""

    def __init__(self) -> None:
        self._of_key: dict[Hashable, int] = {}

    def number(self, *key: Any) -> int:
        """Return the number of the value that a key defines."""
        try:
            return self._of_key.setdefault(key, len(self._of_key))
        except TypeError:  # a parameter has no hash
            return self.number(object())


def bind(eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Bind one equation of a jaxpr, and return the list of its results."""
    with eqn.ctx.manager, with_types_of(eqn):
        params = eqn.primitive.get_bind_params(eqn.params)
        if not jax.sharding.get_abstract_mesh().empty:
            operands, params = _varying_alike(eqn, operands, params)
        outs = eqn.primitive.bind(*operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _varying_alike(eqn: Equation, operands: Sequence[Array], params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return operands and parameters if the operands vary over more axes of a mesh than in the trace of the equation.

    A loop under `vmap` with `spmd_axis_name` has operands that vary over this axis, but its jaxpr lacks the axis.
    """
    if eqn.primitive.name == "pvary":
        varying = frozenset().union(*map(_compat.varying_axes, operands))
        return operands, params | {"axes": tuple(axis for axis in params["axes"] if axis not in varying)}
    varied_alike = len({_compat.varying_axes(v.aval) for v in eqn.invars}) == 1
    return (varying_alike(operands) if varied_alike and not any(jaxprs_in(eqn.params)) else operands), params


def with_types_of(eqn: Equation) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an equation keeps its types: it may be from a block with `jax.enable_x64`.

    Elsewhere JAX narrows types of 64 bits, and an index may change.
    """
    if jax.config.jax_enable_x64 or not any(map(_has_64_bits, (*eqn.invars, *eqn.outvars))):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def _has_64_bits(v: Any) -> bool:
    return getattr(v.aval, "dtype", None) in _OF_64_BITS


_OF_64_BITS = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def interpret(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    equation: Callable[[Any, list[Any]], Iterable[Any]],
    constant: Callable[[Array], Any] = lambda x: x,
    *,
    literal: Callable[[Any], Any] | None = None,
    outvars: Sequence[Any] | None = None,
) -> list[Any]:
    """Return the values of the outputs of a jaxpr: an abstract interpreter, for values of any kind.

    `equation` maps an equation and the values of its operands to the values of its results. `constant` maps a constant
    to its value; by default this is the constant itself. `literal` maps a `Literal`, with its type, to its value; by
    default `constant` maps the constant in the `Literal`. `outvars` are variables to return instead of the outputs.
    """
    inner = _compat.opened(jaxpr)
    values = dict(zip(inner.constvars, map(constant, jaxpr.consts), strict=True))
    values.update(zip(inner.invars, args, strict=True))

    def read(v: Any) -> Any:
        if isinstance(v, jex.Literal):
            return constant(v.val) if literal is None else literal(v)
        return values[v]

    for eqn in inner.eqns:
        with _compat.at_source_of(eqn), eqn.ctx.manager:
            values.update(zip(eqn.outvars, equation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in (inner.outvars if outvars is None else outvars)]


def jaxprs_in(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation."""
    for p in params.values():
        if type(p) in _PLAIN:
            continue
        for jaxpr in p if isinstance(p, tuple | list) else (p,):
            if type(jaxpr) not in _PLAIN and hasattr(_compat.opened(jaxpr), "eqns"):
                yield _compat.opened(jaxpr)


#: Types of parameters without jaxprs. Most parameters have these types, and we visit each equation several times.
_PLAIN = frozenset((type(None), bool, int, float, str))


def any_equation(jaxpr: Jaxpr, test: Callable[[Any], bool]) -> bool:
    """Return whether an equation of a jaxpr, or of a jaxpr nested in it, passes a test."""
    return any(
        test(eqn) or any(any_equation(inner, test) for inner in jaxprs_in(eqn.params))
        for eqn in _compat.opened(jaxpr).eqns
    )


def is_of_ours(eqn: Equation) -> bool:
    """Return whether an equation is an op or a loop of this library."""
    return eqn.primitive.name.startswith("ta_")


@_compat.cached
def has_ours(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr has an op or a loop of this library."""
    return any_equation(jaxpr, is_of_ours)


@_compat.cached
def has_row_ops(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr reads or writes rows."""
    return any_equation(jaxpr, lambda eqn: eqn.primitive in ROW_OPS)


@_compat.cached
def checks_rows(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr reads or writes rows, or raises for an index or the steps of a loop."""

    def checks(eqn: Equation) -> bool:
        return eqn.primitive in ROW_OPS or eqn.primitive is ta_check_p or raises_at_end(eqn)

    return any_equation(jaxpr, checks)


def raises_at_end(eqn: Equation) -> bool:
    """Return whether an equation is a loop of ours that raises an error if it needs too many steps."""
    return is_of_ours(eqn) and bool(getattr(eqn.params.get("options"), "error", ""))


def may_raise(eqn: Equation) -> bool:
    """Return whether an equation may raise an error of ours."""
    if is_of_ours(eqn) and (primitive.may_raise(eqn.params) or raises_at_end(eqn)):
        return True
    return any(may_raise(e) for jaxpr in jaxprs_in(eqn.params) for e in jaxpr.eqns)


def has_symbolic_shapes(eqn: Equation) -> bool:
    """Return whether `jax.export` leaves a size of an operand or result symbolic."""
    shapes = (getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
    return not all(isinstance(size, int) for shape in shapes for size in shape)


def is_inexact(x: Any) -> bool:
    """Return whether an array, a number or a type is of floats or complex numbers. A token has no dtype."""
    dtype = getattr(x, "dtype", None)
    return isinstance(x, float | complex) if dtype is None else jnp.issubdtype(dtype, jnp.inexact)


def pruned(jaxpr: Jaxpr) -> Any:
    """Eliminate dead code of a closed jaxpr, in control flow too."""
    inner = _compat.opened(jaxpr)
    needed, _ = pe.dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return needed if inner is jaxpr else jaxpr.replace(jaxpr=needed)


@_compat.cached
def part_of(jaxpr: Jaxpr, outputs: Sequence[bool], inputs: Any = False) -> tuple[Any, list[bool]]:
    """Return the jaxpr of the flagged outputs, and which inputs it keeps: those that it uses or `inputs` flags."""
    part, live = pe.dce_jaxpr(_compat.opened(jaxpr), list(outputs), inputs if inputs is False else list(inputs))
    names = ("invars", "outvars", "eqns", "effects", "debug_info")
    return _compat.replaced(jaxpr, **{name: getattr(part, name) for name in names}), live


def read_for(body: Any, carry: Sequence[bool]) -> list[bool]:
    """Return on which inputs of a loop's body the flagged carries depend, after any number of steps.

    The carries are the last inputs. A flagged carry depends on itself.
    """
    first, n = len(body.in_avals) - len(carry), len(carry)

    def one_step(carry: list[bool]) -> list[bool]:
        _, live = part_of(body, tuple(carry))
        return [*live[first:], *live[:first]]

    live = after_any_steps(carry, one_step)
    return [*live[n:], *live[:n]]


def partition(values: Sequence[Any], flags: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the values that are flagged, and the others."""
    return flagged(values, flags), flagged(values, [not flag for flag in flags])


def flagged(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def merge(values: Sequence[Any], flags: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """Return `others`, with `values` at the flagged positions."""
    rest = iter(values)
    return [next(rest) if flag else other for flag, other in zip(flags, others, strict=True)]


def nonzero_outputs(jaxpr: Jaxpr, flags: Sequence[bool]) -> list[bool]:
    """Return which outputs have tangents in `jax.jvp` if the flagged inputs do."""
    if not any(flags):
        return [False] * len(jaxpr.out_avals)
    has_tangent: list[bool] = []

    def at(primals: Sequence[Array], dots: Sequence[Array]) -> None:
        _, tangents = jvp_of_some(function(jaxpr), primals, flags, dots)
        has_tangent[:] = [not is_any_zero(t) for t in tangents]

    types = list(jaxpr.in_avals)
    jax.eval_shape(at, types, [t.to_tangent_aval() for t in flagged(types, flags)])
    return has_tangent


def fixed_point(facts: Facts, step: Callable[[Facts], tuple[Facts, Result]]) -> tuple[Facts, Result]:
    """Return the facts that hold before every step of a loop, and the other result of a step from these facts.

    This is Kleene iteration. `step` maps facts about the carry before a step to those that hold both before and after
    it. If a step only adds facts, "the carry depends on x", start with the fewest: the result is the least fixed point.
    If it only drops facts, "the carries are equal", start with the most: the result is the greatest fixed point.

    >>> b_and_c, c_and_d = ("b", "c"), ("c", "d")
    >>> before = {b_and_c: b_and_c, c_and_d: ("a", "b")}  # the step `a, b, c, d = a, c, b, a`
    >>> fixed_point({b_and_c, c_and_d}, lambda equal: ({pair for pair in equal if before[pair] in equal}, "a step"))
    ({('b', 'c')}, 'a step')
    """
    while True:
        after, result = step(facts)
        if after == facts:
            return facts, result
        facts = after


def after_any_steps(carry: Sequence[bool], one_step: Callable[[list[bool]], list[bool]]) -> list[bool]:
    """Return the flags of the outputs of a loop's body, its carries first, after any number of steps.

    `one_step` maps flags of the carries to those of the outputs. A flagged carry stays flagged.
    """

    def step(carry: list[bool]) -> tuple[list[bool], list[bool]]:
        outs = one_step(carry)
        return [a or b for a, b in zip(carry, outs, strict=False)], outs[len(carry) :]

    after, others = fixed_point(list(carry), step)
    return [*after, *others]


def jvp_of_some(
    f: Callable[..., Any], primals: Sequence[Any], nonzero: Sequence[bool], dots: Sequence[Array]
) -> tuple[list[Any], list[Any]]:
    """Return the results of a function and their tangents. The flagged arguments have the tangents `dots`.

    If a result depends on none of these arguments, its tangent is an `ad.Zero`, as in JAX's own rules. `jax.jvp` would
    return an array of zeros, and JAX would differentiate a `custom_vjp` of it in forward mode, which is an error.
    """
    has_tangent: list[bool] = []

    @jax.custom_jvp
    def probe(*outs: Array) -> tuple[Array, ...]:
        return outs

    @functools.partial(probe.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:  # only called if some have tangents
        has_tangent[:] = [not isinstance(t, SymbolicZero) for t in tangents]
        return primals, tangents

    def at(*some: Array) -> list[Any]:
        outs = list(f(*merge(some, nonzero, primals)))
        probe(*outs)
        return outs

    outs, dots_out = jax.jvp(at, flagged(primals, nonzero), dots)
    zeros = list(map(zero_tangent, outs))
    return outs, merge(flagged(dots_out, has_tangent), has_tangent, zeros) if has_tangent else zeros


def jvp_with_zeros(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the results of a function and their tangents, as a rule with `symbolic_zeros` does."""
    nonzero = [not isinstance(t, SymbolicZero) for t in tangents]
    return jvp_of_some(f, primals, nonzero, flagged(tangents, nonzero))


def is_any_zero(tangent: Any) -> bool:
    """Return whether a tangent or cotangent is a zero: JAX's own, that of a rule, or that of an integer."""
    return isinstance(tangent, ad.Zero | SymbolicZero) or tangent.dtype == jax.dtypes.float0


def joint_jvp(body: Any, nonzero_consts: Sequence[bool], nonzero_carry: Sequence[bool]) -> Any:
    """Extend a body by tangents of the flagged consts and carries.

    The new body takes tangents after its consts and after its carry, and returns the latter, too.
    """
    call, num_consts, num_carry = function(body), len(nonzero_consts), len(nonzero_carry)
    first, num_dots = len(body.in_avals) - num_consts - num_carry, sum(nonzero_consts)
    nonzero = [*[False] * first, *nonzero_consts, *nonzero_carry]
    types = list(body.in_avals)
    tangents = [t.to_tangent_aval() for t in flagged(body.in_avals, nonzero)]

    def step(*args: Array) -> list[Array]:
        before, rest = args[:first], args[first:]
        consts, rest = rest[:num_consts], rest[num_consts:]
        const_dots, rest = rest[:num_dots], rest[num_dots:]
        carry, carry_dots = rest[:num_carry], rest[num_carry:]
        inputs = [*before, *consts, *carry]

        def at(*some: Array) -> tuple[list[Array], list[Array]]:
            outs = call(*merge(some, nonzero, inputs))
            return flagged(outs, nonzero_carry), outs

        _, dots, outs = jax.jvp(at, flagged(inputs, nonzero), [*const_dots, *carry_dots], has_aux=True)
        return [*outs, *dots]

    split = first + num_consts
    return jax.make_jaxpr(step)(*types[:split], *tangents[:num_dots], *types[split:], *tangents[num_dots:])


@_compat.cached
def with_more_consts(body: Any, num_consts: int, more: Sequence[Any]) -> Any:
    """Add unused consts to a body, after its own."""
    call, types = function(body), list(body.in_avals)

    def f(*args: Array) -> list[Array]:
        return call(*args[:num_consts], *args[num_consts + len(more) :])

    return jax.make_jaxpr(f)(*types[:num_consts], *more, *types[num_consts:])
