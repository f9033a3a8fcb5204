"""Store the factor of a triangular solve in a loop by columns, as LAPACK needs it: then no step converts it.

    y = triangular_solve(l, x)                   y = triangular_solve(l, x)
    l = dynamic_update_slice(l, y, ...)          l = dynamic_update_slice(l, y, ...)
                                                 l = with_layout_constraint(l, by columns)

XLA propagates the layout that a triangular solve needs through elementwise operations, but not to the carry of a loop.
A transpose before the solve also becomes a copy (jaxlib 0.12). A constraint on the updated carry makes the loop
carry the buffer by columns. Then a row is not contiguous, so we change only buffers that nothing else reads.
"""

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint

from jax_tensorarray import _gates
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._jaxprs.uses import Use
from jax_tensorarray._lowering.equations import Block
from jax_tensorarray._lowering.ordering import num_bytes
from jax_tensorarray._lowering.scopes import Scope, rebuilt
from jax_tensorarray._types import Equation


def store_by_columns(jaxpr: Any) -> Any:
    """Constrain the layout of each carry that only triangular solves and one update of it use."""
    if not jaxprs.any_equation(jaxpr, _solves):
        return jaxpr

    def constrain(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
        if not _updates_factor(scope, eqn):
            return eqn
        updated = block.add(eqn)
        block.rename(eqn.outvars, block.call(_by_columns, updated.outvars, eqn))
        return None

    return rebuilt(Scope(jaxpr), constrain)


def _solves(eqn: Equation) -> bool:
    return eqn.primitive.name == "triangular_solve"


def _updates_factor(scope: Scope, eqn: Equation) -> bool:
    if eqn.primitive.name != "dynamic_update_slice" or scope.role != "body":
        return False
    carry, (updated,) = eqn.invars[0], eqn.outvars
    number = scope.carried(carry)
    if number is None or num_bytes(carry) < _gates.ORDERED_BYTES_OF_ALL:
        return False
    if scope.uses.of(updated) != [Use(None, number)]:
        return False
    others = [use for use in scope.uses.of(carry) if use.eqn is not eqn]
    return bool(others) and all(use.eqn is not None and _solves(use.eqn) and use.operand == 0 for use in others)


def _by_columns(x: Any) -> Any:
    n = x.ndim
    return [with_layout_constraint(x, Layout(major_to_minor=(*range(n - 2), n - 1, n - 2)))]
