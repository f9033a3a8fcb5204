"""The exceptions on the page of guarantees are as it says, and every test that it names is there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jax_tensorarray import in_place

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "guarantees.md"


def test_the_tests_that_the_page_names_are_there():
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) > 20
    for file, test in named:
        path = ROOT / file
        assert path.exists(), file
        assert not test or f"def {test}(" in path.read_text(), f"{file}::{test}"


def test_sums_agree_up_to_rounding():
    def loss(b):
        return jnp.sum(lax.fori_loop(1, 50, lambda i, b: b.at[i].set(jnp.sin(b[0] + b[i - 1])), b) ** 2)

    b = jnp.linspace(0, 1, 200, dtype=jnp.float32).reshape(50, 4)
    np.testing.assert_allclose(jax.grad(in_place(loss))(b), jax.grad(loss)(b), rtol=1e-4)


@pytest.mark.slow
def test_a_broken_promise_of_an_index_has_another_gradient():
    def loss(b, index):
        def body(i, b):
            (row,) = b.at[jnp.stack([index])].get(mode="promise_in_bounds")
            return b.at[i].set(2 * row)

        return jnp.sum(lax.fori_loop(0, 2, body, b)[:2])

    b = jnp.arange(4.0)
    within, beyond = jnp.int32(3), jnp.int32(9)
    np.testing.assert_array_equal(jax.grad(in_place(loss))(b, within), jax.grad(loss)(b, within))
    np.testing.assert_array_equal(in_place(loss)(b, beyond), loss(b, beyond))
    assert jax.grad(in_place(loss))(b, beyond)[3] == 4 and jax.grad(loss)(b, beyond)[3] == 0


def test_the_sign_of_a_zero_may_differ():
    def f(b):
        body = lambda i, b: b + jnp.where(jnp.arange(4) == i, 1.0, 0.0)  # noqa: E731
        return lax.fori_loop(0, 2, body, b)

    b = jnp.array([1.0, 2.0, -0.0, -0.0])
    np.testing.assert_array_equal(in_place(f)(b), f(b))  # to NumPy both zeros are equal


@pytest.mark.parametrize("ordered", [False, True])
def test_unordered_callbacks_happen_once_each(ordered):
    seen = []

    def f(a, b):
        def step(carry, i):
            a, b = carry
            io_callback(lambda i: seen.append(int(i)), None, i, ordered=ordered)
            return (b, a.at[i].set(b[i - 1])), None

        return lax.scan(step, (a, b), jnp.arange(6))[0]

    jax.block_until_ready(jax.jit(in_place(f))(jnp.ones(8), jnp.zeros(8)))
    jax.effects_barrier()
    assert (seen if ordered else sorted(seen)) == [*range(6)]
