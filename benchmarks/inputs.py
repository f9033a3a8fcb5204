"""What the cases are given: the same arrays in every environment, from NumPy alone."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BATCH = 16
LETTERS = 32


def inputs(case: str, T: int, row: int) -> tuple[Array, ...]:
    """Arguments of a case at T steps with rows of `row` floats; the first is `x`."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    if case == "decoder":
        return normal(T, row), normal(row, row, scale=row**-0.5)
    if case == "lstm":
        return normal(T, row), normal(3 * row, 4 * row, scale=(3 * row) ** -0.5)
    if case == "beam_search":
        return normal(T, LETTERS), normal(row, LETTERS, scale=row**-0.5), normal(row, row, scale=0.5 * row**-0.5)
    if case in {"while_write", "while_write_loose", "while_layers"}:
        return normal(row), normal(row, row, scale=row**-0.5)
    if case in {"while_read_earlier", "while_read_earlier_loose"}:
        return (normal(row),)
    if case == "while_vmapped":
        return (normal(row) * np.linspace(0.5, 1.5, BATCH, dtype=np.float32)[:, None],)
    if case == "triangular":
        k = np.arange(T, 0, -1)
        return normal(1), np.concatenate([np.cos(k) / k**2, np.zeros(T)]).astype(np.float32)
    return (normal(T, row),)


def permutation(T: int) -> Array:
    """Rows in an order of no pattern, each once."""
    return np.random.default_rng(1).permutation(T).astype(np.int32)
