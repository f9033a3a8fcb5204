"""Ops that only passes and loops put into a program.

`ta_fence` is an order, `ta_zero` a number that XLA cannot know, and `ta_raise` raises what calls have noted.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jax_tensorarray._ops.primitive import Array, all_to_front, like_buffer, make_primitive, simple_kernel

#: An array with at most so many elements is selected as a whole. XLA fuses the select with the operations before it.
_FEW = 32


def after_check(checked: Array, x: Any) -> Any:
    """Return an array that is only there once a `ta_check` is. Whatever the check returns, it is the same array."""
    if not isinstance(x, jax.Array) or not isinstance(jax.typeof(x), ShapedArray):  # a token, or a ref
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(after_check(checked, jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if not x.ndim or (isinstance(x.size, int) and x.size <= _FEW):
        return jnp.where(checked >= -1, x, jnp.zeros_like(x))  # it is always so, which XLA cannot know
    return ta_fence_p.bind(x, checked, waits=1, lowering="ffi")


def _transpose(ct: Any, buffer: Any, *values: Any, **_: Any) -> Any:
    return [ct, *[None] * len(values)]


def _batch(primitive: Any, args: Any, dims: Any, **params: Any) -> Any:
    return primitive.bind(*all_to_front(args, dims), **params), 0


#: `ta_fence buffer *values` is the buffer itself, in place, once the values are there. It only waits for these, so
#: `waits` is their number. A fence that is lowered to "ffi" stays a call: XLA must not remove it.
ta_fence_p = make_primitive(
    "ta_fence",
    abstract_eval=lambda buffer, *values, waits, **_: like_buffer(buffer),
    linear_in=(0,),
    transpose=_transpose,
    batch=_batch,
    reference=lambda buffer, **_: buffer,
    kernel=simple_kernel("fence", ("buffer",), ("buffer",)),
)


#: `ta_zero code`, an int64, is the code of a record that a loop carries. While no index is out of range it is 0, which
#: XLA cannot know. The jaxpr of a loop or a branch has at most one, before all that needs it. `slices` removes it.
ta_zero_p = make_primitive(
    "ta_zero",
    abstract_eval=lambda code: code,
    reference=lambda code: code,
)


def _raise_type(*values: Any) -> ShapedArray:
    return ShapedArray((), jnp.dtype(jnp.int32))


#: `ta_raise *values` raises the first error that has been noted, see `_lowering.deferred`, once the values are there.
ta_raise_p = make_primitive(
    "ta_raise",
    abstract_eval=_raise_type,
    reference=lambda *values: jnp.int32(0),
    kernel=simple_kernel("raise", (), ("nothing",)),
)
