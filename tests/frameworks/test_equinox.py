"""Equinox: `eqx.filter_jit(in_place(step))`, and `in_place` at every other place of a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import STEP, placed, waves

eqx = pytest.importorskip("equinox", reason="equinox is not installed: pip install '.[test-frameworks]'")
optax = pytest.importorskip("optax", reason="optax is not installed: pip install '.[test-frameworks]'")

pytestmark = [pytest.mark.usefixtures("in_single_precision"), pytest.mark.filterwarnings("default")]

XS = waves(8, 3)


class Net(eqx.Module):
    """A recurrent model with a number, a function, a name and a bound among its leaves."""

    cell: eqx.nn.Linear
    activation: Callable
    rate: float
    start: int
    name: str = eqx.field(static=True)

    def __check_init__(self):
        if not 0 < self.rate < 1:  # no tracer and no placeholder can be compared
            raise ValueError(f"rate must be between 0 and 1, got {self.rate}")

    def __call__(self, xs):
        def step(i, b):
            return b.at[i].set(self.activation(self.rate * self.cell(b[i - 1]) + b[i // 2]))

        return lax.fori_loop(self.start, len(xs), step, xs)


def net():
    return Net(eqx.nn.Linear(3, 3, key=jax.random.key(0)), jnp.tanh, 0.5, 1, "net")


ADAM = optax.adam(0.1)


@pytest.mark.slow
@placed("loss", "grad", *STEP)
def test_a_filtered_step(at):
    def step(net, state, xs, weight):
        loss = at("loss", lambda net: weight * jnp.sum(net(xs) ** 2))
        value, grads = at("grad", eqx.filter_value_and_grad(loss))(net)
        updates, state = ADAM.update(grads, state, eqx.filter(net, eqx.is_inexact_array))
        return eqx.apply_updates(net, updates), state, value

    model = net()
    step = at.step(step, eqx.filter_jit)
    model, state, first = step(model, ADAM.init(eqx.filter(model, eqx.is_inexact_array)), XS, 0.5)
    return step(model, state, XS, 0.25), first


@pytest.mark.slow(but=1)
@placed("model", "checkpoint", "vmap", *STEP)
def test_an_ensemble_of_checkpointed_models(at):
    @eqx.filter_vmap
    def make(key):
        return eqx.nn.MLP(3, 3, 4, 1, key=key)

    def run(mlp, xs):
        block = at("checkpoint", eqx.filter_checkpoint(at("model", lambda mlp, b, i: b.at[i].set(mlp(b[i // 2])))))
        return lax.scan(lambda b, i: (block(mlp, b, i), b[i]), xs, jnp.arange(1, len(xs)))

    def step(mlps, xs):
        batch = at("vmap", eqx.filter_vmap(run, in_axes=(eqx.if_array(0), None)))
        return eqx.filter_grad(lambda mlps: jnp.sum(batch(mlps, xs)[0] ** 2))(mlps)

    return at.step(step, eqx.filter_jit)(make(jax.random.split(jax.random.key(0), 2)), XS)


class Counts(eqx.Module):
    """A recurrent model whose last state is normalised over the batch."""

    norm: eqx.nn.BatchNorm
    cell: eqx.nn.GRUCell

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.cell = eqx.nn.GRUCell(3, 3, key=jax.random.key(0))

    def __call__(self, xs, state):
        def step(hs, i):
            return hs.at[i].set(self.cell(xs[i], hs[i // 2])), None

        hs, _ = lax.scan(step, jnp.zeros((len(xs), 3)), jnp.arange(len(xs)))
        return self.norm(hs[-1], state)


@pytest.mark.slow(but=1)
@placed("loss", *STEP)
def test_a_model_with_state(at):
    def loss(model, state, batch):
        ys, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
        return jnp.mean(ys**2), state

    def step(model, state, batch):
        grads, state = eqx.filter_grad(at("loss", loss), has_aux=True)(model, state, batch)
        return eqx.apply_updates(model, grads), state

    model, state = eqx.nn.make_with_state(Counts)()
    return at.step(step, eqx.filter_jit)(model, state, waves(2, 5, 3))


@placed("loop", "step", raises=eqx.EquinoxRuntimeError)
def test_an_error_at_run_time(at):
    """`eqx.filter_jit` is outermost: it makes the error of what XLA raises."""

    def fill(net, xs):
        def step(i, b):
            b = eqx.error_if(b, i > 5, "the step is past 5")
            return b.at[i].set(net.activation(b[i // 2]))

        return lax.fori_loop(net.start, len(xs), step, xs)

    return eqx.filter_jit(at("step", lambda net, xs: at("loop", fill)(net, xs)))(net(), XS)
