"""Constructors of rows: from a size, from whole arrays, and from the leaves of a pytree."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jax_tensorarray import _compat
from jax_tensorarray._array import checks
from jax_tensorarray._array.history import Version
from jax_tensorarray._array.ragged import Ragged
from jax_tensorarray._array.rows import Rows, Spec, Static
from jax_tensorarray._array.stacked import Stacked, UncheckedSize, Undecided
from jax_tensorarray._ops.check import ta_check


def created(
    element: PyTreeDef, rows: list[Any], size: Any, dynamic_size: Any, max_size: Any, infer_shape: bool = True
) -> Rows:
    """Return rows without writes, from the arguments of a constructor: see `Spec.declared`."""
    if size is None:
        raise ValueError(
            "Size must be declared for TensorArrays. Argument `size` must be provided; give size=0 and "
            "dynamic_size=True if it is to grow"
        )
    spec = Spec.declared(element, rows, dynamic_size, max_size, infer_shape)
    constant = checks.known_size(size)
    all_known = all(checks.is_known(shape) for shape, _ in rows)
    if constant is not None:
        spec.check_max_size(constant)
        if not all_known:
            return Undecided(spec, constant) if infer_shape else Ragged(spec, constant, Version([None] * constant))
        size = constant
    else:
        if spec.max_size is None:
            raise TypeError(
                "TensorArray: size is a shape and must be known while tracing, got a traced value; give "
                "dynamic_size=True and max_size for a size that is known only at run time"
            )
        if not all_known:
            raise TypeError("TensorArray: a traced size needs element_shape")
        op, mode = "TensorArray: size not in [0, max_size]", None
        if spec.found_by == "growing":
            op, mode = op + spec.bound(), "error"
        # In an inactive example the check returns -1. Such an example has no rows.
        size = jnp.maximum(ta_check(size, spec.max_size + 1, mode=mode, op=op), 0)
    return Stacked.zeros(spec, size, [(shape, checks.as_dtype(dtype)) for shape, dtype in rows])


def like(x: Any, size: Any, dynamic_size: bool | None, max_size: Any) -> Rows:
    """Return rows without writes, each like the pytree `x`."""
    leaves, element = jax.tree.flatten(x)
    if not leaves:
        raise ValueError("TensorArray.like: there is no array in x")
    rows = []
    for leaf in leaves:
        row = leaf if hasattr(leaf, "dtype") else checks.as_rows("TensorArray.like", leaf)
        rows.append((np.shape(row), row.dtype))
    return created(element, rows, size, dynamic_size, max_size)


def of_array(value: Any, dynamic_size: bool | None, max_size: Any) -> Rows:
    """Return the rows of `value`, a pytree of arrays `[size, *elem]`."""
    leaves, element = jax.tree.flatten(value)
    leaves = [checks.as_rows("TensorArray.from_array", x) for x in leaves]
    if not leaves:
        raise ValueError("TensorArray.from_array: there is no array in value")
    n = checks.number_of_rows("TensorArray.from_array", leaves)
    spec = Spec.declared(element, [(x.shape[1:], x.dtype) for x in leaves], dynamic_size, max_size)
    spec.check_max_size(n)
    return Stacked.of(spec, leaves)


def unstacked(op: str, rows: Rows, value: Any) -> Rows:
    """Return the rows of `value` instead of `rows`."""
    spec, values = rows.spec, rows.converted(op, value)
    n = checks.number_of_rows(op, values)
    rows.check_shapes(op, [x.shape[1:] for x in values])
    if not spec.dynamic_size and n > (size := rows.fixed_size()):
        raise ValueError(f"Cannot unstack {n} tensors into a TensorArray of static size {size}")
    spec.check_max_size(n, "Cannot unstack {size} tensors into a TensorArray of max_size {most}")
    return Stacked.of(spec, values)


def split(op: str, rows: Rows, value: Any, lengths: Any) -> Rows:
    """Return pieces of `value` of these lengths instead of `rows`."""
    lengths = checks.as_lengths(lengths)
    spec, values = rows.spec, rows.converted(op, value)
    for x in values:
        checks.check_lengths(lengths, x)
    if not spec.dynamic_size and len(lengths) != (size := rows.fixed_size()):
        raise ValueError(
            f"TensorArray's size is not equal to the size of lengths ({size} vs. {len(lengths)}), and the "
            "TensorArray is not marked as dynamically resizeable."
        )
    if len(set(lengths)) > 1 and (spec.infer_shape or checks.is_known(spec.shape)):
        raise ValueError(
            f"{op}: rows of different lengths, {lengths}, need infer_shape=False and an element_shape that does "
            "not fix the length"
        )
    if not lengths:
        return rows.resized(0) if spec.dynamic_size else rows
    length = lengths[0] if len(set(lengths)) == 1 else None
    rows.check_shapes(op, [(length, *x.shape[1:]) for x in values])
    spec.check_max_size(len(lengths), "Cannot split into {size} rows with max_size {most}")
    if length is not None:
        return Stacked.of(spec, [x.reshape(len(lengths), length, *x.shape[1:]) for x in values])
    return Ragged.of(spec, rows.dtypes[0], jnp.split(values[0], np.cumsum(lengths)[:-1]))


def of_leaves(static: Static, children: Any) -> Rows:
    """Return the rows from the leaves of a pytree.

    The children may be anything: JAX fills trees with axes, shardings, avals and plain objects.
    """
    spec, size = static
    if spec.ranks is None:
        return Ragged.of(spec, spec.dtype, list(children[0])) if children else Undecided(spec, size)
    may_be_carried = spec.dynamic_size and spec.max_size is None and not _compat.executes_eagerly()
    if may_be_carried and _compat.unflattened_by_control_flow():
        spec = replace(spec, is_carried=True)
    unchecked = None if spec.max_size is None else UncheckedSize(children[1])
    return Stacked(spec, unchecked, Version(tuple(spec.element.flatten_up_to(children[0]))))


def restored(static: Static, children: Any) -> Rows:
    """Return rows from a file. Check their number at once if it is concrete."""
    rows = of_leaves(static, children)
    size = rows.size.value if isinstance(rows.size, UncheckedSize) else None
    if isinstance(size, np.ndarray | np.generic | jax.Array | int) and not np.ndim(size):
        rows.live()
    return rows
