"""Functions of TensorFlow that JAX has under no name, or not with these arguments; what the examples compute with."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import TensorArray, fori_loop, tf

Array = Any

gradient = jax.grad
tanh, repeat, softmax = jnp.tanh, jnp.repeat, jax.nn.softmax
reverse, expand_dims, zeros_like, int32, float32, asarray = (
    *(jnp.flip, lambda x: jnp.expand_dims(x, -1), jnp.zeros_like),
    *(jnp.int32, jnp.float32, jnp.asarray),
)
in_xla = True  # under jit, which compiles with XLA


def matmul(x: Array, y: Array, transpose_b: bool = False) -> Array:
    return jnp.matmul(x, jnp.swapaxes(y, -2, -1) if transpose_b else y)


def take(x: Array, indices: Array) -> Array:
    return x[indices]


def argmax(x: Array, axis: int = -1, output_type: Any = jnp.int32) -> Array:
    return jnp.argmax(x, axis).astype(output_type)


def argmin(x: Array, axis: int = -1, output_type: Any = jnp.int32) -> Array:
    return jnp.argmin(x, axis).astype(output_type)


def total(x: Array) -> Array:
    return jnp.sum(x)


class TensorShape(tuple):
    """A shape that is a leaf of a pytree."""

    def __new__(cls, dims: Any) -> Any:
        return super().__new__(cls, [] if dims is None else [int(n) for n in np.atleast_1d(dims)])

    @property
    def ndims(self) -> int:
        return len(self)

    def concatenate(self, other: Any) -> Any:
        return TensorShape([*self, *other])

    def __radd__(self, other: Any) -> Any:
        return TensorShape([*other, *self])


class Variable:
    """What no argument is: JAX has no variables."""


def cond(pred: Any, true_fn: Any, false_fn: Any) -> Any:
    if isinstance(pred, bool):
        return true_fn() if pred else false_fn()
    return lax.cond(pred, true_fn, false_fn)


def convert_to_tensor(value: Any, dtype: Any = None, name: str | None = None) -> Any:
    """An array: of NumPy if the value is a number of Python, which is known while tracing then."""
    return np.asarray(value, dtype) if isinstance(value, int | float) else jnp.asarray(value, dtype)


def constant(value: Any, dtype: Any = None, name: str | None = None) -> Array:
    return jnp.asarray(value, dtype)


def get_static_value(x: Any) -> Any:
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def is_tensor(x: Any) -> bool:
    return isinstance(x, jax.Array)


def executing_eagerly() -> bool:
    return False


def get_default_graph() -> None:
    """Nothing: what is traced is not an object."""


def assert_equal(x: Any, y: Any, message: str) -> None:
    if isinstance(x, int) and x != y:
        raise ValueError(message)


def assert_greater(x: Any, y: Any, message: str) -> None:
    if isinstance(x, np.ndarray) and not x > y:
        raise ValueError(message)


def flatten(structure: Any, expand_composites: bool = False) -> list[Any]:
    return jax.tree.leaves(structure, is_leaf=lambda x: isinstance(x, TensorArray))


def is_nested(x: Any) -> bool:
    return isinstance(x, tuple | list | dict)


def pack_sequence_as(structure: Any, flat: Any, expand_composites: bool = False) -> Any:
    rest = iter(flat)
    return tf.nest.map_structure(lambda _: next(rest), structure)


def assert_same_structure(first: Any, second: Any) -> None:
    tf.nest.map_structure(lambda *_: None, first, second)


def gather(x: Array, indices: Array, axis: int = 0, batch_dims: int = 0) -> Array:
    axis = axis % x.ndim if batch_dims == 0 or axis < 0 else max(axis, batch_dims)

    def one(x: Array, indices: Array) -> Array:
        return jnp.take(x, indices, axis - batch_dims)

    for _ in range(batch_dims):
        one = jax.vmap(one)
    return one(x, indices)


def gather_nd(x: Array, indices: Array, batch_dims: int = 0) -> Array:
    def one(x: Array, indices: Array) -> Array:
        return x[tuple(jnp.moveaxis(indices, -1, 0))]

    for _ in range(batch_dims):
        one = jax.vmap(one)
    return one(x, indices)


def cumsum(x: Array, axis: int = 0) -> Array:
    return jnp.cumsum(x, axis)


def one_hot(indices: Any, depth: int, on_value: Any, off_value: Any = 0, dtype: Any = None) -> Array:
    chosen = jnp.where(jnp.asarray(indices)[..., None] == jnp.arange(depth), on_value, off_value)
    return chosen if dtype is None else chosen.astype(dtype)


def random_uniform(
    shape: Any, minval: float = 0, maxval: float = 1, dtype: Any = jnp.float32, seed: int | None = None
) -> Array:
    """Numbers that depend on the seed only: JAX has no hidden state."""
    return jax.random.uniform(jax.random.key(seed or 0), shape, dtype, minval, maxval)


def reverse_sequence(x: Array, lengths: Array, seq_axis: int, batch_axis: int) -> Array:
    def one(x: Array, length: Array) -> Array:
        places = jnp.arange(x.shape[0])
        return x[jnp.where(places < length, length - 1 - places, places)]

    moved = jnp.moveaxis(x, (batch_axis, seq_axis), (0, 1))
    return jnp.moveaxis(jax.vmap(one)(moved, lengths), (0, 1), (batch_axis, seq_axis))


def sequence_mask(lengths: Array, maxlen: int) -> Array:
    return jnp.arange(maxlen) < lengths[..., None]


def tensor_scatter_nd_add(x: Array, indices: Array, updates: Array) -> Array:
    return x.at[tuple(jnp.moveaxis(indices, -1, 0))].add(updates)


def tile(x: Any, multiples: Any) -> Array:
    return jnp.tile(jnp.asarray(x), multiples)


def transpose(x: Array, perm: Any = None) -> Array:
    return jnp.transpose(x, perm)


def where(condition: Array, x: Any, y: Any) -> Array:
    return jnp.where(condition, x, y)


def where_of_examples(condition: Array, x: Array, y: Array) -> Array:
    """A choice between examples, where the condition has one axis."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)


#: What a port finds under the names of `names.NAMES`.
NAMESPACE: dict[str, Any] = {
    **{"jax": jax, "jnp": jnp, "tf": tf, "TensorArray": TensorArray, "fori_loop": fori_loop},
}
NAMESPACE["ops"] = SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})
