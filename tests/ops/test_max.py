"""`ta_max`: ties, derivatives, in place. `test_random_programs.py` has it in loops of all kinds.

`test_starts.py` and `test_dtypes.py` have what it shares with other ops."""

import functools
import itertools
import re

import in_place
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import unrolled
from in_numpy import in_numpy
from jax import jit, lax

import jax_tensorarray as ta
from jax_tensorarray import ta_max, ta_read

pytestmark = pytest.mark.slow(but=3)

# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=oracle.name_of)
def test_zeros_subnormals_infinities_and_nans(dtype):
    tiny = np.finfo(dtype).smallest_subnormal if dtype in (np.float32, np.float64) else ml_dtypes.finfo(dtype).tiny
    ends = np.array([0.0, float(tiny), 2 * float(tiny), 1.0, np.inf, np.nan], np.float64)
    numbers = np.concatenate([ends, -ends]).astype(dtype)
    a, b = (x.reshape(-1) for x in np.meshgrid(numbers, numbers, indexing="ij"))
    found = ta_max(jnp.asarray(a), jnp.arange(a.size), jnp.asarray(b))
    oracle.assert_same_numbers(found, oracle.larger(a, b))


def test_where_a_number_is_nan_nothing_has_a_derivative():
    operands = jnp.array([1.0, jnp.nan, jnp.nan, 2.0]), jnp.array([jnp.nan, 3.0, jnp.nan, 1.0])
    tangents = jnp.full(4, 2.0), jnp.full(4, 3.0)
    found = jax.jvp(lambda b, v: ta_max(b, jnp.arange(4), v), operands, tangents)[1]
    np.testing.assert_array_equal(found, jax.jvp(jnp.maximum, operands, tangents)[1])


def test_complex_numbers_have_no_order():
    with pytest.raises(TypeError, match="ta_max: complex numbers have no order, so there is no maximum of complex64"):
        ta_max(jnp.zeros(3, jnp.complex64), 1, jnp.zeros((), jnp.complex64))


# --- batches ---------------------------------------------------------------------------------------------------


# --- derivatives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), np.float64), ((3, 2), np.float32), ((12,), ml_dtypes.bfloat16)],
    ids=["one", "many", "bfloat16"],
)
def test_ties_share_the_derivative_evenly(shape, dtype):
    rng = np.random.default_rng(1)
    buffer, value = (rng.integers(0, 2, s).astype(dtype) for s in ((4, 7), (*shape, 7)))
    index, where = rng.integers(0, 4, shape), rng.random(shape) < 0.8
    d, w = rng.integers(-4, 5, value.shape).astype(dtype), rng.integers(-4, 5, buffer.shape).astype(dtype)

    def derivatives(op):
        def f(b, v):
            return op(b, index, v, where=where)

        def back(b, v):
            return jax.vjp(f, b, v)[1](jnp.asarray(w))

        return lambda b, v: (jax.jvp(f, (b, v), (jnp.asarray(w), jnp.asarray(d))), back(b, v))

    of_ours = derivatives(ta_max if dtype == np.float32 else functools.partial(ta_max, lowering="ffi"))
    found = jit(of_ours)(jnp.asarray(buffer), jnp.asarray(value))
    expected = in_numpy(derivatives(unrolled.ta_max))(buffer, value)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(
            a.astype(np.float64), b.astype(np.float64), rtol=0, atol=16 * float(ml_dtypes.finfo(dtype).eps)
        )


def test_one_position_has_the_derivative_of_the_maximum_of_jax():
    numbers = np.array([-np.inf, -1, -0.0, 0.0, 1, np.inf, np.nan])
    a, b = (x.reshape(-1) for x in np.meshgrid(numbers, numbers))

    def of(maximum):
        return jit(jax.grad(lambda a, b: jnp.vdot(jnp.arange(1.0, 50), maximum(a, b)), argnums=(0, 1)))(a, b)

    expected = of(jnp.maximum)
    for a_, b_ in zip(of(lambda a, b: ta_max(a[None], 0, b)[0]), expected, strict=True):
        np.testing.assert_array_equal(a_, b_)
    for a_, b_ in zip(of(lambda a, b: ta_max(a, jnp.arange(49), b)), expected, strict=True):
        np.testing.assert_array_equal(a_, b_)


@pytest.mark.parametrize("by", [0, 1])
def test_the_derivative_of_one_position_does_not_depend_on_how_a_value_is_rounded_when_it_is_made_again(by):
    """A checkpoint keeps the rows that are read and makes the value again, perhaps by operations in another order."""
    rounded = itertools.count()

    def error(x):
        return jax.pure_callback(lambda x: np.float64(1e-12 * next(rounded)), jax.ShapeDtypeStruct((), x.dtype), x)

    def put(b, x):
        return ta_max(b, 1, jnp.sin(x) + error(lax.stop_gradient(x)))

    def loss(f):
        return jax.grad(lambda b, x: jnp.sum(f(b, x) ** 2), by)

    args = jnp.array([[1.0, 2.0], [0.1, -0.1], [3.0, 4.0]]), jnp.array([0.5, -0.5])
    found = loss(jax.checkpoint(put, policy=ta.checkpoint_policies.save_reads))(*args)
    want = loss(lambda b, x: b.at[1].set(jnp.maximum(b[1], jnp.sin(x))))(*args)
    assert next(rounded) > 1
    np.testing.assert_allclose(found, want, rtol=1e-9)


def test_only_rows_are_touched_and_only_for_what_is_differentiated():
    def names(argnums, index):
        jaxpr = jax.make_jaxpr(jax.grad(lambda b, v: ta_max(b, index, v).sum(), argnums))
        value = jnp.ones((*index.shape, 3))
        text = str(jaxpr(jnp.ones((50, 3)), value))
        return re.findall(r"ta_\w+(?=\[)", text)

    one, many = jnp.array(4), jnp.array([4, 2, 4])
    assert names(0, one) == ["ta_max", "ta_read", "ta_swap", "ta_add"]
    assert names(1, one) == ["ta_max", "ta_read", "ta_read"]
    assert names((0, 1), many) == ["ta_max", *["ta_read"] * 2, "ta_add", "ta_read", "ta_read", "ta_swap", "ta_add"]


# --- loops -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", ["auto", "ffi"])
def test_a_loop_that_reads_another_row_than_it_updates_is_in_place(lowering):
    def f(xs):
        def body(c, i):
            b, total = c
            seen = ta_read(b, (i * 3) % len(xs), lowering=lowering)
            b = ta_max(b, (i * 7) % len(xs), ta_read(xs, i, lowering=lowering), lowering=lowering)
            return (b, total + jnp.sum(seen)), None

        b, total = lax.scan(body, (-jnp.ones_like(xs), jnp.zeros((), xs.dtype)), jnp.arange(len(xs)))[0]
        return jnp.sum(b**2) + total

    rng = np.random.default_rng(0)
    in_place.assert_in_place(jax.grad(f), lambda n: (jnp.asarray(rng.normal(size=(n, 16)).astype(np.float32)),))
