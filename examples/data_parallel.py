"""Train a recurrent model in several processes: divided by examples, then by features.

The model repeats what it has heard some steps before. Its states are rows of a TensorArray, from which every step reads
the last one and an earlier one. The losses of the training so far are another TensorArray, in a state that is donated
to every update. What each device has is said once, as shardings of the inputs and of the first rows. The program is
the same as on one device, and so are the losses.

    python examples/data_parallel.py --processes 2

starts two processes on this machine, which talk through `jax.distributed`, with two CPU devices each. On a cluster,
start one on each machine: `--processes N --process k --coordinator HOST:PORT`.
"""

import argparse
import functools
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tensorarray import TensorArray, fori_loop

STEPS, INPUTS, HIDDEN, BATCH = 12, 3, 24, 24
DELAY = 3  # the target is the input of that many steps before
EARLIER = 3  # a state is made from the last one and from the one so many steps before

#: How arrays are divided: examples on the axis "data" of the mesh, features of a state on the axis "feature".
STATES = P(None, "data", "feature")
PARAMS = {
    "hear": P(None, "feature"),
    "keep": P(None, "feature"),
    "recall": P(None, "feature"),
    "bias": P("feature"),
    "say": P("feature", None),
}


def init_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"hear": (INPUTS, HIDDEN), "keep": (HIDDEN, HIDDEN), "recall": (HIDDEN, HIDDEN), "say": (HIDDEN, INPUTS)}
    params = {name: 0.25 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return {**params, "bias": np.zeros(HIDDEN)}


def make_batch(update, examples=slice(None)):
    """Return some examples of the batch of an update, [steps, examples, inputs]."""
    return np.random.default_rng([1, update]).standard_normal((STEPS, BATCH, INPUTS))[:, examples]


# --- the model -------------------------------------------------------------------------------------------------


def run(params, xs, mesh):
    """Return all states, a TensorArray of rows [examples, hidden]. Row 0 is the state before the first step."""
    states = TensorArray(xs.dtype, size=STEPS + 1, element_shape=(xs.shape[1], HIDDEN))
    states = jax.lax.with_sharding_constraint(states, NamedSharding(mesh, STATES))

    def step(i, states):
        last, earlier = states.read(i), states.read(jnp.maximum(i + 1 - EARLIER, 0))
        heard = xs[i] @ params["hear"]
        return states.write(
            i + 1, jnp.tanh(heard + last @ params["keep"] + earlier @ params["recall"] + params["bias"])
        )

    return fori_loop(0, STEPS, step, states)


def loss(params, xs, mesh):
    """Return the mean squared difference between the output and the input that was heard before."""
    said = run(params, xs, mesh).stack()[1 + DELAY :] @ params["say"]
    return jnp.mean((said - xs[:-DELAY]) ** 2)


# --- training --------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("mesh", "rate"), donate_argnames="state")
def update(state, xs, mesh, rate=0.01):
    """Take a step of Adam. The state is updated where it is."""
    value, gradient = jax.value_and_grad(loss)(state["params"], xs, mesh)
    k = state["losses"].size() + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradient)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], gradient)

    def moved(p, m, v):
        return p - rate * (m / (1 - 0.9**k)) / (jnp.sqrt(v / (1 - 0.99**k)) + 1e-8)

    params = jax.tree.map(moved, state["params"], m, v)
    return {"params": params, "m": m, "v": v, "losses": state["losses"].append(value)}


def place(make, shape, mesh, spec):
    """Make an array in parts. Every process makes its own, `make(index)`."""
    dtype = jnp.result_type(float)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: make(index).astype(dtype))


def new_state(mesh, updates):
    params = {name: place(x.__getitem__, x.shape, mesh, PARAMS[name]) for name, x in init_params().items()}
    # Made in jit, in all processes at once: rows that do not exist yet are arbitrary memory, which device_put compares.
    losses = functools.partial(TensorArray, jnp.result_type(float), 0, True, max_size=updates, element_shape=())
    return {
        "params": params,
        "m": jax.tree.map(jnp.zeros_like, params),
        "v": jax.tree.map(jnp.zeros_like, params),
        "losses": jax.jit(losses, out_shardings=NamedSharding(mesh, P()))(),
    }


def batch_of(k, mesh):
    return place(lambda index: make_batch(k, index[1]), (STEPS, BATCH, INPUTS), mesh, P(None, "data", None))


def train(mesh, updates):
    """Return the loss before each update, as a NumPy array that every process has."""
    state = new_state(mesh, updates)
    for k in range(updates):
        state = update(state, batch_of(k, mesh), mesh)
    return np.asarray(state["losses"].stack())


def main(updates):
    """Train on all devices that there are, divided by examples and by features. Return the losses of both."""
    devices, found = len(jax.devices()), {}
    for name, shape in {"data": (devices, 1), "feature": (1, devices)}.items():
        mesh = jax.make_mesh(shape, ("data", "feature"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        found[name] = train(mesh, updates)
        if jax.process_index() == 0:
            print(f"{name}-parallel, {devices} devices in {jax.process_count()} processes:", flush=True)
            for k in sorted({*range(0, updates, max(1, updates // 8)), updates - 1}):
                print(f"  update {k:4}: loss {found[name][k]:.9f}", flush=True)
    return found


# --- processes -------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(processes, arguments):
    """Run this file in so many processes, and end them all when one fails."""
    coordinator = f"localhost:{free_port()}"
    command = [sys.executable, __file__, *arguments, "--coordinator", coordinator, "--process"]
    children = [subprocess.Popen([*command, str(k)]) for k in range(processes)]
    try:
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.1)
        return max(abs(child.poll() or 0) for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of each process")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--process", type=int, help="which one this is; without it, all are started here")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    options = parser.parse_args()
    if options.process is None and options.processes > 1:
        sys.exit(start(options.processes, sys.argv[1:]))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    main(options.updates)
