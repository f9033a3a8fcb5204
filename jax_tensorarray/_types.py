"""Types that every folder uses, and what it asks of the types of arrays.

A `Jaxpr` of `jax.extend.core` may be closed in every annotation: before jax 0.11 it is a `ClosedJaxpr` then.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from jax.extend.core import Primitive
from jax.typing import ArrayLike

INT32_MAX = 2**31 - 1

#: An array or nested sequences of numbers, which become one.
Numbers = ArrayLike | Sequence[Any]

#: What an index out of range does: it is an error, or the row is left out.
Mode = Literal["error", "drop"]

#: What a row op becomes when it is lowered: what is best in place, slices of XLA, or a kernel.
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
