"""A persistent array with an undo log: writes update the newest version in place, and older ones stay readable.

Outside of `jit` a TensorArray is an immutable value: a write returns a new one, and the old one does not change. The
log has the overwritten rows as long as somebody holds an older version. After `ta = ta.write(i, x)` nobody does, so a
loop of writes is in place, and its log has one entry. If an older version is read, or outlives `LOG_LIMIT` writes, it
gets a copy of the rows, once.

A thread may be interrupted between any two instructions: by Ctrl-C, or by another exception from a signal handler.
No version may then have changed, and the lock must be free. Three rules ensure this:

- Python handles signals between instructions, never inside of a function written in C. The call that updates buffers
  in place deletes its operands, so its results must not be lost: `deque.extend` makes the call and appends the results
  to the log, and the newest entry of the log *is* the newest state. No other assignment is needed.
- All other changes have an order in which each intermediate state is right: the log gets a row before a list loses it,
  and only data that nobody else holds changes in several steps.
- Only `Version._alone` takes the lock.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import _compat
from jax_tensorarray._ops import arguments
from jax_tensorarray._ops.clear import ta_clear
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.primitive import row_params
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import INT32_MAX, Array

Buffers = tuple[Array, ...]

#: How many overwritten rows the log has for a version before the version gets a copy.
LOG_LIMIT = 256


class Layout(NamedTuple):
    """Shapes and dtypes of the rows in buffers `[capacity, *elem]`, one for each leaf of an element."""

    capacity: int
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


def layout_of(buffers: Buffers) -> Layout:
    ranks = tuple(b.ndim - 1 for b in buffers)
    capacities = [b.shape[0] if b.ndim else 0 for b in buffers]
    if len(set(capacities)) > 1:
        raise ValueError(f"the leaves of this TensorArray have different numbers of rows: {capacities}")
    shapes, dtypes = tuple(b.shape[1:] for b in buffers), tuple(b.dtype for b in buffers)
    return Layout(capacities[0], ranks, shapes, dtypes)


def with_wide_index(f: Callable[..., Any], index: Any, *args: Any) -> Any:
    """Return `f(index, *args)` without narrowing of a large index, which JAX would do without x64."""
    if type(index) is int:
        if index < INT32_MAX:
            return f(index, *args)
    elif index.max(initial=0) < INT32_MAX:
        return f(np.asarray(index, np.int32), *args)
    with jax.enable_x64(True):
        return f(np.asarray(index, np.int64), *args)


# --- rows in buffers --------------------------------------------------------------------------
#
# Functions below that donate their first argument update it in place.


@partial(jax.jit, donate_argnums=0)
def _swap(buffers: Buffers, at: Any, values: Buffers) -> tuple[Buffers, Buffers]:
    """Write rows at the index. Return the updated buffers and the old rows.

    `at` is the index, or the index and two numbers. With these, first clear the rows between them.
    """
    index, *zeros = at if isinstance(at, tuple) else (at,)
    if zeros:
        buffers = tuple(ta_clear(b, *zeros) for b in buffers)
    params = row_params("TensorArray.write", "drop")
    pairs = [ta_swap_p.bind(b, index, v, **params) for b, v in zip(buffers, values, strict=True)]
    return tuple(b for b, _ in pairs), tuple(old for _, old in pairs)


@partial(jax.jit, donate_argnums=0)
def _restore(buffers: Buffers, index: Array, old: Buffers) -> Buffers:
    params = row_params("TensorArray.write", "drop", reverse=True)
    return tuple(ta_write_p.bind(b, index, v, **params) for b, v in zip(buffers, old, strict=True))


@partial(jax.jit, static_argnums=1)
def _grow(buffers: Buffers, capacity: int) -> Buffers:
    return tuple(into_capacity(b, capacity) for b in buffers)


@jax.jit
def _copy(buffers: Buffers) -> Buffers:
    return tuple(jnp.copy(b) for b in buffers)


@partial(jax.jit, keep_unused=True)  # then the result is on the devices of the buffers
def _alike(buffers: Buffers) -> Buffers:
    return tuple(ta_empty(b.shape[0], b.shape[1:], b.dtype) for b in buffers)


def into_capacity(rows: Array, capacity: int) -> Array:
    """Return a buffer of `capacity` rows that begins with `rows`; the others are uninitialised."""
    if rows.shape[0] == capacity:
        return rows
    return lax.dynamic_update_slice(ta_empty(capacity, rows.shape[1:], rows.dtype), rows, (0,) * rows.ndim)


def largest(index: Any) -> int:
    """Return the largest of one or several constant indices."""
    return index if isinstance(index, int) else int(index.max())


def room_for(index: Any, size: int, capacity: int) -> tuple[int, tuple[int, int], int]:
    """Return the size after a write at a constant index, the range of rows to clear before it, and the new capacity.

    A single row is the last one, so only the rows before it need clearing. With many indices, rows in between may stay
    unwritten. The new capacity is 0 if the rows fit. Otherwise it is at least twice the old one, so n appends copy O(n)
    rows in all.
    """
    stop = largest(index) + 1
    zeros = size, stop - 1 if isinstance(index, int) else stop
    return max(size, stop), zeros, max(stop, 2 * capacity, 8) if stop > capacity else 0


_warm: set[Any] = set()  # layouts and kinds of the compiled calls, for all stores


def _holds_keys(buffer: Any) -> bool:
    return isinstance(buffer, jax.Array) and arguments.is_extended(buffer.dtype)


def _nobody() -> None:
    """Return None, as a dead weak reference does."""


class _Store:
    """The newest rows, stacked in a tuple of buffers, and the log that restores older versions.

    An entry of the log has the number of a version, a weak reference to the version before it, the written index, and a
    pair: all rows after the write, and the old rows at the index. The first entry is that of the first version.
    """

    __slots__ = ("layout", "lock", "log", "owned", "used", "warm")

    def __init__(self, rows: Any, owned: bool, used: int) -> None:
        self.log: deque[tuple[int, Callable[[], Version | None], Any, Any]] = deque([(0, _nobody, None, (rows, None))])
        # Nobody else holds these rows. JAX runs a call with random keys in Python, where an interrupt may come after
        # the buffers are deleted. So each write copies the keys.
        self.owned = owned and not any(map(_holds_keys, rows))
        self.used = used  # no version has rows at or past this one
        self.layout: Layout | None = None
        self.warm: set[Any] = set()  # the kinds of calls of `_swap` that were made with such rows
        self.lock: Any = threading.RLock()

    @property
    def rows(self) -> Any:
        return self.log[-1][3][0]

    def rows_of(self, number: int) -> Any:
        """Return a copy of the rows of the version with this number."""
        # Compute with concrete arrays, even if an older version is read inside of jit.
        with nullcontext() if _compat.executes_eagerly() else jax.ensure_compile_time_eval():
            rows = self.copied()
            for at, _, index, (_, old) in reversed(self.log):
                if at == number:
                    break
                rows = self.restored(rows, index, old)
        return rows

    def copied(self) -> Any:
        return _copy(self.rows)

    def grown(self, capacity: int) -> Any:
        return _grow(self.rows, capacity)

    def restored(self, rows: Any, index: Any, old: Any) -> Any:
        """Restore the old rows at the index. Nobody else may hold `rows`."""
        return with_wide_index(lambda index: _restore(rows, index, old), index)

    def write(self, index: Any, before: Callable[[], "Version | None"], values: Any, zeros: tuple[int, int]) -> None:
        """Update the newest rows in place, and log the old ones. The index comes from `with_wide_index`."""
        newest, _, _, (rows, _) = self.log[-1]
        at: Any = index
        kind: tuple[Any, ...] = type(values[0]), jax.config.jax_enable_x64
        if type(index) is not int:
            kind = *kind, index.shape, index.dtype
        if zeros[1] > zeros[0]:
            at, kind = (index, *np.asarray(zeros, getattr(index, "dtype", np.int32))), (*kind, "zeros")
        if kind not in self.warm:
            self._warm_up(kind, rows, at, values)
        swapped = map(_swap, (rows,), (at,), (values,))
        self.log.extend(zip((newest + 1,), (before,), (index,), swapped))  # noqa: B905 (a keyword takes as long as zip)

    def _warm_up(self, kind: Any, buffers: Buffers, at: Any, values: Buffers) -> None:
        """Compile a call of `_swap` with such buffers.

        Only the first call of a kind runs in Python. There an interrupt may come after the buffers are deleted and
        before the results exist. So we make the first call with other buffers, whose pages nobody touches.
        """
        if self.layout is None:
            self.layout = layout_of(buffers)
        if (self.layout, kind) not in _warm:
            alone = all(len(b.sharding.device_set) == 1 for b in buffers)
            try:
                _compat.traced_as_a_whole(lambda: _swap((_alike if alone else _copy)(buffers), at, values))
            except jax.errors.JaxRuntimeError:  # there is no memory for them
                return
        _warm.add((self.layout, kind))
        self.warm.add(kind)

    def trim(self) -> None:
        """Drop the entries of the log that no older version needs."""
        while len(self.log) > 1:
            oldest = self.log[1][1]()
            if oldest is not None and oldest.is_in(self):
                if len(self.log) <= LOG_LIMIT:
                    return
                oldest.detach()
            self.log.popleft()


class _ListStore(_Store):
    """The same for rows of different shapes, in a list, with None for a row without a write."""

    __slots__ = ()

    def copied(self) -> Any:
        return list(self.rows)

    def grown(self, capacity: int) -> Any:
        return [*self.rows, *[None] * (capacity - len(self.rows))]

    def restored(self, rows: Any, index: Any, old: Any) -> Any:
        rows[index] = old
        return rows

    def write(self, index: Any, before: Callable[[], "Version | None"], values: Any, zeros: tuple[int, int]) -> None:
        newest, _, _, (rows, _) = self.log[-1]
        start, stop = zeros
        if stop > start:
            rows[start:stop] = [None] * (stop - start)
        self.log.append((newest + 1, before, index, (rows, rows[index])))
        rows[index] = values


class Version:
    """One version of the rows, held by the TensorArrays with these rows."""

    __slots__ = ("__weakref__", "_at")

    def __init__(self, rows: Any, *, owned: bool = False, used: int = 0) -> None:
        store = _ListStore if isinstance(rows, list) else _Store
        self._at = store(rows, owned, used), 0  # and the number of this version in that store

    def newest(self) -> Any:
        """Return rows of the same shapes and dtypes as these, at no cost."""
        return self._at[0].rows

    @property
    def layout(self) -> Layout:
        """The layout of these rows, if they are stacked in buffers."""
        store = self._at[0]
        if store.layout is None:
            store.layout = layout_of(store.rows)
        return store.layout

    @property
    def owned(self) -> bool:
        """Whether nobody else holds the newest rows."""
        return self._at[0].owned

    def capacity_for(self, row: Any) -> int:
        """Return the capacity if nobody else holds the rows and `row` has their type, else 0."""
        store = self._at[0]
        layout = store.layout
        if layout is None or not store.owned or len(layout.shapes) > 1:
            return 0
        # A traced array is of another type than the buffer that it would be written to.
        kind = type(row)
        usual = kind is np.ndarray or (kind is type(store.log[-1][3][0][0]) and not getattr(row, "weak_type", False))
        return layout.capacity if usual and row.shape == layout.shapes[0] and row.dtype == layout.dtypes[0] else 0

    def is_in(self, store: _Store) -> bool:
        return self._at[0] is store

    def look(self, f: Callable[[Any], Any]) -> Any:
        """Return `f(rows)`. It must not store them: the next write updates them in place."""
        return self._alone(lambda store, nested: f(store.rows))

    def share(self) -> Any:
        """Return the rows for others to hold. From now on, writes copy them."""

        def shared(store: _Store, nested: bool) -> Any:
            if nested:
                return store.copied()
            store.trim()
            if len(store.log) > 1:  # older versions need these rows, and the others may donate them
                return self.detach()
            store.owned = False
            return store.rows

        while (rows := self._alone(shared)) is None:
            pass
        return rows

    def write(
        self, index: Any, values: Any, stop: int, zeros: tuple[int, int] = (0, 0), capacity: int = 0
    ) -> "Version":
        """Return the version with `values` at `index`, in which rows at or past `stop` are unused.

        First clear the rows between the two numbers in `zeros`. If `capacity` is not 0, the rows do not fit, and it is
        the new capacity.
        """
        return self._alone(self._written, index, values, stop, zeros, capacity)

    def _written(
        self, store: _Store, nested: bool, index: Any, values: Any, stop: int, zeros: tuple[int, int], capacity: int
    ) -> "Version":
        shown = zeros[1] > zeros[0] < store.used  # an older version has rows that this write would clear
        before: Callable[[], Version | None] = weakref.ref(self)
        if capacity or shown or nested or not store.owned:
            rows = store.grown(capacity) if capacity else store.copied()
            store, before = type(store)(rows, True, stop), _nobody
        else:
            store.trim()
            store.used = max(store.used, stop)
        new = Version.__new__(Version)
        new._at = store, store.log[-1][0] + 1
        if type(index) is int and index < INT32_MAX:
            store.write(index, before, values, zeros)
        else:
            with_wide_index(store.write, index, before, values, zeros)
        return new

    def detach(self) -> None:
        """Give this version a copy of its rows. The caller holds the lock of its store."""
        store, number = self._at
        self._at = type(store)(store.rows_of(number), True, store.used), 0

    def _alone(self, f: Callable[..., Any], *args: Any) -> Any:
        """Return `f(store, nested, *args)`, run under the lock of the store with this version as the newest one.

        The lock is free afterwards, wherever an interrupt comes. `nested` says that this thread has the lock already:
        it is in a signal handler or a finalizer that has interrupted another call. Then `f` may look at the rows, but
        must not change or store them.
        """
        result: tuple[Any, ...] = ()
        while not result:
            store = self._at[0]
            lock = store.lock
            nested = lock._is_owned()
            try:
                with lock:
                    if self._at[0] is store and self._at[1] != store.log[-1][0]:
                        self.detach()
                    result = (f(store, nested, *args),) if self._at[0] is store else ()
            finally:  # an interrupt may come after the block and before the release of the lock
                if not nested and lock._is_owned():
                    lock.release()
        return result[0]
