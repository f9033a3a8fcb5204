"""Programs of TensorArrays outside of jit, against Python lists: every version keeps its rows, come what may.

Each operation is done to the list, too. `HYPOTHESIS_PROFILE=night` draws many more programs, and others each time.
"""

import contextlib
import copy
import functools
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_machines import Library
from array_programs import (
    LIMIT,
    Inapplicable,
    Lists,
    Parity,
    any_array,
    inputs,
    made,
    masks,
    modes,
    programs,
    ragged,
    refs,
    run,
    simple,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted
from list_model import ListArray
from random_programs import weighted

from jax_tensorarray._array import history

NIGHT = os.environ.get("HYPOTHESIS_PROFILE") == "night"
GONE = "donated to a jitted function"


# --- what there is only outside of jit -------------------------------------------------------------------------


class Jitted(NamedTuple):
    """A jitted function writes or appends a row. The array may be donated to it."""

    array: int
    how: str
    row: int
    where: Parity | None
    mode: str | None
    is_donated: bool


class Forget(NamedTuple):
    array: int


class Threads(NamedTuple):
    """Each writes to a version and reads another. None of them waits for ever."""

    array: int
    others: tuple[int, ...]
    row: int


class Interrupt(NamedTuple):
    """Before some instruction: nothing has happened then, and other threads can go on."""

    array: int
    other: int
    index: int
    instruction: int
    what: str


ELEMENTS = ("float64",) * 4 + ("int32", "bool", "complex64", "bfloat16")
DTYPES = ("int", "int", "int8", "uint8", "int64", "uint64", "uint32", "jnp")
STATEMENTS = weighted(
    {
        simple(("known", "size"), dtypes=DTYPES): 20,
        made(Jitted, refs, st.sampled_from(["write", "write", "append"]), refs, masks, modes, st.booleans()): 2,
        made(Forget, refs): 2,
        made(Threads, refs, st.lists(refs, min_size=1, max_size=2).map(tuple), refs): 1,
        made(
            Interrupt,
            *(refs, refs, st.integers(0, LIMIT), st.integers(0, 250)),
            st.sampled_from(["write", "look", "stack"]),
        ): 1,
    }
)


# --- the machine -----------------------------------------------------------------------------------------------


@dataclass
class Life:
    """Of buffers that several arrays may share: donating one of them may end all."""

    over: bool = False


@dataclass(frozen=True, eq=False)
class Held:
    """An array and the list that it should be."""

    ta: Any
    model: ListArray
    life: Life
    machine: "Eager"

    def both(self, name, *args, converted=lambda x: x, **options):
        """What the methods of the list and of the array give. Both raise an error, or neither does."""
        try:
            wanted = getattr(self.model, name)(*args, **options)
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)) as e:
                getattr(self.ta, name)(*map(converted, args), **options)
            assert str(error) in str(e.value)
            raise
        try:
            return wanted, getattr(self.ta, name)(*map(converted, args), **options)
        except (IndexError, ValueError) as error:
            raise AssertionError(f"{name}{args}, {options}") from error

    def written(self, name, *args, **options):
        model, ta = self.both(name, *args, converted=self.machine.given, **options)
        return self.machine.hold(ta, model, self.life if model is self.model else None)

    def taken(self, name, *args, **options):
        wanted, found = self.both(name, *args, **options)
        assert_same(found, wanted)
        return wanted

    def pop(self, **options):
        (model, wanted), (ta, row) = self.both("pop", **options)
        assert_same(row, wanted)
        return self.machine.hold(ta, model, self.life), wanted

    def size(self):
        assert self.ta.size() == self.model.size()
        return self.model.size()

    def check(self):
        """The array has its rows, or it says that it is gone."""
        try:
            assert self.ta.size() == self.model.size()
            for k in range(self.model.size()):
                with contextlib.suppress(ValueError):  # a row without a known shape
                    self.taken("read", k)
        except RuntimeError as error:
            assert GONE in str(error)
            assert self.life.over


for name in ("write", "append", "scatter", "unstack", "split"):
    setattr(Held, name, functools.partialmethod(Held.written, name))
for name in ("read", "gather", "stack", "concat"):
    setattr(Held, name, functools.partialmethod(Held.taken, name))


def assert_same(found, wanted):
    assert (np.shape(found), found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, wanted)


@functools.partial(jax.jit, static_argnums=(1, 5))
def _written(ta, known, index, row, where, mode):
    return ta.write(0 if known else index, row, where=where, mode=mode)


_written_in_place = jax.jit(_written, static_argnums=(1, 5), donate_argnums=0)
_appended = jax.jit(lambda ta, row: ta.append(row))


class Eager(Lists):
    is_compiled = False

    def __init__(self, program, max_size):
        super().__init__(program, limit=np.inf if max_size is None else max_size)
        self.made_by, self.all, self.views = Library(program, max_size).array, [], []

    def array(self, spec):
        return self.hold(self.made_by(spec), super().array(spec))

    def hold(self, ta, model, life=None):
        self.all.append(Held(ta, model, life or Life(), self))
        return self.all[-1]

    def given(self, x):
        """Every other array is one of JAX that nobody else has."""
        return jnp.array(x) if isinstance(x, np.ndarray) and x.dtype.kind == "f" and len(self.all) % 2 else x

    def index(self, n, dtype):
        if dtype == "jnp":
            return jnp.int16(n)
        n = max(n, 0) if dtype.startswith("u") else n
        return n if dtype == "int" else np.dtype(dtype).type(n)

    def vector(self, xs):
        return np.array(xs)

    def stack(self, entry):
        held, wanted = entry.value, entry.value.stack()
        limit = max(len(wanted), self.limit if entry.size is None and self.limit < np.inf else 0)
        assert_same(held.ta.mask(), np.arange(limit) < len(wanted))
        assert_same(held.ta.stack(pad=True), self.padded(wanted, limit))
        if entry.spec.shaped and self.program.elem:
            assert_same(held.ta.concat(pad=True), np.concatenate([*self.padded(wanted, limit), wanted[0][:0]]))
        self.views.append((held.ta.stack(), wanted, held.life))
        if not len(wanted):
            raise Inapplicable
        return wanted

    def concat(self, entry):
        return entry.value.concat()

    def again(self, held, how):
        ta = held.ta
        if how in ("deepcopy", "pickle"):
            same = copy.deepcopy(ta) if how == "deepcopy" else pickle.loads(pickle.dumps(ta))
            return self.hold(same, held.model)
        same = {
            "identity": lambda: ta.identity(),
            "copy": lambda: copy.copy(ta),
            "leaves": lambda: jax.tree.map(lambda x: x, ta),
            "host": lambda: jax.device_get(ta),
        }
        return self.hold(same[how](), held.model, held.life)

    def ends(self, scope):
        for held in self.all:
            held.check()
        for found, wanted, life in self.views:
            if not life.over:
                assert_same(found, wanted)
        return []

    def special(self, s, entry, scope):
        held, row = entry.value, scope.row(getattr(s, "row", 0))
        if isinstance(s, Jitted) and not entry.is_ragged and entry.is_shaped:
            self.in_jit(s, entry, scope, row)
        elif isinstance(s, Forget) and len(scope.arrays) > 1:
            scope.arrays.remove(entry)
            self.all.remove(held)
        elif isinstance(s, Threads) and not entry.is_ragged:
            self.threads([held, *[scope.entry(ref).value for ref in s.others]], row)
        elif isinstance(s, Interrupt):
            self.interrupt(s, entry, scope.entry(s.other).value, row, scope)

    def in_jit(self, s, entry, scope, row):
        held, size = entry.value, entry.value.size()
        if s.how == "append":
            if entry.size is None and size < LIMIT:
                scope.add(entry, self.hold(_appended(held.ta, row), held.model.append(row)))
            return
        if not size:
            return
        known = entry.size is None and self.limit == np.inf  # no limit is needed if the index is known
        index = 0 if known else LIMIT + 1 if s.mode == "drop" else size - 1
        where = s.where is None or s.where.n % 2 == 0
        write = _written_in_place if s.is_donated else _written
        ta = write(held.ta, known, index, row, where, s.mode)
        scope.add(entry, self.hold(ta, held.model.write(index, row, where=where, mode=s.mode)))
        if s.is_donated:
            held.life.over = True
            scope.arrays = [e for e in scope.arrays if not e.value.life.over]

    def threads(self, helds, row):
        def work(k):
            mine, wanted = helds[k].ta, helds[k].model
            for x in (row, 2 * row):
                mine, wanted = mine.write(0, x), wanted.write(0, x)
                helds[k - 1].check()
            Held(mine, wanted, helds[k].life, self).check()

        if all(held.model.size() for held in helds):
            with ThreadPoolExecutor(len(helds)) as pool:
                for found in [pool.submit(work, k) for k in range(len(helds))]:
                    found.result()

    def interrupt(self, s, entry, other, row, scope):
        """How many instructions there are depends on what ran before, so what was made is not drawn from."""
        held = entry.value
        if s.what == "write":
            model = held.model.write(s.index, row)
        elif s.what == "stack":
            held.model.stack()

        def act():
            if s.what == "write":
                return held.ta.write(s.index, row)
            return held.ta.stack() if s.what == "stack" else held.check()

        was, found = interrupted(act, history.__file__, s.instruction)
        thread = threading.Thread(target=other.check, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        if s.what == "write" and not was:
            self.hold(found, model)


@settings(max_examples=5000 if NIGHT else 3 * settings.default.max_examples)
@given(
    programs(STATEMENTS, 20, 30, ELEMENTS, ((2,), (2,), ()), newest=weighted({any_array: 1, ragged: 1})),
    st.sampled_from([None, LIMIT]),
    st.sampled_from([2, 256]),
)
def test_every_version_of_an_array_is_a_list_of_its_own(program, max_size, log_limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "LOG_LIMIT", log_limit)
        run(Eager(program, max_size), program, program.numbers[0], *inputs(program, 0))
