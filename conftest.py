"""Doctests show what users see, in 32 bits; tests/conftest.py puts everything else in 64."""

import jax
import pytest

# A package of its own, with tests that need its kernels.
collect_ignore = ["template"]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """`-n 2` keeps the tests of a file together, since they share what they compile."""
    if config.getoption("numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


@pytest.fixture(autouse=True)
def bits_of_doctests(request, doctest_namespace):
    if isinstance(request.node, pytest.DoctestItem):
        doctest_namespace.update(jax=jax, jnp=jax.numpy)  # as in every example of JAX
        with jax.enable_x64(False):
            yield
    else:
        yield
