"""TensorArrays for `flax.serialization`, which only knows types that were registered with it."""

from typing import Any

from jax_tensorarray._array.tensorarray import TensorArray, _restored


def register_with_flax() -> None:
    """Make `flax.serialization` save and restore TensorArrays: `to_bytes`, `from_bytes`, `to_state_dict` and the like.

    Flax keeps a list of the types that it can save and does not ask pytrees how to save them. A TensorArray that is
    made when `flax.serialization` has been imported does this by itself. Call the function if all of them are made
    before. Nothing else in flax needs it; neither do orbax, pickle and `copy`.

    Raises:
        ImportError: flax is not installed.
    """
    from flax import serialization

    names = "rows", "size"

    def saved(ta: TensorArray) -> dict[str, Any]:
        children, _ = ta._zero_padded()._flatten()
        return {name: serialization.to_state_dict(x) for name, x in zip(names, children, strict=False)}

    def restored(ta: TensorArray, state: dict[str, Any]) -> TensorArray:
        children, aux = ta._flatten()
        expected = names[: len(children)]
        if set(state) != set(expected):
            raise ValueError(f"{ta!r} is restored from {list(expected)}, but what was saved has {list(state)}")
        return _restored(
            aux,
            [serialization.from_state_dict(x, state[name], name) for name, x in zip(expected, children, strict=True)],
        )

    serialization.register_serialization_state(TensorArray, saved, restored, override=True)
