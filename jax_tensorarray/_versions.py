"""Versions of a list of rows: the newest is updated in place, and every older one can still be read.

Outside of `jit` a TensorArray is a value, as an array is: a write returns a new one and the old one stays as it was.
What the write overwrote is kept in a log for as long as somebody holds an older version. In `ta = ta.write(i, x)`
nobody does after the assignment, so a loop of writes is in place and its log is empty. An older version that is
looked at, or outlives `LOG_LIMIT` writes, gets a copy of the rows of its own, once.
"""

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray._ops.clear import ta_clear
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._register import row_params

Array = Any

#: How many overwritten rows are kept for a version before it gets a copy of its own.
LOG_LIMIT = 256


class Layout(NamedTuple):
    """Shapes and dtypes of the rows in buffers `[capacity, *elem]`, one for each leaf of an element."""

    capacity: int
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


class Arrays:
    """Rows that are stacked in buffers `[capacity, *elem]`, one for each leaf of an element."""

    __slots__ = ("_layout", "buffers")

    def __init__(self, buffers: tuple[Array, ...]) -> None:
        self.buffers = buffers
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            shapes = tuple(b.shape[1:] for b in self.buffers)
            dtypes = tuple(np.dtype(b.dtype) for b in self.buffers)
            ranks = tuple(b.ndim - 1 for b in self.buffers)
            self._layout = Layout(self.buffers[0].shape[0] if ranks[0] >= 0 else 0, ranks, shapes, dtypes)
        return self._layout

    def copy(self) -> "Arrays":
        return Arrays(_copy(self.buffers))

    def swap(self, index: Any, values: Any) -> Any:
        self.buffers, old = _swap(self.buffers, index, values)
        return old

    def restore(self, index: Any, old: Any) -> None:
        self.buffers = _restore(self.buffers, index, old)

    def grow(self, capacity: int) -> None:
        if capacity > self.layout.capacity:
            self.buffers, self._layout = _grow(self.buffers, capacity), None

    def clear(self, start: int, stop: int) -> None:
        self.buffers = _clear(self.buffers, start, stop)


# The functions below own their first argument and update it in place.


@functools.partial(jax.jit, donate_argnums=0)
def _swap(buffers: tuple[Array, ...], index: Array, values: tuple[Array, ...]) -> Any:
    params = row_params("TensorArray.write", "drop")
    index = jnp.asarray(index, jnp.int32)
    pairs = [ta_swap_p.bind(b, index, v, **params) for b, v in zip(buffers, values, strict=True)]
    return tuple(b for b, _ in pairs), tuple(old for _, old in pairs)


@functools.partial(jax.jit, donate_argnums=0)
def _restore(buffers: tuple[Array, ...], index: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
    params = row_params("TensorArray.write", "drop", reverse=True)
    index = jnp.asarray(index, jnp.int32)
    return tuple(ta_write_p.bind(b, index, v, **params) for b, v in zip(buffers, old, strict=True))


@functools.partial(jax.jit, donate_argnums=0)
def _clear(buffers: tuple[Array, ...], start: Array, stop: Array) -> tuple[Array, ...]:
    return tuple(ta_clear(b, start, stop) for b in buffers)


@functools.partial(jax.jit, static_argnums=1)
def _grow(buffers: tuple[Array, ...], capacity: int) -> tuple[Array, ...]:
    return tuple(into_capacity(b, capacity) for b in buffers)


@jax.jit
def _copy(buffers: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(jnp.copy(b) for b in buffers)


def into_capacity(rows: Array, capacity: int) -> Array:
    """A buffer of `capacity` rows that begins with these; the others are uninitialised."""
    if rows.shape[0] == capacity:
        return rows
    return lax.dynamic_update_slice(ta_empty(capacity, rows.shape[1:], rows.dtype), rows, (0,) * rows.ndim)


class List:
    """Rows that are kept one by one, since their shapes differ. An unwritten one is None."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def copy(self) -> "List":
        return List(list(self.rows))

    def swap(self, index: int, row: Any) -> Any:
        old, self.rows[index] = self.rows[index], row
        return old

    def restore(self, index: int, old: Any) -> None:
        self.rows[index] = old

    def grow(self, capacity: int) -> None:
        self.rows.extend([None] * (capacity - len(self.rows)))

    def clear(self, start: int, stop: int) -> None:
        self.rows[start:stop] = [None] * (stop - start)


class _Store:
    """The newest rows, and what it takes to get back to the versions that are alive."""

    __slots__ = ("__weakref__", "lock", "log", "newest", "owned", "rows", "seen")

    def __init__(self, rows: Any, owned: bool, seen: int) -> None:
        self.rows = rows
        self.owned = owned  # nobody else holds these rows
        self.seen = seen  # rows at or past this one belong to no version
        self.newest = 0
        self.log: deque[tuple[Any, Any, Any]] = deque()  # (version before the write, index, rows before the write)
        self.lock = threading.RLock()

    def trim(self) -> None:
        while self.log:
            oldest = self.log[0][0]()
            if oldest is not None and len(self.log) <= LOG_LIMIT:
                return
            if oldest is not None:
                oldest.detach()
            self.log.popleft()


class Version:
    """One version of the rows, held by the TensorArrays that have it."""

    __slots__ = ("__weakref__", "_number", "_store")

    def __init__(self, rows: Any, *, owned: bool = False, seen: int = 0) -> None:
        self._store = _Store(rows, owned, seen)
        self._number = 0

    def newest(self) -> Any:
        """Rows of the same shapes and dtypes as these, at no cost."""
        return self._store.rows

    @property
    def owned(self) -> bool:
        """Whether nobody else holds the newest rows."""
        return self._store.owned

    def look(self, f: Callable[[Any], Any]) -> Any:
        """`f(rows)`, which must not keep them: the next write updates them in place."""
        store = self._lock()
        try:
            return f(store.rows)
        finally:
            store.lock.release()

    def share(self) -> Any:
        """The rows, to be held by others: they are not updated in place any more."""
        store = self._lock()
        store.owned = False
        store.lock.release()
        return store.rows

    def write(self, index: Any, values: Any, stop: int) -> "Version":
        """The version in which `index` has those rows, and rows at or past `stop` are unused."""
        store = self._lock()
        try:
            if not store.owned:
                return Version(store.rows.copy(), owned=True, seen=store.seen).write(index, values, stop)
            old = store.rows.swap(index, values)
            store.log.append((weakref.ref(self), index, old))
            store.newest += 1
            store.seen = max(store.seen, stop)
            new = Version.__new__(Version)
            new._store, new._number = store, store.newest
            store.trim()
            return new
        finally:
            store.lock.release()

    def make_room(self, start: int, stop: int, capacity: int) -> "Version":
        """The same rows below `start`, zeros up to `stop`, and room for `capacity`; at best in place."""
        store = self._lock()
        try:
            visible = stop > start and store.seen > start  # an older version has rows where zeros are to be
            version = self if store.owned and not visible else self._copied()
            rows = version._store.rows
            rows.grow(capacity)
            if stop > start:
                rows.clear(start, stop)
            return version
        finally:
            store.lock.release()

    def detach(self) -> None:
        """Give this version a copy of the rows of its own. The lock of its store is held."""
        copied = self._copied()
        self._store, self._number = copied._store, 0

    def _lock(self) -> _Store:
        """The store of which this is the newest version, locked."""
        while True:
            store = self._store
            store.lock.acquire()
            if self._store is store and self._number != store.newest:
                self.detach()
            if self._store is store:
                return store
            store.lock.release()

    def _copied(self) -> "Version":
        store = self._store
        with jax.ensure_compile_time_eval():  # by arrays, also where an older version is looked at inside of jit
            rows = store.rows.copy()
            for back in range(1, store.newest - self._number + 1):
                _, index, old = store.log[-back]
                rows.restore(index, old)
        return Version(rows, owned=True, seen=store.seen)
