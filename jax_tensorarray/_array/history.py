"""A persistent array with an undo log: the newest version is updated in place, and every older one can still be read.

Outside of `jit` a TensorArray is a value, as an array is: a write returns a new one and the old one stays as it was.
The overwritten rows are kept in a log for as long as somebody holds an older version. In `ta = ta.write(i, x)`
nobody does after the assignment, so a loop of writes is in place and its log has one entry. An older version that is
read, or outlives `LOG_LIMIT` writes, gets a copy of the rows of its own, once.

A thread may be interrupted between any two instructions: by Ctrl-C, or by another exception from a signal handler.
Every version must then be as it was, and the lock free. Three rules ensure this:

- Python handles signals between instructions, never inside of a function written in C. The call that updates buffers
  in place deletes the buffers it is given, so its results must not be dropped: `deque.extend` makes the call and puts
  the results into the log, and the newest entry of the log *is* the newest state. No other assignment is needed.
- Everything else is done in an order that is right at every step: the log has what a list is going to lose before
  the list loses it, and only data that nobody else holds is changed in several steps.
- The lock is taken by `Version._alone` and nothing else.
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
from jax_tensorarray._types import INT32_MAX

Array = jax.Array
Buffers = tuple[Array, ...]

#: How many overwritten rows are kept for a version before it gets a copy of its own.
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
    """Return `f(index, *args)` without narrowing a large index, as JAX would do with 64-bit types off."""
    if type(index) is int:
        if index < INT32_MAX:
            return f(index, *args)
    elif index.max(initial=0) < INT32_MAX:
        return f(np.asarray(index, np.int32), *args)
    with jax.enable_x64(True):
        return f(np.asarray(index, np.int64), *args)


# --- rows that are stacked in buffers --------------------------------------------------------------------------
#
# Functions below that donate their first argument update it in place.


@partial(jax.jit, donate_argnums=0)
def _swap(buffers: Buffers, at: Any, values: Buffers) -> tuple[Buffers, Buffers]:
    """Write rows at the index. Return the updated buffers and the old rows.

    `at` is the index, or the index and two numbers; the rows between these two are cleared first.
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


@partial(jax.jit, keep_unused=True)  # so that the result is placed on the devices of the buffers
def _alike(buffers: Buffers) -> Buffers:
    return tuple(ta_empty(b.shape[0], b.shape[1:], b.dtype) for b in buffers)


def into_capacity(rows: Array, capacity: int) -> Array:
    """Return a buffer of `capacity` rows that begins with `rows`; the others are uninitialised."""
    if rows.shape[0] == capacity:
        return rows
    return lax.dynamic_update_slice(ta_empty(capacity, rows.shape[1:], rows.dtype), rows, (0,) * rows.ndim)


def largest(index: Any) -> int:
    """Return the largest of one or several known indices."""
    return index if isinstance(index, int) else int(index.max())


def room_for(index: Any, size: int, capacity: int) -> tuple[int, tuple[int, int], int]:
    """Return the size after a write at a known index, the range of rows to clear before it, and the new capacity.

    A single row is the last one, so only rows before it are cleared. With many, some in between may stay unwritten. The
    new capacity is 0 if the rows fit. Else it is at least twice the old one, so n appends copy O(n) rows in all.
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

    An entry of the log is the number of a version, a weak reference to the version before it, the written index, and a
    pair: all rows as they are since, and the rows at the index as they were. The log begins with the first entry.
    """

    __slots__ = ("layout", "lock", "log", "owned", "seen", "warm")

    def __init__(self, rows: Any, owned: bool, seen: int) -> None:
        self.log: deque[tuple[int, Callable[[], Version | None], Any, Any]] = deque([(0, _nobody, None, (rows, None))])
        # Nobody else holds these rows. JAX runs a call with random keys in Python, where an interrupt may come when the
        # buffers are already gone. So each write gets a copy of the keys.
        self.owned = owned and not any(map(_holds_keys, rows))
        self.seen = seen  # rows at or past this one belong to no version
        self.layout: Layout | None = None
        self.warm: set[Any] = set()  # the kinds of calls of `_swap` that were made with such rows
        self.lock: Any = threading.RLock()

    @property
    def rows(self) -> Any:
        return self.log[-1][3][0]

    def rows_of(self, number: int) -> Any:
        """Return a copy of the rows of the version of that number."""
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
        """Put the old rows back at the index. Nobody else may hold `rows`."""
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
        """Make JAX compile a call of `_swap` with such buffers, and remember it.

        Only the first call of a kind runs through Python. An interrupt may come there when the buffers are already
        gone and the results have not arrived. So that call is made with other buffers, whose pages are never touched.
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
        """Drop the entries of the log that no older version needs any more."""
        while len(self.log) > 1:
            oldest = self.log[1][1]()
            if oldest is not None and oldest.is_in(self):
                if len(self.log) <= LOG_LIMIT:
                    return
                oldest.detach()
            self.log.popleft()


class _ListStore(_Store):
    """The same of rows whose shapes differ, in a list, with None for a row that was never written."""

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

    def __init__(self, rows: Any, *, owned: bool = False, seen: int = 0) -> None:
        store = _ListStore if isinstance(rows, list) else _Store
        self._at = store(rows, owned, seen), 0  # and the number of this version in that store

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
        """Return the capacity if nobody else holds the rows and `row` is an array just like each of them, else 0."""
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
        """Return `f(rows)`. It must not keep them: the next write updates them in place."""
        return self._alone(lambda store, nested: f(store.rows))

    def share(self) -> Any:
        """Return the rows for others to hold: they are not updated in place any more."""

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
        """Return the version with those rows at `index`, in which rows at or past `stop` are unused.

        Before that, the rows between the two numbers in `zeros` are cleared. A `capacity` other than 0 means that the
        rows do not fit, and is the number of rows to make room for.
        """
        return self._alone(self._written, index, values, stop, zeros, capacity)

    def _written(
        self, store: _Store, nested: bool, index: Any, values: Any, stop: int, zeros: tuple[int, int], capacity: int
    ) -> "Version":
        shown = zeros[1] > zeros[0] < store.seen  # an older version has rows where zeros are to be
        before: Callable[[], Version | None] = weakref.ref(self)
        if capacity or shown or nested or not store.owned:
            rows = store.grown(capacity) if capacity else store.copied()
            store, before = type(store)(rows, True, stop), _nobody
        else:
            store.trim()
            store.seen = max(store.seen, stop)
        new = Version.__new__(Version)
        new._at = store, store.log[-1][0] + 1
        if type(index) is int and index < INT32_MAX:
            store.write(index, before, values, zeros)
        else:
            with_wide_index(store.write, index, before, values, zeros)
        return new

    def detach(self) -> None:
        """Give this version a copy of the rows of its own. The caller holds the lock of its store."""
        store, number = self._at
        self._at = type(store)(store.rows_of(number), True, store.seen), 0

    def _alone(self, f: Callable[..., Any], *args: Any) -> Any:
        """Return `f(store, nested, *args)`, run under the lock of the store with this version as the newest one.

        The lock is free afterwards, wherever an interrupt comes. `nested` says that this thread has it already: a
        signal handler or a finalizer is using what it has interrupted. It may look at the rows, but must not change or
        keep them.
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
            finally:  # an interrupt may come when the block is left and the lock not yet released
                if not nested and lock._is_owned():
                    lock.release()
        return result[0]
