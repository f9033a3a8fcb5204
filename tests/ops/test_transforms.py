"""Row ops under JAX's switches for debugging, policies of checkpoints, and in Taylor series.

`test_random_programs.py` and `test_starts.py` have their derivatives, and all other transformations."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unrolled
from in_numpy import in_numpy
from jax import jit, lax
from jax.experimental.jet import jet
from ops import OPS, OURS

import jax_tensorarray as ta

pytestmark = pytest.mark.slow(but=1)


def test_a_checkpoint_that_saves_reads_does_not_read_again():
    def f(buffer):
        return jnp.sum(jnp.sin(ta.ta_read(jnp.sin(buffer), jnp.array([2, 0, 2]))) ** 2)

    def reads(policy):
        gradient = jax.grad(jax.checkpoint(f, policy=policy))
        return str(jax.make_jaxpr(gradient)(jnp.ones((5, 2)))).count(" ta_read[")

    assert reads(ta.checkpoint_policies.save_reads) == 1
    assert reads(None) == 2


# --- debugging switches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ta_write", "ta_add", "ta_swap"])
def test_debug_nans_reports_a_nan_that_is_stored(op):
    f = jax.jit(functools.partial(OPS[op], OURS, mode=None))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        f(jnp.ones(3), jnp.array([1]), jnp.array([jnp.inf]) - jnp.inf, jnp.array([True]))


def test_debug_nans_does_not_mind_a_nan_that_is_not_read():
    buffer = jnp.asarray(np.array([1.0, np.nan]))
    with jax.debug_nans(True):
        rows = ta.ta_read(buffer, jnp.array([0, 1]), where=jnp.array([True, False]))
    np.testing.assert_array_equal(rows, [1.0, 0.0])


# --- Taylor series -----------------------------------------------------------------------------------------------


def coefficients(f, x, terms):
    """The derivatives in t of `f(x + terms[0] t + terms[1] t^2 / 2 + ...)` at 0, by nested forward mode."""
    at, found = lambda t: f(x + sum(c * t ** (k + 1) / math.factorial(k + 1) for k, c in enumerate(terms))), []
    for _ in terms:
        at = functools.partial(lambda f, t: jax.jvp(f, (t,), (1.0,))[1], at)
        found.append(at(0.0))
    return found


def programs_of_ops(ops):
    twice, masked = np.array([1, 3, 1]), {"where": np.array([True, False, True]), "mode": "drop"}
    yield lambda x: jnp.sin(ops.ta_read(x, twice))
    yield lambda x: jnp.sin(ops.ta_read(x * x, np.array([9, 1]), mode="drop"))
    yield lambda x: ops.ta_write(jnp.sin(x), twice, jnp.cos(x[:3]), **masked)
    yield lambda x: ops.ta_add(jnp.sin(x), twice, jnp.cos(x[:3])) ** 2
    yield lambda x: sum(jnp.sum(y**2) for y in ops.ta_swap(jnp.sin(x), twice, jnp.cos(x[:3])))
    yield lambda x: ops.ta_max(jnp.sin(x), twice, jnp.cos(x[:3]))
    yield lambda x: ops.ta_stack(jnp.sin(x), 3)


def test_jet_expands_every_op_in_a_taylor_series():
    x, *terms = np.random.default_rng(0).normal(size=(4, 5, 3))
    for k, (ours, plain) in enumerate(zip(programs_of_ops(ta), programs_of_ops(unrolled), strict=True)):
        wanted = in_numpy(lambda x, *terms, f=plain: (f(x), coefficients(f, x, terms)))(x, *terms)
        for transform in (jit, lambda f: f)[: 2 if k == 4 else 1]:
            value, series = transform(lambda x, *terms, f=ours: jet(f, (x,), (list(terms),)))(x, *terms)
            np.testing.assert_allclose(value, wanted[0], rtol=1e-12)
            np.testing.assert_allclose(series, wanted[1], rtol=1e-9, atol=1e-12)


def test_jet_expands_what_in_place_makes_of_rows():
    x, *terms = np.random.default_rng(0).normal(size=(4, 5, 3))

    def rows(x):
        row = lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (1, 3))
        x = lax.dynamic_update_slice(x, jnp.sin(row), (jnp.int32(2), jnp.int32(0)))
        return x.at[0].add(x[2] * x[jnp.array([9, 4])][1])

    def elements(x):
        return x.at[:, 1].mul(jnp.exp(x[:, 2])).at[3, 0].max(x[1, 1])

    for f, transform in ((rows, lambda f: f), (jit(elements), jit)):
        wanted = in_numpy(lambda x, *terms, f=f: (f(x), coefficients(f, x, terms)))(x, *terms)
        value, series = transform(lambda x, *terms, f=f: jet(ta.in_place(f), (x,), (list(terms),)))(x, *terms)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-12)
        np.testing.assert_allclose(series, wanted[1], rtol=1e-9, atol=1e-12)


def test_a_series_of_an_op_can_be_differentiated_and_batched():
    x, *terms = np.random.default_rng(0).normal(size=(3, 5, 3))
    ours, plain = (lambda x, ops=ops: ops.ta_max(jnp.sin(x), np.array([1, 3, 1]), x[:3]) for ops in (ta, unrolled))

    def total(series):
        return sum(jnp.sum(jnp.sin(c)) for c in series)

    found = jit(jax.vmap(jax.grad(lambda x: total(jet(ours, (x,), (terms,))[1]))))(np.stack([x, 2 * x]))
    expected = [in_numpy(jax.grad(lambda x: total(coefficients(plain, x, terms))))(x) for x in (x, 2 * x)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
