"""Compare random programs with their oracle."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from random_machines import THETA, expected, loss, outputs
from random_programs import BATCH, STATE


def total(program, machine):
    return lambda theta, start: loss(outputs(program, machine, theta, start), jnp)


def close(got, want, what):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, what
    assert not np.isnan(want).any(), f"{what}: an index out of range that the program needs, and no error"
    scale = max(1.0, np.max(np.abs(want), initial=0.0))
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9 * scale, err_msg=what)


def same_state(got, want):
    for k, (x, y) in enumerate(zip(got, want, strict=True)):
        close(x, y, f"slot {k}, {STATE[k]}")


def examples(program, own_starts, own_thetas, axis):
    """A batch that differs in parameters, starts or both: arguments, their axes, and what NumPy says of each."""
    thetas = np.stack([THETA * (1 + 0.25 * k * own_thetas) for k in range(BATCH)])
    starts = np.array([program.start + 2 * k * own_starts for k in range(BATCH)], np.int32)
    want = [expected(program, t, int(s), dropping=True) for t, s in zip(thetas, starts, strict=True)]
    theta = np.moveaxis(thetas, 0, axis) if own_thetas else THETA
    return (theta, starts if own_starts else starts[0]), (axis if own_thetas else None, 0 if own_starts else None), want


BATCHES = st.sampled_from([(True, False), (False, True), (True, True)])
