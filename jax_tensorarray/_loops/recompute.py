"""Rematerialization of a step: compute its derivative from the carry before it and the rows that it read.

x = f(ta_read(b, k), x)
# with the residuals `x` and `ta_read(b, k)`, and `f` again in reverse mode
x = checkpoint(f, policy=save_reads)(ta_read(b, k), x)
"""

from dataclasses import dataclass
from typing import Any

import jax

from jax_tensorarray import _compat, checkpoint_policies
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._loops.strategy import Strategy, Tape


@dataclass(frozen=True)
class Recompute(Tape):
    """Store the carry of each step and the rows that it reads, and compute the rest again: "recompute".

    Args:
        offload: as for `Tape`.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import fori_loop
    >>> from jax_tensorarray.residuals import Recompute
    >>> deep = lambda x: fori_loop(0, 3, lambda i, y: jnp.sin(jnp.cos(y)), x, residuals=Recompute())
    >>> print(f"{jax.grad(deep)(1.0):.4f}")
    -0.1189
    """

    def prepare(self, body: Any, consts: Any, tree: Any, leaves: Any, source: str) -> tuple[Strategy, Any, Any]:
        return Tape(self.offload), _recomputed(body), consts


@_compat.cached
def _recomputed(body: Any) -> Any:
    """Return the body with a checkpoint: reverse mode stores its operands and the rows that it reads."""
    call = jax.checkpoint(jaxprs.function(body), policy=checkpoint_policies.save_reads)
    return jax.make_jaxpr(call)(*body.in_avals)
