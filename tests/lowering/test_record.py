"""An index out of range in a loop is recorded there and raised after it: the first of the program, as an int32.

`test_passes.py` has random programs.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit, lax

from jax_tensorarray import TensorArray, ta_add, ta_read, ta_write


def error_of(f, *args):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(f(*args))
    return re.search(r"ta_\w+: index .* size \d+", str(caught.value)).group()


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64], ids=lambda d: d.__name__
)
def test_an_index_of_any_dtype_is_told_as_the_nearest_int32(dtype):
    f = jit(lambda b, at: lax.scan(lambda b, i: (ta_add(b, i, 1.0), None), b, at)[0])
    for bad in {np.iinfo(dtype).max, np.iinfo(dtype).min, 5, 2**7 - 1} - set(range(5)):
        text = f"ta_add: index {min(max(bad, -(2**31)), 2**31 - 1)} is out of range for a buffer of size 5"
        assert error_of(f, np.zeros(5), np.array([4, bad, 0], dtype)) == text


def test_a_loop_that_waits_for_a_row_ends():
    """Each of these goes on for ever, if it goes on with what a row out of range is."""
    read = "ta_read: index 9 is out of range for a buffer of size 3"

    def inside(b, i):
        return lax.while_loop(lambda x: x < 1, lambda x: x + ta_read(b, i), 0.0)

    def condition(b, i):
        return lax.while_loop(lambda x: ta_read(b, i) + 0 * x < 1, lambda x: x + 1, 0.0)

    def inner(b, i):
        def step(x, i):
            row = ta_read(b, i)
            return lax.while_loop(lambda y: y < 1, lambda y: y + row, x), None

        return lax.scan(step, 0.0, i[None])[0]

    def later(b, i):
        row = lax.scan(lambda x, i: (ta_read(b, i), None), 0.0, i[None])[0]
        return jax.jit(lambda row: lax.while_loop(lambda y: y < 1, lambda y: y + row, 0.0))(row)

    def bound(b, i):
        return lax.scan(
            lambda x, i: (lax.fori_loop(0, 2**62 + ta_read(b, i).astype(int), lambda k, x: x + k, x), None),
            0.0,
            i[None],
        )[0]

    for f in (inside, condition, inner, later, bound):
        assert error_of(jit(f), np.zeros(3), np.int32(9)) == read


def test_a_condition_is_checked_for_each_example_that_runs():
    def f(b, at):
        return lax.while_loop(lambda k: ta_read(b, at[k]) < 2, lambda k: k + 1, 0)

    g = jit(jax.vmap(f, (None, 0)))
    b, at = np.arange(4.0), np.array([[0, 2, 9], [1, 0, 3]])
    np.testing.assert_array_equal(g(b, at), [1, 2])
    at[0, 1] = -7
    assert error_of(g, b, at) == "ta_read: index -7 is out of range for a buffer of size 4"


def test_what_comes_before_it_has_happened():
    seen = []

    def body(k, b):
        jax.debug.callback(lambda k: seen.append(int(k)), k, ordered=True)
        return ta_write(b, k, 1.0)

    error_of(jit(lambda n, b: lax.fori_loop(0, n, body, b)), 5, np.zeros(3))
    assert seen[:3] == [0, 1, 2]


def test_the_gradient_raises_what_the_program_does():
    def f(x, at):
        b, _ = lax.scan(lambda b, i: (ta_write(b, i, jnp.sin(x)), None), jnp.zeros(4), at)
        return jnp.sum(b**2)

    assert error_of(jit(jax.grad(f)), 0.5, np.array([1, -2, 7])) == (
        "ta_write: index -2 is out of range for a buffer of size 4"
    )


def test_the_size_of_a_tensorarray_is_told_as_it_is():
    def f(n, at):
        ta = TensorArray(jnp.float32, n, dynamic_size=True, max_size=9, element_shape=[])
        ta = lax.fori_loop(0, n, lambda i, ta: ta.write(i, 1.0), ta)
        return lax.fori_loop(0, at, lambda i, x: x + ta.read(i), 0.0)

    assert jit(f)(4, 4) == 4
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match="index 4 is out of range for a TensorArray of size 4"
    ):
        jax.block_until_ready(jit(f)(4, 6))


@pytest.mark.parametrize("mode", [None, "error"])
def test_vmapped_indices_are_checked_where_they_are_to_be(mode):
    def f(b, at):
        return lax.scan(lambda b, i: (ta_write(b, i, 1.0, mode=mode), None), b, at)[0]

    g = jit(jax.vmap(f))
    at = np.array([[0, 1], [2, 7], [-1, 0]])
    assert error_of(g, np.zeros((3, 4)), at) == "ta_write: index -1 is out of range for a buffer of size 4"
    np.testing.assert_array_equal(g(np.zeros((3, 4)), at % 4).sum(1), [2, 2, 2])


@pytest.mark.parametrize("shared", ["index", "mask"])
def test_examples_may_share_the_index_or_the_mask(shared):
    def f(b, index, mask):
        return lax.fori_loop(0, 2, lambda _, b: ta_write(b, index, 1.0, where=mask), b)

    axes = (0, *((None, 0) if shared == "index" else (0, None)))
    g = jax.jit(jax.vmap(f, axes))
    index, mask = np.array([1, 5, 2]), np.array([True, False, True])
    good, bad = (1, 5) if shared == "index" else (np.where(index == 5, 0, index), index)
    some = mask if shared == "index" else np.bool_(True)
    found = g(np.zeros((3, 4), np.float32), good, some)
    want = np.zeros((3, 4), np.float32)
    for example in range(3):
        i, on = (x if np.ndim(x) == 0 else x[example] for x in (good, some))
        want[example, i] = on
    np.testing.assert_array_equal(found, want)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="ta_write: index 5 is out of range"):
        jax.block_until_ready(g(np.zeros((3, 4), np.float32), bad, some))
    none = np.zeros_like(some)
    np.testing.assert_array_equal(g(np.zeros((3, 4), np.float32), bad, none), np.zeros((3, 4)))
    empty = g(
        np.zeros((0, 4), np.float32), *(x if d is None else x[:0] for x, d in zip((bad, some), axes[1:], strict=True))
    )
    assert empty.shape == (0, 4)


def test_a_function_that_is_used_in_other_ways_keeps_its_calls():
    """A comparator of a sort has no place for a record."""

    @jax.jit
    def key(b, i):
        return ta_read(b, i)

    def f(b, at):
        total = lax.scan(lambda x, i: (x + key(b, i), None), 0.0, at)[0]
        return total, lax.map(lambda i: key(b, i), at)

    total, rows = jit(f)(np.arange(4.0), np.array([3, 0]))
    assert total == 3
    np.testing.assert_array_equal(rows, [3, 0])
