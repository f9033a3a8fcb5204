"""What is particular to a GPU: it raises errors later, and launches of all sizes have to mean the same.

The values are checked on every platform. Tests of errors that are raised later need a GPU, or the emulated one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from waiting import finish

import jax_tensorarray as ta
from jax_tensorarray import _kernels, check_errors

PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
needs_gpu = pytest.mark.skipif(not hasattr(_kernels.modules.get(PLATFORM), "wait_for_error"), reason="needs a GPU")

OPS = ["ta_read", "ta_write", "ta_swap", "ta_add", "ta_max"]
TEXT = "{}: index {} is out of range for a buffer of size {}"


def call(lib, op, buffer, index, value, **options):
    if op == "ta_read":
        return (lib.ta_read(buffer, index, **options),)
    results = getattr(lib, op)(buffer, index, value, **options)
    return results if isinstance(results, tuple) else (results,)


# --- values ----------------------------------------------------------------------------------------------------


def check(op, size, row, count, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    buffer = rng.integers(-9, 9, (size, *row)).astype(dtype)
    value = rng.integers(-9, 9, (count, *row)).astype(dtype)
    index, where = rng.integers(-1, size + 1, count), rng.random(count) < 0.9
    found = jax.jit(functools.partial(call, ta, op, mode="drop"))(buffer, index, value, where=where)
    for f, e in zip(found, call(oracle, op, buffer, index, value, where=where), strict=True):
        oracle.assert_same_bits(f, e)


@pytest.mark.slow(but=6)
@pytest.mark.parametrize(
    ("size", "row", "count"),
    [
        pytest.param(5, (3,), 1, id="one row"),
        pytest.param(40, (1,), 3000, id="many narrow rows"),
        pytest.param(3, (70_001,), 4, id="rows of an odd width"),
        pytest.param(4, (2**18,), 3, id="wide rows"),
        pytest.param(2000, (16,), 1500, id="few duplicates"),
        pytest.param(1, (4,), 1000, id="nothing but duplicates"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_ops_of_all_sizes_mean_what_the_oracle_says(op, size, row, count):
    check(op, size, row, count)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in OPS for dtype in (np.int8, np.float16, np.float64, np.bool_)]
    + [(op, np.complex64) for op in OPS if op != "ta_max"],  # complex numbers have no order
)
def test_sanitized_small_launches(op, dtype):
    """The tests that CUDA's own sanitizers run, which take their time."""
    check(op, 4, (6,), 7, dtype)
    check(op, 4, (3,), 200, dtype)


def test_sanitized_batches_and_ranges():
    buffer = np.arange(24.0).reshape(2, 4, 3)
    index = np.array([[3, 0, 3], [1, 1, 2]])
    found = jax.vmap(ta.ta_read)(buffer, index)
    oracle.assert_same_bits(found, np.stack([oracle.ta_read(*x) for x in zip(buffer, index, strict=True)]))
    found = jax.vmap(ta.ta_stack)(buffer, np.array([1, 4]))
    oracle.assert_same_bits(found, np.stack([oracle.ta_stack(b, n) for b, n in zip(buffer, (1, 4), strict=True)]))


# --- errors that are raised later ------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("op", OPS)
def test_a_stray_index_is_dropped_and_raised_by_the_next_op(op):
    buffer, value = np.arange(8.0).reshape(4, 2), np.ones((3, 2))
    index = np.array([1, 7, 0])
    found = jax.block_until_ready(jax.jit(functools.partial(call, ta, op))(buffer, index, value))
    for f, e in zip(found, call(oracle, op, buffer, index, value), strict=True):
        oracle.assert_same_bits(f, e)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=TEXT.format(op, 7, 4)):
        jax.block_until_ready(ta.ta_read(jnp.zeros(3), jnp.array(1)))
    finish(ta.ta_read(jnp.zeros(3), jnp.array(1)))  # raised once, and nothing is left


@needs_gpu
def test_a_stray_index_is_raised_by_check_errors_once():
    jax.block_until_ready(jax.jit(ta.ta_read)(jnp.zeros(3), jnp.array(-2)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=TEXT.format("ta_read", -2, 3)):
        check_errors()
    check_errors()


@needs_gpu
def test_of_many_errors_the_first_is_raised_and_its_consequences_are_not():
    @jax.jit
    def f(buffer):
        for stray in (5, 6, 7):
            buffer = ta.ta_write(buffer, jnp.asarray(stray), 1.0)
        return buffer

    try:
        jax.block_until_ready(f(jnp.zeros(5)))
        check_errors()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert TEXT.format("ta_write", 5, 5) in str(error)
    else:
        pytest.fail("nothing was raised")
    check_errors()


@needs_gpu
def test_a_loop_with_a_stray_index_raises_what_the_loop_on_a_cpu_raises():
    f = jax.jit(lambda b, n: lax.fori_loop(0, n, lambda i, b: ta.ta_write(b, i, 1.0), b))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=TEXT.format("ta_write", 4, 4)):
        finish(f(jnp.zeros(4), 50))
    assert finish(f(jnp.zeros(4), 4)).sum() == 4


@needs_gpu
def test_an_index_past_the_live_rows_of_a_tensorarray_is_raised():
    def f(x, i):
        array = ta.TensorArray(jnp.float32, size=0, dynamic_size=True, max_size=9, element_shape=())
        return array.append(x).append(x).read(i)

    assert finish(jax.jit(f)(jnp.float32(3.0), 1)) == 3
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"index 2 is out of range .* of size 2"):
        finish(jax.jit(f)(jnp.float32(3.0), 2))


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_drops_strays_records_none(op):
    index = jnp.array([1, 7, -1])
    finish(call(ta, op, jnp.zeros((4, 2)), index, jnp.ones((3, 2)), mode="drop"))


def test_check_errors_has_nothing_to_say_where_nothing_went_wrong():
    finish(jax.jit(ta.ta_read)(jnp.zeros(3), jnp.array(2)))
    assert check_errors() is None
