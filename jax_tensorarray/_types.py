"""Types that every folder uses, and what it asks of the types of arrays.

A `Jaxpr` of `jax.extend.core` may be closed in every annotation: before jax 0.11 it is a `ClosedJaxpr` then.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jax.extend.core import Primitive

INT32_MAX = 2**31 - 1


class Equation(Protocol):
    """A `JaxprEqn` whose variables are arrays, with the shape and dtype that JAX promises of none."""

    @property
    def primitive(self) -> Primitive: ...
    @property
    def params(self) -> Any: ...
    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...
    def replace(self, *args: Any, **kwargs: Any) -> Any: ...


def bytes_of(types: Iterable[Any]) -> int:
    """Return the size in bytes of arrays of these types."""
    return sum(t.size * t.dtype.itemsize for t in types)
