"""What only passes put into a program.

`ta_fence` is an order, `ta_zero` a number that XLA cannot know, and `ta_raise` raises what calls have noted.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jax_tensorarray._ops.primitive import Array, like_buffer, make_primitive, simple_kernel


def _in_plain_jax(buffer: Array, *values: Array) -> Array:
    return jax.lax.optimization_barrier((buffer, *values))[0]


#: `ta_fence buffer *values` is the buffer itself, in place, once the values are there.
ta_fence_p = make_primitive(
    "ta_fence",
    abstract_eval=lambda buffer, *values, waits: like_buffer(buffer),
    reference=_in_plain_jax,
    kernel=simple_kernel("fence", ("buffer",), ("buffer",)),
)


#: `ta_zero code`, an int64, is the code of a record that a loop carries. While no index is out of range it is 0, which
#: XLA cannot know. The jaxpr of a loop or a branch has at most one, before all that needs it. `access` removes it.
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
