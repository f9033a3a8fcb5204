"""The suite runs in 64 bits, so that derivatives can be compared with finite differences."""

import os
import sys
from pathlib import Path

import jax
import pytest

# The helpers of the tests are plain modules beside them, importable however pytest is started.
sys.path.insert(0, str(Path(__file__).parent))

jax.config.update("jax_enable_x64", True)

if library := os.environ.get("TENSORARRAY_EMULATED_GPU"):
    import emulate

    emulate.install(Path(library) if Path(library).is_file() else None)


@pytest.fixture(autouse=True)
def no_error_is_left_behind():
    """A GPU raises errors later: those that a test did not expect have to be its own."""
    yield
    from jax_tensorarray import check_errors

    check_errors()
