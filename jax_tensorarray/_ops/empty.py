"""`ta_empty`: an uninitialised buffer, made in O(1)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir
from jax.typing import DTypeLike

from jax_tensorarray._ops import arguments
from jax_tensorarray._ops.primitive import debugs_nans, make_primitive, simple_kernel
from jax_tensorarray._types import Array


def ta_empty(
    size: int, element_shape: int | Sequence[int] = (), dtype: DTypeLike = jnp.float32, *, out_sharding: Any = None
) -> jax.Array:
    """Return an uninitialised buffer of `size` rows, made in O(1): no memory is touched.

    A row has arbitrary contents until you write it. If `jax_debug_nans` or `jax_debug_infs` is on, or the platform has
    no kernels, the buffer is filled with zeros.

    Args:
        size: number of rows, a Python integer.
        element_shape: shape of a row.
        dtype: dtype of the buffer. Random keys have a dtype such as `jax.random.key(0).dtype`.
        out_sharding: the sharding of the buffer, on meshes with explicit axes. `jax.numpy.zeros` has the same argument.

    Returns:
        Array of shape `[size, *element_shape]`. It depends on no input, so there is nothing to differentiate.

    Raises:
        TypeError: `size` or `element_shape` is not made of integers, or no array can have that `dtype`.
        ValueError: `size` or a dimension is negative, or too large for any array.

    >>> import jax.numpy as jnp
    >>> buffer = ta_empty(1_000_000, (64,))
    >>> buffer.shape, buffer.dtype
    ((1000000, 64), dtype('float32'))

    NumPy: `numpy.empty`.
    """
    is_shape = isinstance(element_shape, Sequence) and not isinstance(element_shape, str | bytes)
    row = tuple(element_shape) if is_shape else (element_shape,)  # type: ignore[arg-type]
    shape = tuple(_dimension(d) for d in (size, *row))
    dtype = arguments.as_dtype("ta_empty", dtype)
    if debugs_nans():
        return jnp.zeros(shape, dtype, out_sharding=out_sharding)
    if out_sharding is not None:
        jaxpr = jax.make_jaxpr(lambda: jnp.zeros(shape, dtype, out_sharding=out_sharding))()
        return ta_empty_p.bind(aval=jaxpr.out_avals[0])
    return ta_empty_p.bind(aval=ShapedArray(shape, dtype))


def empty_like(aval: Any) -> jax.Array:
    """Return an uninitialised buffer of a type, with its sharding.

    >>> import jax.numpy as jnp
    >>> empty_like(jax.typeof(jnp.zeros((3, 2)))).shape
    (3, 2)
    """
    return jnp.zeros(aval.shape, aval.dtype) if debugs_nans() else ta_empty_p.bind(aval=aval)


_LARGEST = np.iinfo(np.int64).max


def _dimension(d: Any) -> int:
    if isinstance(d, bool) or not isinstance(d, int | np.integer):
        raise TypeError(f"ta_empty: sizes must be Python integers, known while tracing; got {d!r}")
    if d < 0:
        raise ValueError(f"ta_empty: sizes must not be negative, got {d}")
    if d > _LARGEST:
        raise ValueError(f"ta_empty: sizes must be less than 2**63, got {d}")
    return int(d)


def _abstract_eval(*, aval: Any) -> Any:
    return aval


def _in_plain_jax(*, aval: Any, **_: Any) -> Array:
    return jnp.zeros(aval.shape, aval.dtype)


_uninitialised = simple_kernel("empty", (), ("buffer",))
_zeros = mlir.lower_fun(_in_plain_jax, multiple_results=False)


def _lower(ctx: Any, *, aval: Any, effect: bool = False, **_: Any) -> Any:
    # The program may have been traced before `jax.debug_nans` was on.
    return _zeros(ctx, aval=aval) if debugs_nans() else _uninitialised(ctx, effect=effect)


ta_empty_p = make_primitive("ta_empty", abstract_eval=_abstract_eval, reference=_in_plain_jax, kernel=_lower)
