"""`TensorArray`: the class to which TensorFlow code ports line for line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, PyTreeDef

from jax_tensorarray import _compat
from jax_tensorarray._array import checks
from jax_tensorarray._array.checks import Shape
from jax_tensorarray._array.history import Layout, Version, exactly, into_capacity
from jax_tensorarray._ops import arguments
from jax_tensorarray._ops.check import ta_check
from jax_tensorarray._ops.clear import ta_clear
from jax_tensorarray._ops.empty import ta_empty
from jax_tensorarray._ops.primitive import row_params
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.stack import ta_stack
from jax_tensorarray._ops.write import ta_write_p

Array = Any

_ONE = jax.tree.structure(0)  # of an element that is an array


@dataclass(frozen=True)
class _Spec:
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
        return f"rows of rank {_listed(self.ranks)}"


@dataclass(frozen=True)
class _Leaf:
    """A size that came as a leaf of a pytree or from a file. It may be anything, and is checked where it is used."""

    value: Any


class TensorArray:
    """A list of arrays, the rows, with the methods and the meaning of `tf.TensorArray`.

    It is a value: `write` returns the new TensorArray and the old one stays as it was. It is a pytree, so it goes
    through every transformation, and may be carried by `lax.scan`, `fori_loop`, `while_loop` and `cond`; there rows
    are read and written in place, and gradients take O(1) a row. With respect to a TensorArray, `jax.grad` gives the
    gradient of its rows.

    Outside of `jit` a loop of `ta = ta.write(i, x)` is in place too. An older version that you keep and use costs one
    copy of the rows; it is never invalidated, unless you donate it to a jitted function.

    Args:
        dtype: dtype of the rows. Rows of another dtype are refused; Python numbers, and lists of them, are converted.
        size: number of rows, a Python integer. Rows that were never written are zeros. With `max_size` it may be
            traced: one outside of `[0, max_size]` is then an error at run time, as an index is, and dropped under vmap.
        dynamic_size: whether writing past the end makes the array longer. Rows in between are zeros. Inside of `jit`
            and the other transformations an array can only grow up to `max_size`.
        clear_after_read: ignored. Rows can be read any number of times, as in `tf.function`.
        tensor_array_name: ignored.
        handle: must be None.
        flow: must be None.
        infer_shape: whether all rows have the shape of the first one written. If not, and `element_shape` is not
            fully known, rows of different shapes are kept one by one, and indices must be Python integers.
        element_shape: shape of a row; dimensions may be None until the first write. Give it to carry an array through
            a loop that makes its first write.
        colocate_with_first_write_call: ignored.
        name: ignored.
        max_size: the number of rows that a `dynamic_size` array may grow to. Its size is then a value of the program,
            known only at run time, and `stack` gives `max_size` rows, zeros past the size. Memory for them is taken
            at once but not touched before it is written. The size is a leaf of the pytree: changing it there may
            expose rows that were not written, but none past `max_size`. Without `max_size`, the loops of
            jax_tensorarray that have a `max_steps` make room for one row a step; one row more is an error. Inside of
            `jit` such an array is stacked by `stack(pad=True)`; outside of it, it is as long as its rows.

    Raises:
        IndexError: an index known while tracing is out of range.
        jax.errors.JaxRuntimeError, ValueError: a traced index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: an argument of the wrong dtype; an array with rows of unknown shape enters a loop or `cond`.
        ValueError: a row of the wrong shape; no size; growth that needs a `max_size`.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import TensorArray
    >>> def fibonacci(n):
    ...     ta = TensorArray(jnp.float32, size=n)
    ...     ta = ta.write(0, 0.0)
    ...     ta = ta.write(1, 1.0)
    ...     ta = jax.lax.fori_loop(2, n, lambda i, ta: ta.write(i, ta.read(i - 1) + ta.read(i - 2)), ta)
    ...     return ta.stack()
    >>> fibonacci(7)
    Array([0., 1., 1., 2., 3., 5., 8.], dtype=float32)

    TensorFlow: `tf.TensorArray`.
    """

    __slots__ = ("__weakref__", "_size", "_spec", "_version")

    _spec: _Spec
    _version: Version | None  # None as long as the shape of a row is unknown
    _size: Any  # of the live rows: a Python integer, a traced int32, a _Leaf, or None for all that are there

    def __init__(
        self,
        dtype: Any,
        size: Any = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool | None = None,
        tensor_array_name: str | None = None,
        handle: Any = None,
        flow: Any = None,
        infer_shape: bool = True,
        element_shape: Any = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
        *,
        max_size: int | None = None,
    ) -> None:
        del clear_after_read, tensor_array_name, colocate_with_first_write_call, name
        for given, what in ((handle, "handle"), (flow, "flow")):
            if given is not None:
                raise TypeError(f"TensorArray: JAX has neither handles nor flows; leave out {what}")
        self._create(_ONE, [(checks.as_shape(element_shape), dtype)], size, dynamic_size, max_size, bool(infer_shape))

    @classmethod
    def like(
        cls, x: Any, size: Any = None, *, dynamic_size: bool | None = None, max_size: int | None = None
    ) -> "TensorArray":
        """Return a TensorArray with rows of the shape and dtype of `x`.

        Args:
            x: an array, a `jax.ShapeDtypeStruct`, a number, or a pytree of them. With a pytree every method works
                leaf by leaf: it takes and returns pytrees of that structure.
            size: number of rows.
            dynamic_size: see the class.
            max_size: see the class.

        >>> ta = TensorArray.like({"loss": 0.0, "hidden": jnp.zeros(2)}, 3)
        >>> ta = ta.write(1, {"loss": 4.0, "hidden": jnp.ones(2)})
        >>> ta.stack()["loss"]
        Array([0., 4., 0.], dtype=float32)
        """
        leaves, element = jax.tree.flatten(x)
        if not leaves:
            raise ValueError("TensorArray.like: there is no array in x")
        ta = cls.__new__(cls)
        rows = []
        for leaf in leaves:
            row = leaf if hasattr(leaf, "dtype") else checks.as_rows("TensorArray.like", leaf)
            rows.append((np.shape(row), row.dtype))
        ta._create(element, rows, size, dynamic_size, max_size, True)
        return ta

    @classmethod
    def from_array(cls, value: Any, *, dynamic_size: bool | None = None, max_size: int | None = None) -> "TensorArray":
        """Return a TensorArray with the rows of `value`, an array `[size, *elem]` or a pytree of such arrays.

        >>> TensorArray.from_array(jnp.arange(6.0).reshape(3, 2)).read(1)
        Array([2., 3.], dtype=float32)
        """
        leaves, element = jax.tree.flatten(value)
        leaves = [checks.as_rows("TensorArray.from_array", x) for x in leaves]
        if not leaves:
            raise ValueError("TensorArray.from_array: there is no array in value")
        n = checks.number_of_rows("TensorArray.from_array", leaves)
        ta = cls.__new__(cls)
        ta._declare(element, [(x.shape[1:], x.dtype) for x in leaves], dynamic_size, max_size, True)
        ta._check_max_size(n)
        return ta._filled(leaves)

    def _declare(
        self, element: PyTreeDef, rows: Any, dynamic_size: bool | None, max_size: Any, infer_shape: bool
    ) -> None:
        if max_size is not None:
            if not dynamic_size:
                raise ValueError("TensorArray: max_size says how far an array may grow, so it needs dynamic_size=True")
            known = checks.known_size(max_size, "max_size")
            if known is None:
                raise TypeError("TensorArray: max_size is a shape and must be known while tracing")
            if known > np.iinfo(np.int32).max:
                raise ValueError(f"TensorArray: max_size must be below 2**31, since sizes are of int32, got {known}")
            max_size = known
        dtype = checks.as_dtype(rows[0][1]) if element == _ONE else None
        self._spec = _Spec(element, bool(dynamic_size), max_size, infer_shape, rows[0][0], dtype)
        self._version, self._size = None, 0

    def _create(
        self, element: PyTreeDef, rows: Any, size: Any, dynamic_size: Any, max_size: Any, infer_shape: bool
    ) -> None:
        if size is None:
            raise ValueError(
                "Size must be declared for TensorArrays. Argument `size` must be provided; give size=0 and "
                "dynamic_size=True if it is to grow"
            )
        self._declare(element, rows, dynamic_size, max_size, infer_shape)
        known = checks.known_size(size)
        all_known = all(checks.is_known(shape) for shape, _ in rows)
        if known is None:
            limit = self._spec.max_size
            if limit is None:
                raise TypeError(
                    "TensorArray: size is a shape and must be known while tracing, got a traced value; give "
                    "dynamic_size=True and max_size for a size that is known only at run time"
                )
            if not all_known:
                raise TypeError("TensorArray: a traced size needs element_shape")
            # Under vmap a size out of range is dropped, as an index is: there are no rows then.
            checked = ta_check(size, limit + 1, op="TensorArray: size not in [0, max_size]")
            self._size = jnp.maximum(checked, 0)
        else:
            self._check_max_size(known)
            self._size = known
            if not infer_shape and not all_known:
                self._version = Version([None] * known)
        if all_known:
            self._allocate([(shape, checks.as_dtype(dtype)) for shape, dtype in rows])

    def _check_max_size(self, size: int) -> None:
        if self._spec.max_size is not None and size > self._spec.max_size:
            raise ValueError(f"TensorArray: size {size} is larger than max_size {self._spec.max_size}")

    # --- properties --------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """Dtype of the rows; a pytree of them if rows are pytrees."""
        if self._spec.ranks is None:
            return self._spec.dtype
        return self._spec.element.unflatten(self._layout().dtypes)

    @property
    def element_shape(self) -> Any:
        """Shape of a row: None where it is unknown, as a whole or a dimension; a pytree if rows are pytrees."""
        if self._spec.ranks is None:
            return self._spec.shape
        return self._spec.element.unflatten(self._layout().shapes)

    @property
    def dynamic_size(self) -> bool:
        """Whether writing past the end makes the array longer."""
        return self._spec.dynamic_size

    def size(self, name: str | None = None) -> Any:
        """Return the number of rows: a NumPy int32 if it is known, else a traced int32.

        It is traced for an array with `max_size` inside of `jit`.
        """
        if isinstance(self._size, _Leaf) and np.ndim(self._size.value):
            return self._size.value  # of many arrays that vmap or scan stacked
        size = self._live()
        if isinstance(size, jax.core.Tracer):
            return size
        return np.int32(size) if size <= np.iinfo(np.int32).max else np.int64(size)

    def __len__(self) -> int:
        size = self._known_live()
        if size is None:
            raise TypeError("the number of rows of this TensorArray is known only at run time: use size(), not len()")
        return size

    def __repr__(self) -> str:
        spec = self._spec
        try:
            if spec.ranks is None:
                rows = f"dtype={spec.dtype.name}, element_shape={spec.shape}"
            elif spec.element == _ONE:
                rows = f"dtype={self.dtype.name}, element_shape={self.element_shape}"
            else:
                layout = self._layout()
                kinds = [f"{d.name}{list(s)}" for d, s in zip(layout.dtypes, layout.shapes, strict=True)]
                rows = "rows=" + str(spec.element.unflatten(kinds)).replace("'", "")
            size = self._live()
            rows += f", size={'traced' if isinstance(size, jax.core.Tracer) else int(size)}"
        except (AttributeError, TypeError, ValueError, RuntimeError):  # leaves that are no rows, in the hands of JAX
            rows = "rows=..."
        if spec.dynamic_size:
            rows += ", dynamic_size=True"
        if spec.max_size is not None:
            rows += f", max_size={spec.max_size}"
        if not spec.infer_shape:
            rows += ", infer_shape=False"
        return f"TensorArray({rows})"

    # --- one row -----------------------------------------------------------------------------------------------

    def read(self, index: Any, name: str | None = None, *, where: Any = None, mode: str | None = None) -> Any:
        """Return the row at `index`. Differentiable.

        Args:
            index: integer, from 0 on.
            name: ignored.
            where: bool. If it is False the row is zeros and `index` is ignored.
            mode: what happens to an index that is negative, or not below `size()`: "error" raises, "drop" gives
                zeros. None is "error", but "drop" for an index or a size that `jax.vmap` batches.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: there is no such row.
            TypeError: `where` is not bool.
            ValueError: no row was written yet and its shape is not known.

        >>> ta = TensorArray.from_array(jnp.array([1.0, 2.0, 3.0]))
        >>> ta.read(2)
        Array(3., dtype=float32)
        >>> ta.read(3, mode="drop")
        Array(0., dtype=float32)

        TensorFlow: `tf.TensorArray.read`, which has no masks.
        """
        op = "TensorArray.read"
        at = checks.known_index(op, index)
        where, mode = checks.options(op, name, where, mode)
        return self._read(op, index if at is None else at, at, where, mode)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            raise TypeError("TensorArray: rows are not sliced; use gather(jnp.arange(a, b)) or stack()[a:b]")
        return self.read(index)

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, range(len(self)))

    def write(
        self, index: Any, value: Any, name: str | None = None, *, where: Any = None, mode: str | None = None
    ) -> "TensorArray":
        """Return the TensorArray whose row at `index` is `value`. Differentiable: the last write gets the gradient.

        Args:
            index: integer, from 0 on. Past the end is an error, unless `dynamic_size` is given.
            value: the row, of the dtype and shape of the others, or a Python number or lists of them.
            name: ignored.
            where: bool. If it is False nothing is written and `index` is ignored. This is the way to write
                conditionally: a `cond` or `jnp.where` between two TensorArrays may touch all rows under `vmap`.
            mode: what happens to an index that is negative, or past the end to which the array may grow: "error"
                raises, "drop" writes nothing. None is "error", but "drop" for an index that `jax.vmap` batches.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: there is no such row and the array cannot grow to it.
            TypeError: `value` has another dtype, or `where` is not bool.
            ValueError: `value` has another shape, or growing inside `jit` needs `max_size`.

        >>> ta = TensorArray(jnp.float32, size=2, element_shape=())
        >>> ta.write(0, 1.0).write(1, 2.0, where=False).write(2, 3.0, mode="drop").stack()
        Array([1., 0.], dtype=float32)

        TensorFlow: `tf.TensorArray.write`, which has no masks.
        """
        plain = where is None and mode is None and name is None
        if plain and type(index) is int and (ta := self._written_now(index, value)) is not None:
            return ta
        op = "TensorArray.write"
        at = checks.known_index(op, index)
        where, mode = checks.options(op, name, where, mode)
        values = self._converted(op, value)
        self = self._accepting(op, [x.shape for x in values])
        op, mode = self._writing(op, mode)
        return self._put(op, index if at is None else at, at, values, where, mode)

    def append(self, value: Any, *, where: Any = None, mode: str | None = None) -> "TensorArray":
        """Return the TensorArray with `value` appended as its last row. Needs `dynamic_size=True`.

        Args:
            value: the row.
            where: bool. If it is False nothing is appended.
            mode: what happens to a row past `max_size`: "error" raises, "drop" leaves it out. None is "error", but
                "drop" for a size that `jax.vmap` batches.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: it has `max_size` rows already.
            TypeError: `value` has another dtype, or `where` is not bool.
            ValueError: `value` has another shape, the array has a fixed size, or growing inside `jit` needs `max_size`.

        >>> ta = TensorArray(jnp.float32, size=0, dynamic_size=True)
        >>> for x in [1.0, 2.0, 3.0]:
        ...     ta = ta.append(x)
        >>> ta.stack()
        Array([1., 2., 3.], dtype=float32)
        """
        op = "TensorArray.append"
        self._check_dynamic(op)
        plain = where is None and mode is None
        if plain and type(self._size) is int and (ta := self._written_now(self._size, value)) is not None:
            return ta
        where, mode = checks.options(op, None, where, mode)
        values = self._converted(op, value)
        self = self._accepting(op, [x.shape for x in values])
        op, mode = self._writing(op, mode)
        at = self._known_live()
        return self._put(op, self._claimed() if at is None else at, at, values, where, mode, at_end=True)

    def pop(self, *, where: Any = None, mode: str | None = None) -> tuple["TensorArray", Any]:
        """Return the TensorArray without its last row, and that row (differentiable). Needs `dynamic_size=True`.

        Args:
            where: bool. If it is False no row is taken away, and the row is zeros.
            mode: what happens if the array has no rows: "error" raises, "drop" gives zeros. None is "error", but
                "drop" for a size that `jax.vmap` batches.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: there are no rows.
            TypeError: `where` is not bool.
            ValueError: the array has a fixed size, or a traced `where` needs `max_size`.

        >>> ta, row = TensorArray.from_array(jnp.array([1.0, 2.0]), dynamic_size=True).pop()
        >>> row
        Array(2., dtype=float32)
        >>> len(ta)
        1
        """
        op = "TensorArray.pop"
        self._check_dynamic(op)
        where, mode = checks.options(op, None, where, mode)
        size = self._known_live()
        if size is None or isinstance(where, jax.core.Tracer):
            if self._spec.max_size is None:
                raise ValueError(
                    f"{op}: with a where that is traced the size is known only at run time, which needs max_size: give "
                    "TensorArray(..., max_size=n), the largest number of rows it may have"
                )
            row = self._read(op, self._live() - 1, None if size is None else size - 1, where, mode)
            left = jnp.maximum(jnp.asarray(self._live(), jnp.int32) - 1, 0)
            return self._with(self._version, left if where is None else jnp.where(where, left, self._live())), row
        taken = where is None or bool(where)
        if taken and not size and mode != "drop":
            raise IndexError("Tried to pop a row but array size is: 0")
        at = size - 1 if taken else -1
        return self._with(self._version, max(at, 0) if taken else size), self._read(op, at, at, mode="drop")

    # --- many rows ---------------------------------------------------------------------------------------------

    def stack(self, name: str | None = None, *, pad: bool | None = None) -> Any:
        """Return all rows as one array `[size, *elem]`, without a copy where that is possible. Differentiable.

        Args:
            name: ignored.
            pad: whether an array with `max_size` gives `max_size` rows, with zeros past the size, inside and outside
                of `jit` alike. `pad=False` gives exactly `size()` rows; the size must then be known, so it works
                outside of `jit` only. None is True, but False for a `max_size` that a loop found, since nobody has
                asked for zeros then.

        Raises:
            ValueError: the shape of the rows is not known, or rows have different shapes.
            TypeError: `pad=False` and a size known only at run time.
        """
        checks.check_name("TensorArray.stack", name, "pad is")
        return self._spec.element.unflatten(self._stacked("TensorArray.stack", pad))

    def concat(self, name: str | None = None) -> Any:
        """Join all rows along their first axis: `[n_0 + n_1 + ..., *rest]` from rows `[n_k, *rest]`. Differentiable.

        With `max_size` the rows past the size are included, as zeros.

        Raises:
            ValueError: rows are scalars, or differ in more than their length, or the shape of one is not known.
        """
        op = "TensorArray.concat"
        if not self._is_list():
            return self._spec.element.unflatten([checks.joined(x) for x in self._stacked(op, None)])
        return checks.concatenated(self._list_rows(op), self._spec.shape, self._spec.dtype)

    def gather(self, indices: Any, name: str | None = None, *, where: Any = None, mode: str | None = None) -> Any:
        """Return the rows at `indices`, an array of shape `I`, as one array `[*I, *elem]`. Differentiable.

        Args:
            indices: integers.
            name: ignored.
            where: bool, broadcast to `I`. Rows where it is False are zeros, and their indices are ignored.
            mode: what happens to an index out of range: see `read`.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: an index is out of range.
            TypeError: an index is not an integer, or `where` not bool.
            ValueError: `where` does not fit `I`, or the shape of a row is not known.

        >>> TensorArray.from_array(jnp.array([1.0, 2.0])).gather([1, 0, 7], where=jnp.array([True, True, False]))
        Array([2., 1., 0.], dtype=float32)

        TensorFlow: `tf.TensorArray.gather`, which has no masks.
        """
        op = "TensorArray.gather"
        known = checks.known_indices(op, indices)
        indices = jnp.asarray(indices) if known is None else known
        where, mode = checks.options(op, name, where, mode, indices.shape)
        if not self._is_list():
            return self._read(op, indices, known, where, mode)
        self._need_known(op, known, where)
        known, *_ = checks.readable(known, len(self), where, mode)
        stacked = self._stack_list(op, [self._read(op, int(i), int(i), mode="drop") for i in known.reshape(-1)])
        return stacked.reshape(*known.shape, *stacked.shape[1:])

    def scatter(
        self, indices: Any, value: Any, name: str | None = None, *, where: Any = None, mode: str | None = None
    ) -> "TensorArray":
        """Return the TensorArray with `value[k]` written to row `indices[k]`, in order: the last duplicate stays.

        Differentiable: of duplicates the last one that is written gets the gradient.

        Args:
            indices: integers `[n]`.
            value: rows `[n, *elem]`.
            name: ignored.
            where: bool, broadcast to `[n]`. Rows where it is False are not written, and their indices are ignored.
            mode: what happens to an index out of range: see `write`.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: an index is out of range.
            TypeError: an index is not an integer, `value` has another dtype, or `where` is not bool.
            ValueError: `indices` and `value` differ in length, a row has the wrong shape, `where` does not fit, or
                growing inside `jit` needs `max_size`.

        >>> ta = TensorArray(jnp.float32, size=3, element_shape=())
        >>> ta.scatter([2, 0, 9], jnp.array([1.0, 2.0, 3.0]), mode="drop").stack()
        Array([2., 0., 1.], dtype=float32)

        TensorFlow: `tf.TensorArray.scatter`, which has no masks.
        """
        op = "TensorArray.scatter"
        known = checks.known_indices(op, indices)
        indices = jnp.asarray(indices) if known is None else known
        if indices.ndim != 1:
            raise ValueError(f"{op}: indices must be a vector, got shape {indices.shape}")
        where, mode = checks.options(op, name, where, mode, indices.shape)
        values = self._converted(op, value)
        n = checks.number_of_rows(op, values)
        self = self._accepting(op, [x.shape[1:] for x in values])
        if n != indices.shape[0]:
            raise ValueError(f"{op}: {indices.shape[0]} indices were given, and {n} rows")
        if self._is_list():
            self._need_known(op, known, where)
            for k, (i, row) in enumerate(zip(known.tolist(), values[0], strict=True)):
                self = self._put(op, i, i, [row], where if where is None else where[k], mode)
            return self
        op, mode = self._writing(op, mode)
        return self._put(op, indices, known, values, where, mode) if n else self

    def unstack(self, value: Any, name: str | None = None) -> "TensorArray":
        """Return the TensorArray with exactly the rows of `value`, an array `[n, *elem]`. Makes no copy.

        Raises:
            ValueError: there are more rows than the array has, and it is not dynamic; or rows of another shape.
        """
        op = "TensorArray.unstack"
        values = self._converted(op, value)
        n = checks.number_of_rows(op, values)
        self = self._accepting(op, [x.shape[1:] for x in values], replaced=True)
        if not self._spec.dynamic_size and n > len(self):
            raise ValueError(f"Cannot unstack {n} tensors into a TensorArray of static size {len(self)}")
        if self._spec.max_size is not None and n > self._spec.max_size:
            raise ValueError(f"Cannot unstack {n} tensors into a TensorArray of max_size {self._spec.max_size}")
        return self._filled(values)

    def split(self, value: Any, lengths: Any, name: str | None = None) -> "TensorArray":
        """Return the TensorArray whose rows are pieces of `value`, cut along its first axis.

        Args:
            value: array `[sum(lengths), *rest]`.
            lengths: Python integers. Different ones need `infer_shape=False`.
            name: ignored.

        Raises:
            TypeError: `lengths` are traced.
            ValueError: `lengths` do not fit `value`, the size of the array, or each other.
        """
        op = "TensorArray.split"
        lengths = checks.as_lengths(lengths)
        spec = self._spec
        values = self._converted(op, value)
        for x in values:
            checks.check_lengths(lengths, x)
        if not spec.dynamic_size and len(lengths) != len(self):
            raise ValueError(
                f"TensorArray's size is not equal to the size of lengths ({len(self)} vs. {len(lengths)}), and the "
                "TensorArray is not marked as dynamically resizeable."
            )
        if len(set(lengths)) > 1 and (spec.infer_shape or checks.is_known(spec.shape)):
            raise ValueError(
                f"{op}: rows of different lengths, {lengths}, need infer_shape=False and an element_shape that does "
                "not fix the length"
            )
        if not lengths:
            return self._with(self._version, 0 if spec.dynamic_size else self._size)
        length = lengths[0] if len(set(lengths)) == 1 else None
        self = self._accepting(op, [(length, *x.shape[1:]) for x in values], replaced=True)
        if self._spec.max_size is not None and len(lengths) > self._spec.max_size:
            raise ValueError(f"Cannot split into {len(lengths)} rows with max_size {self._spec.max_size}")
        if length is not None:
            return self._filled([x.reshape(len(lengths), lengths[0], *x.shape[1:]) for x in values])
        return self._as_list(jnp.split(values[0], np.cumsum(lengths)[:-1]))

    # --- for TensorFlow's sake ---------------------------------------------------------------------------------

    def identity(self) -> "TensorArray":
        """Return a TensorArray with the same rows."""
        return self._with(self._version, self._size)

    def close(self, name: str | None = None) -> None:
        """Do nothing: memory is freed when the last TensorArray that holds it is gone."""

    def grad(self, source: Any, flow: Any = None, name: str | None = None) -> Any:
        """Raise NotImplementedError, as TensorFlow 2 does not have it either: use `jax.grad`."""
        raise NotImplementedError("TensorArray.grad is not supported; jax.grad differentiates through a TensorArray")

    # --- rows and versions -------------------------------------------------------------------------------------

    def _with(self, version: Version | None, size: Any, **changes: Any) -> "TensorArray":
        ta = TensorArray.__new__(TensorArray)
        ta._spec = replace(self._spec, **changes) if changes else self._spec
        ta._version, ta._size = version, size
        return ta

    def _is_list(self) -> bool:
        return self._spec.ranks is None and self._version is not None

    def _layout(self) -> Layout:
        """Return shapes and dtypes of the rows."""
        assert self._version is not None
        layout = self._version.layout
        if layout.ranks != self._spec.ranks:
            raise ValueError(
                f"this TensorArray has rows of rank {_listed(self._spec.ranks)}, but those of its buffer are of rank "
                f"{_listed(layout.ranks)}: it came out of vmap or scan, which stacked many of them. Use it inside of "
                "vmap, or take one with jax.tree.map(lambda x: x[k], ta)"
            )
        return layout

    def _buffers(self) -> tuple[Array, ...]:
        """Return the buffers. They are shared from now on, so they are no longer updated in place."""
        self._check_alive()
        assert self._version is not None
        buffers: tuple[Array, ...] = self._version.share()
        return buffers

    def _run(self, f: Callable[[tuple[Array, ...]], Any]) -> Any:
        """Return `f(buffers)`. If it runs eagerly, the buffers stay ours."""
        self._check_alive()
        assert self._version is not None
        if _eager(() if self._version.owned else self._version.newest()):
            return self._version.look(f)
        return f(self._version.share())

    def _check_alive(self) -> None:
        assert self._version is not None
        self._layout()
        if not self._version.owned:
            _check_alive(self._version.newest())

    def _is_concrete(self) -> bool:
        """Return whether the rows are concrete arrays, none of them traced."""
        assert self._version is not None
        return self._version.owned or not _traced(self._version.newest())

    def _capacity(self) -> int:
        return self._layout().capacity

    def _live(self) -> Any:
        """Return the number of live rows, a Python integer or a traced int32."""
        size = self._size
        if isinstance(size, _Leaf):
            size = self._checked_size(size.value)
            if isinstance(size, int):
                self._size = size  # a traced one must not outlive what is being traced
        return self._capacity() if size is None else size

    def _claimed(self) -> Any:
        """Return the number of live rows as an index to append at, unchecked.

        The write checks it, unless it is known to be in range.
        """
        leaf = self._size.value if isinstance(self._size, _Leaf) else None
        is_usual = isinstance(leaf, jax.core.Tracer) and not leaf.ndim and leaf.dtype == jnp.int32
        return leaf if is_usual else self._live()

    def _known_live(self) -> int | None:
        size = self._live()
        return None if isinstance(size, jax.core.Tracer) else int(size)

    def _checked_size(self, size: Any) -> Any:
        """Check a size that came from outside, and return it as a Python integer or a traced int32."""
        capacity = self._capacity()  # raises if vmap or scan has stacked several arrays
        if np.ndim(size):
            raise TypeError(
                f"TensorArray: the size of this array is of shape {np.shape(size)}, though its rows are those of one "
                "array: a function that jax.tree.map called has changed it. map_structure hands over the array itself"
            )
        if getattr(size, "ndim", None) == 0 and not isinstance(size, jax.core.Tracer):
            _check_alive((size,))
            size = np.asarray(size)[()]
        known = checks.known_size(size)
        if known is None:
            # With size -1 no row can be read, written or taken; nothing else shows that something is wrong.
            return jnp.where(_is_index(size, capacity + 1), size.astype(jnp.int32), -1)
        if known > capacity:
            raise ValueError(f"TensorArray: size {known} is larger than max_size {capacity}")
        return known

    def _allocate(self, rows: list[tuple[Any, Any]]) -> None:
        """Make the buffers: zeros for the rows that are live, uninitialised memory for rows that may follow."""
        spec = self._spec
        if spec.max_size is None:
            buffers = tuple(jnp.zeros((self._size, *shape), dtype) for shape, dtype in rows)
        else:
            buffers = tuple(ta_empty(spec.max_size, shape, dtype) for shape, dtype in rows)
            if not (isinstance(self._size, int) and self._size == 0):
                buffers = tuple(ta_clear(b, 0, self._size) for b in buffers)
        self._spec = self._stacked_spec([len(shape) for shape, _ in rows])
        if not spec.dynamic_size:
            self._size = None
        # A write outside of tracing may update them in place: nobody else holds them.
        self._version = Version(buffers, owned=_eager(buffers))

    def _stacked_spec(self, ranks: list[int]) -> _Spec:
        spec = self._spec
        fixed = spec.infer_shape or checks.is_known(spec.shape)
        return replace(spec, ranks=tuple(ranks), infer_shape=fixed, shape=None if fixed else spec.shape, dtype=None)

    def _filled(self, values: list[Array]) -> "TensorArray":
        """Return the array with exactly those rows."""
        n, capacity = values[0].shape[0], self._spec.max_size
        size = n if self._spec.dynamic_size else None
        ta = self._with(None, size)
        ta._spec = self._stacked_spec([x.ndim - 1 for x in values])
        ta._version = Version(tuple(values if capacity is None else (into_capacity(x, capacity) for x in values)))
        return ta

    def _converted(self, op: str, value: Any) -> list[Array]:
        """Return the leaves of `value` as arrays of the dtype of the rows."""
        spec = self._spec
        try:
            leaves = spec.element.flatten_up_to(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{op}: rows have the structure {spec.element}, but value has {jax.tree.structure(value)}"
            ) from error
        dtypes = (spec.dtype,) if spec.ranks is None else self._layout().dtypes
        return [checks.as_rows(op, x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]

    def _accepting(self, op: str, shapes: list[Shape], *, replaced: bool = False) -> "TensorArray":
        """Return an array that can hold rows of those shapes. `replaced` says that all of its rows will be replaced."""
        spec = self._spec
        if spec.ranks is None:
            checks.check_shape(op, shapes[0], spec.shape)
            if not spec.infer_shape or replaced:
                return self
            ta = self._with(None, self._size)
            ta._allocate([(shapes[0], spec.dtype)])
            return ta
        expected = self._layout().shapes
        if tuple(shapes) == expected:
            return self
        if spec.infer_shape:
            for shape, row in zip(shapes, expected, strict=True):
                checks.check_shape(op, shape, row)
        checks.check_shape(op, shapes[0], spec.shape)
        return self if replaced else self._as_list(list(self._stacked("TensorArray", False)[0]))

    def _put(
        self, op: str, index: Any, known: Any, values: list[Array], where: Any, mode: str | None, at_end: bool = False
    ) -> "TensorArray":
        """Write one row or many. `known` is the index if it is not traced, else None."""
        spec, size = self._spec, self._known_live()
        if isinstance(where, np.ndarray | np.generic) and not where.any():
            return self
        if known is not None:
            limit = None if spec.dynamic_size else size
            known, where, mode = checks.writable(known, limit, spec.max_size, where, mode)
            if mode == "drop" and _largest(known) < 0:
                return self
            index = known
        if self._is_list():
            self._need_known(op, known, where)
            return self._put_in_list(int(known), values[0], size or 0)
        if size is not None and known is not None and where is None and _eager(values) and self._is_concrete():
            return self._put_now(known, values, size)
        grows = spec.dynamic_size and (known is None or size is None or _largest(known) >= size)
        if grows and spec.max_size is None:
            raise ValueError(
                f"{op}: inside jit, grad, vmap and loops a TensorArray with dynamic_size=True grows no further than "
                "max_size: give TensorArray(..., max_size=n), the largest number of rows it may have. The loops of "
                "jax_tensorarray find it from their max_steps or maximum_iterations"
            )
        buffers = self._buffers()
        if grows:
            buffers, size = self._grown(op, buffers, index, known, where, at_end)
        buffers = tuple(_write(op, b, index, x, where, mode) for b, x in zip(buffers, values, strict=True))
        return self._with(Version(buffers), size if grows else self._size)

    def _written_now(self, index: int, value: Any) -> "TensorArray | None":
        """Write on the fast path, which fits most eager loops: no conversion, growth, tracing or error is needed.

        Return None if any of these may be needed. The general path then does them, and takes three times as long.
        """
        version, size = self._version, self._size
        if version is None:
            return None
        capacity = version.capacity_for(value)
        if not 0 <= index < capacity or self._spec.element != _ONE or not _compat.executes_eagerly():
            return None
        if size is not None:
            if type(size) is not int or index > size:
                return None
            size = max(size, index + 1)
        if type(value) is np.ndarray:
            value = value.copy()  # JAX reads it when its turn comes, and it may have changed by then
        return self._with(version.write(index, (value,), size or capacity), size)

    def _put_now(self, index: Any, values: list[Array], size: int) -> "TensorArray":
        """Write eagerly, in place if nobody else holds the rows."""
        assert self._version is not None
        self._check_alive()
        stop, capacity = _largest(index) + 1, self._capacity()
        # With many rows, rows in between may stay unwritten; with one, only the rows before it.
        zeros = size, stop - 1 if isinstance(index, int) else stop
        room = max(stop, 2 * capacity, 8) if stop > capacity else 0
        size = max(size, stop)
        version = self._version.write(index, tuple(values), size, zeros, room)
        return self._with(version, size if self._spec.dynamic_size else None)

    def _grown(
        self, op: str, buffers: tuple[Array, ...], index: Any, known: Any, where: Any, at_end: bool
    ) -> tuple[tuple[Array, ...], Any]:
        """Clear the rows between the live ones and those to be written. Return the buffers and the new size."""
        size = self._claimed() if at_end else self._live()
        new_size: Any
        if isinstance(size, int) and known is not None and where is None:
            new_size = max(size, _largest(known) + 1)
            at_end = at_end or (isinstance(known, int) and known <= size)
        else:
            index, _ = arguments.as_index(op, index, self._capacity(), "drop", masked=True)
            written = _is_index(index, self._capacity())  # an index outside is an error, or dropped
            if where is not None:
                written &= where
            stops = jnp.where(written, index.astype(jnp.int32) + 1, 0)
            new_size = jnp.maximum(jnp.max(stops) if stops.ndim else stops, size)
            if at_end:  # checked where it is used, as `size` was not
                return buffers, _Leaf(new_size)
        if not at_end:
            # A single row is the last one, and is overwritten; with many, some in between may stay unwritten.
            stop = new_size - 1 if np.ndim(index) == 0 else new_size
            buffers = tuple(ta_clear(b, size, stop) for b in buffers)
        return buffers, new_size

    def _read(self, op: str, index: Any, known: Any, where: Any = None, mode: str | None = None) -> Any:
        """Return the rows at an index of any shape. `known` is the index if it is not traced, else None."""
        spec, size, is_settled = self._spec, self._known_live(), False
        if known is not None and size is not None:
            known, where, mode = checks.readable(known, size, where, mode)
            index, is_settled = known, mode == "drop"
        if self._is_list():
            self._need_known(op, known, where)
            return self._list_rows(op, int(known))[0]
        self._need_shape(op)
        if is_settled and where is None and self._is_concrete() and _compat.executes_eagerly():
            return spec.element.unflatten(self._run(lambda buffers: exactly(partial(_read_now, buffers), known)))
        buffers = self._buffers()
        if not is_settled and size != self._capacity():
            index, where, mode = ta_check(index, self._live(), where=where, mode=mode, op=op), None, "drop"
        return spec.element.unflatten([_read(op, b, index, where, mode) for b in buffers])

    def _stacked(self, op: str, pad: bool | None) -> list[Array]:
        spec, size = self._spec, self._known_live()
        if pad is None:
            pad = not spec.by_loop
            if size is None and not pad:
                raise TypeError(
                    f"{op}: the number of rows is known only at run time here, and max_size, {spec.max_size}, was "
                    "found by a loop. Write stack(pad=True) for that many rows, zeros past the size, or give "
                    "TensorArray(..., max_size=n) where the array is made"
                )
        if spec.max_size is not None and pad and not self._is_list():
            self._need_shape(op)
            if size == self._capacity():
                return list(self._buffers())
            return self._run(lambda buffers: [ta_stack(b, self._live()) for b in buffers])
        if size is None:
            raise TypeError(f"{op}: pad=False gives as many rows as there are, which is known only at run time here")
        if self._is_list():
            return [self._stack_list(op, self._list_rows(op))]
        if not size and spec.ranks is None and checks.is_known(spec.shape):
            return [jnp.zeros((0, *spec.shape), spec.dtype)]  # type: ignore[misc]
        self._need_shape(op)
        if size == self._capacity():
            return list(self._buffers())
        return self._run(lambda buffers: [b[:size] for b in buffers])

    def _has_no_shape(self) -> bool:
        """Return whether the shape of a row is still unknown: not given, no row written, and all rows will share it."""
        spec = self._spec
        written = self._version is not None and any(row is not None for row in self._version.newest())
        return spec.ranks is None and spec.infer_shape and not written and not checks.is_known(spec.shape)

    def _with_shape(self, element_shape: Any) -> "TensorArray":
        ta = self._with(None, self._size, shape=checks.as_shape(element_shape))
        ta._allocate([(ta._spec.shape, ta._spec.dtype)])
        return ta

    def _has_no_bound(self) -> bool:
        """Return whether the array may grow without a given bound, with its rows in one buffer, now or later."""
        spec = self._spec
        return spec.dynamic_size and spec.max_size is None and not self._is_list()

    def _known_size(self) -> Any:
        return self._size if self._version is None else self._live()

    def _bounded(self, more: int) -> "TensorArray":
        """Return an array with the same rows and room for `more`."""
        size = self._known_size()
        limit = min(size + more, np.iinfo(np.int32).max)
        changes = {"max_size": limit, "by_loop": True}
        if self._version is None:
            return self._with(None, size, **changes)
        return self._with(Version(tuple(into_capacity(b[:size], limit) for b in self._buffers())), size, **changes)

    def _unbounded(self) -> "TensorArray":
        """Undo the bound that a loop has set, if the size is known: the array then grows again as far as needed."""
        if self._spec.is_unused:
            return self._with(None, self._size, is_unused=False)
        if not self._spec.by_loop or (size := self._known_live()) is None:
            return self
        return self._with(Version(self._buffers()), size, max_size=None, by_loop=False)

    def _writing(self, op: str, mode: str | None) -> tuple[str, str | None]:
        """Return the name and the mode to write with.

        If a loop has set the bound, a row too many is an error, never dropped.
        """
        if not self._spec.by_loop:
            return op, mode
        found = f"{op} (max_size={self._spec.max_size}, which a loop found: one row a step. Give it if there are more)"
        return found, mode or "error"

    def _need_shape(self, op: str) -> None:
        if self._version is None:
            raise ValueError(
                f"{op}: no row was written yet, and the shape of a row is not known "
                f"(element_shape={self._spec.shape}); give TensorArray(..., element_shape=...)"
            )

    def _check_dynamic(self, op: str) -> None:
        if not self._spec.dynamic_size:
            raise ValueError(f"{op}: this TensorArray has a fixed size; give TensorArray(..., dynamic_size=True)")

    # --- rows of different shapes, kept one by one -------------------------------------------------------------

    def _as_list(self, rows: list[Array]) -> "TensorArray":
        spec = self._spec
        dtype = spec.dtype if spec.ranks is None else self.dtype
        return self._with(Version(rows), len(rows), ranks=None, dtype=dtype)

    def _need_known(self, op: str, index: Any, where: Any) -> None:
        if index is None:
            raise TypeError(
                f"{op}: a TensorArray with infer_shape=False keeps rows of different shapes, so an index must be known "
                "while tracing, a Python integer. If all rows have one shape, give element_shape or infer_shape=True; "
                "if not, pad them to one shape"
            )
        if isinstance(where, jax.core.Tracer):
            raise TypeError(f"{op}: rows of different shapes need a where that is known while tracing")

    def _put_in_list(self, index: int, row: Array, size: int) -> "TensorArray":
        assert self._version is not None
        version = self._version
        if not _compat.executes_eagerly():  # writes of a transformation must not be visible outside of it
            version = Version(list(version.share()), owned=True, seen=size)
        capacity, zeros = len(version.newest()), (size, index)
        size = max(size, index + 1)
        return self._with(
            version.write(index, row, size, zeros, max(size, 2 * capacity) if size > capacity else 0), size
        )

    def _list_rows(self, op: str, index: int | None = None) -> list[Array]:
        """Return all rows, or the one at `index`. Unwritten ones are zeros if the shape of a row is known."""
        assert self._version is not None
        if index is not None and index < 0:
            raise ValueError(
                f"{op}: a row that is not read is zeros, of no known shape in a TensorArray with infer_shape=False"
            )
        rows = self._version.look(lambda rows: rows[: self._size])
        found = []
        for i, row in enumerate(rows if index is None else rows[index : index + 1], index or 0):
            if row is None:
                raise ValueError(
                    f"{op}: row {i} was never written, and its shape is not known (element_shape={self._spec.shape})"
                )
            _check_alive((row,))
            found.append(row)
        return found

    def _stack_list(self, op: str, rows: list[Array]) -> Array:
        shapes = {row.shape for row in rows}
        if len(shapes) > 1:
            raise ValueError(f"{op}: rows have different shapes: {[row.shape for row in rows]}; concat joins them")
        if rows:
            return jnp.stack(rows)
        if not checks.is_known(self._spec.shape):
            raise ValueError(f"{op}: there are no rows, and the shape of one is not known; give element_shape")
        return jnp.zeros((0, *self._spec.shape), self._spec.dtype)  # type: ignore[misc]

    # --- pytree ------------------------------------------------------------------------------------------------

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        spec = self._spec
        if spec.ranks is None and not spec.is_unused and _compat.flattened_by_control_flow():
            rows = () if self._version is None else self._version.newest()
            if all(row is None for row in rows):
                given = "an unknown shape" if spec.shape is None else f"a partly unknown shape, {spec.shape},"
                raise TypeError(
                    f"a TensorArray whose rows have {given} cannot enter scan, while_loop, fori_loop or cond; say all "
                    "of the shape of a row: TensorArray(..., element_shape=...)"
                )
        if self._version is None:
            return (), (spec, self._size)
        if spec.ranks is None:
            rows = self._version.share()[: self._size]
            return (tuple(rows),), (spec, None)
        buffers = self._version.share()
        if spec.max_size is not None:
            size = self._size
            if isinstance(size, int):
                # An array of rank 0, since not every library takes NumPy scalars: orbax does not restore into one.
                size = np.array(size, np.int32)
            size = size.value if isinstance(size, _Leaf) else size
            return (spec.element.unflatten(buffers), size), (spec, None)
        if self._size is not None:
            buffers = tuple(b if b.shape[0] == self._size else b[: self._size] for b in buffers)
        return (spec.element.unflatten(buffers),), (spec, None)

    def _zero_padded(self) -> "TensorArray":
        """Return the array with zeros past its rows, so that no uninitialised memory gets into a file."""
        if self._spec.max_size is None or self._spec.ranks is None:
            return self
        assert self._version is not None
        if (
            not all(isinstance(b, (jax.Array, np.ndarray)) for b in self._version.newest())
            or self._version.layout.ranks != self._spec.ranks
        ):
            return self  # in the hands of JAX
        return self._with(Version(tuple(self._stacked("TensorArray", True))), self._size)

    def __copy__(self) -> "TensorArray":
        return self.identity()

    def __reduce__(self) -> Any:
        children, aux = self._zero_padded()._flatten()
        return _restored, (aux, children)


def _flatten_with_keys(ta: TensorArray) -> tuple[Any, Any]:
    children, aux = ta._flatten()
    return tuple((GetAttrKey(name), child) for name, child in zip(("rows", "size"), children, strict=False)), aux


def _unflatten(aux: Any, children: Any) -> TensorArray:
    # The children may be anything: JAX fills trees with axes, shardings, avals and bare objects.
    ta = TensorArray.__new__(TensorArray)
    ta._spec, ta._size = aux
    ta._version = None
    if children and ta._spec.ranks is None:
        ta._version, ta._size = Version(list(children[0])), len(children[0])
    elif children:
        ta._version = Version(tuple(ta._spec.element.flatten_up_to(children[0])))
        ta._size = _Leaf(children[1]) if len(children) > 1 else None
    return ta


def _restored(aux: Any, children: Any) -> TensorArray:
    """Return a TensorArray from a file. Its size is checked at once if it is a concrete value."""
    ta = _unflatten(aux, children)
    size = ta._size.value if isinstance(ta._size, _Leaf) else None
    if isinstance(size, np.ndarray | np.generic | jax.Array | int) and not np.ndim(size):
        ta._live()
    return ta


jax.tree_util.register_pytree_with_keys(TensorArray, _flatten_with_keys, _unflatten, TensorArray._flatten)


def _eager(arrays: Any) -> bool:
    """Return whether an operation on those arrays is run right now, with nothing traced."""
    return _compat.executes_eagerly() and not _traced(arrays)


def _traced(arrays: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _check_alive(arrays: Any) -> None:
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise RuntimeError(
                "the rows of this TensorArray are gone: it was donated to a jitted function (donate_argnums). "
                "Use the TensorArray that the function returned"
            )


def _largest(index: Any) -> int:
    return index if isinstance(index, int) else int(index.max())


def _is_index(index: Array, size: int) -> Array:
    """Return whether a traced index is in [0, size), computed in its own dtype, which need not hold the size."""
    return (index >= 0) & (index <= min(size - 1, jnp.iinfo(index.dtype).max))


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, ranks))


def _write(op: str, buffer: Array, index: Any, value: Array, where: Any, mode: str | None) -> Array:
    buffer, index, where, mode = arguments.row_operands(op, buffer, index, where, mode)
    return ta_write_p.bind(buffer, index, value, *where, **row_params(op, mode))


def _read(op: str, buffer: Array, index: Any, where: Any, mode: str | None) -> Array:
    buffer, index, where, mode = arguments.row_operands(op, buffer, index, where, mode)
    return ta_read_p.bind(buffer, index, *where, **row_params(op, mode))


@jax.jit
def _read_now(buffers: tuple[Array, ...], index: Array) -> list[Array]:
    params = row_params("TensorArray.read", "drop")
    return [ta_read_p.bind(b, index, **params) for b in buffers]


def entering_loop(step: Callable[[Any], Any], carry: Any, max_steps: Any) -> Any:
    """Return a carry in which each array knows what a loop needs: the shape of a row, and how many there may be.

    If an array lacks either, the step is traced to find out. An array that the step writes gets the shape of the rows
    that are written. One that grows gets room for a row a step, or for the rows that a loop inside of the step adds.
    An array that nobody writes needs neither.
    """
    leaves, tree = jax.tree.flatten(carry, is_leaf=_is_array)
    undecided = [_is_array(x) and (x._has_no_shape() or x._has_no_bound()) for x in leaves]
    if not any(undecided):
        return carry
    steps = 0 if max_steps is None else int(max_steps)

    def bounded(rows: list[int]) -> list[Any]:
        each = zip(leaves, rows, undecided, strict=True)
        return [x._bounded(steps * n) if n and flag and x._has_no_bound() else x for x, n, flag in each]

    entering, after, is_traced = leaves, None, True
    try:
        after = _leaves_after(step, tree, leaves, undecided)
    except Exception:  # an array that must have a bound to be written, or the user's own
        is_traced = False
    if not is_traced:
        entering = bounded([1] * len(leaves))
        try:
            after = _leaves_after(step, tree, entering, undecided)
        except Exception:
            if jax.config.jax_disable_jit:  # it may be a program that cannot be traced
                return carry
            raise
    if after is None:
        return carry
    if is_traced and any(added := [_added(x, y) for x, y in zip(leaves, after, strict=True)]):
        if max_steps is None:
            raise ValueError(
                "a TensorArray grows in a loop inside of one whose number of steps has no bound: give "
                "TensorArray(..., max_size=n), the largest number of rows it may have, or the outer loop max_steps or "
                "maximum_iterations"
            )
        entering = bounded(added)
    if max_steps is None:
        entering = leaves

    def decided(before: Any, x: Any, y: Any) -> Any:
        if not _is_array(y):
            return x
        if x._spec.by_loop and type(y._size) is int and y._size == x._size:
            x = before  # it did not grow
        if y._version is None:
            return x._with(None, x._size, is_unused=True)
        return x._with_shape(y.element_shape) if x._has_no_shape() and not y._has_no_shape() else x

    each = zip(leaves, entering, after, undecided, strict=True)
    return jax.tree.unflatten(tree, [decided(before, x, y) if flag else x for before, x, y, flag in each])


def _leaves_after(step: Callable[[Any], Any], tree: Any, leaves: list[Any], closed: list[bool]) -> list[Any] | None:
    """Return the leaves of the carry after a step, with some leaves closed over. None if their number has changed."""
    found: list[list[Any]] = []

    def traced(*known: Any) -> None:
        given = iter(known)
        args = [x if flag else next(given) for x, flag in zip(leaves, closed, strict=True)]
        found.append(jax.tree.leaves(step(jax.tree.unflatten(tree, args)), is_leaf=_is_array))

    jax.eval_shape(traced, *(x for x, flag in zip(leaves, closed, strict=True) if not flag))
    return found[-1] if len(found[-1]) == len(leaves) else None


def _added(x: Any, y: Any) -> int:
    """Return how many rows a loop inside of a step may add to an array that was not bounded before it."""
    grew = _is_array(x) and _is_array(y) and x._has_no_bound() and y._spec.by_loop
    return y._spec.max_size - x._known_size() if grew else 0


def leaving_loop(carry: Any) -> Any:
    """Return a carry in which the arrays that the loop bounded may grow again, where their size is known."""
    leaves, tree = jax.tree.flatten(carry, is_leaf=_is_array)
    return jax.tree.unflatten(tree, [x._unbounded() if _is_array(x) else x for x in leaves])


def _is_array(x: Any) -> bool:
    return isinstance(x, TensorArray)


def map_structure(
    func: Callable[..., Any], *structure: Any, check_types: bool = True, expand_composites: bool = False
) -> Any:
    """Map `func` over pytrees with every `TensorArray` as a leaf, as `tf.nest.map_structure` does.

    `jax.tree.map` goes into arrays: it maps the buffer and the size. `func` gets the arrays themselves.

    Args:
      func: from a leaf of each structure to a leaf of the result.
      structure: pytrees of the same structure.
      check_types: ignored: containers must be of the same types.
      expand_composites: ignored: `func` gets the leaves of every pytree except a `TensorArray`.

    Returns:
      A pytree of that structure.

    >>> import jax.numpy as jnp
    >>> old, new = ({"done": jnp.array(False), "rows": TensorArray.from_array(jnp.full(2, x))} for x in (1.0, 2.0))
    >>> after = map_structure(lambda a, b: b if isinstance(b, TensorArray) else a | True, old, new)
    >>> print(after["done"], after["rows"].stack())
    True [2. 2.]

    TensorFlow: `tf.nest.map_structure`.
    """
    return jax.tree.map(func, *structure, is_leaf=_is_array)
