"""NumPyro: models with scans, chains of samples, and steps of variational inference."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from placements import placed, waves

numpyro = pytest.importorskip("numpyro", reason="numpyro is not installed: pip install '.[test-frameworks]'")
control_flow = pytest.importorskip("numpyro.contrib.control_flow")
infer = pytest.importorskip("numpyro.infer")

pytestmark = [pytest.mark.usefixtures("in_single_precision"), pytest.mark.filterwarnings("default")]

XS = waves(4)


def model(xs):
    """A time series that looks back at one of its earlier states."""
    scale = numpyro.sample("scale", numpyro.distributions.LogNormal(0.0, 1.0))

    def step(states, x):
        i, states = states
        mean = jnp.tanh(states[i // 2])
        y = numpyro.sample("y", numpyro.distributions.Normal(mean, scale), obs=x)
        return (i + 1, states.at[i].set(mean + y)), None

    control_flow.scan(step, (jnp.int32(0), jnp.zeros(len(xs))), jnp.asarray(xs))


@pytest.mark.slow(but=1)
@placed("potential", "in jit")
def test_a_chain_of_samples(at):
    def potential(z):
        return infer.util.potential_energy(model, (XS,), {}, z)

    kernel = infer.HMC(potential_fn=at("potential", potential), num_steps=2, adapt_step_size=False, step_size=0.1)
    state = jax.jit(lambda key: kernel.init(key, 0, {"scale": jnp.float32(0.1)}, (), {}))(jax.random.key(1))

    def chain(state):
        def step(k, carry):
            state, samples = carry
            state = kernel.sample(state, (), {})
            return state, samples.at[k].set(state.z["scale"])

        return lax.fori_loop(0, 3, step, (state, jnp.zeros(3)))

    return at.step(chain)(state)


@pytest.mark.slow
@placed("in jit", "instead of jit")
def test_a_step_of_variational_inference(at):
    svi = infer.SVI(model, infer.autoguide.AutoDelta(model), numpyro.optim.Adam(0.1), infer.Trace_ELBO())
    state = jax.jit(svi.init)(jax.random.key(0), XS)
    return at.step(svi.update)(state, XS)
