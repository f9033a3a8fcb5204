"""Make tests fail if a loop copies whole buffers.

Put `pytest_plugins = ["jax_tensorarray.pytest_plugin"]` into the `conftest.py` at the root of the tests. A test with
the marker `forbid_copies` then fails if JAX compiles such a loop for it. `@pytest.mark.forbid_copies(min_bytes=10**6)`
ignores smaller buffers. A test may also request the fixture of the same name.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from jax_tensorarray import doctor


def pytest_configure(config: Any) -> None:
    config.addinivalue_line(
        "markers", "forbid_copies(min_bytes): fail if JAX compiles a loop that copies whole buffers"
    )


@pytest.fixture
def forbid_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if JAX compiles a loop that copies whole buffers."""
    marker = request.node.get_closest_marker("forbid_copies")
    with doctor.forbid_copies(*(marker.args if marker else ()), **(marker.kwargs if marker else {})):
        yield


@pytest.fixture(autouse=True)
def _forbid_copies_where_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("forbid_copies"):
        request.getfixturevalue("forbid_copies")
