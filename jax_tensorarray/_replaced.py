"""The patches of JAX that this library makes when it is first used.

The first use is a trace of a row op or of a loop with `max_steps`, or a program that `in_place` evaluates. Importing
the library adds rules for its own primitives, and changes nothing that JAX has.
"""

from jax_tensorarray import _compat
from jax_tensorarray._in_place import early
from jax_tensorarray._jaxprs import registry
from jax_tensorarray._loops import under_vmap
from jax_tensorarray._lowering import program


def replacements() -> list[_compat.Replacement]:
    """Return the replacements. Each does what JAX does, unless it is given row ops or what `in_place` has traced.

    | replaced | since |
    |---|---|
    | `lower_jaxpr_to_module`, before which come the passes of `_lowering` | only a whole program shows its order |
    | the transposes of what runs jaxprs, such as `jit` and `scan` | JAX adds up the cotangents of reads inside, dense |
    | the batching rules of `cond` and `while` | JAX selects between buffers where examples differ |
    | `bind` of `scan` and `while` | a loop is repaired, or freed of steps never taken, before it is differentiated |

    The first use comes before JAX needs any of them: a row op, or a loop that raises an error at its end, is traced
    before the jaxpr with it is lowered, transposed or batched. Only if a lowering rule traces a row op, JAX lowers a
    module already, and no passes follow.
    """
    return [
        *_compat.before_lowering(program.rewritten),
        *_compat.forwarding_transposes(registry.ENTRIES),
        *under_vmap.batching_rules(),
        *early.binds(),
    ]
