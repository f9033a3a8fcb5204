"""Haiku: `in_place(f.apply)`, or `in_place` around the function that `jax.jit` is given."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import STEP, assert_same_or_refused, placed, waves

hk = pytest.importorskip("haiku", reason="haiku is not installed: pip install '.[test-frameworks]'")

pytestmark = [pytest.mark.usefixtures("in_single_precision"), pytest.mark.filterwarnings("default")]

XS = waves(6, 2)


def remembers(xs):
    """A recurrent model that reads one of its earlier states."""
    dense = hk.Linear(4)

    def step(states, i):
        h = jnp.tanh(dense(jnp.concatenate([xs[i], states[i // 2]])))
        return states.at[i].set(h), jnp.sum(h)

    return hk.scan(step, jnp.zeros((len(xs), 4)), jnp.arange(len(xs)))[0]


@pytest.mark.slow(but=1)
@placed("apply", "loss", "grad", *STEP)
def test_a_transformed_scan(at):
    init, apply = hk.without_apply_rng(hk.transform(lambda xs: hk.remat(remembers)(xs)))

    def update(params, xs):
        loss = at("loss", lambda params: jnp.mean(at("apply", apply)(params, xs) ** 2))
        value, grads = at("grad", jax.value_and_grad(loss))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return at.step(update)(init(jax.random.key(0), XS), XS)


@pytest.mark.slow
@placed("apply", "around jit")
def test_a_model_with_state_dropout_and_layers_that_are_stacked(at):
    @hk.transform_with_state
    def model(xs, is_training):
        @hk.experimental.layer_stack(2)
        def layer(xs):
            return xs + hk.Linear(2)(remembers(xs))

        xs = hk.dropout(hk.next_rng_key(), 0.5, hk.BatchNorm(True, True, 0.9)(xs, is_training))
        return layer(xs)

    def update(params, state, key, xs):
        def loss(params):
            ys, new = at("apply", model.apply, static_argnums=4)(params, state, key, xs, True)
            return jnp.mean(ys**2), new

        grads, state = jax.grad(loss, has_aux=True)(params)
        return grads, state

    params, state = model.init(jax.random.key(0), XS, True)
    return at.step(update)(params, state, jax.random.key(1), XS)


@pytest.mark.slow
def test_a_function_that_calls_modules_is_right_or_refused_inside_of_a_transformed_one():
    """`jax.jit` gives gradients of zero there."""

    def gradient(at):
        init, apply = hk.transform(lambda xs: jnp.sum(at("inside", remembers)(xs)))
        xs = jnp.asarray(XS)
        return jax.grad(lambda params: apply(params, None, xs))(init(jax.random.key(0), xs))

    assert_same_or_refused(gradient, "inside", "transform")


@pytest.mark.slow(but=2)
@placed("apply", *STEP)
def test_a_search_of_unknown_length(at):
    def search(limit):
        dense = hk.Linear(2)

        def step(state):
            i, b = state
            return i + 1, b.at[i].set(jnp.tanh(dense(b[i - 1])) + 0.1 * lax.stop_gradient(b[i // 2]))

        start = jnp.int32(1), jnp.asarray(XS)
        if hk.running_init():
            return step(start)
        return hk.while_loop(lambda s: (s[0] < 6) & (jnp.sum(s[1]) < limit), step, start)

    init, apply = hk.without_apply_rng(hk.transform(search))
    return at.step(at("apply", apply))(init(jax.random.key(0), 5.0), jnp.float32(5))
