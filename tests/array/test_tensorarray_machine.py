"""Any history of TensorArrays outside of jit, against Python lists: every version keeps its rows, come what may.

Hypothesis draws the steps. `HYPOTHESIS_PROFILE=night` draws many more, and others each time.
"""

import copy
import functools
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule
from interrupts import interrupted

from jax_tensorarray import TensorArray
from jax_tensorarray._array import history

pytestmark = pytest.mark.slow

NIGHT = os.environ.get("HYPOTHESIS_PROFILE") == "night"
MAX_SIZE = 7
GONE = "donated to a jitted function"

numbers = st.integers(-9, 9)
indices = st.integers(-1, MAX_SIZE + 1)
wheres = st.sampled_from([None, True, False])
modes = st.sampled_from([None, "error", "drop"])
index_dtypes = st.sampled_from([int, np.int8, np.uint8, np.int64, np.uint64, np.uint32, jnp.int16])


@dataclass
class Life:
    """Of buffers that several arrays may share: donating one of them may end all."""

    over: bool = False


@dataclass(frozen=True, eq=False)
class Held:
    """An array and the rows that it should have."""

    ta: TensorArray
    rows: tuple
    life: Life


class Kind:
    """Static arrays of scalars; the others say what differs."""

    ragged, dynamic, limit = False, False, None

    def made(self, values):
        ta = TensorArray(np.float32, size=3, element_shape=())
        return ta, tuple(self.row(0) for _ in range(3))

    def row(self, x):
        return np.asarray(x, np.float32)


class Growing(Kind):
    dynamic = True

    def made(self, values):
        return TensorArray(np.float32, size=0, dynamic_size=True), ()


class Limited(Kind):
    """With rows that are pytrees."""

    dynamic, limit = True, MAX_SIZE

    def made(self, values):
        return TensorArray.like(self.row(0), size=2, dynamic_size=True, max_size=MAX_SIZE), (self.row(0),) * 2

    def row(self, x):
        return {"a": np.full(2, x, np.float32), "b": np.int8(x)}


class Ragged(Kind):
    """Rows of one to three numbers. One that was not written is None."""

    ragged, dynamic = True, True

    def made(self, values):
        return TensorArray(np.float32, size=1, dynamic_size=True, infer_shape=False), (None,)

    def row(self, x):
        return np.full(abs(x) % 3 + 1, x, np.float32)


def leaves(row):
    return [(x.dtype, x.shape, np.asarray(x).tolist()) for x in jax.tree.leaves(row)]


def is_written(rows):
    return all(row is not None for row in rows)


def check(held):
    """The array has its rows, or it says that it is gone."""
    try:
        assert len(held.ta) == len(held.rows)
        for i, row in enumerate(held.rows):
            if row is None:
                with_error(ValueError, lambda i=i: held.ta.read(i), "never written")
            else:
                assert leaves(held.ta.read(i)) == leaves(row)
    except RuntimeError as error:
        assert GONE in str(error)
        assert held.life.over


def with_error(kind, f, text):
    try:
        f()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def _write_row(ta, index, x, where, known, mode):
    return ta.write(0 if known else index, x, where=where, mode=mode)


@functools.partial(jax.jit, static_argnums=1)
def _grow_in_jit(ta, index, x):
    return ta.append(x) if index is None else ta.write(index, x)


_write_in_jit = jax.jit(_write_row, static_argnums=(4, 5))
_write_donated = jax.jit(_write_row, static_argnums=(4, 5), donate_argnums=0)


class Arrays(RuleBasedStateMachine):
    held, views = Bundle("held"), Bundle("views")

    @initialize(target=held, kind=st.sampled_from([Kind, Growing, Limited, Ragged]), limit=st.sampled_from([2, 256]))
    def begin(self, kind, limit):
        history.LOG_LIMIT = limit
        self.kind = kind()
        self.all = []
        return self.hold(*self.kind.made(None))

    def hold(self, ta, rows, life=None):
        held = Held(ta, tuple(rows), life or Life())
        self.all.append(held)
        return held

    def written(self, rows, index, x, where=None, mode=None):
        """The rows after a write, the same ones if nothing is written, None if it is an error."""
        kind = self.kind
        if where is False:
            return rows
        if not 0 <= index < (len(rows) if not kind.dynamic else kind.limit or np.inf):
            return rows if mode == "drop" else None
        gap = None if kind.ragged else kind.row(0)
        rows = [*rows, *[gap] * (index + 1 - len(rows))]
        rows[index] = kind.row(x)
        return tuple(rows)

    def attempt(self, held, f, rows):
        """`f(ta)`, which is to have those rows, or raise an IndexError if they are None; or the array is gone.

        If they are the rows that it has, nothing was written, and the array itself is given.
        """
        if rows is held.rows:
            return multiple() if held.life.over else self.hold(f(held.ta), rows, held.life)
        try:
            ta = f(held.ta)
        except IndexError:
            assert rows is None
        except RuntimeError as error:
            assert GONE in str(error)
            assert held.life.over
        else:
            assert rows is not None
            return self.hold(ta, rows)
        return multiple()

    # --- new versions ------------------------------------------------------------------------------------------

    @rule(
        target=held,
        old=held,
        index=indices,
        x=numbers,
        dtype=index_dtypes,
        where=wheres,
        mode=modes,
        given=st.sampled_from([np.asarray, jnp.asarray]),
    )
    def write(self, old, index, x, dtype, where, mode, given):
        index = max(index, 0) if np.dtype(dtype).kind == "u" else index
        rows, row = self.written(old.rows, index, x, where, mode), jax.tree.map(given, self.kind.row(x))
        return self.attempt(old, lambda ta: ta.write(dtype(index), row, where=where, mode=mode), rows)

    @rule(
        target=held,
        old=held,
        many=st.lists(st.tuples(indices, numbers, st.booleans()), min_size=2, max_size=3),
        masked=st.booleans(),
        mode=modes,
    )
    def scatter(self, old, many, masked, mode):
        if self.kind.ragged:
            many = [(i, 3, where) for i, _, where in many]  # rows of one shape, since they come in one array
        rows = old.rows
        for i, x, where in many:
            rows = rows if rows is None else self.written(rows, i, x, where if masked else None, mode)
        values = jax.tree.map(lambda *x: np.stack(x), *[self.kind.row(x) for _, x, _ in many])
        index, where = [i for i, _, _ in many], [where for _, _, where in many] if masked else None
        return self.attempt(old, lambda ta: ta.scatter(index, values, where=where, mode=mode), rows)

    @rule(target=held, old=held, x=numbers, where=wheres, mode=modes)
    def append(self, old, x, where, mode):
        def append(ta):
            return ta.append(self.kind.row(x), where=where, mode=mode)

        if not self.kind.dynamic:
            with_error(ValueError, lambda: append(old.ta), "fixed size")
            return multiple()
        return self.attempt(old, append, self.written(old.rows, len(old.rows), x, where, mode))

    @rule(target=held, old=held, where=wheres, mode=modes)
    def pop(self, old, where, mode):
        def pop():
            return old.ta.pop(where=where, mode=mode)

        if not self.kind.dynamic:
            with_error(ValueError, pop, "fixed size")
            return multiple()
        row, is_taken = self.looked_up(old, max(len(old.rows) - 1, 0), where, mode), where is not False and old.rows
        if isinstance(row, Exception):
            if not old.life.over:
                with_error(type(row), pop, str(row))
            return multiple()
        try:
            ta, found = pop()
        except RuntimeError as error:
            assert GONE in str(error)
            assert old.life.over
            return multiple()
        assert leaves(found) == leaves(row)
        return self.hold(ta, old.rows[:-1] if is_taken else old.rows, old.life)

    @rule(target=held, old=held, xs=st.lists(numbers, min_size=2, max_size=4))
    def unstack(self, old, xs):
        if self.kind.ragged:
            return multiple()
        rows = [self.kind.row(x) for x in xs]
        value = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        if not self.kind.dynamic and len(xs) > len(old.rows):
            with_error(ValueError, lambda: old.ta.unstack(value), "static size")
            return multiple()
        return self.hold(old.ta.unstack(value), rows)

    @rule(target=held, old=held, xs=st.lists(numbers, min_size=1, max_size=4))
    def split(self, old, xs):
        if not self.kind.ragged:
            return multiple()
        rows = [self.kind.row(x) for x in (1, 2, *xs)]  # the first two differ in length
        return self.hold(old.ta.split(np.concatenate(rows), [len(x) for x in rows]), rows)

    # --- the same array ----------------------------------------------------------------------------------------

    @rule(target=held, old=held, how=st.sampled_from(["identity", "copy", "leaves", "deepcopy", "pickle", "host"]))
    def again(self, old, how):
        if old.life.over:
            return multiple()
        if how == "identity":
            return self.hold(old.ta.identity(), old.rows, old.life)
        if how == "copy":
            return self.hold(copy.copy(old.ta), old.rows, old.life)
        if how == "leaves":
            return self.hold(jax.tree.map(lambda x: x, old.ta), old.rows, old.life)
        if how == "deepcopy":
            return self.hold(copy.deepcopy(old.ta), old.rows)
        if how == "pickle":
            return self.hold(pickle.loads(pickle.dumps(old.ta)), old.rows)
        return self.hold(jax.device_get(old.ta), old.rows, old.life)

    @rule(old=consumes(held))
    def forget(self, old):
        self.all.remove(old)

    # --- looking at it -----------------------------------------------------------------------------------------

    @rule(old=held)
    def look(self, old):
        check(old)

    def looked_up(self, old, index, where=None, mode=None):
        """The row that a read gives, or the error that it raises."""
        inside = 0 <= index < len(old.rows)
        if where is not False and inside:
            return ValueError("never written") if old.rows[index] is None else old.rows[index]
        if where is not False and mode != "drop":
            return IndexError("negative indices" if index < 0 else f"array size is: {len(old.rows)}")
        if self.kind.ragged:
            return ValueError("zeros, of no known shape")
        return ValueError("no row was written yet") if old.ta.element_shape is None else self.kind.row(0)

    @rule(old=held, index=indices, dtype=index_dtypes, where=wheres, mode=modes)
    def read(self, old, index, dtype, where, mode):
        def read():
            return old.ta.read(dtype(index), where=where, mode=mode)

        index = max(index, 0) if np.dtype(dtype).kind == "u" else index
        if old.life.over:
            return
        row = self.looked_up(old, index, where, mode)
        if isinstance(row, Exception):
            with_error(type(row), read, str(row))
        else:
            assert leaves(read()) == leaves(row)

    @rule(target=views, old=held)
    def stack(self, old):
        if (
            not old.rows
            or not is_written(old.rows)
            or old.life.over
            or len({str(leaves(r)[0][1]) for r in old.rows}) > 1
        ):
            return multiple()
        stacked = old.ta.stack()
        wanted = jax.tree.map(lambda *x: np.stack(x), *old.rows)
        assert leaves(stacked) == leaves(wanted)
        size, limit = len(old.rows), max(self.kind.limit or 0, len(old.rows))
        assert np.asarray(old.ta.mask()).tolist() == [k < size for k in range(limit)]
        for padded, row in zip(*map(jax.tree.leaves, (old.ta.stack(pad=True), wanted)), strict=True):
            assert leaves(padded) == leaves(np.concatenate([row, np.zeros((limit - size, *row.shape[1:]), row.dtype)]))
        return stacked, jax.tree.map(np.asarray, stacked), wanted, old.life

    @rule(view=views)
    def look_at_what_was_stacked(self, view):
        stacked, seen, wanted, life = view
        if not life.over:
            assert leaves(stacked) == leaves(wanted)
            assert leaves(seen) == leaves(wanted)

    @rule(old=held, many=st.lists(st.tuples(indices, st.booleans()), min_size=2, max_size=3), mode=modes)
    def gather(self, old, many, mode):
        def gather():
            return old.ta.gather([i for i, _ in many], where=np.array([where for _, where in many]), mode=mode)

        if old.life.over or self.kind.ragged:
            return
        rows = [self.looked_up(old, i, where, mode) for i, where in many]
        errors = sorted((row for row in rows if isinstance(row, Exception)), key=lambda e: type(e) is not IndexError)
        if errors:  # all indices are looked at before the rows are
            with_error(type(errors[0]), gather, str(errors[0]))
        else:
            assert leaves(gather()) == leaves(jax.tree.map(lambda *x: np.stack(x), *rows))

    @rule(old=held)
    def concat(self, old):
        if self.kind.ragged and old.rows and is_written(old.rows) and not old.life.over:
            assert leaves(old.ta.concat()) == leaves(np.concatenate(old.rows))

    # --- jit ---------------------------------------------------------------------------------------------------

    @rule(target=held, old=held, x=numbers, donated=st.booleans(), where=st.booleans(), mode=modes)
    def write_in_jit(self, old, x, donated, where, mode):
        if not old.rows or self.kind.ragged or old.life.over:
            return multiple()
        known = self.kind.dynamic and not self.kind.limit  # no limit is needed where an index is known
        index = 0 if known else len(old.rows) - 1
        if mode == "drop" and not known:
            index = MAX_SIZE + x
        old.life.over = donated
        ta = (_write_donated if donated else _write_in_jit)(old.ta, index, self.kind.row(x), where, known, mode)
        return self.hold(ta, self.written(old.rows, index, x, where, mode))

    @rule(target=held, old=held, x=numbers, gap=st.sampled_from([None, 0, 1]))
    def grow_in_jit(self, old, x, gap):
        index = len(old.rows) + (gap or 0)
        if not self.kind.dynamic or self.kind.ragged or old.life.over or index >= MAX_SIZE:
            return multiple()
        ta = _grow_in_jit(old.ta, None if gap is None else index, self.kind.row(x))
        return self.hold(ta, self.written(old.rows, index, x))

    # --- threads and interrupts --------------------------------------------------------------------------------

    @rule(olds=st.lists(held, min_size=2, max_size=3), xs=st.lists(numbers, min_size=2, max_size=2))
    def threads(self, olds, xs):
        """Each writes to a version and reads another. None of them waits for ever."""

        def work(k):
            mine, rows = olds[k].ta, olds[k].rows
            for x in xs:
                rows = self.written(rows, 0, x) if rows or self.kind.dynamic else rows
                mine = mine.write(0, self.kind.row(x))
                check(olds[k - 1])
            check(Held(mine, rows, olds[k].life))

        if any(not old.rows or old.life.over for old in olds):
            return
        with ThreadPoolExecutor(len(olds)) as pool:
            for found in [pool.submit(work, k) for k in range(len(olds))]:
                found.result()

    @rule(
        old=held,
        other=held,
        index=st.integers(0, MAX_SIZE),
        at=st.integers(0, 250),
        what=st.sampled_from(["write", "look", "stack"]),
    )
    def interrupt(self, old, other, index, at, what):
        """Before some instruction: nothing has happened then, and other threads can go on.

        How many there are depends on what ran before, so what was made is not drawn from.
        """
        rows = self.written(old.rows, index, 5) if what == "write" else old.rows
        if rows is None or old.life.over or other.life.over:
            return

        def act():
            if what == "write":
                return old.ta.write(index, self.kind.row(5))
            return check(old) if what == "look" or self.kind.ragged or not rows else old.ta.stack()

        was, found = interrupted(act, history.__file__, at)
        thread = threading.Thread(target=check, args=(other,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        if what == "write" and not was:
            self.hold(found, rows)

    def teardown(self):
        history.LOG_LIMIT = 256
        for held in getattr(self, "all", []):
            check(held)


Arrays.TestCase.settings = settings(
    max_examples=5000 if NIGHT else 6 * settings.default.max_examples,
    stateful_step_count=60 if NIGHT else 40,
    derandomize=not NIGHT,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestArrays = Arrays.TestCase
