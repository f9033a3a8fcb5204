"""`tf.nest`: structures whose leaves are whole TensorArrays."""

from collections.abc import Callable
from typing import Any

import jax

from jax_tensorarray._array.pytree import is_array

__all__ = ["map_structure"]


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

    Raises:
      TypeError: `func` is not a function, or `check_types` or `expand_composites` is not a bool.
      ValueError: there is no structure, or the structures differ.

    >>> import jax.numpy as jnp
    >>> from jax_tensorarray import TensorArray
    >>> from jax_tensorarray.tf.nest import map_structure
    >>> old, new = ({"done": jnp.array(False), "rows": TensorArray.from_array(jnp.full(2, x))} for x in (1.0, 2.0))
    >>> after = map_structure(lambda a, b: b if isinstance(b, TensorArray) else a | True, old, new)
    >>> print(after["done"], after["rows"].stack())
    True [2. 2.]

    TensorFlow: `tf.nest.map_structure`.
    """
    op = "tf.nest.map_structure"
    if not callable(func):
        raise TypeError(f"{op}: func must be a function, got {func!r}")
    for name, flag in (("check_types", check_types), ("expand_composites", expand_composites)):
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} must be True or False, got {flag!r}")
    if not structure:
        raise ValueError(f"{op}: give at least one structure")
    return jax.tree.map(func, *structure, is_leaf=is_array)
