"""TensorArrays in `flax.serialization`."""

from jax_tensorarray._array import flax
from jax_tensorarray._array.tensorarray import TensorArray

__all__ = ["register"]


def register() -> None:
    """Make `flax.serialization` save and restore TensorArrays: `to_bytes`, `from_bytes`, `to_state_dict` and the like.

    Flax keeps a list of the types that it can save and does not ask pytrees how to save them. A TensorArray that is
    made when `flax.serialization` has been imported does this by itself. Call the function if all of them are made
    before. Nothing else in flax needs it; neither do orbax, pickle and `copy`.

    Raises:
        ImportError: flax is not installed.
    """
    flax.register(TensorArray)
