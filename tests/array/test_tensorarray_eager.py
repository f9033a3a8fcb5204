"""Outside of jit: a write is in place unless somebody holds the rows, and an interrupt leaves all as it was.

That every version keeps its rows is what `test_tensorarray_machine.py` is about.
"""

import gc
import itertools
import pickle
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupts import interrupted

import jax_tensorarray as jta
from jax_tensorarray import TensorArray, _compat
from jax_tensorarray._array import history

f64 = jnp.float64


def pointer(ta):
    (buffer,) = ta._rows.version.newest()
    return buffer.unsafe_buffer_pointer()


def made(how, n=4):
    """An array of n rows 0, 10, 20, ..."""
    if how == "static":
        ta = TensorArray(f64, size=n, element_shape=())
    elif how == "growing":
        ta = TensorArray(f64, size=0, dynamic_size=True)
    elif how == "limited":
        ta = TensorArray(f64, size=0, dynamic_size=True, max_size=n + 2)
    elif how == "ragged":
        ta = TensorArray(f64, size=n, infer_shape=False)
    for i in range(n):
        ta = ta.write(i, 10.0 * i)
    return ta


KINDS = ["static", "growing", "limited", "ragged"]


def rows(ta):
    return np.asarray(ta.stack()).tolist()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("how", ["static", "growing", "limited"])
def test_a_write_is_in_place(how):
    ta = made(how, 8)
    before = pointer(ta)
    for i in range(8):
        ta = ta.write(i, 1.0)
    ta = ta.scatter([3, 4], [5.0, 6.0]).write(0, 7.0, where=False).write(-1, 7.0, mode="drop")
    ta = ta.scatter([5, 2, -1], [7.0, 8.0, 9.0], where=jnp.array([False, True, True]), mode="drop")
    assert pointer(ta) == before
    assert rows(ta) == [1, 1, 8, 5, 6, 1, 1, 1]


def test_an_older_version_costs_one_copy_at_most():
    first = made("static", 1000)
    ta, pointers = first, set()
    for i in range(3 * history.LOG_LIMIT):
        ta = ta.write(i % 1000, 1.0)
        pointers.add(pointer(ta))
    assert len(pointers) == 1
    assert len(ta._rows.version._at[0].log) <= 2
    assert rows(first)[:3] == [0, 10, 20]


def test_versions_are_freed():
    ta = made("static", 100)
    buffer = ta._rows.version.newest()[0]
    count = len(gc.get_referrers(buffer))
    for i in range(100):
        ta = ta.write(i, 1.0)
    assert buffer.is_deleted()  # donated to the write that followed
    assert count >= 1


def test_what_was_unstacked_or_flattened_is_not_written_to():
    x = jnp.arange(4.0)
    ta = TensorArray(f64, size=4).unstack(x).write(0, -1.0)
    np.testing.assert_array_equal(x, np.arange(4.0))
    (leaf,) = jax.tree.leaves(ta)
    ta = ta.write(1, -2.0)
    np.testing.assert_array_equal(leaf, [-1, 1, 2, 3])
    assert rows(ta) == [-1, -2, 2, 3]
    pair = TensorArray.from_array((x, x)).write(0, (5.0, 6.0))
    np.testing.assert_array_equal(pair.stack()[0], [5, 1, 2, 3])
    np.testing.assert_array_equal(pair.stack()[1], [6, 1, 2, 3])
    np.testing.assert_array_equal(x, np.arange(4.0))


def test_what_was_passed_may_change_afterwards():
    """Also while JAX still waits for the rows that were there before."""
    slow = jnp.ones((1500, 1500), f64)
    row, index = np.array([1.0, 2.0]), np.array([2, 3], np.int32)
    TensorArray.from_array(slow[:4, :2]).write(0, row).write(1, row).scatter(index, [row, row]).gather(index)
    for _ in range(3):
        slow = slow @ slow / 1500
    ta = TensorArray.from_array(slow[:4, :2]).write(0, row)
    ta = ta.write(1, row)
    first = ta.gather(index)
    later = ta.scatter(index, np.stack([row, row]))
    row[:], index[:] = 9, 0
    np.testing.assert_allclose(first, [[1, 1], [1, 1]])
    np.testing.assert_allclose(later.stack(), [[1, 2]] * 4)
    np.testing.assert_allclose(ta.stack(), [[1, 2], [1, 2], [1, 1], [1, 1]])


def test_nor_is_what_a_jitted_function_closed_over():
    ta = made("static")
    f = jax.jit(lambda i: ta.read(i))
    assert f(1) == 10
    later = ta.write(1, -1.0)
    assert f(1) == 10
    assert later.read(1) == -1
    g = jax.jit(lambda x: ta.write(0, x).stack())
    np.testing.assert_array_equal(g(7.0), [7, 10, 20, 30])
    assert rows(ta) == [0, 10, 20, 30]


@pytest.mark.parametrize("how", KINDS)
def test_an_older_version_may_be_used_inside_of_a_transformation(how):
    first = made(how)
    second = first.write(1, -1.0)
    third = second.write(2, -2.0)
    with jax.checking_leaks():
        assert rows(jax.lax.cond(True, lambda ta: second, lambda ta: ta, third)) == [0, -1, 20, 30]
        np.testing.assert_array_equal(jax.jit(lambda: first.stack())(), [0, 10, 20, 30])
        assert jax.grad(lambda x: x * first.read(1))(1.0) == 10
    assert rows(first) == [0, 10, 20, 30]
    assert rows(second) == [0, -1, 20, 30]
    assert rows(third) == [0, -1, -2, 30]


def test_capacity_doubles():
    ta, pointers = TensorArray(f64, size=0, dynamic_size=True, element_shape=()), []
    for i in range(200):
        ta = ta.append(float(i))
        pointers.append(pointer(ta))
    moved = sum(a != b for a, b in itertools.pairwise(pointers))
    assert moved <= 6  # 8, 16, ..., 256
    assert rows(ta) == list(range(200))


def test_without_the_hook_writes_copy_and_are_right(monkeypatch):
    monkeypatch.setattr(_compat, "executes_eagerly", lambda: False)
    ta = made("static")
    first, before = ta, pointer(ta)
    ta = ta.write(0, 1.0)
    assert pointer(ta) != before
    assert rows(ta) == [1, 10, 20, 30]
    assert rows(first) == [0, 10, 20, 30]


# --- arrays that nobody takes ----------------------------------------------------------------------------------


class Held:
    """Something that holds an array."""

    ta = None


def test_an_array_that_a_method_returns_is_missed_if_the_statement_drops_it():
    ta, held = made("growing"), Held()
    held.ta = ta

    def traced(x):
        def body(i, ta):
            ta.write(i, x)
            return ta

        return jax.lax.fori_loop(0, 3, body, TensorArray(f64, size=3, element_shape=())).stack()

    dropping = {
        "write": [
            lambda: exec("ta.write(1, 5.0)", {"ta": ta}),
            lambda: exec("held.ta.write(1, value=5.0)", {"held": held}),
            lambda: exec("for k in range(2): (ta\n .write)(k, 5.0, where=True)", {"ta": ta}),
            lambda: jax.jit(traced)(1.0),
        ],
        "append": [lambda: exec("ta.append(*[5.0])", {"ta": ta})],
        "scatter": [lambda: exec("ta.scatter([0, 1], [5.0, 6.0])", {"ta": ta})],
        "unstack": [lambda: exec("1; ta.unstack([5.0]); 2", {"ta": ta})],
    }
    for name, statements in dropping.items():
        for run in statements:
            with pytest.warns(UserWarning, match=rf"TensorArray\.{name}: the array that it returns is dropped"):
                run()
    np.testing.assert_array_equal(ta.stack(), [0, 10, 20, 30])


def test_so_is_one_that_a_loop_returns():
    ta = TensorArray(f64, size=3, element_shape=())
    scope = {"jta": jta, "foldr": jta.tf.foldr, "ta": ta, "xs": jnp.arange(3)}
    scope["write"] = lambda i, ta: ta.write(i, 1.0)
    dropping = {
        "tf.while_loop": "jta.tf.while_loop(lambda i, _: i < 3, lambda i, ta: (i + 1, write(i, ta)), (0, ta))",
        "while_loop": "jta.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, write(*c)), (0, ta), max_steps=5)",
        "fori_loop": "1; jta.fori_loop(0, 3, write, ta); 2",
        "scan": "jta.scan(lambda ta, i: (write(i, ta), i), ta, xs)",
        "tf.foldl": "jta.tf.foldl(lambda ta, i: write(i, ta), xs, ta)",
        "foldr": "foldr(lambda ta, i: write(i, ta), xs, initializer=ta)",
    }
    for name, statement in dropping.items():
        for run in (lambda s=statement: exec(s, scope), jax.jit(lambda s=statement: exec(s, scope))):
            with pytest.warns(
                UserWarning, match=rf"^{re.escape(name)}: the TensorArray .* is dropped, .* = {re.escape(name)}\("
            ):
                run()
    np.testing.assert_array_equal(ta.stack(), [0, 0, 0])


def test_the_warning_names_the_statement():
    ta = made("static")
    with pytest.warns(UserWarning) as caught:
        ta.write(0, 5.0)
    (warning,) = caught
    here = test_the_warning_names_the_statement.__code__
    assert (warning.filename, warning.lineno) == (here.co_filename, here.co_firstlineno + 3)


def test_nobody_is_warned_of_an_array_that_was_used_or_taken():
    """Warnings are errors here."""
    ta, held = made("growing"), Held()
    new = ta.write(0, 5.0)
    new = None
    _ = ta.write(0, 5.0)
    assert new is None
    ta.write(0, 5.0).stack()
    len(ta.write(0, 5.0))
    jax.block_until_ready(ta.write(0, 5.0))
    jax.tree.map(jnp.sin, ta.write(0, 5.0))
    [ta.write(k, 5.0) for k in range(3)]
    held.ta = ta.write(0, 5.0)
    held.ta = held.ta.write(1, 5.0)

    def written(ta):
        return ta.write(0, 5.0)

    written(ta)
    with pytest.raises(IndexError):
        ta.write(0, 5.0).write(-1, 5.0)
    del held

    def body(i, ta):
        return ta.write(i, 5.0)

    ta = made("static")
    _ = jta.fori_loop(0, 3, body, ta)
    jta.fori_loop(0, 3, body, ta).stack()
    _, after = jta.tf.while_loop(lambda i, _: i < 3, lambda i, ta: (i + 1, body(i, ta)), (0, ta))
    [jta.fori_loop(0, k, body, after) for k in range(2)]
    jta.fori_loop(0, 3, lambda i, x: x + ta.write(i, 5.0).read(i), 0.0)


# --- interrupts ------------------------------------------------------------------------------------------------

ACTIONS = {
    "write": lambda new, old: new.write(3, jnp.asarray(5.0)).write(2, np.asarray(6.0)),
    "branch": lambda new, old: old.write(3, 5.0),
    "grow": lambda new, old: new.write(9, 1.0),
    "gap": lambda new, old: new.pop()[0].pop()[0].write(3, 9.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "action"),
    [*(("growing", action) for action in ("write", "grow", "gap")), ("ragged", "write"), ("ragged", "branch")],
)
def test_an_interrupt_before_any_instruction_changes_nothing(how, action, monkeypatch):
    """All versions are as they were, and another thread can use them."""
    monkeypatch.setattr(history, "LOG_LIMIT", 2)
    was_interrupted, at = True, 0
    while was_interrupted:
        first = made(how)
        second = first.write(1, -1.0)
        third = second.scatter([2, 0], [-2.0, -3.0])
        if at % 3 == 0:
            history._warm.clear()
        was_interrupted, _ = interrupted(lambda new=third, old=second: ACTIONS[action](new, old), history.__file__, at)
        found = []

        def other(versions=(first, second, third), found=found):
            found += [rows(ta.write(0, 7.0)) for ta in versions]
            found += [rows(ta) for ta in versions]

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), at
        expected = [[0, 10, 20, 30], [0, -1, 20, 30], [-3, -1, -2, 30]]
        assert found == [*[[7, *e[1:]] for e in expected], *expected], at
        at += 1
    assert at > (10 if how == "ragged" else 20)  # ragged rows need few instructions


@pytest.mark.slow
def test_an_interrupt_while_jax_ends_a_trace_leaves_no_tracer_behind(monkeypatch):
    """It comes in the first call, which is traced. Plain JAX returns tracers from then on."""
    core = sys.modules[type(jax.make_jaxpr(jnp.sin)(1.0).eqns[0]).__module__]
    ta, x = made("static"), jnp.ones(2)
    for first in (lambda: ta.read(2), lambda: jta.ta_read(x, 1), lambda: made("static").write(1, 2.0)):
        jax.clear_caches(), history._warm.clear()

        def interrupt(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(core.SetCurrentTraceContextManager, "__exit__", interrupt)
            first()
        assert type(jnp.sin(1.0)) is type(ta.read(2)) is type(x)


def test_a_handler_may_use_what_it_interrupts(monkeypatch):
    """As a signal handler or a finalizer does, in the same thread, while a write is under way."""
    ta = made("static")
    seen = []

    def push(self, *args, original=history._Store.write):
        if not seen:
            seen.append(ta.stack())
            seen.append(ta.write(3, 7.0))
        original(self, *args)

    monkeypatch.setattr(history._Store, "write", push)
    after = ta.write(0, -1.0)
    assert np.asarray(seen[0]).tolist() == rows(ta) == [0, 10, 20, 30]
    assert rows(seen[1]) == [0, 10, 20, 7]
    assert rows(after) == [-1, 10, 20, 30]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("index", [0, 2**31 - 2, 2**31, 2**32 + 3, np.array([1, 2**40]), np.array([], np.int32)])
def test_no_index_is_narrowed(index, x64):
    with jax.enable_x64(x64):
        found = history.with_wide_index(lambda index: jax.jit(lambda i: i)(index), index)
    assert np.array_equal(np.asarray(found, object), np.asarray(index, object))


def test_rows_that_are_random_keys():
    keys = jax.random.split(jax.random.key(1), 4)
    zero = jax.random.key_data(jax.random.key(0))
    ta = TensorArray(keys.dtype, size=3).write(1, keys[1])
    versions = [ta]
    for i in range(3):
        versions.append(versions[-1].write(i, keys[i + 1]))
    ta = versions[-1].scatter([0, 2], keys[:2])
    assert ta.dtype == keys.dtype
    assert "dtype=key<fry>, element_shape=(), size=3" in repr(ta)

    def data(ta):
        return np.asarray(jax.random.key_data(ta.stack()))

    given = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(data(ta), given[[0, 2, 1]])
    np.testing.assert_array_equal(data(versions[0]), [zero, given[1], zero])  # an older version stays as it was
    np.testing.assert_array_equal(data(versions[2]), [given[1], given[2], zero])
    np.testing.assert_array_equal(data(ta.unstack([keys[3], keys[2]])), given[[3, 2]])
    np.testing.assert_array_equal(jax.random.key_data(ta.gather([[2], [0]])), given[[[1], [0]]])
    grown = TensorArray.from_array(keys, dynamic_size=True, max_size=6).append(keys[0])
    np.testing.assert_array_equal(jax.random.key_data(grown.stack(pad=True)), [*given, given[0], zero])
    np.testing.assert_array_equal(data(pickle.loads(pickle.dumps(grown))), [*given, given[0]])
    grown, last = grown.pop()
    np.testing.assert_array_equal(jax.random.key_data(last), given[0])
    pieces = TensorArray(keys.dtype, 2, infer_shape=False).split(keys, [3, 1])
    np.testing.assert_array_equal(jax.random.key_data(pieces.concat()), given)


def test_an_interrupted_write_loses_no_keys(monkeypatch):
    """JAX calls a program of keys in Python, where an interrupt may come after the buffers are donated."""
    keys = jax.random.split(jax.random.key(1), 4)
    ta = TensorArray.from_array(keys).write(0, keys[1])

    def interrupted(buffers, *args):
        for b in buffers:
            b.delete()
        raise KeyboardInterrupt

    monkeypatch.setattr(history, "_swap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ta.write(1, keys[0])
    np.testing.assert_array_equal(jax.random.key_data(ta.stack()), jax.random.key_data(keys)[jnp.array([1, 1, 2, 3])])
