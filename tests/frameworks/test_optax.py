"""Optax: its transformations keep a state between the steps, which `in_place` passes on as `jax.jit` does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import STEP, placed, waves

optax = pytest.importorskip("optax", reason="optax is not installed: pip install '.[test-frameworks]'")
chex = pytest.importorskip("chex", reason="chex is not installed: pip install '.[test-frameworks]'")

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


@chex.dataclass(frozen=True)
class Play:
    """A state of play: a position, the places that were visited, and the steps so far."""

    position: jax.Array
    visits: jax.Array
    steps: jax.Array


def played(play, action):
    """Move, and start again after four steps."""
    position = play.position + 0.1 * jnp.array([-1.0, 0.0, 1.0])[action]
    place = jnp.clip(jnp.int32(10 * jnp.abs(position)), 0, 4)
    reward = 1.0 / (1.0 + play.visits[place])
    play = Play(position=position, visits=play.visits.at[place].add(1), steps=play.steps + 1)
    done = play.steps >= 4
    first = Play(position=jnp.float32(0), visits=jnp.zeros(5, jnp.int32), steps=jnp.int32(0))
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), first, play), reward, done


class Transition(NamedTuple):
    features: jax.Array
    action: jax.Array
    value: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    done: jax.Array


def advantages(rollout, last, gamma=0.99, decay=0.95):
    """Generalised advantage estimates, written row by row from the end."""
    values = jnp.concatenate([rollout.value, last[None]])

    def step(k, carry):
        total, rows = carry
        t = len(rows) - 1 - k
        goes_on = 1.0 - rollout.done[t]
        delta = rollout.reward[t] + gamma * values[t + 1] * goes_on - values[t]
        total = delta + gamma * decay * goes_on * total
        return total, rows.at[t].set(total)

    return lax.fori_loop(0, len(rollout.value), step, (jnp.zeros_like(last), jnp.zeros_like(rollout.value)))[1]


@pytest.mark.slow
@placed("env", "gae", "in jit")
def test_proximal_policy_optimization(at):
    """Environments in a batch that start again, and epochs of minibatches in an order that is drawn."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-2))

    def policy(params, features):
        hidden = jnp.tanh(features @ params["w"])
        return jax.nn.log_softmax(hidden @ params["pi"]), (hidden @ params["v"])[..., 0]

    def loss(params, batch, advantage):
        log_probs, value = policy(params, batch.features)
        ratio = jnp.exp(jnp.take_along_axis(log_probs, batch.action[:, None], 1)[:, 0] - batch.log_prob)
        clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return jnp.mean((value - batch.value - advantage) ** 2) - jnp.mean(clipped)

    def act(carry, key):
        params, plays = carry
        features = jnp.stack([plays.position, plays.steps.astype(jnp.float32)], axis=-1)
        log_probs, value = policy(params, features)
        action = jax.random.categorical(key, log_probs)
        plays, reward, done = jax.vmap(at("env", played))(plays, action)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
        return (params, plays), Transition(features, action, value, log_prob, reward, done.astype(jnp.float32))

    def minibatch(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    def update(params, state, plays, key):
        keys = jax.random.split(key, 7)
        (_, plays), rollout = lax.scan(act, (params, plays), keys[:6])
        found = rollout, at("gae", advantages)(rollout, rollout.value[-1])
        flat = jax.tree.map(lambda x: x.reshape(12, *x.shape[2:]), found)
        order = jax.random.permutation(keys[6], 12).reshape(3, 4)
        carry, losses = lax.scan(minibatch, (params, state), jax.tree.map(lambda x: x[order], flat))
        return *carry, plays, losses

    params = {"w": jnp.asarray(waves(2, 4)), "pi": jnp.asarray(waves(4, 3)), "v": jnp.asarray(waves(4, 1))}
    plays = Play(position=jnp.zeros(2), visits=jnp.zeros((2, 5), jnp.int32), steps=jnp.array([0, 2]))
    return at.step(update)(params, optimizer.init(params), plays, jax.random.key(0))
