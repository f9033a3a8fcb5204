"""Loops, conditionals and calls, whose bodies are repaired too."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tensorarray import _compat
from jax_tensorarray._in_place.selects import select
from jax_tensorarray._in_place.values import Predicate, Value, arrays
from jax_tensorarray._loops import bodies
from jax_tensorarray._loops.api import while_loop
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.write import ta_write
from jax_tensorarray.checkpoint_policies import save_reads

if TYPE_CHECKING:
    from jax_tensorarray._in_place.repair import Repair

Array = Any


def jit(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """In the place of its call, so that what is known of its operands is known inside, unless it asks for something."""
    params = eqn.params
    if not bodies.asks_for_nothing(params):
        return None
    return repair.evaluate(params["jaxpr"], operands)


def checkpoint(repair: "Repair", eqn: Any, operands: Sequence[Value], added: dict[int, Value]) -> list[Value]:
    """Rows that are read are kept besides what the policy keeps: else each step keeps the buffers that it reads."""
    params = eqn.params
    inputs = [*operands, *added.values()]
    jaxpr, consts = _compat.lifted(jax.make_jaxpr(_adding(repair.function, params["jaxpr"], added))(*_types(inputs)))
    new = jaxpr if hasattr(params["jaxpr"], "consts") else _compat.opened(jaxpr)
    policy = _with_rows(params["policy"])
    outs = eqn.primitive.bind(*consts, *arrays(inputs), **params | {"jaxpr": new, "policy": policy})
    return [Value(x) for x in outs]


def _with_rows(policy: Any) -> Any:
    def keeps(prim: Any, *args: Any, **params: Any) -> Any:
        kept = False if policy is None else policy(prim, *args, **params)
        return kept or save_reads(prim, *args, **params)

    return keeps


def _adding(function: Any, jaxpr: Any, added: dict[int, Value]) -> Callable[..., list[Array]]:
    """The function that a jaxpr is, which takes behind its operands what is added to some of its results."""

    def f(*args: Array) -> list[Array]:
        split = len(args) - len(added)
        more = dict(zip(added, map(Value, args[split:]), strict=True))
        return function(jaxpr, more)(*args[:split])

    return f


def cond(repair: "Repair", eqn: Any, operands: Sequence[Value], added: dict[int, Value]) -> list[Value]:
    index, *rest = arrays([*operands, *added.values()])
    functions = [_adding(repair.function, branch, added) for branch in eqn.params["branches"]]
    branches = [jax.make_jaxpr(f)(*map(jax.typeof, rest)) for f in functions]
    if any(branch.consts for branch in branches):
        return [Value(x) for x in lax.switch(index, functions, *rest)]
    outs = eqn.primitive.bind(index, *rest, **eqn.params | {"branches": tuple(branches)})
    return [Value(x) for x in outs]


def scan(repair: "Repair", eqn: Any, operands: Sequence[Value], added: dict[int, Value]) -> list[Value] | None:
    params = eqn.params
    n, m = _compat.scan_counts(params)
    consts, carry, xs = operands[:n], list(operands[n : n + m]), operands[n + m :]
    for number, value in added.items():
        if carry[number].only != ():
            return None
        carry[number] = value
    body = repair.of_loop().function(params["jaxpr"])
    of_consts = arrays(consts)

    def step(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        outs = body(*of_consts, *carry, *xs)
        return outs[:m], outs[m:]

    after, ys = lax.scan(
        step,
        arrays(carry),
        arrays(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        **{name: value for name, value in params.items() if name == "_split_transpose"},
    )
    return [Value(x) for x in (*after, *ys)]


def while_(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    params, inputs = eqn.params, arrays(operands)
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body, carry = inputs[:a], inputs[a:b], inputs[b:]
    inner = repair.of_loop()
    predicate, body = inner.function(params["cond_jaxpr"]), _compat.closed(params["body_jaxpr"])

    def goes_on(carry: list[Array]) -> Array:
        return jnp.any(predicate(*of_cond, *carry)[0])

    def step(carry: list[Array]) -> list[Array]:
        (active,) = predicate(*of_cond, *carry)
        before = [Value(x) for x in carry]
        after = inner.evaluate(body, [*map(Value, of_body), *before])
        if not active.ndim:
            return [x.array for x in after]
        chosen = Predicate(active)
        selected = [(select(chosen, *pair), *pair) for pair in zip(before, after, strict=True)]
        return [chosen.select(old.array, new.array) if x is None else x.array for x, old, new in selected]

    if repair.max_steps is None:
        return [Value(x) for x in while_loop(goes_on, step, carry)]
    outs, steps = while_loop(goes_on, step, carry, max_steps=repair.max_steps, return_steps=True)
    # The number of a step too many. Nothing is given that does not know that there was none.
    most = min(repair.max_steps, _INT32_MAX - 1) + 1
    number = jnp.where(steps.cut, most, 0)
    is_right = ta_check(number, most, mode="error", op="in_place: more than max_steps steps") >= 0
    return [Value(_known_if(is_right, x)) for x in outs]


_INT32_MAX = 2**31 - 1

#: So many elements may as well be selected as a row is written.
_FEW = 1024


def _known_if(is_right: Array, x: Array) -> Array:
    """An array, once it is known that it is right."""
    if math.prod(x.shape) <= _FEW:
        return jnp.where(is_right, x, jnp.zeros_like(x))
    row = jnp.zeros(x.shape[1:], x.dtype)
    return ta_write(x, jnp.where(is_right, -1, 0), row, mode="drop")


def _types(operands: Sequence[Value]) -> list[Any]:
    return [jax.typeof(x.array) for x in operands]


LOOPS = ("scan", "while")
CALLS = ("jit", "pjit")

#: Rules that add to results what is to be added to these.
ADDING: dict[str, Callable[["Repair", Any, Sequence[Value], dict[int, Value]], list[Value] | None]] = {
    "checkpoint": checkpoint,
    "remat2": checkpoint,
    "cond": cond,
    "scan": scan,
}
RULES: dict[str, Callable[..., list[Value] | None]] = {"jit": jit, "pjit": jit, "while": while_, **ADDING}
