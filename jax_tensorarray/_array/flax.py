"""Save and restore TensorArrays by `flax.serialization`, which only accepts registered types."""

import sys
from typing import Any

#: The children of an array as a pytree.
NAMES = "rows", "size"

#: Whether the class is not yet registered with flax.
is_unregistered = True


def register_if_imported(array_type: Any) -> None:
    """Register the class with flax, unless flax is being imported."""
    global is_unregistered
    if hasattr(sys.modules["flax.serialization"], "register_serialization_state"):  # its import has ended
        is_unregistered = False
        register(array_type)


def register(array_type: Any) -> None:
    """Register the functions that save and restore an array."""
    from flax import serialization

    def saved(ta: Any) -> dict[str, Any]:
        children, _ = ta._rows.zero_padded().flatten()
        return {name: serialization.to_state_dict(x) for name, x in zip(NAMES, children, strict=False)}

    def restored(ta: Any, state: dict[str, Any]) -> Any:
        children, aux = ta._flatten()
        expected = NAMES[: len(children)]
        if set(state) != set(expected):
            raise ValueError(f"{ta!r} is restored from {list(expected)}, but the saved state has {list(state)}")
        return array_type._restored(
            aux,
            [serialization.from_state_dict(x, state[name], name) for name, x in zip(expected, children, strict=True)],
        )

    serialization.register_serialization_state(array_type, saved, restored, override=True)
