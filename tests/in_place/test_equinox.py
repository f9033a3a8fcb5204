"""Loops of Equinox: their selects and writes are of rows, also where `in_place` comes before `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import compiled

from jax_tensorarray import in_place
from jax_tensorarray._hlo import text as hlo_text

pytestmark = pytest.mark.slow(but=1)

eqxi = pytest.importorskip("equinox.internal")

STEPS, SIZE = 100, 32


def solution(x, *, kind, declared):
    """A number of steps that depends on the example, saved where they were taken."""

    def body(c):
        i, y, ys = c
        y = jnp.sin(y) + 0.1 * y + (0.0 if declared else 0.1 * ys[i // 2])
        return i + 1, y, ys.at[i].set(y)

    def goes_on(c):
        return (c[0] < STEPS) & (jnp.sum(c[1]) < 1e5)

    options = {"buffers": lambda c: c[2]} if declared else {}
    if kind == "checkpointed":
        options["checkpoints"] = 10
    start = (0, x, jnp.zeros((STEPS, SIZE)))
    return eqxi.while_loop(goes_on, body, start, max_steps=STEPS, kind=kind, **options)[2]


@pytest.mark.parametrize(("kind", "declared"), [("lax", True), ("lax", False), ("checkpointed", False)])
def test_its_loops_select_rows(kind, declared):
    def f(x):
        return solution(x, kind=kind, declared=declared)

    x = np.random.default_rng(0).random((4, SIZE))
    want = jax.jit(jax.vmap(f))(x)
    for g in (in_place(jax.vmap(f)), jax.vmap(in_place(f))):
        np.testing.assert_allclose(jax.jit(g)(x), want, rtol=1e-12)
        assert not hlo_text.copies_in_loops(compiled(g, x).as_text(), want.nbytes)


def test_the_gradient_of_its_checkpointed_loop():
    def loss(x):
        return jnp.sum(solution(x, kind="checkpointed", declared=True) ** 2)

    x = np.random.default_rng(0).random(SIZE)
    want = jax.jit(jax.grad(loss))(x)
    for g in (in_place(jax.grad(loss)), jax.grad(in_place(loss))):
        np.testing.assert_allclose(jax.jit(g)(x), want, rtol=1e-12)
