"""The reduction agrees with NumPy under every transformation, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from decay_row import _ffi, logsumexp_rows, logsumexp_rows_p
from helpers import assert_close, call, gathers, launch, put, refused


def in_numpy(buffer, axis=0):
    """Compute the op in NumPy, in twice the precision."""
    buffer = np.asarray(buffer, np.longdouble)
    shift = np.max(buffer, axis, keepdims=True, initial=-np.inf)
    shift = np.where(np.isinf(shift), 0, shift)
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp(buffer - shift), axis)) + np.squeeze(shift, axis)


def rows(*shape, dtype=np.float64):
    return jnp.asarray(10 * np.random.default_rng(0).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5,), (1, 3), (63, 2), (130, 3, 2), (0, 2), (4, 0)], ids=str)
def test_values_are_those_of_numpy(shape, dtype):
    buffer = rows(*shape, dtype=dtype)
    for run in (lambda f: f, jax.jit):
        found = run(logsumexp_rows)(buffer)
        assert found.dtype == buffer.dtype
        assert_close(found, in_numpy(buffer), dtype)


def test_neither_large_numbers_nor_infinities_nor_nan_are_lost():
    inf, nan = np.inf, np.nan
    columns = [[1e4, 1e4], [-1e4, -1e4], [-inf, -inf], [inf, 1.0], [inf, inf], [1.0, -inf], [-inf, 1.0], [nan, 1.0]]
    columns = jnp.asarray([*columns, [1.0, nan], [nan, inf], [-inf, nan]])
    expected = np.array([1e4 + np.log(2), -1e4 + np.log(2), -inf, inf, inf, 1.0, 1.0, nan, nan, nan, nan])
    for repeated in (1, 100):
        assert_close(logsumexp_rows(jnp.repeat(columns, repeated, axis=1).T), expected + np.log(repeated))


@pytest.mark.parametrize(
    ("buffer", "error", "text"),
    [
        (np.float64(1), ValueError, "got a scalar"),
        (np.arange(3), TypeError, "floating dtype, got int64"),
        (np.ones(3, complex), TypeError, "floating dtype, got complex128"),
    ],
)
def test_bad_inputs_are_said_to_be_so(buffer, error, text):
    with pytest.raises(error, match=text):
        logsumexp_rows(buffer)
    with pytest.raises(TypeError, match="with 3 batch axes"):
        logsumexp_rows_p.bind(rows(2, 3), batch_dims=3)


def test_derivatives_of_two_orders_are_those_of_finite_differences():
    check_grads(jax.jit(logsumexp_rows), [rows(5, 3) / 10], order=2)


def test_where_all_are_minus_infinity_the_derivative_is_zero():
    assert_close(jax.grad(lambda b: logsumexp_rows(b)[1])(jnp.array([[0.0, -jnp.inf]] * 3)), np.zeros((3, 2)))


def test_vmap_is_a_loop():
    buffer = np.asarray(rows(3, 5, 4, 2))
    assert_close(jax.vmap(logsumexp_rows, 1)(buffer), in_numpy(buffer))
    assert_close(jax.vmap(jax.vmap(logsumexp_rows, 1), 2)(buffer), in_numpy(buffer).swapaxes(0, 1))
    found = jax.vmap(jax.grad(lambda b: jnp.sum(logsumexp_rows(b) ** 2)))(buffer)
    out = in_numpy(buffer, 1)[:, None]
    assert_close(found, 2 * out * np.exp(buffer - out))


def test_each_device_reduces_its_part(mesh):
    buffer = np.asarray(rows(4, 5, 8))
    for spec in (("d",), (None, None, "d")):
        divided = put(mesh, buffer, *spec)
        for f in (jax.vmap(logsumexp_rows), jax.grad(lambda b: jnp.sum(jax.vmap(logsumexp_rows)(b) ** 2))):
            assert gathers(f, divided) == []
            assert_close(jax.jit(f)(divided), f(buffer))
    with pytest.raises(ValueError, match="logsumexp_rows: the rows of the buffer are divided"):
        logsumexp_rows(put(mesh, buffer, "d"))


@pytest.mark.parametrize("kernel_platform", _ffi.platforms)
def test_the_kernel_is_called_with_memory_for_each_part(kernel_platform):
    traced = jax.jit(logsumexp_rows).trace(rows(100, 3))
    text = traced.lower(lowering_platforms=(kernel_platform,)).as_text()
    (call,) = [line for line in text.split("\n") if "_logsumexp(" in line]
    assert "-> (tensor<3xf64>, tensor<2x64x3xf64>)" in call


def test_a_call_by_hand_that_does_not_fit_is_an_error_before_memory_is_touched():
    def call_for(batch_dims=1, out=(4, 3), scratch=(2, 1, 4, 3), dtype="float64"):
        results = [jax.ShapeDtypeStruct(out, "float64"), jax.ShapeDtypeStruct(scratch, dtype)]
        call("decay_row_logsumexp", [jax.ShapeDtypeStruct((4, 5, 3), "float64")], results, batch_dims)

    call_for()
    wrong = [{"batch_dims": d} for d in (-1, 0, 2, 3, 2**62)] + [{"out": (4, 4)}, {"dtype": "float32"}]
    wrong += [{"scratch": shape} for shape in [(1, 1, 4, 3), (2, 0, 4, 3), (2, 1, 4, 4), (2, 4, 3), (24,)]]
    for arguments in wrong:
        with refused():
            call_for(**arguments)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "shape, parts", [((1, 5, 3), 1), ((7, 4, 1), 4), ((3, 20, 50), 7), ((2, 1, 3), 4), ((2, 3, 0), 2)]
)
def test_the_threads_of_a_gpu_do_what_numpy_does(threads, shape, parts, dtype):
    batch, _, row = shape
    buffer = np.array(rows(*shape), dtype)
    out, scratch = np.full((batch, row), np.nan, dtype), np.full((2, parts, batch, row), np.nan, dtype)
    launch(threads[f"logsumexp_{dtype}"], (*shape, parts), scratch, buffer, out)
    assert_close(out, in_numpy(buffer, 1), dtype)
