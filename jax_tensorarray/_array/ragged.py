"""Rows of different shapes, stored one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_tensorarray import _compat
from jax_tensorarray._array import checks
from jax_tensorarray._array.history import Version, room_for
from jax_tensorarray._array.rows import Rows, Spec, Static, check_alive
from jax_tensorarray._types import Array


class Ragged(Rows):
    """Rows in a list, with None for a row without a write."""

    __slots__ = ()
    size: int

    @classmethod
    def of(cls, spec: Spec, dtype: Any, rows: list[Array]) -> "Ragged":
        return cls(replace(spec, ranks=None, dtype=dtype), len(rows), Version(rows))

    def read(self, op: str, index: Any, where: Any = None, mode: str | None = None) -> list[Array]:
        _need_known(op, index, where)
        index, *_ = checks.readable(index, self.size, where, mode)
        if isinstance(index, int):
            return self._rows(op, [index])
        stacked = self._stack(op, self._rows(op, index.reshape(-1).tolist()))
        return [stacked.reshape(*index.shape, *stacked.shape[1:])]

    def write(self, op: str, index: Any, values: list[Array], where: Any, mode: str | None) -> "Ragged":
        if at_end := index is None:
            index = self.size
        if isinstance(index, int) or not index.ndim:
            self.check_shapes(op, [values[0].shape])
            return self._write_one(op, index, values[0], where, mode, at_end)
        self.check_shapes(op, [values[0].shape[1:]])
        _need_known(op, index, where)
        for k, (i, row) in enumerate(zip(index.tolist(), values[0], strict=True)):
            self = self._write_one(op, i, row, where if where is None else where[k], mode)
        return self

    def _write_one(
        self, op: str, index: Any, row: Array, where: Any, mode: str | None, at_end: bool = False
    ) -> "Ragged":
        spec, size = self.spec, self.size
        if checks.takes_none(where):
            return self
        if not isinstance(index, jax.core.Tracer):
            limit = None if spec.dynamic_size else size
            index, where, mode = checks.writable(index, limit, spec.max_size, where, mode, at_end)
            if mode == "drop" and index < 0:
                return self
        _need_known(op, index, where)
        version = self.version
        if not _compat.executes_eagerly():  # writes of a transformation must not be visible outside of it
            version = Version(list(version.share()), owned=True, used=size)
        size, zeros, room = room_for(index, size, len(version.newest()))
        return Ragged(spec, size, version.write(index, row, size, zeros, room))

    def stack(self, op: str, pad: bool) -> list[Array]:
        rows = self._stack(op, self._rows(op, range(self.size)))
        room = self.spec.padded(self.size) - self.size if pad else 0
        return [jnp.concatenate([rows, jnp.zeros((room, *rows.shape[1:]), rows.dtype)]) if room else rows]

    def concat(self, op: str, pad: bool) -> list[Array]:
        if pad and self.spec.padded(self.size) > self.size:
            if len({row.shape for row in self._rows(op, range(self.size))}) > 1:
                raise ValueError(f"{op}: there is no padding of rows of different shapes; leave pad=True out")
            return [checks.joined(x) for x in self.stack(op, pad)]
        return [checks.concatenated(self._rows(op, range(self.size)), self.spec.shape, self.spec.dtype)]

    def flatten(self) -> tuple[tuple[Any, ...], Static]:
        if all(row is None for row in self.version.newest()):
            self.spec.check_may_enter_loop()
        return (tuple(self.version.share()[: self.size]),), Static(self.spec)

    def has_no_bound(self) -> bool:
        return False  # a list needs no bound

    def _rows(self, op: str, indices: Sequence[int]) -> list[Array]:
        rows = self.version.look(lambda every: [None if i < 0 else every[i] for i in indices])
        for i, row in zip(indices, rows, strict=True):
            if i < 0:
                raise ValueError(
                    f"{op}: a row that is not read is zeros, of no known shape in a TensorArray with infer_shape=False"
                )
            if row is None:
                raise ValueError(
                    f"{op}: row {i} was never written, and its shape is not known (element_shape={self.spec.shape})"
                )
            check_alive((row,))
        return rows

    def _stack(self, op: str, rows: list[Array]) -> Array:
        shapes = [row.shape for row in rows]
        if len(set(shapes)) > 1:
            raise ValueError(f"{op}: rows have different shapes: {shapes}; concat joins them")
        if rows:
            return jnp.stack(rows)
        if not checks.is_known(self.spec.shape):
            raise ValueError(f"{op}: there are no rows, and the shape of one is not known; give element_shape")
        return jnp.zeros((0, *self.spec.shape), self.spec.dtype)  # type: ignore[misc]


def _need_known(op: str, index: Any, where: Any) -> None:
    if isinstance(index, jax.core.Tracer):
        raise TypeError(
            f"{op}: a TensorArray with infer_shape=False keeps rows of different shapes, so an index must be known "
            "while tracing, a Python integer. If all rows have one shape, give element_shape or infer_shape=True; "
            "if not, pad them to one shape"
        )
    if isinstance(where, jax.core.Tracer):
        raise TypeError(f"{op}: rows of different shapes need a where that is known while tracing")
