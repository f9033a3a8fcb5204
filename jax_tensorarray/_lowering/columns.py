"""Keep a factor that a loop solves with by columns, as LAPACK needs it: no step copies it from rows to columns.

XLA propagates the layout that a triangular solve needs through elementwise operations, but not to the carry of a loop.
It turns a transpose before the solve into a copy, too (jaxlib 0.12). A constraint on the updated carry makes the loop
carry the buffer by columns. Then a row is not contiguous, so only buffers are changed that nothing else reads.
"""

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint

from jax_tensorarray import _gates
from jax_tensorarray._lowering.equations import Block
from jax_tensorarray._lowering.ordering import num_bytes
from jax_tensorarray._lowering.scopes import Scope, rebuilt
from jax_tensorarray._types import Equation


def store_by_columns(jaxpr: Any) -> Any:
    """Constrain the layout of the carries that a body gives to triangular solves and to one update, to nothing else."""
    return rebuilt(Scope(jaxpr), _constrained)


def _constrained(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
    if not _updates_factor(scope, eqn):
        return eqn
    updated = block.add(eqn)
    block.rename(eqn.outvars, block.call(_by_columns, updated.outvars, eqn))
    return None


def _updates_factor(scope: Scope, eqn: Equation) -> bool:
    if eqn.primitive.name != "dynamic_update_slice" or scope.role != "body":
        return False
    carry, (updated,) = eqn.invars[0], eqn.outvars
    number = scope.carried(carry)
    if number is None or num_bytes(carry) < _gates.ORDERED_BYTES_OF_ALL:
        return False
    returned = [k for k, v in enumerate(scope.jaxpr.outvars) if v is updated]
    if returned != [number] or any(v is carry for v in scope.jaxpr.outvars):
        return False
    uses = [(e, k) for e in scope.jaxpr.eqns for k, v in enumerate(e.invars) if v is carry]
    solves = [e for e, k in uses if e.primitive.name == "triangular_solve" and k == 0]
    is_read_after = any(v is updated for e in scope.jaxpr.eqns for v in e.invars)
    return bool(solves) and len(uses) == len(solves) + 1 and not is_read_after


def _by_columns(x: Any) -> Any:
    n = x.ndim
    return [with_layout_constraint(x, Layout(major_to_minor=(*range(n - 2), n - 1, n - 2)))]
