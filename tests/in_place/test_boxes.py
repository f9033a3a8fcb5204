"""An axis of one element is taken as a whole, and has indices that are out of range too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import in_place


@pytest.mark.parametrize("column", [0, 2, -1, -3])
def test_an_axis_of_one_element_has_stray_indices_too(column):
    """It is taken as a whole, so the row op does not start along it."""

    def f(b, j):
        return lax.fori_loop(0, 3, lambda i, b: b.at[i, j].add(jnp.cos(b[i, 0]) + b[i + 1, 0]), b)

    b = np.arange(5.0)[:, None]
    assert "ta_add[" in str(jax.make_jaxpr(in_place(f))(b, column))
    found, want = jax.jit(in_place(f))(b, column), jax.jit(f)(b, column)
    np.testing.assert_array_equal(found, want)
    assert bool(jnp.all(want == b)) == (column in (2, -3))
