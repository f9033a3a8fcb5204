"""Loops of public libraries under `in_place`: the same results. A test is skipped if its library is not installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_place import assert_no_whole_buffer_copy, compiled
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray._in_place import rows

KEY = jax.random.key(0)


def need(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[ecosystem]'")


@pytest.fixture(autouse=True, scope="module")
def in_single_precision():
    with jax.enable_x64(False):
        yield


def gaussian(x):
    return -0.5 * jnp.sum(x**2)


def blackjax_chains():
    blackjax = need("blackjax")

    def chain(key):
        nuts = blackjax.nuts(gaussian, 0.5, jnp.ones(3))
        step = lambda s, k: (nuts.step(k, s)[0], s.position)  # noqa: E731
        return lax.scan(step, nuts.init(jnp.ones(3)), jax.random.split(key, 5))[1]

    return jax.vmap(chain), jax.random.split(KEY, 3)


def diffrax_gradient():
    diffrax = need("diffrax")

    def solved(y):
        term, at = diffrax.ODETerm(lambda t, y, args: -y), diffrax.SaveAt(ts=jnp.linspace(0, 1, 20))
        steps = diffrax.PIDController(1e-4, 1e-4)
        solution = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.05, y, saveat=at, stepsize_controller=steps)
        return jnp.sum(solution.ys)

    return jax.grad(solved), jnp.arange(3.0)


def equinox_bounded_loop():
    loops = need("equinox.internal")

    def filled(x):
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.sin(c[1][c[0] // 2])))  # noqa: E731
        return jnp.sum(loops.while_loop(lambda c: c[0] < len(x), body, (0, x), max_steps=16, kind="bounded")[1])

    return jax.grad(filled), jnp.ones(12)


def flashbax_items():
    flashbax = need("flashbax")
    buffer = flashbax.make_item_buffer(max_length=100, min_length=1, sample_batch_size=4)

    def filled(key):
        def step(state, key):
            state = buffer.add(state, {"x": jax.random.normal(key, (8,))})
            return state, buffer.sample(state, key).experience["x"][0]

        return lax.scan(step, buffer.init({"x": jnp.zeros(8)}), jax.random.split(key, 50))[1]

    return filled, KEY


def flax_network():
    nn = need("flax.linen")
    model, x = nn.RNN(nn.LSTMCell(8)), jnp.ones((2, 10, 4))
    return jax.grad(lambda p: jnp.sum(model.apply(p, x))), model.init(KEY, x)


def keras_layer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        keras = need("keras")
    layer = keras.layers.Bidirectional(keras.layers.GRU(8, return_sequences=True))
    x = jax.random.normal(KEY, (3, 20, 4))
    layer(x)
    weights, others = ([v.value for v in vs] for vs in (layer.trainable_variables, layer.non_trainable_variables))
    return jax.grad(lambda weights: jnp.sum(layer.stateless_call(weights, others, x)[0] ** 2)), weights


def jax_minimize():
    from jax.scipy.optimize import minimize

    return lambda x: minimize(lambda x: jnp.sum((x - 1) ** 4), x, method="BFGS").x, jnp.zeros(4)


def numpyro_samples():
    numpyro, collect = need("numpyro"), need("numpyro.util").fori_collect
    infer = need("numpyro.infer")
    y = jnp.linspace(-1, 1, 10)

    def model(y):
        mean = numpyro.sample("mean", numpyro.distributions.Normal(0, 1))
        numpyro.sample("y", numpyro.distributions.Normal(mean, 1), obs=y)

    def sampled(key):
        kernel = infer.NUTS(model)
        state = kernel.init(key, 5, None, (y,), {})
        step = lambda s: kernel.sample(s, (y,), {})  # noqa: E731
        return collect(0, 10, step, state, transform=lambda s: s.z, progbar=False)

    return sampled, KEY


def optax_history():
    optax = need("optax")

    def minimized(x):
        method, f = optax.lbfgs(), lambda x: jnp.sum((x - 1) ** 2 * jnp.arange(1, 6))
        value_and_grad = optax.value_and_grad_from_state(f)

        def step(c, _):
            x, state = c
            value, grad = value_and_grad(x, state=state)
            update, state = method.update(grad, state, x, value=value, grad=grad, value_fn=f)
            return (optax.apply_updates(x, update), state), value

        return lax.scan(step, (x, method.init(x)), None, length=10)[1]

    return minimized, jnp.zeros(5)


@pytest.mark.parametrize(
    "program",
    [
        blackjax_chains,
        diffrax_gradient,
        equinox_bounded_loop,
        flashbax_items,
        flax_network,
        jax_minimize,
        keras_layer,
        numpyro_samples,
        optax_history,
    ],
)
def test_a_library_gives_what_it_gave(program, monkeypatch):
    monkeypatch.setattr(rows, "LEAST_BYTES", 0)
    f, x = program()
    got, want = (jax.jit(g)(x) for g in (in_place(f), f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("policy", ["muzero_policy", "gumbel_muzero_policy"])
def test_a_tree_search_works_on_no_whole_tree(policy):
    """That of mctx, whose trees are the same bit for bit."""
    mctx = need("mctx")
    examples, actions, width, simulations = 4, 8, 16, 300

    def recurrent(params, key, action, state):
        state = jnp.tanh(state @ params["w"] + jax.nn.one_hot(action, actions) @ params["a"])
        output = mctx.RecurrentFnOutput(
            reward=state[:, 0],
            discount=jnp.full(examples, 0.97),
            prior_logits=state @ params["p"],
            value=state @ params["v"],
        )
        return output, state

    keys = jax.random.split(KEY, 6)
    shapes = {"w": (width, width), "a": (actions, width), "p": (width, actions), "v": (width,)}
    params = {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items(), strict=False)}
    root = mctx.RootFnOutput(
        prior_logits=jax.random.normal(keys[4], (examples, actions)),
        value=jnp.zeros(examples),
        embedding=jax.random.normal(keys[5], (examples, width)),
    )
    search = functools.partial(
        getattr(mctx, policy), params, root=root, recurrent_fn=recurrent, num_simulations=simulations
    )
    f = lambda key: search(key)  # noqa: E731
    got, want = (jax.jit(g)(KEY) for g in (in_place(f), f))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    tree = jnp.zeros((examples, simulations + 1))
    assert_no_whole_buffer_copy(compiled(in_place(f), KEY), tree)
    with pytest.raises(AssertionError):
        assert_no_whole_buffer_copy(compiled(f, KEY), tree)
