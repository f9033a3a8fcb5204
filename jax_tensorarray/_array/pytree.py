"""TensorArrays as pytrees of JAX and of flax."""

from typing import Any

import jax
from jax.tree_util import GetAttrKey

from jax_tensorarray._array import flax
from jax_tensorarray._array.tensorarray import TensorArray


def _flatten_with_keys(ta: TensorArray) -> tuple[Any, Any]:
    children, aux = ta._flatten()
    return tuple((GetAttrKey(name), child) for name, child in zip(flax.NAMES, children, strict=False)), aux


jax.tree_util.register_pytree_with_keys(TensorArray, _flatten_with_keys, TensorArray._unflatten, TensorArray._flatten)


def is_array(x: Any) -> bool:
    return isinstance(x, TensorArray)
