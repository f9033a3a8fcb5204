"""`ta_guard`: an array whose derivative is zero for inactive examples. It costs nothing forward.

`where(active, x, stop_gradient(x))` means the same, but a tape would store its result for every step. A guard is
lowered to `x` itself: if all steps share `x`, no tape stores it.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_tensorarray._ops.primitive import all_to_front, is_zero, like_buffer, make_primitive, zero_tangent
from jax_tensorarray._types import Array


def ta_guard(active: Array, x: Array) -> Array:
    """Return `x`, with derivatives for the active examples only.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x: jnp.sum(ta_guard(jnp.array([True, False]), x) ** 2)
    >>> print(f(jnp.array([1.0, 2.0])), jax.grad(f)(jnp.array([1.0, 2.0])))
    5.0 [2. 0.]
    """
    return ta_guard_p.bind(active, x)


def _abstract_eval(active: Any, x: Any) -> Any:
    if active.shape != x.shape[: active.ndim]:
        raise ValueError(f"ta_guard: active {active.shape} and x {x.shape} do not share batch axes")
    return like_buffer(x).update(weak_type=x.weak_type)  # a value in a loop body may have a weak type


def _jvp(primals: Any, tangents: Any) -> Any:
    active, x = primals
    out, t = ta_guard_p.bind(active, x), tangents[1]
    if is_zero(t):
        return out, zero_tangent(out)
    return out, _if_active(active, t)


def _if_active(active: Array, t: Array) -> Array:
    wide = lax.broadcast_in_dim(active, jnp.shape(t), tuple(range(jnp.ndim(active))))
    return lax.select(wide, t, jnp.zeros_like(t))


def _transpose(ct: Any, active: Any, x: Any, **_: Any) -> Any:
    return [None, _if_active(active, ct)]


def _batch(primitive: Any, args: Any, dims: Any) -> Any:
    return primitive.bind(*all_to_front(args, dims)), 0


def _itself(active: Array, x: Array) -> Array:
    return x


def _kernel(ctx: Any, active: Any, x: Any, **_: Any) -> Any:
    return [x]


ta_guard_p = make_primitive(
    "ta_guard",
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    reference=_itself,
    kernel=_kernel,
)
