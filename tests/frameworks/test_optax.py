"""Optax: its transformations keep a state between the steps, which `in_place` passes on as `jax.jit` does."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import STEP, placed, waves

optax = pytest.importorskip("optax", reason="optax is not installed: pip install '.[test-frameworks]'")

pytestmark = [pytest.mark.usefixtures("in_single_precision"), pytest.mark.filterwarnings("default")]


def loss_of(params, xs):
    """A recurrence with a matrix and a scale."""

    def step(b, i):
        return b.at[i].set(jnp.tanh(params["w"] @ b[i // 2] + params["scale"] * xs[i])), None

    return jnp.mean(lax.scan(step, jnp.zeros_like(xs), jnp.arange(len(xs)))[0] ** 2)


def start():
    return {"w": jnp.asarray(waves(2, 2)), "scale": jnp.float32(1)}


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)
OPTIMIZERS = {
    "schedule": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(SCHEDULE)),
    "MultiSteps": optax.MultiSteps(optax.sgd(optax.exponential_decay(0.1, 2, 0.5), momentum=0.9), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "hyperparameters": optax.inject_hyperparams(optax.rmsprop)(learning_rate=SCHEDULE),
    "parts": optax.multi_transform({"w": optax.lion(0.1), "scale": optax.set_to_zero()}, {"w": "w", "scale": "scale"}),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.contrib.schedule_free_sgd(0.1)),
}


@pytest.mark.slow
@placed("loss", "grad", *STEP)
def test_optimizers_with_a_state(at):
    """Each gets the same three gradients, of which one is not finite."""

    def train_step(params, states, xs, factor):
        value, grads = at("grad", jax.value_and_grad(at("loss", loss_of)))(params["schedule"], xs)
        for name, optimizer in OPTIMIZERS.items():
            given = jax.tree.map(lambda g: g * factor, grads) if name == "apply_if_finite" else grads
            updates, states[name] = optimizer.update(given, states[name], params[name])
            params[name] = optax.apply_updates(params[name], updates)
        return params, states, value

    params = dict.fromkeys(OPTIMIZERS, start())
    states = {name: optimizer.init(start()) for name, optimizer in OPTIMIZERS.items()}
    step, values = at.step(train_step), []
    for factor in (1.0, jnp.inf, 1.0):
        params, states, value = step(params, states, waves(5, 2), factor)
        values.append(value)
    return params, states, values


@pytest.mark.slow(but=1)
@placed("loss", "in jit")
def test_a_search_along_lines_in_a_loop(at):
    solver = optax.lbfgs(memory_size=2, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=4))

    def fit(params, xs):
        f = at("loss", lambda params: loss_of(params, xs))
        value_and_grad = optax.value_and_grad_from_state(f)

        def step(carry):
            params, state = carry
            value, grad = value_and_grad(params, state=state)
            updates, state = solver.update(grad, state, params, value=value, grad=grad, value_fn=f)
            return optax.apply_updates(params, updates), state

        def goes_on(carry):
            return optax.tree.get(carry[1], "count") < 3

        return lax.while_loop(goes_on, step, (params, solver.init(params)))

    return at.step(fit)(start(), waves(5, 2))
