"""Oracles in plain JAX that are traced and never compiled: NumPy evaluates their jaxprs, one equation at a time.

An oracle runs once, for a few numbers, and is often unrolled or differentiated several times. XLA needs seconds to
compile such a program, and NumPy milliseconds to run it. JAX still does what it is asked for, which is to
differentiate and to batch. A primitive that is not in the tables below is run by JAX itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_tensorarray import _compat


def in_numpy(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, which must not need the values of its arguments while it is traced."""

    def evaluated(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        avals = [v.aval for v in closed.jaxpr.invars]
        leaves = [np.asarray(x, aval.dtype) for x, aval in zip(jax.tree.leaves(args), avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(closed, leaves))

    return evaluated


def _evaluate(closed: Any, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    jaxpr = closed.jaxpr
    env: dict[Any, np.ndarray] = dict(zip(jaxpr.constvars, map(np.asarray, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> np.ndarray:
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]

    with np.errstate(all="ignore"):
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, eqn.params
            operands = [read(v) for v in eqn.invars]
            if name in _ELEMENTWISE:
                outs = [_ELEMENTWISE[name](*operands)]
            elif name in _OTHERS:
                outs = _OTHERS[name](params, *operands)
            else:
                assert not name.startswith("ta_"), f"an oracle must not call {name}"
                outs = eqn.primitive.bind(*map(jnp.asarray, operands), **params)
                outs = outs if eqn.primitive.multiple_results else [outs]
            for v, out in zip(eqn.outvars, outs, strict=True):
                env[v] = np.asarray(out, v.aval.dtype)
                assert env[v].shape == v.aval.shape, (name, env[v].shape, v.aval)
    return [read(v) for v in jaxpr.outvars]


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "exp": np.exp,
    "log": np.log,
    "abs": np.abs,
    "is_finite": np.isfinite,
    "stop_gradient": np.asarray,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "rem": np.fmod,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: np.choose(np.broadcast_to(which, cases[0].shape).astype(int), cases),
}


def _slice(params: Any, x: np.ndarray) -> list[np.ndarray]:
    steps = params["strides"] or [1] * x.ndim
    return [x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]]


def _pad(params: Any, x: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    """Padding below zero takes elements away."""
    config = params["padding_config"]
    for axis, (low, high, inner) in enumerate(config):
        n = x.shape[axis]
        new = [*x.shape]
        new[axis] = max(low, 0) + n + max(n - 1, 0) * inner + max(high, 0)
        at: list[Any] = [slice(None)] * x.ndim
        at[axis] = max(low, 0) + (inner + 1) * np.arange(n)
        wide = np.full(new, value, x.dtype)
        wide[tuple(at)] = x
        at[axis] = slice(max(-low, 0), new[axis] - max(-high, 0))
        x = wide[tuple(at)]
    return [x]


def _broadcast_in_dim(params: Any, x: np.ndarray) -> list[np.ndarray]:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    return [np.broadcast_to(x.reshape([x.shape[dims.index(k)] if k in dims else 1 for k in range(len(shape))]), shape)]


def _start(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[slice, ...]:
    firsts = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(params: Any, x: np.ndarray, *starts: np.ndarray) -> list[np.ndarray]:
    return [x[_start(x, starts, params["slice_sizes"])]]


def _dynamic_update_slice(params: Any, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> list[np.ndarray]:
    out = x.copy()
    out[_start(x, starts, update.shape)] = update
    return [out]


def _scan(params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    consts, carry, xs = np.split(np.arange(len(operands)), np.cumsum(_compat.scan_counts(params)))
    consts, carry, xs = ([operands[k] for k in group] for group in (consts, carry, xs))
    steps = range(params["length"])
    every = []
    for k in reversed(steps) if params["reverse"] else steps:
        outs = _evaluate(params["jaxpr"], [*consts, *carry, *(x[k] for x in xs)])
        carry = outs[: len(carry)]
        every.append(outs[len(carry) :])
    if params["reverse"]:
        every.reverse()
    avals = [v.aval for v in params["jaxpr"].jaxpr.outvars[len(carry) :]]
    return carry + [
        np.stack([ys[n] for ys in every]) if every else np.zeros((0, *aval.shape), aval.dtype)
        for n, aval in enumerate(avals)
    ]


def _while(params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    a, b = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, carry = list(operands[:a]), list(operands[a : a + b]), list(operands[a + b :])
    while np.any(runs := _evaluate(params["cond_jaxpr"], [*of_cond, *carry])[0]):
        new = _evaluate(params["body_jaxpr"], [*of_body, *carry])
        # Each example of a batch ends on its own: the predicate has their axes, which lead.
        axes = [(*runs.shape, *[1] * (x.ndim - runs.ndim)) for x in carry]
        carry = [np.where(runs.reshape(a), y, x) for a, x, y in zip(axes, carry, new, strict=True)]
    return carry


def _cond(params: Any, index: np.ndarray, *operands: np.ndarray) -> list[np.ndarray]:
    branches = params["branches"]
    return _evaluate(branches[min(max(int(index), 0), len(branches) - 1)], operands)


def _call(params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    jaxpr = params.get("jaxpr") or params["call_jaxpr"]
    return _evaluate(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ()), operands)


def _dot_general(params: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    (contracted, of_y), (batch, batch_of_y) = params["dimension_numbers"]
    axes = list(range(x.ndim))
    axes_of_y = list(range(x.ndim, x.ndim + y.ndim))
    for a, b in zip([*contracted, *batch], [*of_y, *batch_of_y], strict=True):
        axes_of_y[b] = a
    rest = [a for a in axes if a not in (*contracted, *batch)] + [a for a in axes_of_y if a >= x.ndim]
    return [np.einsum(x, axes, y, axes_of_y, [*batch, *rest])]


def _iota(params: Any) -> list[np.ndarray]:
    shape, dim = params["shape"], params["dimension"]
    return [np.broadcast_to(np.expand_dims(np.arange(shape[dim]), [k for k in range(len(shape)) if k != dim]), shape)]


def _div(params: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    return [(x - np.fmod(x, y)) // y if np.issubdtype(x.dtype, np.integer) else x / y]


_OTHERS: dict[str, Callable[..., list[Any]]] = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "checkpoint": _call,
    "remat2": _call,
    "iota": _iota,
    "div": _div,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "slice": _slice,
    "pad": _pad,
    "broadcast_in_dim": _broadcast_in_dim,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "reshape": lambda params, x: [x.reshape(params["new_sizes"])],
    "squeeze": lambda params, x: [np.squeeze(x, tuple(params["dimensions"]))],
    "transpose": lambda params, x: [np.transpose(x, params["permutation"])],
    "concatenate": lambda params, *xs: [np.concatenate(xs, params["dimension"])],
    "stack": lambda params, *xs: [np.stack(xs, params["axis"])],
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
    "split": lambda params, x: np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"]),
    "dot_general": _dot_general,
    "reduce_max": lambda params, x: [np.max(x, tuple(params["axes"]))],
    "reduce_sum": lambda params, x: [np.sum(x, tuple(params["axes"]))],
    "integer_pow": lambda params, x: [x ** params["y"] if params["y"] >= 0 else 1 / x ** -params["y"]],
    "convert_element_type": lambda params, x: [x.astype(params["new_dtype"])],
}
