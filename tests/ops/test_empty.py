"""`ta_empty`: an uninitialised buffer, good for everything that is written before it is read."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_tensorarray import ta_empty, ta_read, ta_write, while_loop

STATM = Path("/proc/self/statm")


SHAPES = [(3, (), (3,)), (3, 2, (3, 2)), (3, (2, 4), (3, 2, 4)), (3, [2], (3, 2)), (0, (2,), (0, 2)), (2, (0,), (2, 0))]
SHAPES += [(np.int8(3), np.int64(2), (3, 2)), (1, (1,) * 7, (1,) * 8)]


@pytest.mark.parametrize(("size", "elem", "shape"), SHAPES)
def test_it_has_the_shape_that_was_asked_for(size, elem, shape):
    buffer = ta_empty(size, elem)
    assert (buffer.shape, buffer.dtype) == (shape, np.float32)
    assert jax.jit(lambda: ta_empty(size, elem))().shape == shape


@pytest.mark.slow
def test_it_has_the_dtype_that_was_asked_for_also_by_its_usual_names():
    for dtype in oracle.DTYPES:
        assert ta_empty(3, (2,), dtype).dtype == dtype
        assert ta_empty(3, dtype=np.dtype(dtype)).dtype == dtype
    for dtype in (float, int, bool, "bfloat16", complex):
        assert ta_empty(3, dtype=dtype).dtype == jnp.zeros(0, dtype).dtype


def test_each_call_gives_a_buffer_of_its_own():
    @jax.jit
    def f():
        first, second = ta_write(ta_empty(2), [0, 1], 1.0), ta_write(ta_empty(2), [0, 1], 2.0)
        return first, second

    np.testing.assert_array_equal(f(), [[1, 1], [2, 2]])


def test_a_buffer_made_inside_a_loop_is_new_in_every_step():
    def step(total, x):
        buffer = ta_write(ta_empty(2, dtype=jnp.float64), jnp.array([0, 1]), x)
        return total + buffer.sum(), buffer

    total, buffers = jax.jit(lambda xs: jax.lax.scan(step, 0.0, xs))(jnp.arange(6.0).reshape(3, 2))
    assert total == 15
    np.testing.assert_array_equal(buffers, np.arange(6.0).reshape(3, 2))


def test_under_vmap_every_example_has_a_buffer_of_its_own():
    def f(index, value):
        return ta_read(ta_write(ta_empty(3, (2,), value.dtype), index, value), index)

    values = np.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(jax.vmap(f)(jnp.array([0, 2, 1, 1]), values), values)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f, in_axes=(None, 0)))(jnp.array(1), values), values)


@pytest.mark.parametrize("switch", [jax.debug_nans, jax.debug_infs])
def test_it_is_zeros_where_nans_are_hunted(switch):
    with switch(True):
        np.testing.assert_array_equal(ta_empty(5, (3,)), np.zeros((5, 3)))
        np.testing.assert_array_equal(jax.jit(lambda: ta_empty(4, (3,)))(), np.zeros((4, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.grad(jax.checkpoint(f))])
def test_tapes_are_new_where_nans_are_hunted(transform):
    """A loop compiled before keeps room for steps not taken, which holds what was in memory."""

    def f(b):
        def body(c):
            return c[0] + 1, ta_write(c[1], c[0], jnp.sin(c[1][c[0]]) * c[1].sum())

        return while_loop(lambda c: c[0] < 3, body, (0, b), max_steps=300, residuals="tape")[1].sum()

    b = jnp.linspace(0.1, 1, 40)
    want = transform(f)(b)
    for _ in range(8):
        jax.block_until_ready([jnp.full(n, jnp.nan) + 0 for n in (40, 300, 12_000) for _ in range(20)])
        with jax.debug_nans(True):
            np.testing.assert_array_equal(transform(f)(b), want)


def test_64_bit_dtypes_are_narrowed_as_jax_narrows_them():
    with jax.enable_x64(False):
        assert ta_empty(3, dtype=float).dtype == np.float32
        with pytest.warns(UserWarning, match="float64"):
            assert ta_empty(3, dtype=np.float64).dtype == np.float32


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a device has memory of its own, which is not a process's")
def test_it_touches_no_memory():
    def resident():
        return int(STATM.read_text().split()[1]) * 4096

    def f(k):
        return ta_read(ta_write(ta_empty(2**28), k, 5.0), k)  # 1 GiB of rows

    run = jax.jit(f).lower(jnp.array(7)).compile()
    before = resident()
    assert run(jnp.array(2**27)) == 5
    assert resident() - before < 2**26
