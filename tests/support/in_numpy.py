"""Oracles in plain JAX that are traced and never compiled: NumPy evaluates their jaxprs, one equation at a time.

An oracle runs once, for a few numbers, and is often unrolled or differentiated several times. XLA needs seconds to
compile such a program, and NumPy milliseconds to run it. JAX still does what it is asked for, which is to
differentiate and to batch. A primitive that is not in the tables below is run by JAX itself.

An oracle must not call this library. `library_in_numpy.py` has rules for its primitives: there they are under test.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Literal, primitives

from jax_tensorarray import _compat

#: Rules for more primitives. They are given the equation, what evaluates a closed jaxpr, and the operands.
Rules = dict[str, Callable[..., Sequence[Any]]]


def in_numpy(
    f: Callable[..., Any], rules: Rules | None = None, rewrite: Callable[[Any], Any] = lambda closed: closed
) -> Callable[..., Any]:
    """`f`, which must not need the values of its arguments while it is traced. What is evaluated may be rewritten."""
    rules = rules or {}

    def evaluated(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        avals = [v.aval for v in closed.jaxpr.invars]
        leaves = [np.asarray(x, aval.dtype) for x, aval in zip(jax.tree.leaves(args), avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(rewrite(closed), leaves, rules))

    return evaluated


def _evaluate(closed: Any, args: Sequence[np.ndarray], rules: Rules) -> list[np.ndarray]:
    program = _program(closed.jaxpr)

    def again(closed: Any, args: Sequence[np.ndarray]) -> list[np.ndarray]:
        return _evaluate(closed, args, rules)

    assert len(args) == len(closed.jaxpr.invars)
    values = [*map(np.asarray, closed.consts), *args, *program.rest]
    with np.errstate(all="ignore"):
        for eqn, run, operands, results in program.steps:
            outs = run(eqn, again, rules, *[values[k] for k in operands])
            for (k, dtype, shape), out in zip(results, outs, strict=True):
                values[k] = out = np.asarray(out, dtype)
                assert out.shape == shape, (eqn.primitive.name, out.shape, shape)
    return [values[k] for k in program.results]


@contextlib.contextmanager
def one_by_one_in_numpy() -> Iterator[None]:
    """Outside of `jit` NumPy computes each operation, for which XLA would compile a program.

    For oracles that branch on what they compute, which cannot be traced.
    """

    def computed(rule: Callable[..., Sequence[Any]], several: bool, *operands: Any, **params: Any) -> Any:
        with np.errstate(all="ignore"):
            outs = [jnp.asarray(np.asarray(out)) for out in rule(params, *map(np.asarray, operands))]
        return outs if several else outs[0]

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        for primitive in vars(primitives).values():
            name = getattr(primitive, "name", None)
            if name in _ELEMENTWISE:
                rule = functools.partial(lambda function, params, *operands: [function(*operands)], _ELEMENTWISE[name])
            elif name in _OTHERS:
                rule = _OTHERS[name]
            else:
                continue
            patch.setattr(primitive, "impl", functools.partial(computed, rule, primitive.multiple_results))
        yield


class _Program(NamedTuple):
    """A jaxpr as places in a list of values: the consts, the arguments, and `rest`, where the literals are already."""

    rest: list[np.ndarray | None]
    #: Equations, what runs them, the places of their operands, and those of their results with dtypes and shapes.
    steps: list[tuple[Any, Callable[..., Sequence[Any]], list[int], list[tuple[int, Any, tuple[int, ...]]]]]
    results: list[int]


@_compat.cached
def _program(jaxpr: Any) -> _Program:
    """What a loop needs again in each of its steps."""
    given = [*jaxpr.constvars, *jaxpr.invars]
    places, rest = {v: k for k, v in enumerate(given)}, []

    def place(v: Any) -> int:
        if isinstance(v, Literal):
            rest.append(np.asarray(v.val, v.aval.dtype))
            return len(given) + len(rest) - 1
        if v not in places:  # what is made by an equation, and what is not needed, which stays None
            rest.append(None)
            places[v] = len(given) + len(rest) - 1
        return places[v]

    steps = []
    for eqn in _needed(jaxpr):
        operands = [place(v) for v in eqn.invars]
        results = [(place(v), v.aval.dtype, v.aval.shape) for v in eqn.outvars]
        steps.append((eqn, _rule(eqn), operands, results))
    return _Program(rest, steps, [place(v) for v in jaxpr.outvars])


def _rule(eqn: Any) -> Callable[..., Sequence[Any]]:
    """What runs an equation: it is given that, what evaluates a closed jaxpr, rules of the caller, and the operands."""
    name, params = eqn.primitive.name, eqn.params
    if name in _ELEMENTWISE:
        function = _ELEMENTWISE[name]
        return lambda eqn, again, rules, *operands: (function(*operands),)
    if name in _OTHERS:
        other = _OTHERS[name]
        return lambda eqn, again, rules, *operands: other(params, *operands)
    if name in _CONTROL:
        control = _CONTROL[name]
        return lambda eqn, again, rules, *operands: control(again, params, *operands)
    return _by_caller_or_jax


def _by_caller_or_jax(eqn: Any, again: Any, rules: Rules, *operands: np.ndarray) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in rules:
        return rules[name](eqn, again, *operands)
    assert not name.startswith("ta_"), f"an oracle must not call {name}"
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params)
    return outs if eqn.primitive.multiple_results else [outs]


def _needed(jaxpr: Any) -> list[Any]:
    """The equations without those that XLA removes, since no result depends on them.

    What raises is kept.

    JAX moves what is the same in every step out of a scan, also of one of no steps, which needs what it carries only.
    """
    needed, eqns = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or eqn.params.get("effect") or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            read = eqn.invars
            if eqn.primitive.name == "scan" and eqn.params["length"] == 0:
                consts, carry = _compat.scan_counts(eqn.params)
                read = read[consts : consts + carry]
            needed |= {v for v in read if not isinstance(v, Literal)}
    return eqns[::-1]


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
    "sqrt": np.sqrt,
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
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": lambda x, by: (x.view(f"u{x.itemsize}") >> by.astype(f"u{x.itemsize}")).view(x.dtype),
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
    if x.ndim == 0:
        return [np.full(shape, x)]  # several times as fast
    return [np.broadcast_to(x.reshape([x.shape[dims.index(k)] if k in dims else 1 for k in range(len(shape))]), shape)]


def _select_n(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which.astype(bool), cases[1], cases[0])
    return np.choose(np.broadcast_to(which, cases[0].shape), cases)


def _start(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[slice, ...]:
    firsts = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(params: Any, x: np.ndarray, *starts: np.ndarray) -> list[np.ndarray]:
    return [x[_start(x, starts, params["slice_sizes"])]]


def _dynamic_update_slice(params: Any, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> list[np.ndarray]:
    out = x.copy()
    out[_start(x, starts, update.shape)] = update
    return [out]


def _scan(evaluate: Any, params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    consts, carry, xs = np.split(np.arange(len(operands)), np.cumsum(_compat.scan_counts(params)))
    consts, carry, xs = ([operands[k] for k in group] for group in (consts, carry, xs))
    steps = range(params["length"])
    every = []
    for k in reversed(steps) if params["reverse"] else steps:
        outs = evaluate(params["jaxpr"], [*consts, *carry, *(x[k] for x in xs)])
        carry = outs[: len(carry)]
        every.append(outs[len(carry) :])
    if params["reverse"]:
        every.reverse()
    avals = [v.aval for v in params["jaxpr"].jaxpr.outvars[len(carry) :]]
    return carry + [
        np.stack([ys[n] for ys in every]) if every else np.zeros((0, *aval.shape), aval.dtype)
        for n, aval in enumerate(avals)
    ]


def _while(evaluate: Any, params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    a, b = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, carry = list(operands[:a]), list(operands[a : a + b]), list(operands[a + b :])
    while np.any(runs := evaluate(params["cond_jaxpr"], [*of_cond, *carry])[0]):
        new = evaluate(params["body_jaxpr"], [*of_body, *carry])
        # Each example of a batch ends on its own: the predicate has their axes, which lead.
        axes = [(*runs.shape, *[1] * (x.ndim - runs.ndim)) for x in carry]
        carry = [np.where(runs.reshape(a), y, x) for a, x, y in zip(axes, carry, new, strict=True)]
    return carry


def _cond(evaluate: Any, params: Any, index: np.ndarray, *operands: np.ndarray) -> list[np.ndarray]:
    branches = params["branches"]
    return evaluate(branches[min(max(int(index), 0), len(branches) - 1)], operands)


def _call(evaluate: Any, params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    jaxpr = params.get("jaxpr") or params.get("call_jaxpr") or params["fun_jaxpr"]
    return evaluate(jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ()), operands)


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


def _gather(params: Any, x: np.ndarray, indices: np.ndarray) -> list[np.ndarray]:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch = indices.shape[:-1]
    shape_of_slice = [n for d, n in enumerate(sizes) if d not in _collapsed(numbers)]
    out = np.empty((*batch, *shape_of_slice), x.dtype)
    fills = "fill" in str(params["mode"]).lower()
    for at in np.ndindex(*batch):
        starts = _starts(numbers.start_index_map, numbers, indices, at, x.ndim)
        if fills and not _fits(starts, sizes, x.shape):
            out[at] = _filling(params["fill_value"], x.dtype)
        else:
            out[at] = x[_start(x, starts, sizes)].reshape(shape_of_slice)
    # The axes of a slice go where `offset_dims` says, those of the batch to what is left.
    ndim = len(batch) + len(shape_of_slice)
    others = [d for d in range(ndim) if d not in numbers.offset_dims]
    return [out.transpose(np.argsort([*others, *numbers.offset_dims]))]


def _scatter(combine: Any, params: Any, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> list[np.ndarray]:
    numbers, x = params["dimension_numbers"], x.copy()
    window, batch = numbers.update_window_dims, indices.shape[:-1]
    others = [d for d in range(updates.ndim) if d not in window]
    updates = updates.transpose([*others, *window])
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    rest = iter(updates.shape[len(batch) :])
    sizes = [1 if d in dropped else next(rest) for d in range(x.ndim)]
    clips = "clip" in str(params["mode"]).lower()
    for at in np.ndindex(*batch):
        starts = _starts(numbers.scatter_dims_to_operand_dims, numbers, indices, at, x.ndim)
        if clips or _fits(starts, sizes, x.shape):
            place = _start(x, starts, sizes)
            x[place] = combine(x[place], updates[at].reshape(sizes))
    return [x]


_COMBINED = {
    "scatter": lambda old, new: new,
    "scatter-add": np.add,
    "scatter_add": np.add,
    "scatter-sub": np.subtract,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter-mul": np.multiply,
    "scatter_min": np.minimum,
    "scatter-min": np.minimum,
    "scatter_max": np.maximum,
    "scatter-max": np.maximum,
}


def _cumsum(x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis) if reverse else np.cumsum(x, axis)


def _collapsed(numbers: Any) -> set[int]:
    return {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}


def _starts(places: Any, numbers: Any, indices: np.ndarray, at: tuple[int, ...], ndim: int) -> list[int]:
    """Where the slice of a position begins, along every axis."""
    starts = [0] * ndim
    for d, i in zip(places, indices[at], strict=True):
        starts[d] = int(i)
    of_indices = getattr(numbers, "start_indices_batching_dims", None) or getattr(
        numbers, "scatter_indices_batching_dims", ()
    )
    for d, of in zip(numbers.operand_batching_dims, of_indices, strict=True):
        starts[d] = at[of]
    return starts


def _fits(starts: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return all(0 <= s <= n - size for s, size, n in zip(starts, sizes, shape, strict=True))


def _filling(value: Any, dtype: Any) -> Any:
    if value is not None:
        return value
    if np.issubdtype(dtype, np.inexact):
        return np.nan
    if np.issubdtype(dtype, np.bool_):
        return True
    return np.iinfo(dtype).min if np.issubdtype(dtype, np.signedinteger) else np.iinfo(dtype).max


_OTHERS: dict[str, Callable[..., list[Any]]] = {
    "iota": _iota,
    "div": _div,
    "gather": _gather,
    "copy": lambda params, x: [x],
    "device_put": lambda params, *xs: xs,
    "optimization_barrier": lambda params, *xs: xs,
    "clamp": lambda params, low, x, high: [np.minimum(np.maximum(x, low), high)],
    "bitcast_convert_type": lambda params, x: [x.view(params["new_dtype"])],
    "square": lambda params, x: [x * x],
    "expand_dims": lambda params, x: [np.expand_dims(x, params["dimensions"])],
    "cumsum": lambda params, x: [_cumsum(x, params["axis"], params["reverse"])],
    "rev": lambda params, x: [np.flip(x, params["dimensions"])],
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
    "reduce_or": lambda params, x: [np.any(x, tuple(params["axes"]))],
    "reduce_and": lambda params, x: [np.all(x, tuple(params["axes"]))],
    "reduce_min": lambda params, x: [np.min(x, tuple(params["axes"]))],
    "reduce_max": lambda params, x: [np.max(x, tuple(params["axes"]))],
    "reduce_sum": lambda params, x: [np.sum(x, tuple(params["axes"]))],
    "integer_pow": lambda params, x: [x ** params["y"] if params["y"] >= 0 else 1 / x ** -params["y"]],
    "convert_element_type": lambda params, x: [x.astype(params["new_dtype"])],
}

_ELEMENTWISE["select_n"] = _select_n
_OTHERS |= {name: functools.partial(_scatter, combine) for name, combine in _COMBINED.items()}

_CONTROL: dict[str, Callable[..., list[Any]]] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"), _call
    ),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
