"""Remove the fences of inner loops: in a loop, the results of a loop with `max_steps` need not wait for its check.

    b, k = while(...)                # with `max_steps`
    b = ta_fence(b, check(k))        # removed if this is the body of another loop

A check in a loop is either recorded and raised after the outermost loop, or it is a call with an effect, which XLA
keeps. A fence is also a call: with it, every update of that buffer in the outer loop would have to be a call.
"""

from typing import Any

from jax_tensorarray._lowering.equations import Block
from jax_tensorarray._lowering.scopes import Scope, rebuilt
from jax_tensorarray._ops.fence import ta_fence_p
from jax_tensorarray._types import Equation


def without_fences_in_loops(jaxpr: Any) -> Any:
    return rebuilt(Scope(jaxpr), _without_fence)


def _without_fence(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
    if eqn.primitive is not ta_fence_p or eqn.params["lowering"] != "ffi" or not scope.is_in_loop:
        return eqn
    block.rename(eqn.outvars, [block.read(eqn.invars[0])])
    return None
