"""The names of TensorFlow, with its arguments in its order: a port begins with `from jax_tensorarray import tf`."""

from typing import TYPE_CHECKING, Any

from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray.tf import nest
from jax_tensorarray.tf._loops import foldl, foldr, map_fn, scan, while_loop

__all__ = ["TensorArray", "foldl", "foldr", "map_fn", "nest", "scan", "while_loop"]

#: What to write for names of TensorFlow whose counterparts have other names.
_COUNTERPARTS = {
    "function": "jax.jit",
    "GradientTape": "jax.grad",
    "stop_gradient": "jax.lax.stop_gradient",
    "recompute_grad": "jax.checkpoint",
    "cond": "jax.lax.cond",
    "switch_case": "jax.lax.switch",
    "case": "jax.lax.switch",
    "vectorized_map": "jax.vmap",
    "range": "jnp.arange, and jax.lax.fori_loop for a loop over it",
    "constant": "jnp.asarray",
    "convert_to_tensor": "jnp.asarray",
    "Tensor": "jax.Array",
    "shape": "x.shape",
    "cast": "x.astype",
    "gather": "x[indices]",
    "concat": "jnp.concatenate",
    "bool": "jnp.bool_",
    "random": "jax.random, with a key in the carry",
    "reduce_logsumexp": "jax.nn.logsumexp",
    "nn": "jax.nn",
    "linalg": "jnp.linalg, and x @ y",
    "math": "jnp",
}


if not TYPE_CHECKING:  # a type checker knows by `__all__` which names there are

    def __getattr__(name: str) -> Any:
        """Raise an error that says where JAX has a name of TensorFlow."""
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        instead = _COUNTERPARTS.get(name, f"jnp.{name.removeprefix('reduce_')}")
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: it has {', '.join(__all__)}. Dtypes and ops are those of "
            f"JAX, such as jnp.int32 and jnp.all; for tf.{name} look at {instead}"
        )
