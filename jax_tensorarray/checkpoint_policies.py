"""Policies for `jax.checkpoint` around a loop body that reads and writes buffers."""

from typing import Any

import jax.numpy as jnp


def save_reads(prim: Any, /, *avals: Any, **_: Any) -> bool:
    """Save the rows that `ta_read` returns and the records of inner loops of this library; recompute all else.

    To recompute a read, or an inner loop that reads, `jax.checkpoint` needs the buffer from before the step. Without
    this policy, a checkpointed body therefore saves the whole buffer in every step, which takes O(T^2) memory. With
    the policy the body saves rows, which takes O(T). Complex rows are recomputed, because `jax.checkpoint` raises a
    TypeError if a policy saves a complex value (jax 0.10 to 0.12).

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import checkpoint_policies, ta_read, ta_write
    >>> def step(i, buffer):
    ...     return ta_write(buffer, i + 1, 2 * jnp.sin(ta_read(buffer, i)))
    >>> body = jax.checkpoint(step, policy=checkpoint_policies.save_reads)
    >>> jax.grad(lambda x: jax.lax.fori_loop(0, 3, body, jnp.zeros(4).at[0].set(x))[3])(0.0)
    Array(8., dtype=float32, weak_type=True)
    """
    # JAX runs a callback again if the policy does not save it, but does not keep its arguments alive: if they are
    # saved and used by nothing else, the variable is missing (KeyError).
    if prim.name in ("ta_read", "ta_while"):
        return not any(jnp.issubdtype(getattr(a, "dtype", bool), jnp.complexfloating) for a in avals)
    return prim.name in ("debug_callback", "debug_print")


__all__ = ["save_reads"]
