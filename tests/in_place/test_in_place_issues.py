"""Programs that people have reported to JAX as quadratic, re-expressed: the same and linear under `in_place`."""

import functools

import jax
import numpy as np
import pytest
from in_place import assert_in_place
from reported import (
    PROGRAMS,
)

from jax_tensorarray import in_place


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("issue", PROGRAMS)
def test_a_reported_program_gives_what_it_gave_and_is_in_place(issue, inside):
    transform, f, args_of = PROGRAMS[issue]
    repaired = in_place(transform(f)) if inside else transform(in_place(f))
    got, want = (jax.jit(g)(*args_of(1100)) for g in (repaired, transform(f)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    assert_in_place(repaired, args_of, length=1100)
