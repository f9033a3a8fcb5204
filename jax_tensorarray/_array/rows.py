"""The rows of a TensorArray: facts about them, and the interface of their three representations.

`Undecided` is an array without writes, whose row shape is unknown. Rows of one shape are `Stacked` in buffers. Rows of
different shapes are in a list, `Ragged`.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jax_tensorarray import _compat, _contexts
from jax_tensorarray._array import checks, growth
from jax_tensorarray._array.checks import Shape
from jax_tensorarray._types import Array

ONE = jax.tree.structure(0)  # of an element that is an array


@dataclass(frozen=True)
class Spec:
    """The static data of a TensorArray besides its rows. It must be the same before and after a loop."""

    element: PyTreeDef
    dynamic_size: bool
    max_size: int | None
    infer_shape: bool = True
    shape: Shape = None  #: of a row, from the user
    dtype: Any = None  #: None if the rows have it
    ranks: tuple[int, ...] | None = None  #: of an element's leaves, if rows are in buffers
    found_by: str = ""  #: the source of a max_size that is not from the user: "a loop" or "growing"
    is_carried: bool = False  #: whether a loop or branch of JAX has the array as an argument: its shape must not change
    is_unused: bool = False  #: whether the body of a loop writes no row: then it needs no shape

    def __repr__(self) -> str:
        if self.ranks is None:
            inferred = "an unknown shape" if self.shape is None else "a partly unknown shape"
            shape = inferred if self.infer_shape else "shapes that may differ"
            rows = f"rows of {shape} (element_shape={self.shape})"
        else:
            rows = f"rows of rank {listed(self.ranks)}"
        if not self.dynamic_size:
            return f"{rows}, a fixed size"
        if self.max_size is None:
            return f"{rows}, dynamic_size=True without max_size"
        return f"{rows}, dynamic_size=True, max_size={self.max_size}" + (
            f", which {self.found_by} found" if self.found_by else ""
        )

    @classmethod
    def declared(
        cls, element: PyTreeDef, rows: list[Any], dynamic_size: bool | None, max_size: Any, infer_shape: bool = True
    ) -> "Spec":
        """Return the spec for the arguments of a constructor. `rows` has the shape and dtype of each leaf of a row."""
        if max_size is not None:
            if not dynamic_size:
                raise ValueError("TensorArray: max_size says how far an array may grow, so it needs dynamic_size=True")
            max_size = checks.known_size(max_size, "max_size")
            if max_size is None:
                raise TypeError("TensorArray: max_size is a shape and must be known while tracing")
            if max_size > np.iinfo(np.int32).max:
                raise ValueError(f"TensorArray: max_size must be below 2**31, since sizes are of int32, got {max_size}")
        dtype = checks.as_dtype(rows[0][1]) if element == ONE else None
        in_buffers = infer_shape or all(checks.is_known(shape) for shape, _ in rows)
        is_found = bool(dynamic_size) and max_size is None and in_buffers and _contexts.bound.value is not None
        max_size, found_by = (_contexts.bound.value, "growing") if is_found else (max_size, "")
        return cls(element, bool(dynamic_size), max_size, infer_shape, rows[0][0], dtype, found_by=found_by)

    def check_max_size(self, size: int, text: str = "TensorArray: size {size} is larger than max_size {most}") -> None:
        """Raise an error with this text if `size` is larger than `max_size`."""
        if self.max_size is not None and size > self.max_size:
            if self.found_by == "growing":
                raise growth.needs_more(f"TensorArray: {size} rows")
            raise ValueError(text.format(size=size, most=self.max_size))

    def check_dynamic(self, op: str) -> None:
        """Raise an error if the array has a fixed size."""
        if not self.dynamic_size:
            raise ValueError(f"{op}: this TensorArray has a fixed size; give TensorArray(..., dynamic_size=True)")

    def bound(self) -> str:
        """Return the suffix for the name of an op that may write past `max_size`."""
        if self.max_size is None:
            return ""
        if self.found_by == "growing":
            return f" (max_size={self.max_size}, {growth.CURED})"
        if self.found_by:
            return f" (max_size={self.max_size}, which a loop found: one row a step. Give it if there are more)"
        return f" (max_size={self.max_size}; give a larger one for more rows)"

    def padded(self, size: int | None) -> int:
        """Return the number of rows of a padded stack, from a constant size or None."""
        return self.max_size if size is None or self.max_size is not None else size  # type: ignore[return-value]

    def check_may_enter_loop(self) -> None:
        """Raise an error if JAX's control flow flattens an array of unknown shape."""
        if not self.is_unused and _compat.flattened_by_control_flow():
            shape = "an unknown shape" if self.shape is None else f"a partly unknown shape, {self.shape},"
            instead = "" if self.infer_shape else ". If all rows have one shape, leave infer_shape=False out"
            raise TypeError(
                f"a TensorArray whose rows have {shape} cannot enter scan, while_loop, fori_loop or cond of JAX; "
                f"give the whole shape of a row: TensorArray(..., element_shape=...){instead}. The loops of "
                "jax_tensorarray, such as tf.while_loop, find the shape; in their bodies write(..., where=p) "
                "replaces a cond"
            )


class Static(NamedTuple):
    """The static data of the pytree."""

    spec: Spec
    size: int | None = None  #: of an array without leaves

    def __repr__(self) -> str:
        return f"{self.spec}" + ("" if self.size is None else f", {self.size} of them")


class Rows(ABC):
    """The rows of a TensorArray in one representation. A write returns a new object or, if it writes no row, this one.

    Only `tell` and `live` change attributes of this object, as a cache. In all methods `op` is the name for errors. An
    index is a Python integer or a NumPy array if it is constant, and otherwise a tracer; so is a `where`. Arguments and
    results have rows as the list of the leaves of an element.
    """

    __slots__ = ("is_padded", "most", "size", "size_of_user", "spec", "version")

    size: Any  #: number of live rows: an integer, a tracer, an `UncheckedSize`, or None for the whole capacity

    def __init__(self, spec: Spec, size: Any, version: Any = None) -> None:
        self.spec, self.size, self.version = spec, size, version
        self.is_padded = False  # whether all rows past the size are zeros
        self.size_of_user: Any = None  # a weak reference to the traced size that `tell` has returned
        self.most = size if type(size) is int else 0  # the largest constant size since a trace began

    def tell(self) -> Any:
        """Return the number of live rows for the user, who may append by a write at this index."""
        size = self.live()
        if isinstance(size, jax.core.Tracer):
            self.size_of_user = weakref.ref(size)
            return size
        return np.int32(size) if size <= np.iinfo(np.int32).max else np.int64(size)

    def is_size(self, index: Any) -> bool:
        """Return whether an index is the traced size that `tell` has returned."""
        return self.size_of_user is not None and index is not None and self.size_of_user() is index

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of a row, for each leaf, with None for unknown dimensions."""
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

    def fixed_size(self) -> int:
        """Return the number of live rows, which must be constant."""
        size = self.known_live()
        if size is None:
            raise TypeError("the number of rows of this TensorArray is known only at run time: use size(), not len()")
        return size

    def described(self) -> str:
        """Return the text of `repr`."""
        spec = self.spec
        try:
            if spec.element == ONE:
                (dtype,), (shape,) = self.dtypes, self.shapes
                rows = f"dtype={dtype.name}, element_shape={shape}"
            else:
                each = zip(self.dtypes, self.shapes, strict=True)
                kinds = [f"{dtype.name}{list(shape or ())}" for dtype, shape in each]
                rows = "rows=" + str(spec.element.unflatten(kinds)).replace("'", "")
            size = self.known_live()
            rows += f", size={'traced' if size is None else size}"
        except (AttributeError, TypeError, ValueError, RuntimeError):  # leaves from JAX that are no rows
            rows = "rows=..."
        if spec.dynamic_size:
            rows += ", dynamic_size=True"
        if spec.max_size is not None:
            rows += f", max_size={spec.max_size}"
        if not spec.infer_shape:
            rows += ", infer_shape=False"
        return rows

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
        """Raise an error if a row cannot have these shapes."""
        checks.check_shape(op, shapes[0], self.spec.shape)

    @abstractmethod
    def read(self, op: str, index: Any, where: Any = None, mode: str | None = None) -> list[Array]:
        """Return the rows at an index of any shape."""

    def fits(self, index: int, value: Any) -> bool:
        """Return whether `put` can write this: without conversion, checks, growth or tracing."""
        return False

    def put(self, index: int, value: Any) -> "Rows":
        """Write a row that `fits`, as in most eager loops. `write` takes two microseconds longer."""
        raise NotImplementedError

    @abstractmethod
    def write(self, op: str, index: Any, values: list[Array], where: Any, mode: str | None) -> "Rows":
        """Write one row, or many if the index is a vector, or append one if it is None.

        The result may be another representation.
        """

    @abstractmethod
    def stack(self, op: str, pad: bool) -> list[Array]:
        """Return all rows, stacked; with `pad` up to `max_size`, with zeros past the size."""

    def concat(self, op: str, pad: bool) -> list[Array]:
        return [checks.joined(x) for x in self.stack(op, pad)]

    def mask(self) -> Array:
        """Return the mask of the rows of `stack(pad=...)` that are not padding."""
        return jnp.arange(self.spec.padded(self.known_live())) < self.live()

    def popped(self, op: str, where: Any, mode: str | None) -> tuple["Rows", list[Array]]:
        """Return the rows without the last one, and that row."""
        size = self.known_live()
        if size is None or isinstance(where, jax.core.Tracer):
            if self.spec.max_size is None:
                raise ValueError(
                    f"{op}: with a traced where the size is known only at run time, which needs max_size: give "
                    "TensorArray(..., max_size=n), the largest number of rows that it may have"
                )
            return self.popped_when_run(op, where, mode)
        pops = where is None or bool(where)
        if pops and not size and mode != "drop":
            raise IndexError("Tried to pop a row but array size is: 0")
        row = self.read(op, size - 1 if pops else -1, mode="drop")
        return self.resized(max(size - 1, 0) if pops else size), row

    def popped_when_run(self, op: str, where: Any, mode: str | None) -> tuple["Rows", list[Array]]:
        """Do the same as `popped` with a traced size or `where`."""
        return self, self.read(op, self.live() - 1, where, mode)  # raises, unless rows are in buffers

    def resized(self, size: Any) -> Self:
        """Return the same rows with another size."""
        new = type(self)(self.spec, size, self.version)
        new.most = max(new.most, self.most)
        return new

    @abstractmethod
    def flatten(self) -> tuple[tuple[Any, ...], Static]:
        """Return the children of the pytree, and its static data."""

    def zero_padded(self) -> "Rows":
        """Return the rows with zeros past the size: a file must not have uninitialised memory."""
        return self

    # --- in loops ----------------------------------------------------------------------------------------------

    def has_no_bound(self) -> bool:
        """Return whether the array may grow without a bound, with its rows in a buffer, now or later."""
        return self.spec.dynamic_size and self.spec.max_size is None

    def bounded(self, limit: int) -> "Rows":
        """Return the same rows with room for `limit` rows, the bound of a loop."""
        return self

    def unbounded(self) -> "Rows":
        """Remove the bound of a loop, if the size is constant. Then the array may grow again."""
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
