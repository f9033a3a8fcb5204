"""Flax Linen: `jax.jit(in_place(train_step))`, and `in_place` at every other place of a step."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import placed, waves

nn = pytest.importorskip("flax.linen", reason="flax is not installed: pip install '.[test-frameworks]'")
optax = pytest.importorskip("optax", reason="optax is not installed: pip install '.[test-frameworks]'")
train_state = pytest.importorskip("flax.training.train_state")

pytestmark = [pytest.mark.usefixtures("in_single_precision"), pytest.mark.filterwarnings("default")]

XS = waves(2, 6, 2)  # [batch, time, features]


class Remembers(nn.Module):
    """A recurrent layer that reads one of its earlier states."""

    size: int = 4

    @nn.compact
    def __call__(self, carry, x):
        i, states = carry
        h = nn.tanh(nn.Dense(self.size)(jnp.concatenate([x, states[:, i // 2]], axis=-1)))
        return (i + 1, states.at[:, i].set(h)), h


def scanned(cell, xs, size=4):
    start = jnp.int32(0), jnp.zeros((len(xs), xs.shape[1], size))
    scan = nn.scan(cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
    return scan(size)(start, xs)[1]


class Layers(nn.Module):
    """Layers whose parameters are stacked, each of them computed again in the backward pass, and dropout."""

    @nn.compact
    def __call__(self, xs, train):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, xs, train):
                h = nn.Dropout(0.5, deterministic=not train)(scanned(Remembers, xs))
                return nn.Dense(2)(h) + xs, None

        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
        layers = nn.scan(nn.remat(Layer, static_argnums=2), length=3, in_axes=nn.broadcast, **options)
        return layers()(xs, train)[0]


MODEL, ADAM = Layers(), optax.adam(0.1)


@functools.cache
def start():
    params = jax.jit(MODEL.init, static_argnums=2)(jax.random.key(0), XS, False)["params"]
    return train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=ADAM)


@pytest.mark.slow
@placed("loss", "grad", "in jit", "instead of jit")
def test_a_train_state_and_layers_that_are_scanned_and_computed_again(at):
    def train_step(state, xs, key):
        def loss(params):
            ys = state.apply_fn({"params": params}, xs, True, rngs={"dropout": jax.random.fold_in(key, state.step)})
            return jnp.mean((ys - jnp.roll(xs, 1, axis=1)) ** 2)

        value, grads = at("grad", jax.value_and_grad(at("loss", loss)))(state.params)
        return state.apply_gradients(grads=grads), value

    return at.step(train_step)(start(), XS, jax.random.key(1))


class Cell(nn.RNNCellBase):
    """The same layer as a cell of `nn.RNN`, with the statistics of its inputs."""

    size: int = 4
    steps: int = 6

    @nn.compact
    def __call__(self, carry, x):
        i, states = carry
        h = nn.tanh(nn.Dense(self.size)(jnp.concatenate([x, states[:, i // 2]], axis=-1)))
        return (i + 1, states.at[:, i].set(h)), h

    def initialize_carry(self, rng, input_shape):
        return jnp.int32(0), jnp.zeros((input_shape[0], self.steps, self.size))

    @property
    def num_feature_axes(self):
        return 1


class Normalised(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, xs):
        return nn.RNN(Cell())(nn.BatchNorm(use_running_average=False)(xs))


@pytest.mark.slow(but=1)
@placed("loss", "around jit")
def test_an_rnn_with_statistics_in_a_jitted_module(at):
    model = Normalised()

    def loss(params, stats, xs):
        ys, changed = model.apply({"params": params, "batch_stats": stats}, xs, mutable=["batch_stats"])
        return jnp.mean(ys**2), changed["batch_stats"]

    def train_step(variables, xs):
        grad = at("grad", jax.value_and_grad(at("loss", loss), has_aux=True))
        (value, stats), grads = grad(variables["params"], variables["batch_stats"], xs)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, "batch_stats": stats}, value

    return at.step(train_step)(model.init(jax.random.key(0), XS), XS)


class Attends(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.MultiHeadDotProductAttention(2, qkv_features=4, decode=True)(nn.LayerNorm()(x)))


@pytest.mark.slow
@placed("apply", "instead of jit")
def test_a_decoder_with_its_cache(at):
    model = Attends()

    def decode(variables, x, key):
        def step(carry, key):
            cache, x = carry
            y, changed = at("apply", model.apply)({**variables, "cache": cache}, x, mutable="cache")
            y = y + jax.random.normal(key, y.shape)
            return (changed["cache"], y), y[:, 0]

        (cache, _), ys = lax.scan(step, (variables["cache"], x), jax.random.split(key, 5))
        return cache, ys

    variables = model.init(jax.random.key(0), jnp.zeros((2, 5, 4)))
    return at.step(decode)(variables, waves(2, 1, 4), jax.random.key(1))
