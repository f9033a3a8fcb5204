"""Types that every folder shares, and the size of arrays from their types.

In every annotation a `Jaxpr` of `jax.extend.core` may be closed. Before jax 0.11 this is a `ClosedJaxpr`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import jax
from jax.extend.core import Primitive
from jax.typing import ArrayLike

INT32_MAX = 2**31 - 1

Array = jax.Array

#: An array or nested sequences of numbers, which become one.
Numbers = ArrayLike | Sequence[Any]

#: The treatment of an index out of range: an error, or skipping the row.
Mode = Literal["error", "drop"]

#: The lowering of a row op: to slices of XLA or to a kernel; "auto" chooses the faster one that is in place.
Lowering = Literal["auto", "xla", "ffi"]


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
