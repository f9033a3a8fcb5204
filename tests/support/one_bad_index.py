"""Programs on eight CPU devices: one gets an index out of range before all of them meet. This is a process of its own.

`python one_bad_index.py [gspmd]` prints the errors of each program, compares what it returns afterwards with NumPy, and
ends with the error of the last one. XLA aborts a process whose devices wait for one that has stopped.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tensorarray import TensorArray, ta_add, ta_read, while_loop

jax.config.update("jax_num_cpu_devices", 8)
if "gspmd" in sys.argv:
    jax.config.update("jax_use_shardy_partitioner", False)

T, STEPS = 16, 3
MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
BUFFER = np.arange(4.0 * T, dtype=np.float32).reshape(T, 4)
GOOD, BAD = np.arange(8), np.array([0, 1, 2, 3, 4, 99, 6, 7])


def put(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def of_each(f, out_specs):
    """On each device `f` of the whole buffer and of its own index."""
    return jax.shard_map(f, mesh=MESH, in_specs=(P(), P("x")), out_specs=out_specs, check_vma=False)


def read(b, i):
    return ta_read(b, i, mode="error")


def all_meet_in_each_step(b, i):
    return lax.fori_loop(0, STEPS, lambda k, s: s + lax.psum(read(b, i + k).sum(), "x"), 0.0)


def written_then_summed(b, i):
    ta = lax.fori_loop(0, STEPS, lambda k, ta: ta.write(i[0] + k, jnp.ones(4)), TensorArray.from_array(b))
    return lax.psum(ta.stack().sum(), "x")


def as_many_steps_as_it_takes(b, i):
    def body(c):
        return c[0] + 1, c[1] + lax.psum(read(b, i + c[0]).sum(), "x")

    return while_loop(lambda c: c[0] < STEPS, body, (0, 0.0), max_steps=9)[1]


def in_batches(b, i):
    def step(b, k):
        return jax.vmap(lambda b, i: ta_add(b, i + k, jnp.ones(4)))(b, i), b.sum()

    return lax.scan(step, b, jnp.arange(STEPS))[1]


WINDOWS = sum(BUFFER[GOOD + k].sum() for k in range(STEPS))
BATCHES = put(np.stack([BUFFER] * 8), "x")

#: A program, its buffer, and what NumPy says of right indices.
PROGRAMS = {
    "positions": (lambda b, i: read(b, i).sum(), put(BUFFER), BUFFER[GOOD].sum()),
    "gathered": (jit(read, out_shardings=NamedSharding(MESH, P())), put(BUFFER), BUFFER[GOOD]),
    "to a host": (
        jit(read, out_shardings=NamedSharding(MESH, P(), memory_kind="pinned_host")),
        put(BUFFER),
        BUFFER[GOOD],
    ),
    "two ways": (
        jit(lambda b, i: [read(b, i)] * 3, out_shardings=[NamedSharding(MESH, P(*axes)) for axes in ("x", "", "x")]),
        put(BUFFER),
        [BUFFER[GOOD]] * 3,
    ),
    "rows too": (lambda b, i: read(b, i).sum(0), put(BUFFER, "x"), BUFFER[GOOD].sum(0)),
    "gradient": (jax.grad(lambda b, i: (read(b, i) ** 2).sum()), put(BUFFER), 2 * BUFFER * (np.arange(T) < 8)[:, None]),
    "batches": (in_batches, BATCHES, 8 * BUFFER.sum() + 32.0 * np.arange(STEPS)),
    "each step": (of_each(all_meet_in_each_step, P()), put(BUFFER), WINDOWS),
    "then a sum": (
        of_each(written_then_summed, P()),
        put(BUFFER),
        8 * BUFFER.sum() + sum(12 - BUFFER[k : k + STEPS].sum() for k in GOOD),
    ),
    "max_steps": (of_each(as_many_steps_as_it_takes, P()), put(BUFFER), WINDOWS),
    "no meeting": (of_each(read, P("x")), put(BUFFER), BUFFER[GOOD]),
}

if __name__ == "__main__":
    for name, (f, buffer, wanted) in PROGRAMS.items():
        jitted = f if hasattr(f, "lower") else jit(f)  # an outer one would say nothing of how the result is divided
        for _ in range(2):
            try:
                jax.block_until_ready(jitted(buffer, put(BAD, "x")))
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                print(str(error).splitlines()[0])
            else:
                sys.exit(f"{name}: no error")
        np.testing.assert_allclose(jitted(buffer, put(GOOD, "x")), wanted, rtol=1e-6, err_msg=name)
    jax.block_until_ready(jitted(buffer, put(BAD, "x")))
