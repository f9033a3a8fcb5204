"""TensorArrays inside of the libraries that people use with JAX. A test is skipped if its library is not installed."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import TensorArray, fori_loop

STEPS, ROW = 5, 3
rng = np.random.default_rng(0)
XS = jnp.asarray(rng.normal(size=(STEPS, ROW)), jnp.float32)


def need(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[ecosystem]'")


def close(found, wanted, tolerance=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, wanted)


def empty():
    return TensorArray(jnp.float32, size=STEPS, element_shape=(ROW,))


def plain_rnn(kernel, bias, xs):
    """Each state is made from that two steps before."""
    h = [jnp.zeros(ROW, xs.dtype)]
    for i, x in enumerate(xs):
        h.append(jnp.tanh((x + h[max(i - 1, 0)]) @ kernel + bias))
    return jnp.stack(h[1:])


def read_two_back(states, i):
    """The state before the last one, of a TensorArray that has those of all steps; zeros at first."""
    return jnp.where(i < 2, jnp.zeros(ROW, states.dtype), states.read(jnp.maximum(i - 2, 0)))


def plain_layers(kernels, x):
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return x


KERNELS = jnp.asarray(rng.normal(size=(4, ROW, ROW)), jnp.float32)

# --- flax ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_linen_scan_carries_a_tensorarray():
    nn = need("flax.linen")

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            i, states = carry
            h = jnp.tanh(nn.Dense(ROW)(x + read_two_back(states, i)))
            return (i + 1, states.write(i, h)), None

    class Rnn(nn.Module):
        @nn.compact
        def __call__(self, xs):
            cell = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False})()
            (_, states), _ = cell((jnp.int32(0), empty()), xs)
            return states.stack()

    variables = Rnn().init(jax.random.key(0), XS)
    dense = variables["params"]["ScanCell_0"]["Dense_0"]
    close(Rnn().apply(variables, XS), plain_rnn(dense["kernel"], dense["bias"], XS))
    grads = jax.jit(jax.grad(lambda v: jnp.sum(Rnn().apply(v, XS) ** 2)))(variables)
    wanted = jax.grad(lambda d: jnp.sum(plain_rnn(d["kernel"], d["bias"], XS) ** 2))(dense)
    close(grads["params"]["ScanCell_0"]["Dense_0"], wanted)


def test_nnx_scan_carries_a_tensorarray():
    nnx = need("flax.nnx")

    class Rnn(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(ROW, ROW, rngs=rngs)

        def __call__(self, xs):
            @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
            def step(carry, dense, x):
                i, states = carry
                h = jnp.tanh(dense(x + read_two_back(states, i)))
                return (i + 1, states.write(i, h)), h[0]

            (_, states), _ = step((jnp.int32(0), empty()), self.dense, xs)
            return states.stack()

    model = Rnn(nnx.Rngs(0))
    kernel, bias = model.dense.kernel[...], model.dense.bias[...]
    close(nnx.jit(lambda m, x: m(x))(model, XS), plain_rnn(kernel, bias, XS))
    grads = nnx.jit(nnx.grad(lambda m: jnp.sum(m(XS) ** 2)))(model)
    wanted = jax.grad(lambda w, b: jnp.sum(plain_rnn(w, b, XS) ** 2), (0, 1))(kernel, bias)
    close((grads["dense"]["kernel"][...], grads["dense"]["bias"][...]), wanted)


def test_nnx_layers_are_rows_of_a_tensorarray_and_states_a_variable():
    nnx = need("flax.nnx")

    class Layers(nnx.Module):
        def __init__(self):
            self.kernels = nnx.Param(TensorArray.from_array(KERNELS))
            self.seen = nnx.Variable(TensorArray(jnp.float32, 0, True, max_size=STEPS, element_shape=(ROW,)))

        def __call__(self, x):
            kernels = self.kernels.get_value()
            self.seen.set_value(self.seen.get_value().append(x))
            return lax.fori_loop(0, len(kernels), lambda k, x: jnp.tanh(x @ kernels.read(k)), x)

    model = Layers()
    step = nnx.jit(lambda m, x: m(x))
    for k in range(2):
        close(step(model, XS[k]), plain_layers(KERNELS, XS[k]))
    close(model.seen.get_value().stack(), XS[:2])
    grads = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x))))(model, XS[2])
    assert len(model.seen.get_value()) == 3
    wanted = jax.grad(lambda w: jnp.sum(plain_layers(w, XS[2])))(KERNELS)
    close(grads["kernels"].get_value().stack(), wanted)


# --- equinox and optax -----------------------------------------------------------------------------------------


def test_an_equinox_module_has_tensorarrays():
    eqx = need("equinox")

    class Layers(eqx.Module):
        kernels: TensorArray
        seen: TensorArray
        activation: object

        def __call__(self, x):
            return lax.fori_loop(0, len(self.kernels), lambda k, x: self.activation(x @ self.kernels.read(k)), x)

    seen = TensorArray(jnp.float32, 0, True, max_size=STEPS, element_shape=(ROW,))
    model = Layers(TensorArray.from_array(KERNELS), seen, jnp.tanh)

    @eqx.filter_jit
    def step(model, x):
        value, grads = eqx.filter_value_and_grad(lambda m, x: jnp.sum(m(x)))(model, x)
        return eqx.tree_at(lambda m: m.seen, model, model.seen.append(x)), value, grads

    for k in range(2):
        model, value, grads = step(model, XS[k])
        wanted = jax.value_and_grad(lambda w, x=XS[k]: jnp.sum(plain_layers(w, x)))(KERNELS)
        close((value, grads.kernels.stack()), wanted)
    close(model.seen.stack(), XS[:2])
    # What is learned and what is not are parts of one tree, in which leaves are None.
    learned, rest = eqx.partition(model, eqx.is_inexact_array)
    assert jax.tree.leaves(learned.seen)[0].shape == (STEPS, ROW)
    assert [x.dtype for x in jax.tree.leaves(rest.seen)] == [np.int32]
    whole = eqx.combine(learned, rest)
    assert jax.tree.structure(whole) == jax.tree.structure(model)
    close(whole.seen.stack(), model.seen.stack())
    moved = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    close(moved.kernels.stack(), KERNELS - 0.1 * grads.kernels.stack())


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["adam", "adafactor"])
def test_optax_updates_parameters_that_are_tensorarrays(name):
    optax = need("optax")
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), getattr(optax, name)(0.1))

    def train(params, apply):
        state = optimiser.init(params)

        @jax.jit
        def update(params, state):
            value, grads = jax.value_and_grad(lambda p: jnp.sum((apply(p, XS[0]) - XS[1]) ** 2))(params)
            updates, state = optimiser.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        values = []
        for _ in range(4):
            params, state, value = update(params, state)
            values.append(value)
        return params, jnp.stack(values), state

    def by_rows(kernels, x):
        return lax.fori_loop(0, len(kernels), lambda k, x: jnp.tanh(x @ kernels.read(k)), x)

    found, values, state = train(TensorArray.from_array(KERNELS), by_rows)
    wanted, wanted_values, wanted_state = train(KERNELS, plain_layers)
    assert isinstance(found, TensorArray)
    close((found.stack(), values), (wanted, wanted_values), 1e-4)
    close(jax.tree.leaves(state), jax.tree.leaves(wanted_state), 1e-4)


# --- diffrax ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_state_of_a_diffrax_equation_is_a_tensorarray():
    diffrax = need("diffrax")

    def solve(y0, field):
        terms, adjoint = diffrax.ODETerm(field), diffrax.DirectAdjoint()
        return diffrax.diffeqsolve(terms, diffrax.Heun(), 0.0, 1.0, 0.25, y0, adjoint=adjoint, max_steps=4).ys

    def chain(t, y, args):  # each row follows the one before
        return y.write(0, -y.read(0)).scatter(jnp.arange(1, STEPS), y.gather(jnp.arange(STEPS - 1)))

    def plain(t, y, args):
        return jnp.concatenate([-y[:1], y[:-1]])

    def loss(y0, field):
        (ys,) = jax.tree.leaves(solve(y0, field))
        return jnp.sum(ys**2)

    def values_and_gradient(y0, field):
        return jax.jit(lambda y0: (solve(y0, field), jax.grad(loss)(y0, field)))(y0)

    found, gradient = values_and_gradient(TensorArray.from_array(XS), chain)
    wanted, wanted_gradient = values_and_gradient(XS, plain)
    assert isinstance(found, TensorArray)
    close(jax.tree.map(lambda y: y[-1], found).stack(), wanted[-1])
    close(gradient.stack(), wanted_gradient, 1e-4)


# --- samples ---------------------------------------------------------------------------------------------------


def log_density(x):
    return -jnp.sum(x["a"] ** 2) - jnp.sum((x["b"] - x["a"]) ** 2)


@pytest.mark.slow
def test_blackjax_samples_are_rows_of_a_tensorarray():
    blackjax = need("blackjax")
    start = {"a": jnp.array(0.5), "b": jnp.ones(2)}
    kernel = blackjax.hmc(log_density, 0.2, jnp.ones(3), 4)
    keys = jax.random.split(jax.random.key(0), 20)

    def sample(k, carry):
        state, samples = carry
        state, _ = kernel.step(keys[k], state)
        return state, samples.write(k, state.position)

    init = kernel.init(start), TensorArray.like(start, len(keys))
    _, samples = jax.jit(lambda init: fori_loop(0, len(keys), sample, init))(init)
    _, wanted = lax.scan(lambda s, key: (kernel.step(key, s)[0],) * 2, init[0], keys)
    close(samples.stack(), wanted.position)
    assert len(np.unique(samples.stack()["a"])) > 5


@pytest.mark.slow
def test_numpyro_samples_are_rows_of_a_tensorarray():
    numpyro = need("numpyro")
    start = {"a": jnp.array(0.5), "b": jnp.ones(2)}
    kernel = numpyro.infer.HMC(
        potential_fn=lambda x: -log_density(x), num_steps=4, trajectory_length=None, adapt_mass_matrix=False
    )
    state = kernel.init(jax.random.key(1), 3, start, (), {})

    @jax.jit
    def run(state):
        def sample(k, carry):
            state, samples = carry
            state = kernel.sample(state, (), {})
            return state, samples.append(state.z, where=k >= 3)  # after the warm-up

        samples = TensorArray.like(start, 0, dynamic_size=True, max_size=8)
        return lax.fori_loop(0, 8, sample, (state, samples))[1]

    _, wanted = lax.scan(lambda s, _: (kernel.sample(s, (), {}),) * 2, state, length=8)
    samples = run(state)
    assert len(samples) == 5
    close(samples.stack(), jax.tree.map(lambda x: x[3:], wanted.z), 1e-4)


# --- what is known of a TensorArray ----------------------------------------------------------------------------


def test_chex_asserts_and_dataclasses():
    chex = need("chex")

    @chex.dataclass
    class Memory:
        seen: TensorArray
        count: chex.Array

    @jax.jit
    @chex.assert_max_traces(1)
    def push(memory, x):
        chex.assert_shape(x, (ROW,))
        return memory.replace(seen=memory.seen.write(memory.count, x), count=memory.count + 1)

    memory = Memory(seen=empty(), count=jnp.int32(0))
    for k in range(3):
        memory = push(memory, XS[k])
    close(memory.seen.stack(), jnp.concatenate([XS[:3], jnp.zeros((2, ROW))]))
    other = TensorArray.from_array(memory.seen.stack())
    chex.assert_trees_all_equal(memory.seen, other)
    chex.assert_trees_all_equal_shapes_and_dtypes(memory.seen, empty())
    chex.assert_tree_all_finite(memory)
    chex.assert_tree_shape_prefix(memory.seen, (STEPS,))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(memory.seen, other.write(1, XS[4]))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal_structs(memory.seen, TensorArray(jnp.float32, 0, True, element_shape=(ROW,)))
    with pytest.raises(AssertionError):
        chex.assert_tree_all_finite(other.write(0, jnp.full(ROW, jnp.nan)))


def test_jaxtyping_annotations():
    jaxtyping = need("jaxtyping")
    array, tree, dtype = jax.Array, jaxtyping.PyTree, jaxtyping.Float32
    assert isinstance(empty(), tree[dtype[array, "5 3"]])
    assert not isinstance(empty(), tree[dtype[array, "4 3"]])
    assert not isinstance(empty(), tree[jaxtyping.Int[array, "5 3"]])

    @jax.jit
    def f(ta, row):
        with jaxtyping.jaxtyped("context"):  # in which t and d are the same everywhere
            assert isinstance(ta, tree[dtype[array, "t d"]])
            assert isinstance(ta.read(0), dtype[array, " d"])
            assert isinstance(ta.stack(), dtype[array, "t d"])
            return isinstance(row, dtype[array, " d"])

    assert f(empty(), XS[0])
    assert not f(empty(), XS[0, :2])


# --- keras -----------------------------------------------------------------------------------------------------

KERAS = """
import jax, jax.numpy as jnp, numpy as np
import keras
from jax import lax
from jax_tensorarray import TensorArray

assert keras.backend.backend() == "jax"


class TwoBack(keras.layers.Layer):
    '''A recurrent layer whose state is made from that two steps before.'''

    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units, activation="tanh")
        self.units = units

    def build(self, shape):
        self.dense.build((shape[0], shape[2] + self.units))

    def call(self, xs):
        batch, steps, _ = xs.shape
        before = jnp.zeros((xs.shape[0], self.units), xs.dtype)
        states = TensorArray(xs.dtype, size=steps, element_shape=before.shape)

        def step(i, states):
            h = jnp.where(i < 2, before, states.read(jnp.maximum(i - 2, 0)))
            return states.write(i, self.dense(jnp.concatenate([xs[:, i], h], axis=-1)))

        return jnp.moveaxis(lax.fori_loop(0, steps, step, states).stack(), 0, 1)

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.units)


keras.utils.set_random_seed(0)
xs = np.random.default_rng(0).normal(size=(16, 6, 3)).astype(np.float32)
layer = TwoBack(4)
found = np.asarray(layer(xs))
kernel, bias = (np.asarray(v) for v in layer.get_weights())
wanted = []
for i in range(6):
    h = wanted[i - 2] if i >= 2 else np.zeros((16, 4), np.float32)
    wanted.append(np.tanh(np.concatenate([xs[:, i], h], -1) @ kernel + bias))
np.testing.assert_allclose(found, np.stack(wanted, 1), rtol=1e-5, atol=1e-5)

model = keras.Sequential([keras.Input((6, 3), batch_size=16), layer, keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
targets = np.roll(xs, 2, axis=1)[..., :1]
losses = model.fit(xs, targets, batch_size=16, epochs=20, verbose=0).history["loss"]
assert losses[-1] < 0.7 * losses[0], losses
error = np.mean((model.predict(xs, 16, verbose=0) - targets) ** 2)
np.testing.assert_allclose(model.evaluate(xs, targets, batch_size=16, verbose=0), error, rtol=1e-4)
print("fitted")
"""


def test_a_keras_layer_on_the_jax_backend():
    if importlib.util.find_spec("keras") is None:  # to import it here would be with its default backend
        pytest.skip("keras is not installed: pip install '.[ecosystem]'")
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KERAS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "fitted"
