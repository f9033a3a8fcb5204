"""Draw the memory that gradients of loops take against the number of steps: `python docs/draw_memory.py FILE.svg`.

The programs are compiled, not run.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from drawing import draw

from jax_tensorarray import ta_read, ta_write, while_loop
from jax_tensorarray.residuals import Checkpoint

SIZES = (64, 256, 1024, 4096)


def memory(f: Any, *args: Any) -> float:
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


def layers(steps: int, **options: Any) -> float:
    """Return the MiB of a deep body with a small carry."""

    def loss(x: Any, w: Any) -> Any:
        def step(carry: Any) -> Any:
            i, h = carry
            for _ in range(4):
                h = jnp.tanh(w @ h)
            return i + 1, h

        return jnp.sum(while_loop(lambda carry: carry[0] < steps, step, (0, x), max_steps=steps, **options)[1])

    return memory(jax.grad(loss, argnums=(0, 1)), jnp.ones(64), jnp.eye(64))


def attend(carry: Any) -> Any:
    """Take a step that reads all rows."""
    i, rows = carry
    return i + 1, ta_write(rows, i, jnp.tanh(jax.nn.softmax(rows @ ta_read(rows, i)) @ rows))


def attention(steps: int, **options: Any) -> float:
    def loss(x: Any) -> Any:
        return jnp.sum(while_loop(lambda carry: carry[0] < len(x), attend, (0, x), max_steps=len(x), **options)[1])

    return memory(jax.grad(loss), jnp.ones((steps, 16)))


PANELS = {
    "four layers of 64 per step": (layers, ("tape", "recompute", Checkpoint(10))),
    "a step attends to all rows": (attention, ("tape", "undo")),
}

if __name__ == "__main__":
    found = {
        title: {str(mode): [of(T, residuals=mode) for T in SIZES] for mode in modes}
        for title, (of, modes) in PANELS.items()
    }
    draw(sys.argv[1], found, SIZES, x="T, steps of the loop", y="temporary memory, MiB")
