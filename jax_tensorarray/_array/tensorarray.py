"""`TensorArray`: the class with which TensorFlow code ports line for line."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from jax_tensorarray import _compat
from jax_tensorarray._array import checks, flax, making
from jax_tensorarray._array.dropped import warn_if_dropped
from jax_tensorarray._array.rows import ONE, Rows
from jax_tensorarray._types import Mode, Numbers

#: The id of the newest array. Python deletes an unused result before it calls another method.
_newest = 0


class TensorArray:
    """A list of arrays, the rows, with the methods and the meaning of `tf.TensorArray`.

    A TensorArray is an immutable value: `write` returns a new TensorArray and leaves the old one unchanged. It is also
    a pytree. It can be an argument of every transformation, and a carry of `lax.scan`, `fori_loop`, `while_loop` and
    `cond`. These loops read and write rows in place, and their gradients take O(1) per row. With respect to a
    TensorArray, `jax.grad` gives the gradient of its rows.

    Outside of `jit`, a loop of `ta = ta.write(i, x)` is in place too. You may keep and use an older version, which
    costs one copy of the rows. Only donating it to a jitted function invalidates it.

    A statement `ta.write(i, x)` drops the new array, and gives a `UserWarning`. The same holds for `append`, `scatter`,
    `split`, `unstack`, and a loop of this library whose arrays are dropped.

    Args:
        dtype: dtype of the rows. A row of another dtype is an error. Python numbers, and lists of them, are converted.
            Random keys have a dtype such as `jax.random.key(0).dtype`; their rows that were never written are keys
            whose data is zero.
        size: number of rows, a Python integer. Rows that were never written are zeros. With `dynamic_size` and
            `max_size` the size may be traced. It must then be in `[0, max_size]`, or an error is raised at run time.
        dynamic_size: whether a write past the end makes the array longer. Rows in between are zeros. If the index is
            known while tracing, the array can always grow; if the index is traced, it can grow up to `max_size`.
        clear_after_read: ignored. Rows can be read any number of times, like in `tf.function`.
        tensor_array_name: ignored.
        handle: must be None.
        flow: must be None.
        infer_shape: whether all rows have the shape of the first one written. If False, and `element_shape` is not
            fully known, rows may have different shapes. They are then stored one by one, and indices must be Python
            integers.
        element_shape: shape of a row. Dimensions may be None until the first write. If a loop or a `cond` of JAX makes
            the first write, give the shape, so that it can carry the array. The loops of jax_tensorarray find it.
        colocate_with_first_write_call: ignored.
        name: ignored.
        max_size: the number of rows that a `dynamic_size` array may grow to. It is needed if the array grows at indices
            that are known only at run time. Growing further is an error. The memory is reserved at once, and touched
            when a row is written. The size is then a value of the program and a leaf of the pytree. If you change this
            leaf, rows that were not written may appear, but none past `max_size`. You need no `max_size` in a loop of
            jax_tensorarray with `max_steps`, which reserves one row per step, or the rows that each step appends. Nor
            do you need it under `growing`, which finds a bound by itself.

    Raises:
        IndexError: an index known while tracing is out of range.
        jax.errors.JaxRuntimeError, ValueError: a traced index is out of range (while running; on a GPU later, see
            `check_errors`).
        TypeError: an argument has the wrong dtype, or an array with rows of unknown shape enters a loop of JAX or a
            `cond`.
        ValueError: a row has the wrong shape, the size is missing, or the growth needs a `max_size`.

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

    __slots__ = ("__weakref__", "_rows")

    _rows: Rows

    def __init__(
        self,
        dtype: DTypeLike,
        size: ArrayLike | None = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool | None = None,
        tensor_array_name: str | None = None,
        handle: None = None,
        flow: None = None,
        infer_shape: bool = True,
        element_shape: int | Sequence[int | None] | None = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
        *,
        max_size: int | None = None,
    ) -> None:
        del clear_after_read, tensor_array_name, colocate_with_first_write_call, name
        for argument, what in ((handle, "handle"), (flow, "flow")):
            if argument is not None:
                raise TypeError(f"TensorArray: JAX has neither handles nor flows; leave out {what}")
        rows = [(checks.as_shape(element_shape), dtype)]
        self._rows = making.created(ONE, rows, size, dynamic_size, max_size, bool(infer_shape))
        checks.warn_if_narrowed(dtype)
        if flax.is_unregistered and "flax.serialization" in sys.modules:
            flax.register_if_imported(type(self))

    @classmethod
    def like(
        cls, x: Any, size: ArrayLike | None = None, *, dynamic_size: bool | None = None, max_size: int | None = None
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
        return cls._of(making.like(x, size, dynamic_size, max_size))

    @classmethod
    def from_array(cls, value: Any, *, dynamic_size: bool | None = None, max_size: int | None = None) -> "TensorArray":
        """Return a TensorArray with the rows of `value`, an array `[size, *elem]` or a pytree of such arrays.

        >>> TensorArray.from_array(jnp.arange(6.0).reshape(3, 2)).read(1)
        Array([2., 3.], dtype=float32)
        """
        return cls._of(making.of_array(value, dynamic_size, max_size))

    # --- properties --------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """Dtype of the rows; a pytree of them if rows are pytrees."""
        return self._rows.spec.element.unflatten(self._rows.dtypes)

    @property
    def element_shape(self) -> Any:
        """Shape of a row: None where it is unknown, as a whole or a dimension; a pytree if rows are pytrees."""
        return self._rows.spec.element.unflatten(self._rows.shapes)

    @property
    def dynamic_size(self) -> bool:
        """Whether writing past the end makes the array longer."""
        return self._rows.spec.dynamic_size

    def size(self, name: str | None = None) -> Any:
        """Return the number of rows: a NumPy int32 if it is known, else a traced int32.

        Inside of `jit` the number is traced if the array may have grown at a traced index. It can then be neither a
        shape nor a bound of Python's `range`. Write `fori_loop(0, ta.size(), ...)` instead of `range(ta.size())`, and
        use a padded stack and its `mask()` instead of `rows[:ta.size()]`.
        """
        return self._rows.tell()

    def __len__(self) -> int:
        return self._rows.fixed_size()

    def __repr__(self) -> str:
        return f"TensorArray({self._rows.described()})"

    # --- one row -----------------------------------------------------------------------------------------------

    def read(
        self, index: ArrayLike, name: str | None = None, *, where: Numbers | None = None, mode: Mode | None = None
    ) -> Any:
        """Return the row at `index`. Differentiable.

        Args:
            index: integer, from 0 on.
            name: ignored.
            where: bool. If it is False the row is zeros and `index` is ignored.
            mode: the treatment of an index that is negative, or not below `size()`: "error" raises an error, "drop"
                gives zeros. None means "error". Under `jax.vmap` every example that runs is checked.

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
        index = checks.as_index(op, index)
        mask, as_mode = checks.options(op, name, where, mode)
        return self._element(self._rows.read(op, index, mask, as_mode))

    def __getitem__(self, index: ArrayLike) -> Any:
        if isinstance(index, slice):
            raise TypeError("TensorArray: rows are not sliced; use gather(jnp.arange(a, b)) or stack()[a:b]")
        return self.read(index)

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, range(len(self)))

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            f"{self!r} is no array: read its rows, or take all of them by ta.stack(). If a scan or a map passes it to "
            "your function row by row, give ta.stack() to the scan or the map"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __jax_array__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __array_ufunc__ = None  # then NumPy calls these methods, and does not read the rows

    def write(
        self,
        index: ArrayLike,
        value: Any,
        name: str | None = None,
        *,
        where: Numbers | None = None,
        mode: Mode | None = None,
    ) -> "TensorArray":
        """Return the TensorArray whose row at `index` is `value`. Differentiable: the last write gets the gradient.

        Args:
            index: integer, from 0 on. Past the end is an error, unless `dynamic_size` is given.
            value: the row, of the dtype and shape of the others, or a Python number or lists of them.
            name: ignored.
            where: bool. If it is False nothing is written and `index` is ignored. Use it to write conditionally: under
                `vmap`, a `cond` or `jnp.where` between two TensorArrays may touch all rows.
            mode: the treatment of an index that is negative, or past the end to which the array may grow: "error"
                raises an error, "drop" writes nothing. None means "error". Under `jax.vmap` every example that runs is
                checked.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: there is no such row and the array cannot grow to it.
            TypeError: `value` has another dtype, or `where` is not bool.
            ValueError: `value` has another shape, or growing at a traced index needs `max_size`.

        >>> ta = TensorArray(jnp.float32, size=2, element_shape=())
        >>> ta.write(0, 1.0).write(1, 2.0, where=False).write(2, 3.0, mode="drop").stack()
        Array([1., 0.], dtype=float32)

        TensorFlow: `tf.TensorArray.write`, which has no masks.
        """
        rows = self._rows
        if where is None and mode is None and name is None and type(index) is int and rows.fits(index, value):
            return TensorArray._of(rows.put(index, value))
        op = "TensorArray.write"
        index = checks.as_index(op, index)
        mask, as_mode = checks.options(op, name, where, mode)
        return TensorArray._of(rows.write(op, index, rows.converted(op, value), mask, as_mode))

    def append(self, value: Any, *, where: Numbers | None = None, mode: Mode | None = None) -> "TensorArray":
        """Return the TensorArray with `value` appended as its last row. Needs `dynamic_size=True`.

        Args:
            value: the row.
            where: bool. If it is False nothing is appended.
            mode: the treatment of a row past `max_size`: "error" raises an error, "drop" leaves the row out. None means
                "error". Under `jax.vmap` every example that runs is checked.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: it has `max_size` rows already.
            TypeError: `value` has another dtype, or `where` is not bool.
            ValueError: `value` has another shape, the array has a fixed size, or growing to a traced size needs
                `max_size`.

        >>> ta = TensorArray(jnp.float32, size=0, dynamic_size=True)
        >>> for x in [1.0, 2.0, 3.0]:
        ...     ta = ta.append(x)
        >>> ta.stack()
        Array([1., 2., 3.], dtype=float32)
        """
        op = "TensorArray.append"
        rows = self._rows
        rows.spec.check_dynamic(op)
        if where is None and mode is None and type(rows.size) is int and rows.fits(rows.size, value):
            return TensorArray._of(rows.put(rows.size, value))
        mask, as_mode = checks.options(op, None, where, mode)
        return TensorArray._of(rows.write(op, None, rows.converted(op, value), mask, as_mode))

    def pop(self, *, where: Numbers | None = None, mode: Mode | None = None) -> tuple["TensorArray", Any]:
        """Return the TensorArray without its last row, and that row (differentiable). Needs `dynamic_size=True`.

        Args:
            where: bool. If it is False no row is taken away, and the row is zeros.
            mode: the treatment of an array without rows: "error" raises an error, "drop" gives zeros. None means
                "error". Under `jax.vmap` every example that runs is checked.

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
        self._rows.spec.check_dynamic(op)
        mask, as_mode = checks.options(op, None, where, mode)
        rows, row = self._rows.popped(op, mask, as_mode)
        return TensorArray._of(rows), self._element(row)

    # --- many rows ---------------------------------------------------------------------------------------------

    def stack(self, name: str | None = None, *, pad: bool = False) -> Any:
        """Return all rows as one array `[size, *elem]`, without a copy where that is possible. Differentiable.

        Args:
            name: ignored.
            pad: whether to return `max_size` rows, with zeros past the size, if the array has a `max_size`. JAX must
                know the shape of a result while tracing. If the size is known only at run time, mostly inside of
                `jit`, only the padded stack exists. `mask()` is True for its rows that belong to the array.

        Raises:
            ValueError: the shape of the rows is not known, or rows have different shapes.
            TypeError: `pad` is not a bool, or it is False and the size is known only at run time.

        >>> import jax
        >>> @jax.jit
        ... def ones(n):
        ...     ta = TensorArray(jnp.float32, size=0, dynamic_size=True, element_shape=(), max_size=4)
        ...     ta = jax.lax.fori_loop(0, n, lambda i, ta: ta.append(1.0), ta)
        ...     return ta, ta.stack(pad=True)
        >>> ta, padded = ones(3)
        >>> print(ta.stack(), padded)
        [1. 1. 1.] [1. 1. 1. 0.]

        TensorFlow: `tf.TensorArray.stack`.
        """
        op = "TensorArray.stack"
        checks.check_name(op, name, "pad is")
        return self._element(self._rows.stack(op, checks.as_flag(op, "pad", pad)))

    def concat(self, name: str | None = None, *, pad: bool = False) -> Any:
        """Join all rows along their first axis: `[n_0 + n_1 + ..., *rest]` from rows `[n_k, *rest]`. Differentiable.

        Args:
            name: ignored.
            pad: whether the rows up to `max_size` are included, as zeros: see `stack`.

        Raises:
            ValueError: rows are scalars, or differ in more than their length, or the shape of one is not known.
            TypeError: `pad` is not a bool, or it is False and the size is known only at run time.

        TensorFlow: `tf.TensorArray.concat`.
        """
        op = "TensorArray.concat"
        checks.check_name(op, name, "pad is")
        return self._element(self._rows.concat(op, checks.as_flag(op, "pad", pad)))

    def mask(self) -> jax.Array:
        """Return a mask of the rows of a padded stack: bools `[capacity]`, True below `size()`.

        `capacity` is the number of rows that `stack(pad=True)` returns: `max_size`, or the size if there is none. Use
        the mask to compute with a padded stack, or as the `where` of a `gather` of all rows.

        >>> ta = TensorArray(jnp.float32, size=2, dynamic_size=True, element_shape=(), max_size=4).write(0, 3.0)
        >>> ta.mask()
        Array([ True,  True, False, False], dtype=bool)
        >>> jnp.min(ta.stack(pad=True), where=ta.mask(), initial=jnp.inf)
        Array(0., dtype=float32)

        TensorFlow has no such method: its `stack` returns only the rows of the array.
        """
        return self._rows.mask()

    def gather(
        self, indices: Numbers, name: str | None = None, *, where: Numbers | None = None, mode: Mode | None = None
    ) -> Any:
        """Return the rows at `indices`, an array of shape `I`, as one array `[*I, *elem]`. Differentiable.

        Args:
            indices: integers.
            name: ignored.
            where: bool, broadcast to `I`. If it is False for a row, the row is zeros and its index is ignored.
            mode: the treatment of an index out of range: see `read`.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: an index is out of range.
            TypeError: an index is not an integer, or `where` not bool.
            ValueError: `where` does not fit `I`, or the shape of a row is not known.

        >>> TensorArray.from_array(jnp.array([1.0, 2.0])).gather([1, 0, 7], where=jnp.array([True, True, False]))
        Array([2., 1., 0.], dtype=float32)

        TensorFlow: `tf.TensorArray.gather`, which has no masks.
        """
        op = "TensorArray.gather"
        index = checks.as_indices(op, indices)
        mask, as_mode = checks.options(op, name, where, mode, index.shape)
        return self._element(self._rows.read(op, index, mask, as_mode))

    def scatter(
        self,
        indices: Numbers,
        value: Any,
        name: str | None = None,
        *,
        where: Numbers | None = None,
        mode: Mode | None = None,
    ) -> "TensorArray":
        """Return the TensorArray with `value[k]` written to row `indices[k]`, in order: the last duplicate stays.

        Differentiable. If indices are equal, the row that is written last gets the gradient.

        Args:
            indices: integers `[n]`.
            value: rows `[n, *elem]`.
            name: ignored.
            where: bool, broadcast to `[n]`. If it is False for a row, nothing is written and its index is ignored.
            mode: the treatment of an index out of range: see `write`.

        Raises:
            IndexError, jax.errors.JaxRuntimeError: an index is out of range.
            TypeError: an index is not an integer, `value` has another dtype, or `where` is not bool.
            ValueError: `indices` and `value` differ in length, a row has the wrong shape, `where` does not fit, or
                growing at a traced index needs `max_size`.

        >>> ta = TensorArray(jnp.float32, size=3, element_shape=())
        >>> ta.scatter([2, 0, 9], jnp.array([1.0, 2.0, 3.0]), mode="drop").stack()
        Array([2., 0., 1.], dtype=float32)

        TensorFlow: `tf.TensorArray.scatter`, which has no masks.
        """
        op = "TensorArray.scatter"
        index = checks.as_indices(op, indices)
        if index.ndim != 1:
            raise ValueError(f"{op}: indices must be a vector, got shape {index.shape}")
        mask, as_mode = checks.options(op, name, where, mode, index.shape)
        rows = self._rows
        values = rows.converted(op, value)
        n = checks.number_of_rows(op, values)
        rows.check_shapes(op, [x.shape[1:] for x in values])
        if n != index.shape[0]:
            raise ValueError(f"{op}: {index.shape[0]} indices were given, and {n} rows")
        return TensorArray._of(rows.write(op, index, values, mask, as_mode))

    def unstack(self, value: Any, name: str | None = None) -> "TensorArray":
        """Return the TensorArray with exactly the rows of `value`, an array `[n, *elem]`. Makes no copy.

        Raises:
            ValueError: `value` has more rows than the array and the array is not dynamic, or its rows have another
                shape.
        """
        return TensorArray._of(making.unstacked("TensorArray.unstack", self._rows, value))

    def split(self, value: Any, lengths: Numbers, name: str | None = None) -> "TensorArray":
        """Return the TensorArray whose rows are pieces of `value`, cut along its first axis.

        Args:
            value: array `[sum(lengths), *rest]`.
            lengths: Python integers. Different ones need `infer_shape=False`.
            name: ignored.

        Raises:
            TypeError: `lengths` are traced.
            ValueError: `lengths` do not fit `value`, the size of the array, or each other.
        """
        return TensorArray._of(making.split("TensorArray.split", self._rows, value, lengths))

    # --- for TensorFlow's sake ---------------------------------------------------------------------------------

    def identity(self) -> "TensorArray":
        """Return a TensorArray with the same rows."""
        return TensorArray._of(self._rows)

    def close(self, name: str | None = None) -> None:
        """Do nothing. Python frees the memory with the last TensorArray that holds it."""

    def grad(self, source: Any, flow: Any = None, name: str | None = None) -> Any:
        """Raise NotImplementedError, like TensorFlow 2. Use `jax.grad`."""
        raise NotImplementedError("TensorArray.grad is not supported; jax.grad differentiates through a TensorArray")

    # --- pytree ------------------------------------------------------------------------------------------------

    @classmethod
    def _of(cls, rows: Rows) -> "TensorArray":
        global _newest
        ta = cls.__new__(cls)
        ta._rows = rows
        if flax.is_unregistered and "flax.serialization" in sys.modules:
            flax.register_if_imported(cls)
        _newest = id(ta)
        return ta

    def __del__(self) -> None:
        if id(self) == _newest and (caller := sys._getframe().f_back) is not None:  # None when the process ends
            warn_if_dropped(caller)

    def _element(self, leaves: list[Any]) -> Any:
        return self._rows.spec.element.unflatten(leaves)

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        if "orbax.checkpoint" in sys.modules and _compat.flattened_by("orbax"):
            self._rows = self._rows.zero_padded()  # a file must not show what was in memory
        return self._rows.flatten()

    def __copy__(self) -> "TensorArray":
        return self.identity()

    def __reduce__(self) -> Any:
        children, aux = self._rows.zero_padded().flatten()
        return TensorArray._restored, (aux, children)

    @classmethod
    def _unflatten(cls, aux: Any, children: Any) -> "TensorArray":
        return cls._of(making.of_leaves(aux, children))

    @classmethod
    def _restored(cls, aux: Any, children: Any) -> "TensorArray":
        return cls._of(making.restored(aux, children))
