"""TensorArrays as pytrees of JAX and of flax."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from jax_tensorarray._array import flax
from jax_tensorarray._array.tensorarray import TensorArray


def _flatten_with_keys(ta: TensorArray) -> tuple[Any, Any]:
    children, aux = ta._flatten()
    return tuple((GetAttrKey(name), child) for name, child in zip(flax.NAMES, children, strict=False)), aux


jax.tree_util.register_pytree_with_keys(TensorArray, _flatten_with_keys, TensorArray._unflatten, TensorArray._flatten)


def register_with_flax() -> None:
    """Make `flax.serialization` save and restore TensorArrays: `to_bytes`, `from_bytes`, `to_state_dict` and the like.

    Flax keeps a list of the types that it can save and does not ask pytrees how to save them. A TensorArray that is
    made when `flax.serialization` has been imported does this by itself. Call the function if all of them are made
    before. Nothing else in flax needs it; neither do orbax, pickle and `copy`.

    Raises:
        ImportError: flax is not installed.
    """
    flax.register(TensorArray)


def is_array(x: Any) -> bool:
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
    return jax.tree.map(func, *structure, is_leaf=is_array)
