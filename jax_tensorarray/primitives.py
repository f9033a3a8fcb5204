"""The primitives themselves, for policies, custom interpreters and inspection."""

from jax.extend.core import Primitive

from jax_tensorarray._ops.add import ta_add_p
from jax_tensorarray._ops.check import ta_check_p
from jax_tensorarray._ops.clear import ta_clear_p
from jax_tensorarray._ops.empty import ta_empty_p
from jax_tensorarray._ops.primitive import ROW_OPS
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.stack import ta_stack_p
from jax_tensorarray._ops.swap import ta_swap_p
from jax_tensorarray._ops.write import ta_write_p

_ROW_OPS = {f"{primitive.name}_p": primitive for primitive in ROW_OPS}


def __getattr__(name: str) -> Primitive:
    """Return the primitive of any row op by the name it is registered with, newer ones included."""
    if name in _ROW_OPS:
        return _ROW_OPS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ROW_OPS",
    "ta_add_p",
    "ta_check_p",
    "ta_clear_p",
    "ta_empty_p",
    "ta_read_p",
    "ta_stack_p",
    "ta_swap_p",
    "ta_write_p",
]
__all__ += sorted(_ROW_OPS.keys() - set(__all__))
