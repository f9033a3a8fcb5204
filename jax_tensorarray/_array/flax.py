"""Save and restore TensorArrays by `flax.serialization`, which only knows types that were registered with it."""

import sys
from typing import Any

#: The children of an array as a pytree.
NAMES = "rows", "size"

#: Whether flax does not know of TensorArrays yet.
is_untold = True


def tell(array_type: Any) -> None:
    """Register the class, as flax does not say that it lacks this: it says that it "can not serialize" an array."""
    global is_untold
    if hasattr(sys.modules["flax.serialization"], "register_serialization_state"):  # it has been imported to its end
        is_untold = False
        register(array_type)


def register(array_type: Any) -> None:
    """Tell flax how the class is saved and restored."""
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
