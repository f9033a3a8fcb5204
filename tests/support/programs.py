"""One call of every op, in every place where JAX lets a program put it, with the same result everywhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tensorarray as ta

OPS = ["ta_read", "ta_write", "ta_add", "ta_swap", "ta_stack"]
ROW_OPS = OPS[:4]

#: Duplicates (2), a masked position (the first 3), one out of range (7), and a row that nobody addresses (4).
SIZE, ELEM = 5, (2,)
INDEX = np.array([2, 0, 2, 3, 7, 1, 3])
WHERE = np.array([True, True, True, False, True, True, True])

_rng = np.random.default_rng(0)
BUFFER = _rng.normal(size=(SIZE, *ELEM))
VALUE = _rng.normal(size=(INDEX.size, *ELEM))
#: For derivatives of order one, two and three: each a tangent of (BUFFER, VALUE).
DIRECTIONS = [[_rng.normal(size=BUFFER.shape), _rng.normal(size=VALUE.shape)] for _ in range(3)]


def call(
    lib: Any, op: str, buffer: Any, index: Any, value: Any, where: Any, mode: str | None = "drop"
) -> tuple[Any, ...]:
    """The results of one op as a tuple. `ta_stack` takes the first index as its size."""
    if op == "ta_stack":
        return (lib.ta_stack(buffer, index.reshape(-1)[0]),)
    if op == "ta_read":
        return (lib.ta_read(buffer, index, where=where, mode=mode),)
    results = getattr(lib, op)(buffer, index, value, where=where, mode=mode)
    return results if isinstance(results, tuple) else (results,)


def _direct(op: str, *operands: Any) -> tuple[Any, ...]:
    return call(ta, op, *operands)


def _nested_jit(op: str, *operands: Any) -> tuple[Any, ...]:
    return jax.jit(lambda *inner: jax.jit(lambda *innermost: call(ta, op, *innermost))(*inner))(*operands)


def _one_position(op: str, buffer: Any, rows: Any, x: Any) -> tuple[Any, Any]:
    """The op at one position: the buffer afterwards and the row that came out."""
    results = call(ta, op, buffer, *x)
    if op == "ta_read":
        return buffer, results[0]
    return results[0], results[1] if op == "ta_swap" else rows


def _results(op: str, buffer: Any, rows: Any) -> tuple[Any, ...]:
    return {"ta_read": (rows,), "ta_swap": (buffer, rows)}.get(op, (buffer,))


def _scan(op: str, buffer: Any, index: Any, value: Any, where: Any) -> tuple[Any, ...]:
    zeros = jnp.zeros_like(value[0])
    return _results(op, *lax.scan(lambda b, x: _one_position(op, b, zeros, x), buffer, (index, value, where)))


def _loop_step(op: str, k: Any, carry: Any, xs: Any) -> Any:
    buffer, rows = carry
    buffer, row = _one_position(op, buffer, rows[k], jax.tree.map(lambda x: x[k], xs))
    return buffer, rows.at[k].set(row)


def _fori_loop(op: str, buffer: Any, index: Any, value: Any, where: Any) -> tuple[Any, ...]:
    xs = (index, value, where)
    start = (buffer, jnp.zeros_like(value))
    return _results(op, *lax.fori_loop(0, index.size, lambda k, carry: _loop_step(op, k, carry, xs), start))


def _while_loop(op: str, buffer: Any, index: Any, value: Any, where: Any) -> tuple[Any, ...]:
    xs = (index, value, where)
    start = (jnp.zeros((), index.dtype), (buffer, jnp.zeros_like(value)))
    _, carry = lax.while_loop(lambda c: c[0] < index.size, lambda c: (c[0] + 1, _loop_step(op, c[0], c[1], xs)), start)
    return _results(op, *carry)


def _cond(op: str, *operands: Any) -> tuple[Any, ...]:
    taken = operands[1].reshape(-1)[0] >= 0
    other = [jnp.zeros(r.shape, r.dtype) for r in jax.eval_shape(lambda: call(ta, op, *operands))]
    return lax.cond(taken, lambda: call(ta, op, *operands), lambda: tuple(other))


def _checkpoint(op: str, *operands: Any) -> tuple[Any, ...]:
    return jax.checkpoint(lambda *inner: call(ta, op, *inner))(*operands)


def _checkpointed_scan(op: str, buffer: Any, index: Any, value: Any, where: Any) -> tuple[Any, ...]:
    zeros = jnp.zeros_like(value[0])
    body = jax.checkpoint(
        lambda b, x: _one_position(op, b, zeros, x), policy=ta.checkpoint_policies.save_reads, prevent_cse=False
    )
    return _results(op, *lax.scan(body, buffer, (index, value, where)))


def _vmap(op: str, *operands: Any) -> tuple[Any, ...]:
    out = jax.vmap(lambda *one: call(ta, op, *one))(*(jnp.stack([x, x]) for x in operands))
    return tuple(x[1] for x in out)


#: name -> (op, buffer, index, value, where) -> results
CONTEXTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "direct": _direct,
    "nested_jit": _nested_jit,
    "scan": _scan,
    "fori_loop": _fori_loop,
    "while_loop": _while_loop,
    "cond": _cond,
    "checkpoint": _checkpoint,
    "checkpointed_scan": _checkpointed_scan,
    "vmap": _vmap,
}


def cases(contexts: list[str] | None = None) -> list[tuple[str, str]]:
    """Pairs (op, context). Stacking has no positions to loop over."""
    loops = ("scan", "fori_loop", "while_loop", "checkpointed_scan")
    return [(op, c) for op in OPS for c in contexts or CONTEXTS if op != "ta_stack" or c not in loops]


def loss(xp: Any, results: Callable[..., tuple[Any, ...]], buffer: Any, value: Any) -> Any:
    """A scalar of (buffer, value) with no derivative of order up to three that vanishes."""
    outs = results(xp.sin(buffer), value + 0.5 * value**2)
    weights = [xp.asarray(np.cos(1.0 + np.arange(out.size))).reshape(out.shape) for out in outs]
    total = sum(xp.sum(w * xp.sin(out)) for w, out in zip(weights, outs, strict=True))
    return total + 0.5 * total**2


def loss_in(context: str, op: str) -> Callable[..., Any]:
    """The loss as a function of (buffer, value), with the op of the library in that context."""
    index, where = jnp.asarray(INDEX), jnp.asarray(WHERE)

    def f(buffer: Any, value: Any) -> Any:
        return loss(jnp, lambda b, v: CONTEXTS[context](op, b, index, v, where), buffer, value)

    return f


def loss_by(lib: Any, xp: Any, op: str) -> Callable[..., Any]:
    """The same loss with another implementation of the op."""
    return lambda buffer, value: loss(xp, lambda b, v: call(lib, op, b, INDEX, v, WHERE), buffer, value)
