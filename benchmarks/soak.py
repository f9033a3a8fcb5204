"""`python -m benchmarks.soak`: 10^5 ops, errors and eager writes each, and how much memory the process grows by."""

import gc
import resource
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_tensorarray import TensorArray, ta_read, ta_write

CALLS = 100_000


def _ops() -> Callable[[int], None]:
    step = jax.jit(lambda b, i: (ta_write(b, i, ta_read(b, i) + 1.0), ta_read(b, i)), donate_argnums=0)
    buffer = jnp.zeros((64, 16))

    def call(i: int) -> None:
        nonlocal buffer
        buffer, _ = step(buffer, i % 64)

    return call


def _errors() -> Callable[[int], None]:
    buffer, read = jnp.zeros((64, 16)), jax.jit(ta_read)
    ta = TensorArray.from_array(buffer)

    def call(i: int) -> None:
        try:
            if i % 2:
                jax.block_until_ready(read(buffer, 64 + i))
            else:
                ta.write(64 + i, buffer[0])
        except (IndexError, ValueError, jax.errors.JaxRuntimeError):
            return
        raise AssertionError("no error")

    return call


def _writes() -> Callable[[int], None]:
    row = jnp.ones(16)
    ta = TensorArray(jnp.float32, size=64, element_shape=(16,))
    older = ta

    def call(i: int) -> None:
        nonlocal ta, older
        ta = ta.write(i % 64, row)
        if i % 100 == 0:  # an older version is kept, read and forgotten
            older.read(0)
            older = ta

    return call


def _growing() -> Callable[[int], None]:
    ta = TensorArray(jnp.float32, size=0, dynamic_size=True)
    row = jnp.ones(16)

    def call(i: int) -> None:
        nonlocal ta
        ta = ta.append(row) if i % 64 else ta.unstack(row[None])

    return call


def _resident() -> float:
    """MB that the process has touched, at most."""
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20)


def main() -> None:
    for name, make in (("ops", _ops), ("errors", _errors), ("eager writes", _writes), ("eager growth", _growing)):
        call = make()
        for i in range(CALLS // 5):
            call(i)
        before = _resident()
        for i in range(CALLS):
            call(i)
        print(f"{name}: {CALLS} calls, {_resident() - before:+.2f} MB")


if __name__ == "__main__":
    main()
