"""What happens to a program between JAX and XLA.

`ordering` is the pass over every lowered module that has an op of ours. It puts reads before updates, and calls the
others: `bounds` finds the indices that need no check, `record` has loops carry the first of the others that is out of
range, `branches` reshapes conditionals, `slices` turns calls into XLA's own slices, and `partition` says how XLA
divides the calls that stay. `mlir` is how all of them read a module. `sorting` is earlier: a row op is lowered with the
order in which a GPU visits many positions.
"""

from jax_tensorarray import _compat
from jax_tensorarray._lowering import ordering, partition


def install() -> None:
    """Register the passes with JAX, and with XLA the rules by which it divides calls."""
    _compat.run_after_lowering(ordering.order_readers)
    partition.register()
