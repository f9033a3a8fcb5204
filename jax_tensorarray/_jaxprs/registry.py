"""The primitives that run jaxprs: which operands their jaxprs take, and how to run changed ones in their place."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.jaxprs import flagged, merge

Array = Any
Params = dict[str, Any]
T = TypeVar("T")


class Body(NamedTuple):
    """A jaxpr that an equation runs. Its outputs are the first results, and its inputs the operands from `first` on.

    In a loop these inputs are consts, carries and slices of arrays, and the first outputs are the next carries.
    """

    jaxpr: Any
    first: int = 0
    leading: int = 0  #: how many inputs come before the operands
    num_consts: int = 0
    num_carry: int = 0

    def inputs(self, of_operands: Sequence[T], missing: T) -> list[T]:
        """Return what belongs to the inputs. For inputs that are no operands, which may be the last ones, `missing`."""
        own = of_operands[self.first :]
        made_inside = len(_compat.opened(self.jaxpr).invars) - self.leading - len(own)
        return [*[missing] * self.leading, *own, *[missing] * made_inside]

    def split(self, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split what belongs to the inputs: to consts and what comes before them, to carries, and to slices."""
        a = self.leading + self.num_consts
        b = a + self.num_carry
        return list(inputs[:a]), list(inputs[a:b]), list(inputs[b:])


class Change:
    """What becomes of the jaxprs in an equation. The defaults change nothing."""

    before: Sequence[Array] = ()  #: operands that changed jaxprs take before their own
    after: Sequence[Array] = ()  #: and after them

    def body(self, jaxpr: Any, *args: Array) -> list[Array]:
        """Return the results of the changed jaxpr, perhaps with further ones behind them."""
        raise NotImplementedError

    def policy(self, policy: Any) -> Any:
        """Return the policy of a checkpoint of changed jaxprs."""
        return policy

    # A `custom_jvp` or `custom_vjp` holds its rules as functions, which JAX calls with what it knows by then. So the
    # derivative of the call is changed: tracing it gives what the rule makes. `args` and `primals` include `before`.

    def jvp(self, f: Callable[..., Any], primals: list[Array], dots: list[Array], nonzero: list[bool]) -> Any:
        """Return the results, and the tangents of the inexact ones, as `f(primals, dots)` does for the unchanged call.

        `dots` are the tangents of the primals flagged in `nonzero`.
        """
        return f(primals, dots)

    def forward(self, f: Callable[..., Any], *args: Array) -> Any:
        """Return the results and any pytree for `backward`, as `f(*args)` does for the unchanged call."""
        return f(*args)

    def backward(self, f: Callable[..., Any], before: Sequence[Array], kept: Any, cts: list[Array]) -> list[Array]:
        """Return the cotangents of the inexact operands from those of the inexact results, as `f(kept, cts)` does."""
        return f(kept, cts)  # type: ignore[no-any-return]

    def operands(self, own: Sequence[Array]) -> list[Array]:
        return [*self.before, *own, *self.after]

    def traced(self, jaxpr: Any, operands: Sequence[Array]) -> Any:
        """Return the changed jaxpr, for all of its operands."""
        return jax.make_jaxpr(functools.partial(self.body, _compat.closed(jaxpr)))(*map(jax.typeof, operands))


#: Runs an equation on operands, with changed jaxprs; None if these cannot be changed.
Rebuild = Callable[[Any, Sequence[Array], Change], list[Array] | None]


@dataclass(frozen=True)
class Entry:
    """A primitive that runs jaxprs."""

    bodies: Callable[[Params], list[Body]]  #: from the parameters; there is more than one if these are branches
    repeats: bool = False
    is_inlined: bool = False  #: means the same as its jaxpr in its place, unless a `jit` has options
    has_rules: bool = False  #: for its derivatives
    is_divided: bool = False  #: over devices
    takes_sums: bool = False  #: what is added to a result can be added inside
    rebuild: Rebuild | None = None
    #: Maps the parameters, other jaxprs, and how many results these have more, to the new parameters.
    with_bodies: Callable[[Params, Sequence[Any], int], Params] | None = None


def entry_of(eqn: Any) -> Entry | None:
    entry = ENTRIES.get(eqn.primitive.name)
    return entry if entry is not None and entry.bodies(eqn.params) else None


def repeats(eqn: Any) -> bool:
    """Return whether an equation is a loop."""
    return eqn.primitive.name in ENTRIES and ENTRIES[eqn.primitive.name].repeats


def takes_sums(eqn: Any) -> bool:
    """Return whether what is added to a result of an equation can be added inside."""
    return eqn.primitive.name in ENTRIES and ENTRIES[eqn.primitive.name].takes_sums


def inlined(eqn: Any, *, with_options: bool = False) -> Any:
    """Return the closed jaxpr that means the same in the place of an equation, None if there is none.

    A `jit` with options is inlined only with `with_options`.
    """
    entry = ENTRIES.get(eqn.primitive.name)
    if entry is None or not entry.is_inlined or not (with_options or _has_default_options(eqn.params)):
        return None
    return _compat.closed(entry.bodies(eqn.params)[0].jaxpr)


def _has_default_options(params: Params) -> bool:
    """Return whether a nested jit has no shardings, layouts or compiler options of its own."""
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    special = [s for name in names for s in params.get(name, ())]
    is_usual = all(s is None or type(s).__name__ == "UnspecifiedValue" for s in special)
    return is_usual and not params.get("compiler_options_kvs")


def without_calls(jaxpr: Any) -> Callable[..., list[Array]]:
    """Return a closed jaxpr as a function of flat arguments, with the calls inlined that have no options."""

    def equation(eqn: Any, operands: list[Array]) -> list[Array]:
        inner = inlined(eqn)
        return jaxprs.bind(eqn, operands) if inner is None else run(inner, operands)

    def run(jaxpr: Any, args: Sequence[Array]) -> list[Array]:
        return jaxprs.interpret(jaxpr, args, equation, lambda x: x)

    return lambda *args: run(jaxpr, args)


def rebuilt(eqn: Any, operands: Sequence[Array], change: Change) -> list[Array] | None:
    """Run an equation with changed jaxprs. Return None if these cannot be changed."""
    entry = entry_of(eqn)
    return None if entry is None or entry.rebuild is None else entry.rebuild(eqn, operands, change)


# --- equations around changed jaxprs ---------------------------------------------------------------------------


def _checkpoint(eqn: Any, operands: Sequence[Array], change: Change) -> list[Array]:
    inner, policy, prevent_cse = _compat.checkpoint_of(eqn.params)
    operands, policy = change.operands(operands), change.policy(policy)
    jaxpr, consts = _compat.lifted(change.traced(inner, operands))
    if not isinstance(prevent_cse, bool):
        prevent_cse = (*[False] * len(consts), *[True] * len(change.before), *prevent_cse, *[True] * len(change.after))
    if "_prim" in eqn.params:
        f = jax.checkpoint(jaxprs.function(jaxpr), policy=policy, prevent_cse=prevent_cse)
        return list(f(*consts, *operands))
    new = jaxpr if hasattr(inner, "consts") else _compat.opened(jaxpr)
    params = eqn.params | {"jaxpr": new, "policy": policy, "prevent_cse": prevent_cse}
    return list(eqn.primitive.bind(*consts, *operands, **params))


def _cond(eqn: Any, operands: Sequence[Array], change: Change) -> list[Array]:
    index, *rest = operands
    rest = change.operands(rest)
    branches = [change.traced(branch, rest) for branch in eqn.params["branches"]]
    if any(branch.consts for branch in branches) or any(b.out_avals != branches[0].out_avals for b in branches):
        return list(lax.switch(index, [*map(jaxprs.function, branches)], *rest))
    return list(eqn.primitive.bind(index, *rest, **eqn.params | {"branches": tuple(branches)}))


def _custom_jvp(eqn: Any, operands: Sequence[Array], change: Change) -> list[Array]:
    operands, first = change.operands(operands), len(change.before)
    f = jax.custom_jvp(jaxprs.function(change.traced(eqn.params["call_jaxpr"], operands)))

    def rule(primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        nonzero = [not isinstance(t, SymbolicZero) for t in tangents]

        def derivative(primals: list[Array], dots: list[Array]) -> Any:
            def of(*some: Array) -> list[Array]:
                return jaxprs.bind(eqn, merge(some, nonzero, primals)[first:])

            outs, tangents = jax.jvp(of, flagged(primals, nonzero), dots)
            return outs, flagged(tangents, are_inexact(outs))

        outs, found = change.jvp(derivative, list(primals), flagged(tangents, nonzero), nonzero)
        return outs, merge(found, are_inexact(outs), _zeros(outs))

    f.defjvp(rule, symbolic_zeros=True)
    return list(f(*operands))


def _custom_vjp(eqn: Any, operands: Sequence[Array], change: Change) -> list[Array] | None:
    if eqn.params["symbolic_zeros"]:
        return None  # its rule asks which operands and results have derivatives, and only JAX knows
    operands, first = change.operands(operands), len(change.before)
    f = jax.custom_vjp(jaxprs.function(change.traced(eqn.params["call_jaxpr"], operands)))

    def forward(*args: Array) -> Any:
        nonzero = are_inexact(args)

        def of(*args: Array) -> Any:
            def of_some(*some: Array) -> list[Array]:
                return jaxprs.bind(eqn, merge(some, nonzero, args)[first:])

            return jax.vjp(of_some, *flagged(args, nonzero))

        outs, kept = change.forward(of, *args)
        return outs, (args[:first], kept)

    def backward(residuals: Any, cts: Sequence[Any]) -> tuple[Any, ...]:
        outs = [v.aval for v in eqn.outvars]

        def of(pull: Callable[..., Any], some: list[Array]) -> Any:
            return pull(merge(some, are_inexact(outs), _zeros(outs)))

        found = change.backward(of, *residuals, [ct for ct in cts if ct.dtype != jax.dtypes.float0])
        nonzero = are_inexact(operands)
        return tuple(merge(found, nonzero, [None] * len(nonzero)))

    f.defvjp(forward, backward)
    return list(f(*operands))


def are_inexact(arrays: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in arrays]


def _zeros(outs: Sequence[Any]) -> list[Any]:
    """Return the tangents of integers."""
    return [np.zeros(np.shape(x), jax.dtypes.float0) for x in outs]


def _shard_map(eqn: Any, operands: Sequence[Array], change: Change) -> list[Array]:
    params, everywhere = eqn.params, PartitionSpec()
    f = jax.shard_map(
        functools.partial(change.body, _compat.closed(params["jaxpr"])),
        mesh=params["mesh"],
        in_specs=(*[everywhere for _ in change.before], *params["in_specs"], *[everywhere for _ in change.after]),
        out_specs=list(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(f(*change.operands(operands)))


# --- entries ---------------------------------------------------------------------------------------------------


def _scan(params: Params) -> list[Body]:
    num_consts, num_carry = _compat.scan_counts(params)
    return [Body(params["jaxpr"], 0, 0, num_consts, num_carry)]


def _while(params: Params) -> list[Body]:
    body = params["body_jaxpr"]
    return [Body(body, params["cond_nconsts"], 0, params["body_nconsts"], len(_compat.opened(body).outvars))]


def _checkpoints(params: Params) -> list[Body]:
    found = _compat.checkpoint_of(params)  # others may share the primitive
    return [] if found is None else [Body(found[0])]


def _of_jit(params: Params, bodies: Sequence[Any], more: int) -> Params:
    shardings = (*params["out_shardings"], *[_compat.UNSPECIFIED] * more)
    layouts = (*params["out_layouts"], *[None] * more)
    return params | {"jaxpr": bodies[0], "out_shardings": shardings, "out_layouts": layouts}


_JIT = Entry(lambda params: [Body(params["jaxpr"])], is_inlined=True, with_bodies=_of_jit)
_CALL = Entry(lambda params: [Body(params["call_jaxpr"])], is_inlined=True)

#: By the name of the primitive, since some are private. Each loop of this library adds its own.
ENTRIES: dict[str, Entry] = {
    "jit": _JIT,
    "pjit": _JIT,
    "closed_call": _CALL,
    "core_call": _CALL,
    "eval_jaxpr": _CALL,
    "checkpoint": Entry(
        _checkpoints,
        takes_sums=True,
        rebuild=_checkpoint,
        with_bodies=lambda params, bodies, more: params | {"jaxpr": bodies[0]},
    ),
    "call_hi_primitive": Entry(_checkpoints, takes_sums=True, rebuild=_checkpoint),
    "custom_jvp_call": Entry(lambda params: [Body(params["call_jaxpr"])], has_rules=True, rebuild=_custom_jvp),
    "custom_vjp_call": Entry(lambda params: [Body(params["call_jaxpr"])], has_rules=True, rebuild=_custom_vjp),
    "shard_map": Entry(lambda params: [Body(params["jaxpr"])], is_divided=True, rebuild=_shard_map),
    "cond": Entry(
        lambda params: [Body(branch, 1) for branch in params["branches"]],
        takes_sums=True,
        rebuild=_cond,
        with_bodies=lambda params, bodies, more: params | {"branches": tuple(bodies)},
    ),
    "scan": Entry(_scan, repeats=True, takes_sums=True),
    "while": Entry(_while, repeats=True),
}
#: Its name depends on the version.
ENTRIES[_compat.CHECKPOINT] = ENTRIES.pop("checkpoint")
