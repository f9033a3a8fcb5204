"""Higher-order primitives: how their jaxprs take operands, and how to rebuild an equation around changed jaxprs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr
from jax.interpreters import ad

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.custom_jvp import By, OfCall, by, ta_custom_jvp_p, with_rule
from jax_tensorarray._jaxprs.jaxprs import flagged, is_any_zero, merge
from jax_tensorarray._ops.primitive import zero_tangent
from jax_tensorarray._types import Array, Equation

Params = dict[str, Any]
Step = tuple[list[Array], list[Array]]  #: the next carries, and slices of the stacked results
T = TypeVar("T")


class Body(NamedTuple):
    """A jaxpr that an equation runs. Its outputs are the first results, and its inputs the operands from `first` on.

    In a loop these inputs are consts, carries and slices of arrays, and the first outputs are the next carries.
    """

    jaxpr: Jaxpr
    first: int = 0
    leading: int = 0  #: how many inputs come before the operands
    num_consts: int = 0
    num_carry: int = 0

    def inputs(self, of_operands: Sequence[T], missing: T) -> list[T]:
        """Map values of the operands to the inputs; `missing` for inputs that are no operands."""
        of_inputs = of_operands[self.first :]
        trailing = len(_compat.opened(self.jaxpr).invars) - self.leading - len(of_inputs)
        return [*[missing] * self.leading, *of_inputs, *[missing] * trailing]

    def split(self, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split values of the inputs into those of consts and inputs before them, of carries, and of slices."""
        a = self.leading + self.num_consts
        b = a + self.num_carry
        return list(inputs[:a]), list(inputs[a:b]), list(inputs[b:])

    def step(self, consts: Sequence[Array]) -> Callable[[Sequence[Array], Sequence[Array]], Step]:
        """Return a step as a function of the carries and the slices, for `lax.scan`."""

        def step(carry: Sequence[Array], xs: Sequence[Array]) -> Step:
            outs = jaxprs.function(_compat.closed(self.jaxpr))(*consts, *carry, *xs)
            return outs[: len(carry)], outs[len(carry) :]

        return step


class Change:
    """A change of the jaxprs in an equation. They may get more operands, `before` and `after` those of the equation.

    Operands and results of branches and of a checkpoint may be any pytrees of arrays.
    """

    before: Sequence[Array] = ()
    after: Sequence[Array] = ()
    #: Whether `jvp` and `backward` accept and return symbolic zeros. Otherwise zeros of derivatives are arrays.
    takes_some = True

    def body(self, jaxpr: Jaxpr, *args: Any) -> list[Any]:
        """Return the results of the changed jaxpr, perhaps followed by further ones."""
        raise NotImplementedError

    def join(self, results: Sequence[list[Any]]) -> Callable[[int, list[Any], list[Any]], list[Any]] | None:
        """Return a function that gives the results of all branches one structure, or None: a join in a lattice.

        `results` are those of each branch, with types instead of arrays. The function takes the number of a branch, its
        results and its operands.
        """
        return None

    def policy(self, policy: Any) -> Any:
        """Return the policy of a checkpoint of changed jaxprs."""
        return policy

    # The rules of a `custom_jvp` or `custom_vjp` are functions, which JAX calls when it differentiates. So these
    # methods change the derivative `f` of the call: tracing `f` returns the equations of the rule. Only floats and
    # complex numbers have tangents and cotangents here. `primals` and `args` include `before`.

    def call(self, f: Callable[..., Any], *args: Any) -> Any:
        """Return the results of a derivative."""
        return f(*args)

    def jvp(self, f: Callable[..., Any], primals: list[Array], dots: list[Array], nonzero: list[bool]) -> Any:
        """Return the results and their tangents. `dots` are the tangents of the primals flagged in `nonzero`."""
        return self.call(f, primals, dots)

    def forward(self, f: Callable[..., Any], *args: Array) -> Any:
        """Return the results and the residuals for `backward`, any pytree."""
        return self.call(f, *args)

    def backward(
        self, f: Callable[..., Any], before: Sequence[Array], residuals: Any, cts: list[Array]
    ) -> tuple[list[Array], Any]:
        """Return the cotangents of the operands, and the other results of the rule, a pytree."""
        operand_cts, more = self.call(f, residuals, cts)
        return list(operand_cts), more

    def operands(self, of_eqn: Sequence[Array]) -> list[Array]:
        return [*self.before, *of_eqn, *self.after]

    def traced(self, jaxpr: Jaxpr, operands: Sequence[Array]) -> Any:
        """Return the changed jaxpr for all operands."""
        return jax.make_jaxpr(functools.partial(self.body, _compat.closed(jaxpr)))(*map(jax.typeof, operands))


class Entry(NamedTuple):
    """A primitive that runs jaxprs."""

    #: "inlined" if its jaxpr can replace the equation, "rules" if it has custom derivatives, "divided" over devices,
    #: "checkpoint", "branches" or "loop"
    kind: str
    bodies: Callable[[Params], list[Body]]  #: from the parameters
    #: Runs an equation with changed jaxprs, or returns None if they cannot change.
    rebuild: Callable[[Any, Sequence[Any], Change], list[Any] | None] = lambda eqn, operands, change: None
    #: Maps the parameters, other jaxprs, and how many more results these have, to the new parameters.
    with_bodies: Callable[[Params, Sequence[Any], int], Params] | None = None


def entry_of(eqn: Equation) -> Entry:
    return ENTRIES.get(eqn.primitive.name, _OTHER)


def inlined(eqn: Equation, *, with_options: bool = False) -> Any:
    """Return the closed jaxpr that can replace an equation, or None.

    A `jit` with shardings, layouts or compiler options of its own is inlined only `with_options`.
    """
    entry, params = entry_of(eqn), eqn.params
    if entry.kind != "inlined":
        return None
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    has_options = params.get("compiler_options_kvs") or not all(
        _compat.is_unspecified(s) for name in names for s in params.get(name, ())
    )
    return None if has_options and not with_options else _compat.closed(entry.bodies(params)[0].jaxpr)


def without_calls(
    jaxpr: Jaxpr, *, without: Callable[[Equation], bool] = lambda eqn: False
) -> Callable[..., list[Array]]:
    """Return a closed jaxpr as a function of flat arguments. It inlines calls without options.

    It also inlines the checkpoints for which `without` is true.
    """

    def equation(eqn: Equation, operands: list[Array]) -> list[Array]:
        inner = _compat.closed(entry_of(eqn).bodies(eqn.params)[0].jaxpr) if without(eqn) else inlined(eqn)
        return jaxprs.bind(eqn, operands) if inner is None else without_calls(inner, without=without)(*operands)

    return lambda *args: jaxprs.interpret(jaxpr, args, equation)


def reached(jaxpr: Jaxpr, flags: Sequence[bool]) -> list[bool]:
    """Return which outputs may have a derivative with respect to a flagged input.

    A path between the two has floats and complex numbers only, and no `stop_gradient`. We follow it into control flow
    only as far as JAX does: with a wrong dependency, JAX may differentiate a `custom_vjp` that has no such derivative.
    """
    return _flow(jaxpr, flags, lambda eqn, operands: None)


def each_reached(jaxpr: Jaxpr, flags: Sequence[bool], visit: Callable[[Any, list[bool]], None]) -> None:
    """Call `visit` with each differentiable equation and the flags of its operands that depend on the inputs.

    The equations of nested jaxprs are not visited.
    """
    _flow(jaxpr, flags, visit)


def _flow(jaxpr: Jaxpr, flags: Sequence[bool], visit: Callable[[Any, list[bool]], None]) -> list[bool]:
    inner = _compat.opened(jaxpr)
    marked = {id(v) for v, flag in zip(inner.invars, flags, strict=True) if flag}

    def counts(v: Any) -> bool:
        return jnp.issubdtype(getattr(v.aval, "dtype", jnp.float32), jnp.inexact)

    for eqn in inner.eqns:
        operands = [id(v) in marked for v in eqn.invars]
        if any(operands) and eqn.primitive.name != "stop_gradient":
            visit(eqn, operands)
            entry = entry_of(eqn)
            # A rule `OfCall` differentiates the jaxpr of the call, so it has the same zeros.
            follows = entry.kind not in ("rules", "divided") or isinstance(eqn.params.get("rule"), OfCall)
            of_bodies = [reached_in(body, operands) for body in entry.bodies(eqn.params) if follows]
            if of_bodies:
                out_flags = [any(some) for some in zip(*of_bodies, strict=True)]
            elif _returns_zeros(eqn):
                alone = jax.make_jaxpr(functools.partial(jaxprs.bind, eqn))([v.aval for v in eqn.invars])
                out_flags = jaxprs.nonzero_outputs(alone, operands)
            else:
                out_flags = [True] * len(eqn.outvars)
            marked |= {id(v) for v, flag in zip(eqn.outvars, out_flags, strict=False) if flag and counts(v)}
    return [id(v) in marked for v in inner.outvars]


def _returns_zeros(eqn: Equation) -> bool:
    """Return whether the rule of a `custom_jvp` can return a symbolic zero."""
    return eqn.params.get("symbolic_zeros") is True or isinstance(eqn.params.get("rule"), By)


def reached_in(body: Body, flags: list[bool]) -> list[bool]:
    """Return which outputs of a body, after any number of steps, may depend on a flagged operand of its equation."""
    consts, carry, xs = body.split(body.inputs(flags, False))
    return jaxprs.after_any_steps(carry, lambda carry: reached(body.jaxpr, [*consts, *carry, *xs]))


# --- equations around changed jaxprs ---------------------------------------------------------------------------


def _checkpoint(eqn: Equation, operands: Sequence[Any], change: Change) -> list[Any] | None:
    parts = _compat.checkpoint_of(eqn.params)
    if parts is None:
        return None
    inner, policy, prevent_cse = parts
    entered, policy = _Entered([inner], change.operands(operands), change), change.policy(policy)
    jaxpr, consts = _compat.lifted(entered.jaxprs[0])
    if not isinstance(prevent_cse, bool):
        of_operands = [*[True] * len(change.before), *prevent_cse, *[True] * len(change.after)]
        prevent_cse = (*[False] * len(consts), *entered.of_arrays(of_operands))
    if "_prim" in eqn.params:
        f = jax.checkpoint(jaxprs.function(jaxpr), policy=policy, prevent_cse=prevent_cse)
        return entered.values(f(*consts, *entered.arrays))
    new = jaxpr if hasattr(inner, "consts") else _compat.opened(jaxpr)
    params = eqn.params | {"jaxpr": new, "policy": policy, "prevent_cse": prevent_cse}
    return entered.values(eqn.primitive.bind(*consts, *entered.arrays, **params))


def _cond(eqn: Equation, operands: Sequence[Any], change: Change) -> list[Any]:
    index, *rest = operands
    entered = _Entered(eqn.params["branches"], change.operands(rest), change)
    branches, arrays = entered.jaxprs, entered.arrays
    if any(branch.consts for branch in branches) or any(b.out_avals != branches[0].out_avals for b in branches):
        return entered.values(lax.switch(index, [*map(jaxprs.function, branches)], *arrays))
    return entered.values(eqn.primitive.bind(index, *arrays, **eqn.params | {"branches": tuple(branches)}))


class _Entered:
    """The changed jaxprs of branches or of a checkpoint, as functions of arrays.

    They take an array once that several operands share, and do not return an array that all of them forward.
    """

    def __init__(self, bodies: Sequence[Jaxpr], operands: Sequence[Any], change: Change) -> None:
        leaves, self.tree = jax.tree.flatten(list(operands))
        self.arrays: list[Array] = list({id(x): x for x in leaves}.values())
        numbers = {id(x): k for k, x in enumerate(self.arrays)}
        self.positions = [numbers[id(x)] for x in leaves]
        self.owners = [k for k, x in enumerate(operands) for _ in jax.tree.leaves(x)]
        types = list(map(jax.typeof, self.arrays))
        traced = [
            jaxprs.Traced(lambda *args, body=body: change.body(_compat.closed(body), *self.operands(args)), types)
            for body in bodies
        ]
        if (alike := change.join([of.outs for of in traced])) is not None:
            traced = [
                jaxprs.Traced(lambda *args, b=b, of=of: alike(b, of(*args), self.operands(args)), types)
                for b, of in enumerate(traced)
            ]
        self.outs = jax.tree.structure(traced[0].outs)
        same = [set(of) for of in zip(*(of.forwarded for of in traced), strict=True)]
        self.forwarded = [x.pop() if len(x) == 1 else None for x in same]
        computed = [x is None for x in self.forwarded]
        self.jaxprs = [
            of.jaxpr if all(computed) else jaxprs.part_of(of.jaxpr, tuple(computed), (True,) * len(types))[0]
            for of in traced
        ]

    def operands(self, arrays: Sequence[Array]) -> list[Any]:
        return list(jax.tree.unflatten(self.tree, [arrays[k] for k in self.positions]))

    def of_arrays(self, flags: Sequence[bool]) -> list[bool]:
        """Return which arrays belong to a flagged operand."""
        positions = {k for k, owner in zip(self.positions, self.owners, strict=True) if flags[owner]}
        return [k in positions for k in range(len(self.arrays))]

    def values(self, results: Sequence[Array]) -> list[Any]:
        """Return the results of the equation from those of its jaxprs."""
        rest = iter(results)
        return list(
            jax.tree.unflatten(self.outs, [next(rest) if k is None else self.arrays[k] for k in self.forwarded])
        )


def _custom_jvp(eqn: Equation, operands: Sequence[Array], change: Change) -> list[Array]:
    operands, first = change.operands(operands), len(change.before)
    changed, original = change.traced(eqn.params["call_jaxpr"], operands), eqn.params.get("rule")
    if isinstance(original, OfCall):
        return with_rule(changed, operands, original)

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        nonzero = [not isinstance(t, SymbolicZero) for t in tangents]
        has_tangent: list[bool] = []

        def derivative(primals: list[Array], dots: list[Array]) -> Any:
            outs, tangents = jaxprs.jvp_of_some(lambda *xs: jaxprs.bind(eqn, xs[first:]), primals, nonzero, dots)
            tangents = tangents if change.takes_some else [_instantiated(t) for t in tangents]
            has_tangent[:] = [not is_any_zero(t) for t in tangents]
            return outs, flagged(tangents, has_tangent)

        outs, dots_out = change.jvp(derivative, list(primals), flagged(tangents, nonzero), nonzero)
        flags = [*has_tangent, *are_inexact(outs[len(has_tangent) :])]
        return outs, merge(dots_out, flags, list(map(zero_tangent, outs)))

    return by(changed, operands, rule)


def _custom_vjp(eqn: Equation, operands: Sequence[Array], change: Change) -> list[Array] | None:
    rules, asks = _compat.custom_vjp_rules(eqn), eqn.params["symbolic_zeros"]
    if rules is None or (asks and not change.takes_some):
        return None
    operands, first = change.operands(operands), len(change.before)
    f = jax.custom_vjp(jaxprs.function(change.traced(eqn.params["call_jaxpr"], operands)))

    # Both rules know which operands have derivatives, because some rules ask for it. JAX has closed over the first
    # operands, so they have no derivatives, and `rules.forward` does not take them.
    def forward(*args: Any) -> Any:
        values, has_tangent = [x.value for x in args], [x.perturbed for x in args]
        fixed: list[Any] = []  # the residuals that are no arrays, for the trace of `backward`; None for arrays

        def of(*values: Array) -> Any:
            outs, residuals = rules.forward(values[first:], has_tangent[first:])
            fixed[:] = [None if isinstance(x, jax.Array) else x for x in residuals]
            return outs, [x for x in residuals if isinstance(x, jax.Array)]

        outs, arrays = change.forward(of, *values)
        return outs, (values[:first], arrays, fixed)

    def backward(residuals: Any, cts: Sequence[Any]) -> tuple[Any, Any]:
        cts = cts if asks else [_instantiated(ct) for ct in cts]
        has_ct = [not is_any_zero(ct) for ct in cts]
        is_nonzero: list[bool] = []

        def of(arrays: list[Array], some: list[Array]) -> tuple[list[Array], Any]:
            all_residuals = merge(arrays, [x is None for x in fixed], fixed)
            operand_cts, log = rules.backward(all_residuals, merge(some, has_ct, cts))
            operand_cts = operand_cts if change.takes_some else [_instantiated(x) for x in operand_cts]
            is_nonzero[:] = [not is_any_zero(x) for x in operand_cts]
            return flagged(operand_cts, is_nonzero), log

        before, arrays, fixed = residuals
        operand_cts, log = change.backward(of, before, arrays, flagged(cts, has_ct))
        flags = [*[False] * first, *is_nonzero]
        return tuple(merge(operand_cts, flags, [None] * len(flags))), log

    _compat.define_vjp(f, forward, backward)
    return list(f(*operands))


def _instantiated(ct: Any) -> Any:
    """Return a tangent or cotangent as an array: of dtype float0 for integers.

    If a `custom_vjp` closes over a value, its zero has the type of the value, which may be an integer.
    """
    if not isinstance(ct, ad.Zero | SymbolicZero):
        return ct
    aval: Any = ct.aval
    if jaxprs.is_inexact(aval):
        return ad.instantiate_zeros(ad.Zero(aval))
    return np.zeros(getattr(aval, "shape", ()), jax.dtypes.float0)


def are_inexact(arrays: Sequence[Any]) -> list[bool]:
    return list(map(jaxprs.is_inexact, arrays))


def _shard_map(eqn: Equation, operands: Sequence[Array], change: Change) -> list[Array]:
    params = eqn.params
    f = jax.shard_map(
        functools.partial(change.body, _compat.closed(params["jaxpr"])),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(f(*operands))


def scan_options(params: Params) -> Params:
    """Return the arguments of `lax.scan` from the parameters of its primitive."""
    return {name: params[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in params}


def _run_scan(eqn: Equation, operands: Sequence[Any], change: Change) -> list[Array]:
    """Run a scan with a changed body, and stack its further results. Consts may be anything that the body takes."""
    [loop] = _scan(eqn.params)
    consts, carry, xs = loop.split(operands)
    body, n = functools.partial(change.body, _compat.closed(loop.jaxpr)), len(carry)

    def step(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        outs = body(*change.operands([*consts, *carry, *xs]))
        return outs[:n], outs[n:]

    after, ys = lax.scan(step, carry, xs, **scan_options(eqn.params))
    return [*after, *ys]


def _run_while(eqn: Equation, operands: Sequence[Any], change: Change) -> list[Array] | None:
    """Run a `while_loop` with a changed predicate and body. Consts may be anything that these take."""
    [loop] = _while(eqn.params)
    predicate, of_predicate = _compat.closed(eqn.params["cond_jaxpr"]), operands[: loop.first]
    consts, carry, _ = loop.split(operands[loop.first :])
    if predicate.out_avals[0].shape:  # a batched predicate: `lax.while_loop` does not take one
        return None

    def goes_on(carry: list[Array]) -> Array:
        return change.body(predicate, *change.operands([*of_predicate, *carry]))[0]

    def step(carry: list[Array]) -> list[Array]:
        return change.body(_compat.closed(loop.jaxpr), *change.operands([*consts, *carry]))

    after: list[Array] = lax.while_loop(goes_on, step, carry)
    return after


# --- entries ---------------------------------------------------------------------------------------------------


def _in(name: str, first: int = 0) -> Callable[[Params], list[Body]]:
    """Return the jaxprs in the parameter of that name."""
    return lambda params: [Body(x, first) for x in (params[name] if first else [params[name]])]


def _scan(params: Params) -> list[Body]:
    return [Body(params["jaxpr"], 0, 0, *_compat.scan_counts(params))]


def _while(params: Params) -> list[Body]:
    body = params["body_jaxpr"]
    return [Body(body, params["cond_nconsts"], 0, params["body_nconsts"], len(_compat.opened(body).outvars))]


def _checkpoints(params: Params) -> list[Body]:
    parts = _compat.checkpoint_of(params)  # others may share the primitive
    return [] if parts is None else [Body(parts[0])]


def _of_jit(params: Params, new: Sequence[Any], more: int) -> Params:
    default = {"out_shardings": _compat.UNSPECIFIED, "out_layouts": None}
    return params | {"jaxpr": new[0]} | {name: (*params[name], *[x] * more) for name, x in default.items()}


_OTHER = Entry("", lambda params: [])

#: Entries by the name of the primitive, because some are private. Each loop of this library adds its own.
ENTRIES = {
    "jit": Entry("inlined", _in("jaxpr"), with_bodies=_of_jit),
    "closed_call": Entry("inlined", _in("call_jaxpr")),
    # `jax.jit(inline=True)` within another function.
    "eval_jaxpr": Entry(
        "inlined", _in("call_jaxpr"), with_bodies=lambda params, new, _: params | {"call_jaxpr": new[0]}
    ),
    _compat.CHECKPOINT: Entry(
        "checkpoint", _checkpoints, _checkpoint, lambda params, new, _: params | {"jaxpr": new[0]}
    ),
    "call_hi_primitive": Entry("checkpoint", _checkpoints, _checkpoint),
    **dict.fromkeys(("custom_jvp_call", ta_custom_jvp_p.name), Entry("rules", _in("call_jaxpr"), _custom_jvp)),
    "custom_vjp_call": Entry("rules", _in("call_jaxpr"), _custom_vjp),
    "shard_map": Entry("divided", _in("jaxpr"), _shard_map),
    "cond": Entry("branches", _in("branches", 1), _cond, lambda params, new, _: params | {"branches": tuple(new)}),
    "scan": Entry("loop", _scan, _run_scan),
    "while": Entry("loop", _while, _run_while),
}
