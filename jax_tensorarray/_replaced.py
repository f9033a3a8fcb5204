"""The patches of JAX at the first use of this library.

The first use is a trace of a row op or of a loop with `max_steps`, or a program that `in_place` evaluates. Importing
the library adds rules for its own primitives, and changes nothing that JAX has.
"""

from jax_tensorarray import _compat
from jax_tensorarray._in_place import early
from jax_tensorarray._jaxprs import registry
from jax_tensorarray._loops import under_vmap
from jax_tensorarray._lowering import program


def replacements() -> list[_compat.Replacement]:
    """Return the replacements. Each does the same as JAX, except with row ops or in programs under `in_place`.

    | replacement | reason |
    |---|---|
    | `lower_jaxpr_to_module`: first the passes of `_lowering` run | only a whole program shows its order |
    | the transposes of higher-order primitives, such as `jit` and `scan` | JAX adds dense cotangents of inner reads |
    | the batching rules of `cond` and `while` | JAX selects between buffers if a predicate is batched |
    | `bind` of `scan` and `while` | before JAX differentiates a loop, we rewrite it, or remove steps never taken |

    The first use comes before JAX needs any of them: JAX traces a row op, or a loop that raises an error at its end,
    before it lowers, transposes or batches the jaxpr. The exception is a row op in the trace of a lowering rule: JAX is
    already lowering a module, and no passes follow.
    """
    return [
        *_compat.before_lowering(program.rewritten),
        *_compat.forwarding_transposes(registry.ENTRIES),
        *under_vmap.batching_rules(),
        *early.binds(),
    ]
