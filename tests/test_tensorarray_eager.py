"""Outside of jit: a write is in place unless somebody holds the rows, and every older version keeps its value."""

import gc
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tensorarray import TensorArray, _compat, _versions

f64 = jnp.float64


def pointer(ta):
    (buffer,) = ta._version.newest()
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
    return np.asarray(ta.stack(pad=False)).tolist()


@pytest.mark.parametrize("how", ["static", "growing", "limited"])
def test_a_write_is_in_place(how):
    ta = made(how, 8)
    before = pointer(ta)
    for i in range(8):
        ta = ta.write(i, 1.0)
    ta = ta.scatter([3, 4], [5.0, 6.0])
    assert pointer(ta) == before
    assert rows(ta) == [1, 1, 1, 5, 6, 1, 1, 1]


@pytest.mark.parametrize("how", KINDS)
def test_an_older_version_keeps_its_value(how):
    first = made(how)
    second = first.write(1, -1.0)
    third = second.scatter([1, 3, 1], [-2.0, -3.0, -4.0])
    assert rows(first) == [0, 10, 20, 30]
    assert rows(third) == [0, -4, 20, -3]
    assert rows(second) == [0, -1, 20, 30]


@pytest.mark.parametrize("how", KINDS)
def test_versions_can_branch(how):
    trunk = made(how)
    left, right = trunk.write(0, 1.0), trunk.write(0, 2.0)
    left2, right2 = left.write(3, 3.0), right.write(3, 4.0)
    both = trunk.identity().write(2, 5.0)
    assert rows(left2) == [1, 10, 20, 3]
    assert rows(right2) == [2, 10, 20, 4]
    assert rows(both) == [0, 10, 5, 30]
    assert rows(trunk) == [0, 10, 20, 30]
    assert rows(left) == [1, 10, 20, 30]
    assert rows(right) == [2, 10, 20, 30]


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_any_history_can_be_read_again(how, seed, monkeypatch):
    monkeypatch.setattr(_versions, "LOG_LIMIT", 5)
    rng = np.random.default_rng(seed)
    history = [(made(how), [0.0, 10.0, 20.0, 30.0])]
    for step in range(60):
        ta, expected = history[rng.integers(len(history))]
        expected, size = list(expected), len(expected)
        what = rng.choice(["write", "scatter", "append", "gap", "pop", "forget", "flatten", "read"])
        if what == "write" and size:
            i = int(rng.integers(size))
            expected[i] = float(step)
            history.append((ta.write(i, float(step)), expected))
        elif what == "scatter" and size:
            for i, x in zip(indices := rng.integers(size, size=3), [1.0, 2.0, 3.0], strict=True):
                expected[i] = x
            history.append((ta.scatter(indices, [1.0, 2.0, 3.0]), expected))
        elif what == "append" and how in ("growing", "limited") and size < 6:
            history.append((ta.append(float(step)), [*expected, float(step)]))
        elif what == "gap" and how == "growing":
            history.append((ta.write(size + 2, float(step)), [*expected, 0.0, 0.0, float(step)]))
        elif what == "pop" and how in ("growing", "limited") and size:
            popped, row = ta.pop()
            assert row == expected[-1]
            history.append((popped, expected[:-1]))
        elif what == "forget" and len(history) > 3:
            history.pop(int(rng.integers(len(history))))
        elif what == "flatten":
            history.append((jax.tree.map(lambda x: x, ta), expected))
        elif what == "read" and size:
            i = int(rng.integers(size))
            assert ta.read(i) == expected[i]
        del ta
    for ta, expected in history:
        assert rows(ta) == expected


def test_an_older_version_costs_one_copy_at_most():
    first = made("static", 1000)
    ta, pointers = first, set()
    for i in range(3 * _versions.LOG_LIMIT):
        ta = ta.write(i % 1000, 1.0)
        pointers.add(pointer(ta))
    assert len(pointers) == 1
    assert len(ta._version._at[0].log) <= 2
    assert rows(first)[:3] == [0, 10, 20]


def test_a_loop_keeps_no_log():
    ta = made("static")
    for _ in range(10):
        ta = ta.write(0, 1.0)
    assert len(ta._version._at[0].log) <= 2


def test_versions_are_freed():
    ta = made("static", 100)
    buffer = ta._version.newest()[0]
    count = len(gc.get_referrers(buffer))
    for i in range(100):
        ta = ta.write(i, 1.0)
    assert buffer.is_deleted()  # donated to the write that followed
    assert count >= 1


def test_what_was_stacked_is_not_written_to():
    ta = made("static")
    stacked = ta.stack()
    view = np.asarray(stacked)
    ta = ta.write(0, -1.0).write(1, -2.0)
    np.testing.assert_array_equal(stacked, [0, 10, 20, 30])
    np.testing.assert_array_equal(view, [0, 10, 20, 30])
    assert rows(ta) == [-1, -2, 20, 30]


def test_nor_what_was_unstacked_or_flattened():
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


def test_nor_what_a_jitted_function_closed_over():
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
        np.testing.assert_array_equal(jax.jit(lambda: first.stack(pad=False))(), [0, 10, 20, 30])
        assert jax.grad(lambda x: x * first.read(1))(1.0) == 10
    assert rows(first) == [0, 10, 20, 30]
    assert rows(second) == [0, -1, 20, 30]
    assert rows(third) == [0, -1, -2, 30]


def test_a_row_that_is_read_is_nobodys_but_the_readers():
    ta = made("static")
    row = ta.read(1)
    part = ta.gather([1, 2])
    ta = ta.write(1, -1.0)
    assert row == 10
    np.testing.assert_array_equal(part, [10, 20])


def test_a_donated_array_is_gone_and_says_so():
    step = jax.jit(lambda ta: ta.write(0, -1.0), donate_argnums=0)
    ta = made("static")
    after = step(ta)
    assert rows(after) == [-1, 10, 20, 30]
    for f in (lambda: ta.read(0), lambda: ta.stack(), lambda: ta.write(0, 1.0), lambda: ta.gather([0])):
        with pytest.raises(RuntimeError, match="donated to a jitted function"):
            f()
    assert len(ta) == 4
    assert "size=4" in repr(ta)


def test_an_error_leaves_the_array_as_it_was():
    ta = made("limited")
    for f in (
        lambda: ta.write(0, np.int32(1)),
        lambda: ta.write(0, [1.0, 2.0]),
        lambda: ta.write(99, 1.0),
        lambda: ta.scatter([0, 99], [1.0, 2.0]),
        lambda: ta.unstack([1.0] * 99),
    ):
        with pytest.raises((TypeError, ValueError, IndexError)):
            f()
    assert rows(ta) == [0, 10, 20, 30]


def test_capacity_doubles():
    ta, pointers = TensorArray(f64, size=0, dynamic_size=True, element_shape=()), []
    for i in range(1000):
        ta = ta.append(float(i))
        pointers.append(pointer(ta))
    moved = sum(a != b for a, b in itertools.pairwise(pointers))
    assert moved <= 8  # 8, 16, ..., 1024
    assert rows(ta) == list(range(1000))


def test_gradients_of_eager_loops_are_right():
    def f(xs):
        ta = TensorArray(f64, size=4, element_shape=())
        for i in range(4):
            ta = ta.write(i, xs[i] * (ta.read(i - 1) if i else 1.0))
        return ta.stack().sum()

    xs = jnp.array([2.0, 3.0, 5.0, 7.0])
    np.testing.assert_allclose(jax.grad(f)(xs), [1 + 3 + 15 + 105, 2 + 10 + 70, 6 + 42, 30])


def test_without_the_hook_writes_copy_and_are_right(monkeypatch):
    monkeypatch.setattr(_compat, "executes_eagerly", lambda: False)
    ta = made("static")
    first, before = ta, pointer(ta)
    ta = ta.write(0, 1.0)
    assert pointer(ta) != before
    assert rows(ta) == [1, 10, 20, 30]
    assert rows(first) == [0, 10, 20, 30]


def test_it_works_with_jit_disabled():
    with jax.disable_jit():
        ta = made("growing")
        first = ta
        ta = ta.write(6, 1.0)
        assert rows(ta) == [0, 10, 20, 30, 0, 0, 1]
        assert rows(first) == [0, 10, 20, 30]


def test_threads_may_write_to_versions_of_one_array():
    ta = made("static", 64)
    results = {}

    def work(k):
        mine = ta
        for i in range(64):
            mine = mine.write(i, float(k))
            if i % 9 == 0:
                assert ta.read(i) == 10 * i
        results[k] = rows(mine)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {k: [float(k)] * 64 for k in range(8)}
    assert rows(ta) == [10.0 * i for i in range(64)]


@pytest.mark.parametrize("empty", [(0, (2,)), (3, (0,)), (0, ())])
def test_arrays_without_elements(empty):
    size, element_shape = empty
    ta = TensorArray(f64, size=size, element_shape=element_shape)
    for i in range(size):
        ta = ta.write(i, jnp.zeros(element_shape))
        ta = ta.write(i, jnp.zeros(element_shape))
    assert ta.stack().shape == (size, *element_shape)


def _seconds_a_write(n, writes=2000):
    x = jnp.ones(64)
    ta = TensorArray(f64, size=n, element_shape=(64,))
    ta = ta.write(0, x)
    jax.block_until_ready(ta._version.newest())
    start = time.perf_counter()
    for i in range(writes):
        ta = ta.write(i % n, x)
    jax.block_until_ready(ta._version.newest())
    return (time.perf_counter() - start) / writes


def test_a_write_takes_the_same_time_whatever_the_size():
    """A copy of the larger buffer, 50 MB, takes some 10 ms; a write some 20 us."""
    ratios = []
    for _ in range(5):
        ratios.append(_seconds_a_write(100_000) / _seconds_a_write(1000))
        if ratios[-1] < 5:
            return
    raise AssertionError(f"a write into 100 times as many rows took {ratios} times as long")


def test_appending_is_linear():
    def seconds(n):
        start = time.perf_counter()
        ta = TensorArray(f64, size=0, dynamic_size=True, element_shape=(64,))
        for _ in range(n):
            ta = ta.append(x)
        jax.block_until_ready(ta._version.newest())
        return time.perf_counter() - start

    x = jnp.ones(64)
    ratios = []
    for _ in range(5):
        seconds(16_000)  # compiles for every capacity
        ratios.append(seconds(16_000) / seconds(4000))
        if ratios[-1] < 7:
            return
    raise AssertionError(f"4 times the rows took {ratios} times as long")
