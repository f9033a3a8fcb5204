"""Loops, conditionals and calls, whose bodies are repaired too."""

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

if TYPE_CHECKING:
    from jax_tensorarray._in_place.repair import Repair

Array = Any


def jit(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """In the place of its call, so that what is known of its operands is known inside, unless it asks for something."""
    params = eqn.params
    if not bodies.asks_for_nothing(params):
        return None
    return repair.evaluate(params["jaxpr"], operands)


def checkpoint(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    params = eqn.params
    jaxpr, consts = _compat.lifted(jax.make_jaxpr(repair.function(params["jaxpr"]))(*_types(operands)))
    inner = params["jaxpr"] if hasattr(params["jaxpr"], "consts") else None
    new = jaxpr if inner is not None else _compat.opened(jaxpr)
    outs = eqn.primitive.bind(*consts, *arrays(operands), **params | {"jaxpr": new})
    return [Value(x) for x in outs]


def cond(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    index, *rest = arrays(operands)
    functions = [repair.function(branch) for branch in eqn.params["branches"]]
    branches = [jax.make_jaxpr(f)(*_types(operands[1:])) for f in functions]
    if any(branch.consts for branch in branches):
        return [Value(x) for x in lax.switch(index, functions, *rest)]
    outs = eqn.primitive.bind(index, *rest, **eqn.params | {"branches": tuple(branches)})
    return [Value(x) for x in outs]


def scan(repair: "Repair", eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    params = eqn.params
    num_consts, num_carry = _compat.scan_counts(params)
    inputs = arrays(operands)
    consts, carry, xs = inputs[:num_consts], inputs[num_consts : num_consts + num_carry], inputs[num_consts + num_carry :]
    body = repair.of_loop().function(params["jaxpr"])

    def step(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        outs = body(*consts, *carry, *xs)
        return outs[:num_carry], outs[num_carry:]

    carry, ys = lax.scan(
        step,
        carry,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        **{name: value for name, value in params.items() if name == "_split_transpose"},
    )
    return [Value(x) for x in (*carry, *ys)]


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

    outs = while_loop(goes_on, step, carry, max_steps=repair.max_steps)
    return [Value(x) for x in outs]


def _types(operands: Sequence[Value]) -> list[Any]:
    return [jax.typeof(x.array) for x in operands]


LOOPS = ("scan", "while")
CALLS = ("jit", "pjit")

RULES: dict[str, Callable[["Repair", Any, Sequence[Value]], list[Value] | None]] = {
    "jit": jit,
    "pjit": jit,
    "checkpoint": checkpoint,
    "remat2": checkpoint,
    "cond": cond,
    "scan": scan,
    "while": while_,
}
