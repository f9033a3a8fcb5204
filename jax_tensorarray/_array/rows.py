"""What a TensorArray holds: facts about its rows, and the rows in one of three representations.

`Undecided` is for an array without written rows, if their shape is unknown. Rows of one shape are `Stacked`
in buffers. Rows of different shapes are kept one by one in a list, `Ragged`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jax_tensorarray import _compat
from jax_tensorarray._array import checks
from jax_tensorarray._array.checks import Shape

Array = Any

ONE = jax.tree.structure(0)  # of an element that is an array


@dataclass(frozen=True)
class Spec:
    """All that is known of a TensorArray besides its rows. It must be the same before and after a loop."""

    element: PyTreeDef
    dynamic_size: bool
    max_size: int | None
    infer_shape: bool = True
    shape: Shape = None  #: of a row, as far as it was given
    dtype: Any = None  #: None where the rows say it
    ranks: tuple[int, ...] | None = None  #: of an element's leaves, where rows are stacked in buffers
    by_loop: bool = False  #: whether max_size comes from the steps of a loop, since nobody gave it
    is_unused: bool = False  #: whether a loop has seen that its body writes no row, so that it need not know its shape

    def __repr__(self) -> str:
        if self.ranks is None:
            known = "an unknown shape" if self.shape is None else "a partly unknown shape"
            shape = known if self.infer_shape else "shapes that may differ"
            return f"rows of {shape} (element_shape={self.shape})"
        return f"rows of rank {listed(self.ranks)}"

    @classmethod
    def declared(
        cls, element: PyTreeDef, rows: list[Any], dynamic_size: bool | None, max_size: Any, infer_shape: bool = True
    ) -> "Spec":
        """Return what the arguments of a constructor say. `rows` has the shape and dtype of each leaf of a row."""
        if max_size is not None:
            if not dynamic_size:
                raise ValueError("TensorArray: max_size says how far an array may grow, so it needs dynamic_size=True")
            known = checks.known_size(max_size, "max_size")
            if known is None:
                raise TypeError("TensorArray: max_size is a shape and must be known while tracing")
            if known > np.iinfo(np.int32).max:
                raise ValueError(f"TensorArray: max_size must be below 2**31, since sizes are of int32, got {known}")
            max_size = known
        dtype = checks.as_dtype(rows[0][1]) if element == ONE else None
        return cls(element, bool(dynamic_size), max_size, infer_shape, rows[0][0], dtype)

    def check_max_size(self, size: int) -> None:
        if self.max_size is not None and size > self.max_size:
            raise ValueError(f"TensorArray: size {size} is larger than max_size {self.max_size}")

    def check_may_enter_loop(self) -> None:
        """Raise the error of an array without rows that `lax.scan` or one of its kin flattens."""
        if not self.is_unused and _compat.flattened_by_control_flow():
            given = "an unknown shape" if self.shape is None else f"a partly unknown shape, {self.shape},"
            raise TypeError(
                f"a TensorArray whose rows have {given} cannot enter scan, while_loop, fori_loop or cond; "
                "give the whole shape of a row: TensorArray(..., element_shape=...)"
            )


class Rows(ABC):
    """The rows of a TensorArray in one representation. It is a value: a method that writes returns another.

    In all methods `op` is the name to use in errors. An index is a Python integer or a NumPy array if it is known, and
    otherwise traced; so is a `where`. Rows are given and returned as the list of the leaves of an element.
    """

    __slots__ = ("size", "spec", "version")

    size: Any  #: number of live rows: an integer, traced, an `UncheckedSize`, or None for all that there is room for

    def __init__(self, spec: Spec, size: Any, version: Any = None) -> None:
        self.spec, self.size, self.version = spec, size, version

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of a row as far as it is known, for each leaf."""
        return (self.spec.shape,)

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return (self.spec.dtype,)

    def live(self) -> Any:
        """Return the number of live rows, a Python integer or a traced int32."""
        return self.size

    def known_live(self) -> int | None:
        size = self.live()
        return None if isinstance(size, jax.core.Tracer) else int(size)

    def converted(self, op: str, value: Any) -> list[Array]:
        """Return the leaves of `value` as arrays of the dtype of the rows."""
        element = self.spec.element
        try:
            leaves = element.flatten_up_to(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{op}: rows have the structure {element}, but value has {jax.tree.structure(value)}"
            ) from error
        return [checks.as_rows(op, x, dtype) for x, dtype in zip(leaves, self.dtypes, strict=True)]

    def check_shapes(self, op: str, shapes: Sequence[Shape]) -> None:
        """Raise an error if no row may have these shapes."""
        checks.check_shape(op, shapes[0], self.spec.shape)

    @abstractmethod
    def read(self, op: str, index: Any, where: Any = None, mode: str | None = None) -> list[Array]:
        """Return the rows at an index of any shape."""

    def fits(self, index: int, value: Any) -> bool:
        """Return whether `put` can write this: nothing is to be converted, checked, grown or traced."""
        return False

    def put(self, index: int, value: Any) -> "Rows":
        """Write a row that `fits`. Most eager loops need no more, and `write` takes two microseconds longer."""
        raise NotImplementedError

    @abstractmethod
    def write(self, op: str, index: Any, values: list[Array], where: Any, mode: str | None) -> "Rows":
        """Write one row, or many if the index is a vector, or append one if it is None.

        This may need another representation.
        """

    @abstractmethod
    def stack(self, op: str, pad: bool | None) -> list[Array]:
        """Return all rows, stacked; with `pad` those up to `max_size`."""

    def concat(self, op: str) -> list[Array]:
        return [checks.joined(x) for x in self.stack(op, None)]

    def resized(self, size: Any) -> Self:
        """Return the same rows with another number of live ones."""
        return type(self)(self.spec, size, self.version)

    @abstractmethod
    def flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Return the children of the pytree, and its static data."""

    def zero_padded(self) -> "Rows":
        """Return the rows with zeros past them, so that no uninitialised memory gets into a file."""
        return self

    # --- in loops ----------------------------------------------------------------------------------------------

    def has_no_bound(self) -> bool:
        """Return whether the array may grow without a given bound, with its rows in one buffer, now or later."""
        return self.spec.dynamic_size and self.spec.max_size is None

    def bounded(self, limit: int) -> "Rows":
        """Return the same rows with room for `limit` of them, a bound that a loop has set."""
        return self

    def unbounded(self) -> "Rows":
        """Undo the bound that a loop has set, if the size is known: the array then grows again as far as needed."""
        return self


def listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))


def are_traced(arrays: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_alive(arrays: Any) -> None:
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise RuntimeError(
                "the rows of this TensorArray are gone: it was donated to a jitted function (donate_argnums). "
                "Use the TensorArray that the function returned"
            )
