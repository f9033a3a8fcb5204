"""One table of the ops, for tests that are the same for several of them: operands, oracles, and ways to call them.

An entry is called with the library, its oracle in NumPy, or plain JAX: `OPS["ta_add"](OURS, buffer, index, value,
where)`. The result is a tuple of arrays.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import jax_tensorarray as ta
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.clear import ta_clear

#: The library, with the ops that only it calls.
OURS = SimpleNamespace(
    **{name: getattr(ta, name) for name in ta.__all__ if name.startswith("ta_")}, ta_clear=ta_clear, ta_check=ta_check
)


@dataclass(frozen=True)
class Op:
    name: str
    operands: tuple[str, ...]  # in order; `where` is passed by its name, and may be left out
    results: tuple[str, ...]  # the operand that each is like; an array of rows is like `value`
    differentiable: tuple[int, ...]  # by these operands
    is_linear: bool = True  # in all of these together

    def __call__(self, lib: Any, *operands: Any, mode: str | None = "drop", **options: Any) -> tuple[Any, ...]:
        named = dict(zip(self.operands, operands, strict=False))
        if "where" in self.operands:
            options = {"where": named.pop("where", None), "mode": mode} | options
        results = getattr(lib, self.name)(*named.values(), **options)
        return results if isinstance(results, tuple) else (results,)

    def __str__(self) -> str:
        return self.name


_UPDATED = ("buffer", "index", "value", "where")
OPS = {
    op.name: op
    for op in (
        Op("ta_read", ("buffer", "index", "where"), ("value",), (0,)),
        Op("ta_write", _UPDATED, ("buffer",), (0, 2)),
        Op("ta_add", _UPDATED, ("buffer",), (0, 2)),
        Op("ta_max", _UPDATED, ("buffer",), (0, 2), is_linear=False),
        Op("ta_swap", _UPDATED, ("buffer", "value"), (0, 2)),
        Op("ta_stack", ("buffer", "size"), ("buffer",), (0,)),
        Op("ta_clear", ("buffer", "start", "stop"), ("buffer",), (0,)),
        Op("ta_check", ("index", "size", "where"), ("index",), ()),
    )
}
#: Those that address rows by an index, those of them that update these, and those that have derivatives.
ROW_OPS = [op for op in OPS.values() if op.operands[:2] == ("buffer", "index")]
UPDATES = [op for op in ROW_OPS if "value" in op.operands]
SMOOTH_OPS = [op for op in OPS.values() if op.differentiable]


def every(ops: Any) -> Any:
    """`@every(ROW_OPS)` runs a test for each of these."""
    return pytest.mark.parametrize("op", ops, ids=str)


def assert_same(found: Any, expected: Any, same: Callable[[Any, Any], None] = oracle.assert_same_bits) -> None:
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        same(a, e)


def on_device(*arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, arrays))


# --- random operands --------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {"buffer": (4, 2), "index": (3,), "value": (3, 2), "where": (3,)}
BATCH = 3


def operand(name: str, rng: np.random.Generator, in_axes: Any = (None,)) -> np.ndarray:
    """A random operand with a batch axis for every vmap, innermost last. Indices may be out of range."""
    shape = SHAPES.get(name, ())
    for axis in reversed(in_axes):
        if axis is not None:
            shape = tuple(np.insert(np.array(shape, int), axis if axis >= 0 else len(shape) + 1 + axis, BATCH))
    if name in ("index", "size", "start", "stop"):
        return rng.integers(-1, 6, shape).astype(np.int32)
    return rng.random(shape) < 0.7 if name == "where" else rng.normal(size=shape)


def operands(op: Op, rng: np.random.Generator, *levels: Any) -> list[np.ndarray]:
    """Operands for nested vmaps with these in_axes, outermost first."""
    return [operand(n, rng, axes) for n, *axes in zip(op.operands, *levels, strict=True)]


def combinations(op: Op, axes: tuple[int | None, ...]) -> list[tuple[int | None, ...]]:
    """All in_axes of the op, but for those that map nothing."""
    return [c for c in itertools.product(axes, repeat=len(op.operands)) if any(a is not None for a in c)]


def alone_and_together(op: Op) -> list[tuple[int | None, ...]]:
    """In_axes that map one operand, and those that map all: each pair of operands in every way."""
    count = len(op.operands)
    return [tuple(0 if k == n else None for k in range(count)) for n in range(count)] + [(0,) * count]


def loop(f: Callable[..., tuple[Any, ...]], in_axes: Any) -> Callable[..., tuple[np.ndarray, ...]]:
    """What `jax.vmap(f, in_axes)` means, in NumPy."""
    return lambda *xs: tuple(np.stack(out) for out in zip(*(f(*one) for one in examples(in_axes, xs)), strict=True))


def examples(in_axes: Any, xs: Any) -> Iterator[list[np.ndarray]]:
    for k in range(BATCH):
        yield [x if a is None else np.take(x, k, a) for x, a in zip(xs, in_axes, strict=True)]


# --- an op by itself, and in a loop ------------------------------------------------------------------

#: Duplicates (2), a masked position (the first 3), one out of range (7), and a row that nobody addresses (4).
SIZE, ELEM = 5, (2,)
INDEX = np.array([2, 0, 2, 3, 7, 1, 3])
WHERE = np.array([True, True, True, False, True, True, True])

_rng = np.random.default_rng(0)
BUFFER = _rng.normal(size=(SIZE, *ELEM))
VALUE = _rng.normal(size=(INDEX.size, *ELEM))
#: For derivatives of order one, two and three: each a tangent of (BUFFER, VALUE).
DIRECTIONS = [[_rng.normal(size=BUFFER.shape), _rng.normal(size=VALUE.shape)] for _ in range(3)]

#: What each op takes besides BUFFER and VALUE. Of clears there is one after the other.
_ARGUMENTS = {"index": INDEX, "where": WHERE, "size": 2, "start": np.array([-1, 3, 9]), "stop": np.array([1, 4, -2])}


def arguments(op: Op, buffer: Any, value: Any) -> tuple[Any, ...]:
    return tuple({"buffer": buffer, "value": value, **_ARGUMENTS}[name] for name in op.operands)


def call(op: Op, lib: Any, buffer: Any, *rest: Any) -> tuple[Any, ...]:
    """The op at all positions."""
    if op.name == "ta_clear":
        for bounds in zip(*rest, strict=True):
            (buffer,) = op(lib, buffer, *bounds)
        return (buffer,)
    return op(lib, buffer, *rest)


def _direct(op: Op, *args: Any) -> tuple[Any, ...]:
    return call(op, OURS, *args)


def _one_position(op: Op, buffer: Any, rows: Any, x: Any) -> tuple[Any, Any]:
    """The op at one position: the buffer afterwards and the row that came out."""
    results = dict(zip(op.results, op(OURS, buffer, *x), strict=True))
    return results.get("buffer", buffer), results.get("value", rows)


def _results(op: Op, buffer: Any, rows: Any) -> tuple[Any, ...]:
    return tuple({"buffer": buffer, "value": rows}[name] for name in op.results)


def _scan(op: Op, buffer: Any, *xs: Any) -> tuple[Any, ...]:
    body = lambda b, x: _one_position(op, b, jnp.zeros_like(buffer[0]), x)  # noqa: E731
    return _results(op, *lax.scan(body, buffer, xs))


#: name -> (op, buffer, *rest) -> results
CONTEXTS: dict[str, Callable[..., tuple[Any, ...]]] = {"direct": _direct, "scan": _scan}


def in_context(context: str, op: Op, buffer: Any, value: Any) -> tuple[Any, ...]:
    """The op of the library, of an index that it does not know while tracing."""
    return CONTEXTS[context](op, *on_device(*arguments(op, buffer, value)))


def expected_results(op: Op) -> tuple[np.ndarray, ...]:
    return call(op, oracle, *arguments(op, BUFFER, VALUE))


def loss(xp: Any, results: Callable[..., tuple[Any, ...]], buffer: Any, value: Any) -> Any:
    """A scalar of (buffer, value) with no derivative of order up to three that vanishes."""
    outs = results(xp.sin(buffer), value + 0.5 * value**2)
    weights = [xp.asarray(np.cos(1.0 + np.arange(out.size))).reshape(out.shape) for out in outs]
    total = sum(xp.sum(w * xp.sin(out)) for w, out in zip(weights, outs, strict=True))
    return total + 0.5 * total**2


def loss_in(context: str, op: Op) -> Callable[..., Any]:
    """The loss as a function of (buffer, value), with the op of the library in that context."""
    return lambda buffer, value: loss(jnp, functools.partial(in_context, context, op), buffer, value)


def loss_by(lib: Any, xp: Any, op: Op) -> Callable[..., Any]:
    """The same loss with another implementation of the op."""
    return lambda buffer, value: loss(xp, lambda b, v: call(op, lib, *arguments(op, b, v)), buffer, value)


# --- an index out of range ------------------------------------------------------------------------------------------

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def message(op: Any, index: int, size: int) -> str:
    noun = "TensorArray" if str(op).startswith("TensorArray") else "buffer"
    return re.escape(f"{op}: index {index} is out of range for a {noun} of size {size}") + r"(?!\d)"


def raises(op: Any, index: int, size: int) -> Any:
    return pytest.raises(RUNTIME_ERRORS, match=message(op, index, size))
