"""Doctests show what users see, in 32 bits; tests/conftest.py puts everything else in 64."""

import jax
import pytest


@pytest.fixture(autouse=True)
def bits_of_doctests(request):
    if isinstance(request.node, pytest.DoctestItem):
        with jax.enable_x64(False):
            yield
    else:
        yield
