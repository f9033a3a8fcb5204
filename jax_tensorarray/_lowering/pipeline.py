"""What is done to a module that has been lowered: calls of ours that are divided among devices are labelled."""

from collections.abc import Sequence

from jax.interpreters.mlir import ir

from jax_tensorarray._lowering.calls import MARK
from jax_tensorarray._lowering.partition import is_divided, label_calls


def rewrite(module: ir.Module, platforms: Sequence[str] = (), is_compiled_next: bool = False) -> None:
    """Rewrite `module` in place for these platforms. A module without our calls is left as it is."""
    if MARK not in module.operation.attributes:
        return
    del module.operation.attributes[MARK]
    if is_divided(module):
        with module.context:
            label_calls(module)
