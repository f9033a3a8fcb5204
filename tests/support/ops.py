"""One table of the ops, for tests that are the same for several of them: operands, and ways to call them.

An entry is called with the library, its oracle in NumPy, or plain JAX: `OPS["ta_add"](OURS, buffer, index, value,
where)`. The result is a tuple of arrays.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import oracle
import pytest

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
#: Those that address rows by an index, and those of them that update these.
ROW_OPS = [op for op in OPS.values() if op.operands[:2] == ("buffer", "index")]
UPDATES = [op for op in ROW_OPS if "value" in op.operands]


def every(ops: Any) -> Any:
    """`@every(ROW_OPS)` runs a test for each of these."""
    return pytest.mark.parametrize("op", ops, ids=str)


def assert_same(found: Any, expected: Any, same: Callable[[Any, Any], None] = oracle.assert_same_bits) -> None:
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        same(a, e)


def on_device(*arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, arrays))


# --- an index out of range ------------------------------------------------------------------------------------------

#: JAX raises the former from the first call of a compiled function, and the latter from its fast path.
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def message(op: Any, index: int, size: int) -> str:
    noun = "TensorArray" if str(op).startswith("TensorArray") else "buffer"
    return re.escape(f"{op}: index {index} is out of range for a {noun} of size {size}") + r"(?!\d)"


def raises(op: Any, index: int, size: int) -> Any:
    return pytest.raises(RUNTIME_ERRORS, match=message(op, index, size))
