"""Diffrax: a neural differential equation. Its solver is a loop of Equinox, with a reverse mode by checkpoints."""

import jax
import jax.numpy as jnp
import pytest
from placements import placed, waves

diffrax = pytest.importorskip("diffrax", reason="diffrax is not installed: pip install '.[test-frameworks]'")
eqx = pytest.importorskip("equinox")

pytestmark = [
    pytest.mark.usefixtures("in_single_precision"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.slow,
]


@placed("solve", "in jit")
def test_a_neural_differential_equation_is_trained(at):
    def solve(field, start):
        term, saved = diffrax.ODETerm(lambda t, y, args: field(y)), diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 3))
        return diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.3, start, saveat=saved, max_steps=8).ys

    def train_step(field, start):
        grads = eqx.filter_grad(lambda field: jnp.mean(at("solve", solve)(field, start) ** 2))(field)
        return eqx.apply_updates(field, jax.tree.map(lambda g: -0.1 * g, grads))

    field = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    return at.step(train_step, eqx.filter_jit)(field, jnp.asarray(waves(2)))
