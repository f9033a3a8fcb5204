"""Rows of one shape: stacked in buffers, or deferred until the first write if the shape is unknown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import _compat
from jax_tensorarray._array import checks
from jax_tensorarray._array.checks import Shape
from jax_tensorarray._array.history import Buffers, Layout, Version, into_capacity, largest, room_for, with_wide_index
from jax_tensorarray._array.ragged import Ragged
from jax_tensorarray._array.rows import ONE, Rows, Spec, Static, are_traced, check_alive, listed
from jax_tensorarray._ops import arguments
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.clear import ta_clear
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.primitive import row_params
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.stack import ta_stack
from jax_tensorarray._ops.starts import is_out_of_range
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array


@dataclass(frozen=True)
class UncheckedSize:
    """A size from a leaf of a pytree or from a file. It may be anything, so its first use checks it."""

    value: Any


class Stacked(Rows):
    """Rows in buffers `[capacity, *elem]`, one for each leaf of an element."""

    __slots__ = ()
    version: Version

    @classmethod
    def zeros(cls, spec: Spec, size: Any, rows: list[tuple[Any, Any]]) -> "Stacked":
        """Return `size` rows of zeros, of these shapes and dtypes. Rows up to `max_size` are uninitialised."""
        if spec.max_size is None:
            buffers = tuple(jnp.zeros((size, *shape), dtype) for shape, dtype in rows)
        else:
            buffers = tuple(ta_empty(spec.max_size, shape, dtype) for shape, dtype in rows)
            if not (isinstance(size, int) and size == 0):
                buffers = tuple(ta_clear(b, 0, size) for b in buffers)
        # An eager write may update the buffers in place, because nobody else holds them.
        version = Version(buffers, owned=_compat.executes_eagerly() and not are_traced(buffers))
        return cls(_of_ranks(spec, [len(shape) for shape, _ in rows]), size if spec.dynamic_size else None, version)

    @classmethod
    def of(cls, spec: Spec, values: list[Array]) -> "Stacked":
        """Return the rows of `values`."""
        size = values[0].shape[0] if spec.dynamic_size else None
        buffers = tuple(x if spec.max_size is None else into_capacity(x, spec.max_size) for x in values)
        return cls(_of_ranks(spec, [x.ndim - 1 for x in values]), size, Version(buffers))

    @property
    def layout(self) -> Layout:
        layout = self.version.layout
        if layout.ranks != self.spec.ranks:
            raise ValueError(
                f"this TensorArray has rows of rank {listed(self.spec.ranks)}, but its data has rows of rank "
                f"{listed(layout.ranks)}: it came out of vmap or scan, which stacked several TensorArrays. "
                "jax.vmap(lambda ta: (ta.stack(pad=True), ta.mask()))(tas) gives the rows of all, and "
                "jax.tree.map(lambda x: x[k], tas) takes one array"
            )
        return layout

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.layout.shapes

    @property
    def dtypes(self) -> tuple[Any, ...]:
        return self.layout.dtypes

    def tell(self) -> Any:
        size = self.size
        if isinstance(size, UncheckedSize) and np.ndim(size.value):
            return size.value  # of many arrays, stacked by vmap or scan
        return super().tell()

    def live(self) -> Any:
        size = self.size
        if isinstance(size, UncheckedSize):
            of_gradient = _is_of_gradient(size.value)
            size = self._checked(size.value)
            if isinstance(size, int) and not of_gradient:
                self.size = size  # a tracer must not outlive its trace
        return self.layout.capacity if size is None else size

    def _checked(self, size: Any) -> Any:
        """Check an unchecked size, and return it as a Python integer or a traced int32."""
        capacity = self.layout.capacity  # raises if vmap or scan has stacked several arrays
        if _is_of_gradient(size):
            return capacity
        if np.ndim(size):
            raise TypeError(
                f"TensorArray: the size is of shape {np.shape(size)}, but must be a scalar: a function that "
                "jax.tree.map called has changed it. tf.nest.map_structure passes the TensorArray itself to it"
            )
        if getattr(size, "ndim", None) == 0 and not isinstance(size, jax.core.Tracer):
            check_alive((size,))
            size = np.asarray(size)[()]
        constant = checks.known_size(size)
        if constant is None:
            # With size -1 every read, write and pop is out of range. Other operations show no error.
            return jnp.where(is_out_of_range(size, capacity + 1), -1, size.astype(jnp.int32))
        if constant > capacity:
            raise ValueError(f"TensorArray: size {constant} is larger than max_size {capacity}")
        return constant

    def check_shapes(self, op: str, shapes: Sequence[Shape]) -> None:
        expected = self.layout.shapes
        if tuple(shapes) == expected:
            return
        if self.spec.infer_shape:
            for shape, row in zip(shapes, expected, strict=True):
                checks.check_shape(op, shape, row)
        super().check_shapes(op, shapes)

    def _check_alive(self) -> None:
        _ = self.layout
        if not self.version.owned:
            check_alive(self.version.newest())

    def _buffers(self) -> Buffers:
        """Return the buffers. Others may hold them from now on, so writes copy them."""
        self._check_alive()
        return self.version.share()

    def _is_eager(self) -> bool:
        """Return whether an operation on these rows runs eagerly."""
        return _compat.executes_eagerly() and (self.version.owned or not are_traced(self.version.newest()))

    def _run(self, f: Callable[[Buffers], Any]) -> Any:
        """Return `f(buffers)`. If it runs eagerly, nobody else holds the buffers afterwards."""
        self._check_alive()
        return self.version.look(f) if self._is_eager() else f(self.version.share())

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, op: str, index: Any, where: Any = None, mode: str | None = None) -> list[Array]:
        size, is_settled = self.known_live(), False
        if size is not None and not isinstance(index, jax.core.Tracer):
            index, where, mode = checks.readable(index, size, where, mode)
            is_settled = mode == "drop"
            if is_settled and where is None and self._is_eager():
                read = partial(_compat.traced_as_a_whole, _read_now)
                return self._run(lambda buffers: with_wide_index(partial(read, buffers), index))
        buffers = self._buffers()
        if not is_settled and size != self.layout.capacity:
            index, where, mode = ta_check(index, self.live(), where=where, mode=mode, op=op), None, "drop"
        return [_read(op, b, index, where, mode) for b in buffers]

    def popped_when_run(self, op: str, where: Any, mode: str | None) -> tuple[Rows, list[Array]]:
        size = jnp.asarray(self.live(), jnp.int32)
        # The checked index is also the new size. So a program that uses only the size also raises for a missing row.
        at = ta_check(size - 1, size, where=where, mode=mode, op=op)
        new_size = at if where is None and mode != "drop" else jnp.where(at < 0, size, at)
        return self.resized(new_size), [_read(op, b, at, None, "drop") for b in self._buffers()]

    def stack(self, op: str, pad: bool) -> list[Array]:
        spec, size = self.spec, self.known_live()
        if size == self.layout.capacity:
            return list(self._buffers())
        if pad and spec.max_size is not None:
            return self._run(lambda buffers: [ta_stack(b, self.live()) for b in buffers])
        if size is None:
            raise TypeError(
                f"{op}: how many rows there are is known only at run time here; there may be up to {spec.max_size}. "
                f"Write {op.rpartition('.')[2]}(pad=True) for {spec.max_size} rows, with zeros past the size. mask() "
                "says which of them there are. gather(indices, where=...) gives the rows of a mask, and zeros elsewhere"
            )
        return self._run(lambda buffers: [b[:size] for b in buffers])

    # --- writing -----------------------------------------------------------------------------------------------

    def write(self, op: str, index: Any, values: list[Array], where: Any, mode: str | None) -> Rows:
        spec, layout = self.spec, self.layout
        if at_end := index is None or self.is_size(index):
            index = self._end()
        ndim = 0 if isinstance(index, int) else index.ndim
        shapes = tuple([x.shape[ndim:] for x in values])
        if shapes != layout.shapes:
            self.check_shapes(op, shapes)
            rows = Ragged.of(spec, layout.dtypes[0], list(self.stack("TensorArray", False)[0]))
            return rows.write(op, index, values, where, mode)
        size, is_known = self.known_live(), not isinstance(index, jax.core.Tracer)
        if checks.takes_none(where) or (ndim and not index.shape[0]):
            return self
        if is_known:
            limit = None if spec.dynamic_size else size
            if spec.found_by == "growing" and (not isinstance(where, np.ndarray) or where.any()):
                spec.check_max_size(largest(index) + 1)
            index, where, mode = checks.writable(index, limit, spec.max_size, where, mode, at_end)
            if mode == "drop" and largest(index) < 0:
                return self
            if size is not None and where is None and self._is_eager() and not are_traced(values):
                return self._written_now(index, values, size, layout.capacity)
        op += spec.bound()
        if spec.found_by == "growing":  # a dropped row is always an error, also without a mask
            mode = mode or "error"
        grows = spec.dynamic_size and (not is_known or size is None or largest(index) >= size)
        if grows and spec.max_size is None:
            is_fixed = not is_known or where is not None or (spec.is_carried and largest(index) >= layout.capacity)
            if is_fixed:
                raise checks.needs_max_size(op)
        buffers, size = self._buffers(), self.size
        if grows:
            buffers, size = self._grown(op, buffers, index, where, mode, at_end)
        buffers = tuple(_write(op, b, index, x, where, mode) for b, x in zip(buffers, values, strict=True))
        new = Stacked(spec, size, Version(buffers))
        new.most = max(self.most, size if type(size) is int else 0)
        return new

    def fits(self, index: int, value: Any) -> bool:
        is_near = self.size is None or (type(self.size) is int and index <= self.size)
        is_like = is_near and 0 <= index < self.version.capacity_for(value)
        return is_like and self.spec.element == ONE and _compat.executes_eagerly()

    def put(self, index: int, value: Any) -> "Stacked":
        if type(value) is np.ndarray:
            value = value.copy()  # JAX may read it later, when the user has changed it
        size = None if self.size is None else max(self.size, index + 1)
        return Stacked(self.spec, size, self.version.write(index, (value,), size or 0))

    def _written_now(self, index: Any, values: list[Array], size: int, capacity: int) -> "Stacked":
        """Write eagerly, in place if nobody else holds the rows."""
        self._check_alive()
        size, zeros, room = room_for(index, size, capacity)
        version = self.version.write(index, tuple(values), size, zeros, room)
        return Stacked(self.spec, size if self.spec.dynamic_size else None, version)

    def _end(self) -> Any:
        """Return the index for an append. A traced one may be unchecked, because the write checks it."""
        leaf = self.size.value if isinstance(self.size, UncheckedSize) else None
        is_usual = isinstance(leaf, jax.core.Tracer) and not leaf.ndim and leaf.dtype == jnp.int32
        return leaf if is_usual else self.live()

    def _grown(
        self, op: str, buffers: Buffers, index: Any, where: Any, mode: str | None, at_end: bool
    ) -> tuple[Buffers, Any]:
        """Clear the rows between the live ones and the written ones. Return the buffers and the new size."""
        size, capacity = index if at_end else self.live(), self.layout.capacity
        if isinstance(size, int) and where is None and not isinstance(index, jax.core.Tracer):
            size, zeros, room = room_for(index, size, capacity)
            if room:  # the array has no max_size
                buffers = tuple(into_capacity(b, room) for b in buffers)
            if zeros[1] > zeros[0]:
                buffers = tuple(ta_clear(b, *zeros) for b in buffers)
            return buffers, size
        if self.spec.found_by == "growing" and mode == "drop":  # a larger bound may have room for the row
            where, mode = (index >= 0) if where is None else (index >= 0) & where, "error"
        # This check raises, too, because the program may use only the size, and no row.
        last = ta_check(index, capacity, where=where, mode=mode, op=op)
        if last.ndim:
            last = jnp.max(last)
        new_size = last + 1 if at_end and where is None and mode != "drop" else jnp.maximum(last + 1, size)
        if at_end:  # its first use checks it, because `size` is unchecked
            return buffers, UncheckedSize(new_size)
        buffers = tuple(ta_clear(b, size, last if not np.ndim(index) else last + 1) for b in buffers)
        return buffers, new_size

    def flatten(self) -> tuple[tuple[Any, ...], Static]:
        spec, size, buffers = self.spec, self.size, self.version.share()
        if spec.max_size is not None:
            if isinstance(size, int):
                # An array of rank 0, because some libraries refuse NumPy scalars: orbax does not restore into one.
                size = np.array(size, np.int32)
            size = size.value if isinstance(size, UncheckedSize) else size
            if getattr(size, "dtype", None) == jnp.int32 and _compat.flattened_by_grad():
                raise TypeError(
                    "TensorArray: with max_size, the size is a leaf of the pytree, an int32, which JAX differentiates "
                    "only by jax.grad(f, allow_int=True) and the like, or jax.vjp. The gradient is then an array with "
                    f"max_size rows, here {spec.max_size}, zeros past the size"
                )
            return (spec.element.unflatten(buffers), size), Static(spec)
        if size is not None:
            buffers = tuple(b if b.shape[0] == size else b[:size] for b in buffers)
        spec = replace(spec, is_carried=False) if spec.is_carried else spec
        return (spec.element.unflatten(buffers),), Static(spec)

    def zero_padded(self) -> "Stacked":
        spec, version = self.spec, self.version
        if spec.max_size is None or not all(isinstance(b, jax.Array | np.ndarray) for b in version.newest()):
            return self
        if self.is_padded or version.layout.ranks != spec.ranks:  # stacked by vmap or scan
            return self
        padded = Stacked(spec, self.size, Version(tuple(self.stack("TensorArray", True))))
        padded.is_padded = True
        return padded

    def bounded(self, limit: int) -> "Stacked":
        buffers = tuple(into_capacity(b[: self.live()], limit) for b in self._buffers())
        return Stacked(replace(self.spec, max_size=limit, found_by="a loop"), self.live(), Version(buffers))

    def unbounded(self) -> "Stacked":
        if not self.spec.found_by or self.version.layout.ranks != self.spec.ranks:  # many arrays, stacked by vmap
            return self
        if (size := self.known_live()) is None:
            return self
        return Stacked(replace(self.spec, max_size=None, found_by=""), size, Version(self._buffers()))


class Undecided(Rows):
    """Rows without writes. All will have the shape of the first written one."""

    __slots__ = ()

    def of_shape(self, shape: Shape) -> Stacked:
        return Stacked.zeros(self.spec, self.size, [(shape, self.spec.dtype)])

    def read(self, op: str, index: Any, where: Any = None, mode: str | None = None) -> list[Array]:
        if not isinstance(index, jax.core.Tracer):
            checks.readable(index, self.size, where, mode)
        return self.stack(op, False)

    def write(self, op: str, index: Any, values: list[Array], where: Any, mode: str | None) -> Rows:
        index = self.size if index is None else index
        shape = values[0].shape[0 if isinstance(index, int) else index.ndim :]
        self.check_shapes(op, [shape])
        return self.of_shape(shape).write(op, index, values, where, mode)

    def stack(self, op: str, pad: bool) -> list[Array]:
        raise ValueError(
            f"{op}: no row was written yet, and the shape of a row is not known "
            f"(element_shape={self.spec.shape}); give TensorArray(..., element_shape=...)"
        )

    def flatten(self) -> tuple[tuple[Any, ...], Static]:
        self.spec.check_may_enter_loop()
        return (), Static(self.spec, self.size)

    def bounded(self, limit: int) -> "Undecided":
        return Undecided(replace(self.spec, max_size=limit, found_by="a loop"), self.size)

    def unbounded(self) -> "Undecided":
        return Undecided(replace(self.spec, is_unused=False), self.size)


def _of_ranks(spec: Spec, ranks: list[int]) -> Spec:
    fixed = spec.infer_shape or checks.is_known(spec.shape)
    return replace(spec, ranks=tuple(ranks), infer_shape=fixed, shape=None if fixed else spec.shape, dtype=None)


def _is_of_gradient(size: Any) -> bool:
    """Return whether a size is the gradient of a size. A gradient has `max_size` rows."""
    return getattr(size, "dtype", None) == jax.dtypes.float0


def _write(op: str, buffer: Array, index: Any, value: Array, where: Any, mode: str | None) -> Array:
    buffer, index, where, mode = arguments.row_operands(op, buffer, index, where, mode)
    return ta_write_p.bind(buffer, index, value, *where, **row_params(op, mode))


def _read(op: str, buffer: Array, index: Any, where: Any, mode: str | None) -> Array:
    buffer, index, where, mode = arguments.row_operands(op, buffer, index, where, mode)
    return ta_read_p.bind(buffer, index, *where, **row_params(op, mode))


@jax.jit
def _read_now(buffers: Buffers, index: Array) -> list[Array]:
    params = row_params("TensorArray.read", "drop")
    return [ta_read_p.bind(b, index, **params) for b in buffers]
