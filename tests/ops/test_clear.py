"""`ta_clear` and `ta_stack`: zeros in a range of rows, in place, at no cost where there are none.

`test_starts.py` has their values, derivatives and batches, for bounds of every dtype."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from in_place import assert_in_place, assert_no_whole_buffer_copy, compiled
from jax import lax

from jax_tensorarray import ta_read, ta_stack, ta_write
from jax_tensorarray._ops import reference
from jax_tensorarray._ops.clear import ta_clear

rng = np.random.default_rng(0)
BUFFER = rng.normal(size=(5, 2))


# --- values ----------------------------------------------------------------------------------------------------


ANY = [-(2**100), -(2**40), -1, 2, 2**31, 2**32 + 2, 2**63, 2**100, np.int64(2**40), np.uint64(2**63)]


@pytest.mark.parametrize("x64", [True, False])
def test_a_python_or_numpy_bound_may_be_of_any_magnitude(x64):
    buffer = BUFFER.astype(np.float32)
    with jax.enable_x64(x64):
        for at in (*ANY, np.array(-(2**40)), jnp.uint32(2**32 - 1)):
            for b in (buffer, (4 * buffer).astype(ml_dtypes.int4)):  # by a kernel, and in plain JAX
                oracle.assert_same_bits(ta_clear(jnp.asarray(b), at, 4), oracle.ta_clear(b, at, 4))
                oracle.assert_same_bits(ta_clear(jnp.asarray(b), 1, at), oracle.ta_clear(b, 1, at))
                oracle.assert_same_bits(ta_stack(jnp.asarray(b), at), oracle.ta_stack(b, at))
    np.testing.assert_array_equal(ta_stack(BUFFER), BUFFER)


def test_nans_become_zeros_and_so_do_their_tangents():
    buffer = jnp.array([1.0, np.nan, np.inf])
    for f in (lambda b: ta_clear(b, 1, 3), lambda b: ta_stack(b, jnp.array(1))):
        for found in jax.jvp(f, (buffer,), (buffer,)):
            np.testing.assert_array_equal(found, [1, 0, 0])


@pytest.mark.parametrize("name", ["start", "stop"])
def test_a_bound_is_an_integer_scalar(name):
    bounds = {"start": 0, "stop": 1}
    with pytest.raises(TypeError, match=f"^ta_clear: {name} must have an integer dtype, got float"):
        ta_clear(BUFFER, **(bounds | {name: 1.0}))
    with pytest.raises(ValueError, match=rf"^ta_clear: {name} must be a scalar, got shape \(2,\)"):
        ta_clear(BUFFER, **(bounds | {name: jnp.array([1, 2])}))


# --- in place --------------------------------------------------------------------------------------------------


def rows_of(length, dtype=jnp.float32):
    return (jnp.ones((length, 64), dtype),)


def read_beside_clear(x):
    def body(carry, k):
        b, total = carry
        seen = ta_read(b, (k * 7) % len(x))
        cleared = ta_clear(b, k, k + 1)
        return (cleared, total + jnp.sum(jnp.sin(seen) * ta_read(b, k))), None

    return lax.scan(body, (x, jnp.zeros((), x.dtype)), jnp.arange(len(x)))[0][1]


def clear_in_cond(x):
    def body(b, k):
        b = lax.cond(k % 3 == 0, lambda b: ta_clear(b, k - 1, k), lambda b: ta_write(b, k, jnp.cos(ta_read(b, k))), b)
        return b, None

    return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0] ** 2)


PROGRAMS = {f.__name__: f for f in (read_beside_clear, clear_in_cond)}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_that_clears_is_in_place(name):
    """Forward too, which its gradient begins with."""
    assert_in_place(jax.grad(PROGRAMS[name]), rows_of)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_clearing_nothing_costs_nothing_in_plain_jax_either(batch):
    """A dtype that is packed below a byte has no kernel."""

    def f(x):
        ends = jnp.zeros(batch, int)
        body = functools.partial(reference.clear, batch_dims=len(batch))
        return lax.fori_loop(0, x.shape[len(batch)], lambda k, b: body(b, ends + k, ends + k + (k % 5 == 0)), x)

    def args_of(length):
        return (jnp.ones((*batch, length, 64), jnp.int8),)

    assert_no_whole_buffer_copy(compiled(f, *args_of(2000)), args_of(2000)[0])
