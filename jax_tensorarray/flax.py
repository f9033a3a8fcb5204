"""TensorArrays in `flax.serialization`."""

from jax_tensorarray._array import flax
from jax_tensorarray._array.tensorarray import TensorArray

__all__ = ["register"]


def register() -> None:
    """Make `flax.serialization` save and restore TensorArrays: `to_bytes`, `from_bytes`, `to_state_dict` and the like.

    Flax saves only the types on a list of its own, pytrees included. The first TensorArray that is made after the
    import of `flax.serialization` adds the class to this list. Call `register` if you make all of them before. Nothing
    else in flax needs it, and neither do orbax, pickle and `copy`.

    Raises:
        ImportError: flax is not installed.
    """
    flax.register(TensorArray)
