"""What a TensorArray means: an immutable Python list of rows, with the library's methods and errors.

Indices and predicates are known in Python. Rows are arrays of NumPy, or of JAX where a test differentiates: values and
derivatives are then those of an unrolled program without a loop, a branch, or a primitive of the library.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ListArray:
    """The rows, None if never written; and a row of zeros, None if rows differ in shape or theirs is not known yet."""

    rows: tuple[Any, ...]
    zero: Any
    dynamic: bool = False
    limit: float = np.inf  #: the most rows of a dynamic array
    ragged: bool = False  #: whether rows may differ in shape
    math: Any = np

    def size(self) -> int:
        return len(self.rows)

    def identity(self) -> "ListArray":
        return self

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, index: Any, *, where: Any = True, mode: str | None = None) -> Any:
        return self._taken([(index, True if where is None else where)], mode)[0]

    def gather(self, indices: Any, *, where: Any = True, mode: str | None = None) -> Any:
        wheres = np.broadcast_to(True if where is None else where, len(indices))
        return self.math.stack(self._taken(zip(indices, wheres, strict=True), mode))

    def stack(self) -> Any:
        rows = self._taken([(k, True) for k in range(self.size())])
        if len({row.shape for row in rows}) > 1:
            raise ValueError("different shapes")
        if self.zero is None and (not self.ragged or not rows):
            raise ValueError("there are no rows" if self.ragged else "no row was written yet")
        return self.math.stack(rows) if rows else self.zero[None][:0]

    def concat(self) -> Any:
        rows = self._taken([(k, True) for k in range(self.size())])
        if not self.ragged and self.zero is None:
            raise ValueError("no row was written yet")
        if any(not row.ndim for row in [*rows, *([] if self.zero is None else [self.zero])]):
            raise ValueError("Concat saw a scalar shape")
        if self.zero is None and not rows:
            raise ValueError("there are no rows")
        return self.math.concatenate(rows) if rows else self.zero[:0]

    def _taken(self, at: Any, mode: str | None = None) -> list[Any]:
        """The rows at pairs of an index and whether to read there. All indices are looked at before the rows are."""
        at, size = [(operator.index(i), w) for i, w in at], self.size()
        for i, w in at:
            if w and mode != "drop" and not 0 <= i < size:
                raise IndexError("negative indices" if i < 0 else f"array size is: {size}")
        return [self._row(i if w and 0 <= i < size else None) for i, w in at]

    def _row(self, index: int | None) -> Any:
        row = None if index is None else self.rows[index]
        if row is None and self.zero is None:
            never = "zeros, of no known shape" if index is None else "never written"
            raise ValueError(never if self.ragged else "no row was written yet")
        return self.zero if row is None else row

    # --- writing -----------------------------------------------------------------------------------------------

    def write(self, index: Any, value: Any, *, where: Any = True, mode: str | None = None) -> "ListArray":
        return self._written([(index, value, where)], mode, value)

    def scatter(self, indices: Any, value: Any, *, where: Any = True, mode: str | None = None) -> "ListArray":
        wheres = [where] * len(indices) if where is None or np.ndim(where) == 0 else where
        return self._written(zip(indices, value, wheres, strict=True), mode, value[0])

    def append(self, value: Any, *, where: Any = True, mode: str | None = None) -> "ListArray":
        self._need_dynamic()
        return self._written([(self.size(), value, where)], mode, value, f"there are {self.size()} rows")

    def pop(self, *, where: Any = True, mode: str | None = None) -> tuple["ListArray", Any]:
        self._need_dynamic()
        is_taken = where is None or bool(where)
        if is_taken and not self.rows and mode != "drop":
            raise IndexError("Tried to pop a row but array size is: 0")
        is_taken = is_taken and self.size() > 0
        row = self._row(self.size() - 1 if is_taken else None)
        return replace(self, rows=self.rows[:-1]) if is_taken else self, row

    def unstack(self, value: Any) -> "ListArray":
        self._check_number(len(value), f"static size {self.size()}", "max_size")
        return replace(self, rows=tuple(value), zero=self.math.zeros_like(value[0]))

    def split(self, value: Any, lengths: Sequence[int]) -> "ListArray":
        if not self.dynamic and len(lengths) != self.size():
            raise ValueError("size is not equal to the size of lengths")
        self._check_number(len(lengths), "", "max_size")
        ends = np.cumsum(lengths)
        rows = tuple(value[end - n : end] for n, end in zip(lengths, ends, strict=True))
        return replace(self, rows=rows, zero=self.math.zeros_like(rows[0]) if len(set(lengths)) == 1 else None)

    def _need_dynamic(self) -> None:
        if not self.dynamic:
            raise ValueError("fixed size")

    def _check_number(self, n: int, fixed: str, limited: str) -> None:
        if n > (self.limit if self.dynamic else self.size()):
            raise ValueError(limited if self.dynamic else fixed)

    def _written(self, updates: Any, mode: str | None, row: Any, full: str = "") -> "ListArray":
        """Write what `updates` say: an index, a row, and whether. All or nothing; a row decides the shape anyhow."""
        updates = [(operator.index(i), value) for i, value, where in updates if where is None or where]
        limit, zero, rows = self.limit if self.dynamic else self.size(), self.zero, list(self.rows)
        if zero is None and not self.ragged:
            zero = self.math.zeros_like(row)
        elif zero is not None and row.shape != zero.shape:  # what was a row of zeros stays one
            rows, zero = [zero if x is None else x for x in rows], None
        for i, value in updates:
            if 0 <= i < limit:
                rows += [None] * (i + 1 - len(rows))
                rows[i] = value
            elif mode != "drop":
                past = f"max_size is {self.limit}" if self.dynamic else f"not resizeable and size is: {limit}"
                raise IndexError("negative indices" if i < 0 else full or past)
        is_same = zero is self.zero and not any(0 <= i < limit for i, _ in updates)
        return self if is_same else replace(self, rows=tuple(rows), zero=zero)
