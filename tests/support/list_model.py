"""What a TensorArray means, in plain jnp: an immutable Python list of rows, which may be pytrees.

The methods have the names and arguments of the library's, so that a test can run one program on both. Indices and
predicates are known in Python, so that values and derivatives are those of an unrolled program without any loop,
branch, or primitive of the library.
"""

import operator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _rows_of(value: Any) -> tuple[Any, ...]:
    """The rows of arrays `[n, *elem]`."""
    n = jax.tree.leaves(value)[0].shape[0]
    return tuple(jax.tree.map(lambda x, k=k: x[k], value) for k in range(n))


@dataclass(frozen=True)
class ListArray:
    """The rows, a row of zeros, and how many rows a padded `stack` gives, or None for as many as there are."""

    rows: tuple[Any, ...]
    zero: Any
    max_size: int | None = None
    dynamic: bool = True

    @classmethod
    def from_array(cls, value: Any, max_size: int | None = None, dynamic: bool = True) -> "ListArray":
        return cls(_rows_of(value), jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), value), max_size, dynamic)

    def size(self) -> np.int32:
        return np.int32(len(self.rows))

    def identity(self) -> "ListArray":
        return self

    def write(self, index: Any, value: Any, *, where: Any = True, mode: str | None = None) -> "ListArray":
        limit = (self.max_size or np.inf) if self.dynamic else len(self.rows)
        if not where or (mode == "drop" and not 0 <= index < limit):
            return self
        assert 0 <= index < limit
        i = operator.index(index)
        rows = list(self.rows) + [self.zero] * (i + 1 - len(self.rows))
        rows[i] = value
        return replace(self, rows=tuple(rows))

    def append(self, value: Any, *, where: Any = True, mode: str | None = None) -> "ListArray":
        return self.write(len(self.rows), value, where=where, mode=mode)

    def pop(self, *, where: Any = True, mode: str | None = None) -> tuple["ListArray", Any]:
        if not where or (mode == "drop" and not self.rows):
            return self, self.zero
        return replace(self, rows=self.rows[:-1]), self.rows[-1]

    def read(self, index: Any, *, where: Any = True, mode: str | None = None) -> Any:
        if not where or (mode == "drop" and not 0 <= index < len(self.rows)):
            return self.zero
        assert index >= 0
        return self.rows[operator.index(index)]

    def __getitem__(self, index: Any) -> Any:
        return self.read(index)

    def _stacked(self, rows: Any) -> Any:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    def stack(self, *, pad: bool = False) -> Any:
        padding = self.max_size - len(self.rows) if pad and self.max_size is not None else 0
        rows = [*self.rows, *[self.zero] * padding]
        return self._stacked(rows) if rows else jax.tree.map(lambda x: x[None][:0], self.zero)

    def concat(self, *, pad: bool = False) -> Any:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.stack(pad=pad))

    def mask(self) -> Any:
        limit = len(self.rows) if self.max_size is None else self.max_size
        return jnp.array([k < len(self.rows) for k in range(limit)])

    def gather(self, indices: Any, *, where: Any = True, mode: str | None = None) -> Any:
        wheres = np.broadcast_to(where, len(indices))
        return self._stacked([self.read(i, where=w, mode=mode) for i, w in zip(indices, wheres, strict=True)])

    def scatter(self, indices: Any, value: Any, *, where: Any = True, mode: str | None = None) -> "ListArray":
        ta = self
        for i, w, row in zip(indices, np.broadcast_to(where, len(indices)), _rows_of(value), strict=True):
            ta = ta.write(i, row, where=w, mode=mode)
        return ta

    def unstack(self, value: Any) -> "ListArray":
        return replace(self, rows=_rows_of(value))

    def split(self, value: Any, lengths: Any) -> "ListArray":
        ends = np.cumsum(lengths)
        rows = [jax.tree.map(lambda x, s=e - n, e=e: x[s:e], value) for n, e in zip(lengths, ends, strict=True)]
        return replace(self, rows=tuple(rows))
