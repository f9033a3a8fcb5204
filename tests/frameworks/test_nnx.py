"""Flax NNX: `in_place` around the pure loss, `nnx.jit` outermost.

A module carries updates out of a function only through the transformations of NNX, so other places are allowed to raise
an error that says so, but not to drop an update.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import STEP, assert_same_or_refused, placed, waves

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed: pip install '.[test-frameworks]'")
optax = pytest.importorskip("optax", reason="optax is not installed: pip install '.[test-frameworks]'")

pytestmark = [pytest.mark.usefixtures("in_single_precision"), pytest.mark.filterwarnings("default")]

XS = waves(6, 2)
ADAM = optax.adam(0.1)


class Remembers(nnx.Module):
    """A recurrent model that reads one of its earlier states."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, xs):
        def step(states, i):
            h = jnp.tanh(self.dense(jnp.concatenate([xs[i], states[i // 2]])))
            return states.at[i].set(h), jnp.sum(h)

        return lax.scan(step, jnp.zeros((len(xs), 4)), jnp.arange(len(xs)))[0]


class Counts(Remembers):
    """The same model with dropout and a counter, which change in every call."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, xs):
        self.calls[...] += 1
        return self.dropout(super().__call__(xs))


def started(model):
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def values(*modules):
    """What the modules hold, as arrays."""
    return [nnx.to_pure_dict(nnx.state(module)) for module in modules]


@pytest.mark.slow(but=1)
@placed("loss", "grad")
def test_a_pure_loss_of_a_module(at):
    @nnx.jit
    def train_step(model, optimizer, xs):
        loss = at("loss", lambda model, xs: jnp.mean(model(xs) ** 2))
        value, grads = at("grad", nnx.value_and_grad(loss))(model, xs)
        optimizer.update(model, grads)
        return value

    model, optimizer = started(Remembers(nnx.Rngs(0)))
    losses = [train_step(model, optimizer, XS) for _ in range(2)]
    return losses, values(model, optimizer)


@pytest.mark.slow(but=1)
@placed("loss", "grad")
def test_a_loss_of_the_state_of_a_module_that_changes(at):
    @nnx.jit
    def train_step(model, optimizer, xs):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, rest, xs):
            model = nnx.merge(graphdef, params, rest, copy=True)
            return jnp.mean(model(xs) ** 2), nnx.state(model, nnx.Not(nnx.Param))

        grad = at("grad", jax.value_and_grad(at("loss", loss), has_aux=True))
        (value, rest), grads = grad(params, rest, xs)
        nnx.update(model, rest)
        optimizer.update(model, grads)
        return value

    model, optimizer = started(Counts(nnx.Rngs(0)))
    losses = [train_step(model, optimizer, XS) for _ in range(2)]
    return losses, values(model, optimizer)


@pytest.mark.slow(but=1)
@placed("loss", *STEP)
def test_a_functional_step(at):
    def train_step(graphdef, state, xs):
        model, optimizer = nnx.merge(graphdef, state)
        grads = nnx.grad(at("loss", lambda model: jnp.mean(model(xs) ** 2)))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    graphdef, state = nnx.split(started(Remembers(nnx.Rngs(0))))
    step = at.step(train_step, lambda f: jax.jit(f, static_argnums=0))
    return nnx.to_pure_dict(step(graphdef, state, XS))


@pytest.mark.slow(but=1)
@placed("layer", "loss")
def test_layers_that_are_scanned_and_computed_again(at):
    @nnx.vmap(in_axes=0)
    def make(key):
        return nnx.Linear(6, 4, rngs=nnx.Rngs(key))

    def run(layers, xs):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def layer(xs, linear):
            def fill(linear, xs):
                def step(i, b):
                    return b.at[i].set(jnp.tanh(linear(jnp.concatenate([xs[i, :2], b[i // 2]]))))

                return lax.fori_loop(1, len(xs), step, xs)

            return at("layer", fill)(linear, xs)

        return jnp.sum(layer(xs, layers) ** 2)

    layers = make(jax.random.split(jax.random.key(0), 2))
    return nnx.to_pure_dict(nnx.jit(nnx.grad(at("loss", run)))(layers, waves(5, 4)))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("place", ["loss", "grad", *STEP])
def test_updates_of_a_module_are_carried_out_or_an_error_says_how(place):
    def program(at):
        def train_step(model, optimizer, xs):
            loss = at("loss", lambda model, xs: jnp.mean(model(xs) ** 2))
            value, grads = at("grad", nnx.value_and_grad(loss))(model, xs)
            optimizer.update(model, grads)
            return value

        model, optimizer = started(Counts(nnx.Rngs(0)))
        step = at.step(train_step, nnx.jit)
        losses = [step(model, optimizer, XS) for _ in range(2)]
        return losses, values(model, optimizer)

    assert_same_or_refused(program, place, "in_place", "Counts", "nnx.jit")
