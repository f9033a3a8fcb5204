"""Write absolute values of integers as selects, because XLA assumes them to be non-negative.

    y = abs(x)
    # becomes
    y = select(x < 0, -x, x)

The absolute value of the least integer is negative. XLA's compiler of fusions forgets that (`SimplifyArithPass`, in all
versions from jaxlib 0.10.2 to 0.12). It then drops comparisons of an index with 0, which skip a row or clip a slice.
It recognises an absolute value only if the select compares `x >= 0`. The machine code is the same.
"""

from typing import Any

import numpy as np
from jax import lax

from jax_tensorarray._lowering.equations import Block, is_static
from jax_tensorarray._lowering.scopes import Scope, rebuilt
from jax_tensorarray._ops.starts import like
from jax_tensorarray._types import Equation


def write_out(jaxpr: Any) -> Any:
    """Write every absolute value of signed integers as `where(x < 0, -x, x)`, because any may be part of an index."""
    return rebuilt(Scope(jaxpr), _written_out)


def _written_out(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
    aval = eqn.outvars[0].aval if eqn.primitive.name == "abs" else None
    if aval is None or np.dtype(aval.dtype).kind != "i" or not is_static(aval):
        return eqn
    block.rename(eqn.outvars, block.call(_absolute, [block.read(eqn.invars[0])], eqn))
    return None


def _absolute(x: Any) -> Any:
    return [lax.select(lax.lt(x, like(x, 0)), lax.neg(x), x)]
