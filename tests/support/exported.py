"""The stored programs. `python tests/support/exported.py` stores them, for a new version of the contract."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import TensorArray, ta_add, ta_read, ta_swap, ta_write, while_loop
from jax_tensorarray.export import CONTRACT_VERSION, disabled_checks

FIXTURES = Path(__file__).parent / "fixtures"
ROWS = np.linspace(0.1, 0.9, 24, dtype=np.float32).reshape(8, 3)


def by_ops(b):
    def step(b, i):
        b, old = ta_swap(b, (3 * i) % 8, jnp.sin(ta_read(b, i, where=i % 2 == 0)))
        return ta_add(ta_write(b, i // 2, old * 2), i, old), jnp.sum(old)

    b, sums = lax.scan(step, b, jnp.arange(8))
    return jnp.sum(b * b) + jnp.sum(sums)


def by_a_loop(b):
    def body(c):
        i, ys = c
        y = while_loop(lambda d: d[0] < i, lambda d: (d[0] + 1, jnp.sin(d[1])), (0, ta_read(b, i)), max_steps=9)[1]
        return i + 1, ys.append(y)

    ys = TensorArray.like(b[0], 0, dynamic_size=True, max_size=8)
    n = jnp.sum(b[:, 0] < 0.8)
    return jnp.sum(while_loop(lambda c: c[0] < n, body, (0, ys), max_steps=8)[1].stack(pad=True) ** 2)


PROGRAMS = {f"{f.__name__}-{name}": g for f in (by_ops, by_a_loop) for name, g in (("value", f), ("grad", jax.grad(f)))}


def stored(name, platforms=("cpu",)):
    f = jax.jit(PROGRAMS[name])
    folders = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, folders)
    jax.config.update(folders, ".*/")  # whose machine it was is nobody's business
    try:
        return jax.export.export(f, platforms=platforms, disabled_checks=disabled_checks())(ROWS).serialize()
    finally:
        jax.config.update(folders, before)


def path(name):
    return FIXTURES / f"contract{CONTRACT_VERSION}-{name}.bin"


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    for name in PROGRAMS:
        path(name).write_bytes(stored(name))
        print(path(name), path(name).stat().st_size, "bytes", file=sys.stderr)
