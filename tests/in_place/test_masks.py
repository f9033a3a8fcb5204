"""Masks that choose no row, or that `in_place` does not know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.loop import ORDERS, arguments
from catalogue.masks import FIRST, LOOPS, PRODUCTS, WRITES, B, D, T, X, a_row, filled, hot, onto
from jax import export, jit, lax
from jax.sharding import AxisType, PartitionSpec
from orders import assert_as_in_numpy

from jax_tensorarray import in_place
from jax_tensorarray.doctor import explain

pytestmark = pytest.mark.slow


def test_rows_that_are_not_written_stay_what_they_are():
    b = B.copy()
    b[-1] = np.inf, np.nan, -np.inf, -0.0, 0, 1, 2, 3
    assert_as_in_numpy(filled(WRITES["out of range"], a_row), (b, X, FIRST[0]), "forward")


def test_numbers_that_wrap_are_no_places():
    f = filled(lambda b, i, x: jnp.where(onto(lax.iota(jnp.int8, T) == i.astype(jnp.int8)), x, b), a_row)
    assert_as_in_numpy(f, (B, X, FIRST[0]), "forward")
    assert "ta_write" not in str(jax.make_jaxpr(in_place(f))(B, X, FIRST[0]))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_integers_with_a_mask_reads_a_row(name):
    of = LOOPS[name]
    one_array = lambda f, g, by: g(jax.vmap(f, (None, 0)))  # noqa: E731
    assert_as_in_numpy(of.f, (of.args[0], FIRST - 3), one_array)
    for change, args in [
        (one_array, (of.args[0], FIRST)),
        *((ORDERS[order], arguments(of, order)) for order in of.orders),
    ]:
        assert "dot_general" not in str(jax.make_jaxpr(change(of.f, in_place, 0))(*args))


def test_floats_that_are_multiplied_stay_with_a_reason():
    """0 times infinity is no number, so all rows change."""

    def f(b):
        def body(i, b):
            here = onto(hot(i, b.dtype))
            return b * (1 - here) + here * (jnp.sin(b[i - 1]) + hot(i // 2, b.dtype) @ b)

        return lax.fori_loop(1, 60, body, b)

    b = np.full((T, D), np.inf)
    np.testing.assert_array_equal(jit(in_place(f))(b), jit(f)(b))
    found = [(x.kind, x.op) for x in explain(f)(b) if x.reason == "mask-product"]
    assert found == [("product", "mul"), ("product", "dot_general")]


def test_an_axis_of_one_is_no_place():
    """`arange(1) == i` decides whether there is a row, not which one."""

    def f(b):
        return lax.fori_loop(0, 5, lambda i, b: jnp.where(onto(jnp.arange(1) == i - 2), 3.0 * i, b), b)

    b = np.ones((1, 500))
    np.testing.assert_array_equal(jit(in_place(f))(b), np.full((1, 500), 6.0))


def test_a_diagonal_is_no_row():
    def f(b):
        eye = jnp.arange(40)[:, None] == jnp.arange(40)
        return lax.fori_loop(0, 5, lambda i, b: jnp.where(eye, b[i], b), b)

    b, want = np.sin(np.arange(1600.0)).reshape(40, 40), np.sin(np.arange(1600.0)).reshape(40, 40)
    for i in range(5):
        want = np.where(np.eye(40, dtype=bool), want[i], want)
    np.testing.assert_array_equal(jit(in_place(f))(b), want)


def test_a_size_may_be_a_symbol():
    def f(b):
        return lax.fori_loop(0, 5, lambda i, b: jnp.where(onto(jnp.arange(b.shape[0]) == i), 3.0 * i, b), b)

    (n,) = export.symbolic_shape("n")
    exported = export.export(jit(in_place(f)))(jax.ShapeDtypeStruct((n, D), jnp.float64))
    want = np.ones((T, D))
    want[:5] = 3.0 * np.arange(5)[:, None]
    np.testing.assert_array_equal(exported.call(np.ones((T, D))), want)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices: see tests/conftest.py")
def test_a_mask_inside_of_auto_axes():
    def step(b, i):
        return jnp.where((jnp.arange(len(b)) == i)[:, None], jnp.sin(b[i - 1]), b)

    def loop(step):
        return lambda b: lax.fori_loop(1, len(b), lambda i, b: step(b, i), b)

    b = jnp.arange(1.0, 9).reshape(4, 2)
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])):
        got = in_place(loop(jax.sharding.auto_axes(step, out_sharding=PartitionSpec())))(b)
    np.testing.assert_allclose(got, loop(step)(b), rtol=1e-12)
