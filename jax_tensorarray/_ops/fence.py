"""Ops that only passes and loops add to a program.

`ta_fence` orders operations, `ta_zero` marks a 0 that XLA does not know, and `ta_raise` raises the errors of earlier
calls.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jax_tensorarray._ops.primitive import all_to_front, like_buffer, make_primitive, simple_kernel
from jax_tensorarray._types import Array

#: An array of at most so many elements passes a select instead of a fence. XLA fuses the select with earlier
#: operations.
_FEW = 32


def after_check(checked: Array, x: Any) -> Any:
    """Return `x`, but depending on a `ta_check`: the value is the same whatever the check returns."""
    if not isinstance(x, jax.Array) or not isinstance(jax.typeof(x), ShapedArray):  # a token, or a ref
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(after_check(checked, jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if not x.ndim or (isinstance(x.size, int) and x.size <= _FEW):
        return jnp.where(checked >= -1, x, jnp.zeros_like(x))  # always true, but XLA does not know that
    return ta_fence_p.bind(x, checked, waits=1, lowering="ffi")


def _transpose(ct: Any, buffer: Any, *values: Any, **_: Any) -> Any:
    return [ct, *[None] * len(values)]


def _batch(primitive: Any, args: Any, dims: Any, **params: Any) -> Any:
    return primitive.bind(*all_to_front(args, dims), **params), 0


#: `ta_fence buffer *values` returns the buffer, in place, after it has waited for the values; `waits` is their number.
#: With `lowering="ffi"` a fence stays a call, which XLA must not remove.
ta_fence_p = make_primitive(
    "ta_fence",
    abstract_eval=lambda buffer, *values, waits, **_: like_buffer(buffer),
    linear_in=(0,),
    transpose=_transpose,
    batch=_batch,
    reference=lambda buffer, **_: buffer,
    kernel=simple_kernel("fence", ("buffer",), ("buffer",)),
)


#: `ta_zero code` marks the code of a record that a loop carries, an int64. The code is 0 while no index is out of
#: range, but XLA does not know that. The jaxpr of a loop or a branch has at most one, before its uses. `slices` removes
#: it.
ta_zero_p = make_primitive(
    "ta_zero",
    abstract_eval=lambda code: code,
    reference=lambda code: code,
)


def _raise_type(*values: Any) -> ShapedArray:
    return ShapedArray((), jnp.dtype(jnp.int32))


#: `ta_raise *values` waits for the values, and raises the first error of earlier calls, see `_lowering.deferred`.
ta_raise_p = make_primitive(
    "ta_raise",
    abstract_eval=_raise_type,
    reference=lambda *values: jnp.int32(0),
    kernel=simple_kernel("raise", (), ("nothing",)),
)
