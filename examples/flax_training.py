"""Train a Flax model whose loop reads and writes a buffer: before, and after with `in_place` around the loss.

The model runs programs. A line of a program makes a bit from two earlier lines that it names, as in "7: 3 xor 5". The
model has a vector for each line, computed from the vectors of those two, and predicts the bit. So the vectors are a
buffer that a loop carries. Each step reads two rows at places that the program names, and writes one row. In plain JAX
the gradient of that loop copies the buffer in every step: a step of training takes time that is quadratic in the number
of lines. With `in_place` around the loss it is linear. The model stays unchanged.

    python examples/flax_training.py

prints the losses of both, which are the same; how well the model runs a program twenty times as long as those it has
learned from; the copies before and after; and the time of a step of training. It needs flax and optax:
`pip install flax optax`.
"""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray.doctor import loop_copies

try:
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f"This example needs flax and optax: pip install flax optax ({error})") from None

OPERATORS = {"0": lambda a, b: 0, "1": lambda a, b: 1, "and": lambda a, b: a & b, "or": lambda a, b: a | b}
OPERATORS |= {"xor": lambda a, b: a ^ b, "nand": lambda a, b: 1 - (a & b)}
NAMES = list(OPERATORS)
INPUTS = 2  # so many lines at the start are 0, 1
HIDDEN = 64


class Program(NamedTuple):
    operator: jax.Array  # [T], of NAMES
    left: jax.Array  # [T], an earlier line
    right: jax.Array  # [T]
    bit: jax.Array  # [T], what the line makes


def make_program(rng, length):
    """Make a program of random lines. The first two are the constants, and name themselves."""
    operator = rng.integers(INPUTS, len(NAMES), length)
    operator[:INPUTS] = range(INPUTS)
    earlier = np.maximum(np.arange(length), 1)
    left, right = (rng.integers(0, earlier).astype(np.int32) for _ in range(2))
    bit = np.zeros(length, np.int32)
    for i in range(length):
        bit[i] = OPERATORS[NAMES[operator[i]]](bit[left[i]], bit[right[i]])
    return Program(*map(jnp.asarray, (operator.astype(np.int32), left, right, bit)))


# --- the model -------------------------------------------------------------------------------------------------


class Machine(nnx.Module):
    """A model that runs programs."""

    def __init__(self, rngs):
        self.operators = nnx.Embed(len(NAMES), HIDDEN, rngs=rngs)
        self.mix = nnx.Linear(3 * HIDDEN, 2 * HIDDEN, rngs=rngs)
        self.state = nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)
        self.answer = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def line(self, operator, a, b):
        """Return the vector of a line, from the vectors of the lines that it names."""
        return jnp.tanh(self.state(nnx.relu(self.mix(jnp.concatenate([self.operators(operator), a, b])))))

    def run(self, program):
        """Return the vectors of all lines."""

        def step(states, i):
            a, b = states[program.left[i]], states[program.right[i]]
            return states.at[i].set(self.line(program.operator[i], a, b)), None

        length = len(program.bit)
        states, _ = lax.scan(step, jnp.zeros((length, HIDDEN), jnp.float32), jnp.arange(length))
        return states

    def __call__(self, program):
        """Return the logarithm of the odds that the bit of each line is 1, [T]."""
        return self.answer(self.run(program))[:, 0]


def loss(model, program):
    """Return the cross entropy, the mean over the lines."""
    return jnp.mean(optax.sigmoid_binary_cross_entropy(model(program), program.bit.astype(jnp.float32)))


#: The losses that are compared.
LOSSES = {"before": loss, "after": in_place(loss)}

# --- training --------------------------------------------------------------------------------------------------

#: One for all models: `update` is compiled again for another.
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


@functools.partial(nnx.jit, static_argnums=0)
def update(loss, model, optimizer, program):
    """Take a step of training. Return the loss before it."""
    value, gradient = nnx.value_and_grad(loss)(model, program)
    optimizer.update(model, gradient)
    return value


def train(loss, updates, length, seed=0):
    """Train a model, with a new program in each update. Return it, and the loss before each update."""
    model, rng = Machine(nnx.Rngs(seed)), np.random.default_rng(seed)
    optimizer, losses = nnx.Optimizer(model, OPTIMISER, wrt=nnx.Param), []
    for _ in range(updates):
        losses.append(float(update(loss, model, optimizer, make_program(rng, length))))
    return model, losses


def right(model, program):
    """Return the share of lines whose bit the model knows."""
    return float(jnp.mean((nnx.jit(lambda m, p: m(p))(model, program) > 0) == program.bit))


# --- what it costs ---------------------------------------------------------------------------------------------


def copies(loss, length=1000):
    """Return the copies that `loop_copies` finds in the gradient of a loss."""
    graph, params = nnx.split(Machine(nnx.Rngs(0)))
    program = make_program(np.random.default_rng(0), length)
    return loop_copies(jax.grad(lambda params: loss(nnx.merge(graph, params), program)), min_bytes=0)(params)


def seconds_of_an_update(loss, length):
    """Return the seconds of the fastest update. Updates run for a second, and at least three times."""
    model = Machine(nnx.Rngs(0))
    optimizer, program = nnx.Optimizer(model, OPTIMISER, wrt=nnx.Param), make_program(np.random.default_rng(0), length)
    update(loss, model, optimizer, program).block_until_ready()
    times = []
    while len(times) < 3 or sum(times) < 1:
        start = time.perf_counter()
        update(loss, model, optimizer, program).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def main(updates=200, length=200, lengths=(250, 1000, 4000), seed=0):
    """Train with both losses, and compare. Return the losses."""
    losses = {}
    for name, loss in LOSSES.items():
        model, losses[name] = train(loss, updates, length, seed)
    print("update     before      after")
    for k in range(updates):
        if k == 0 or (k + 1) % max(1, updates // 8) == 0:
            print(f"{k + 1:6} " + " ".join(f"{losses[name][k]:10.7f}" for name in losses))
    for longer in (length, 20 * length):
        program = make_program(np.random.default_rng(seed + 1), longer)
        print(f"{100 * right(model, program):.1f} % of the bits of a new program of {longer} lines are right.")

    print()
    for name, loss in LOSSES.items():
        print(f"{name}: {len(copies(loss))} operations copy the buffer in every step")
    print("\nMilliseconds per step of training:\n\nlines     before      after  before / after")
    for T in lengths:
        before, after = (1e3 * seconds_of_an_update(loss, T) for loss in LOSSES.values())
        print(f"{T:5} {before:10.1f} {after:10.1f} {before / after:15.1f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
