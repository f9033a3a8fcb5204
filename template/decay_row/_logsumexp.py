"""`logsumexp_rows`: the logarithm of a sum of exponentials of rows. It is not linear, and needs scratch memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from decay_row._primitive import bind, register, spec_of

# --- public function -------------------------------------------------------------------------------------------


def logsumexp_rows(buffer: Any) -> jax.Array:
    """Compute `log(sum(exp(buffer), axis=0))`, without overflow.

    Args:
        buffer: array of shape `[T, *row]`, of a floating dtype.

    Returns:
        An array of shape `row`: minus infinity for an empty sum. Differentiable.

    Raises:
        TypeError: the dtype does not fit.
        ValueError: `buffer` is a scalar, or its rows are divided among the devices of a mesh with explicit axes.
    """
    buffer = jnp.asarray(buffer)
    if not buffer.ndim:
        raise ValueError("logsumexp_rows: buffer must have shape [T, *row], got a scalar")
    if not jnp.issubdtype(buffer.dtype, jnp.floating):
        raise TypeError(f"logsumexp_rows: buffer must have a floating dtype, got {buffer.dtype}")
    (out,) = _bind(buffer, batch_dims=0)
    return out


def _bind(buffer: Any, *, batch_dims: int) -> Any:
    return bind(logsumexp_rows_p, _division, buffer, batch_dims=batch_dims)


# --- types -----------------------------------------------------------------------------------------------------


def _abstract_eval(buffer: Any, *, batch_dims: int) -> list[Any]:
    if not 0 <= batch_dims < buffer.ndim or not jnp.issubdtype(buffer.dtype, jnp.floating):
        raise TypeError(f"logsumexp_rows: operand {buffer.str_short()} with {batch_dims} batch axes")
    shape = (*buffer.shape[:batch_dims], *buffer.shape[batch_dims + 1 :])
    _, (spec,) = _division(spec_of(buffer), batch_dims)
    return [buffer.update(shape=shape, sharding=buffer.sharding.update(spec=spec), weak_type=False)]


def _division(spec: Sequence[Any], batch_dims: int) -> Any:
    batch, row = spec[:batch_dims], spec[batch_dims + 1 :]
    return [PartitionSpec(*batch, None, *row)], [PartitionSpec(*batch, *row)]


# --- forward mode ----------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, batch_dims: int) -> Any:
    """Differentiate in plain JAX, whose operations have transposes: the primitive needs none."""
    ((buffer,), (buffer_dot,)) = primals, tangents
    (out,) = _bind(buffer, batch_dims=batch_dims)
    if type(buffer_dot) is ad.Zero:
        return [out], [ad.Zero(jax.typeof(out).to_tangent_aval())]
    shift = jnp.where(jnp.isneginf(out), 0, out)  # -inf - -inf is NaN, where all weights are zero
    weights = jnp.exp(buffer - jnp.expand_dims(shift, batch_dims))
    return [out], [jnp.sum(weights * buffer_dot, batch_dims)]


# --- plain JAX -------------------------------------------------------------------------------------------------


def _in_plain_jax(buffer: Any, *, batch_dims: int) -> list[Any]:
    return [jax.nn.logsumexp(buffer, batch_dims)]


# --- scratch memory --------------------------------------------------------------------------------------------

#: The most parts that a sum is divided into. A GPU needs many to be busy, and each needs memory.
_PARTS = 64


def _scratch(buffer: Any, *, batch_dims: int) -> list[Any]:
    """Return the type of the memory for the maximum and the sum of each part."""
    size = buffer.shape[batch_dims]
    parts = max(1, min(size, _PARTS)) if isinstance(size, int) else _PARTS
    shape = (2, parts, *buffer.shape[:batch_dims], *buffer.shape[batch_dims + 1 :])
    return [buffer.update(shape=shape, sharding=buffer.sharding.update(spec=PartitionSpec(*[None] * len(shape))))]


# --- registration ----------------------------------------------------------------------------------------------

logsumexp_rows_p = register(
    "logsumexp_rows",
    target="decay_row_logsumexp",
    bind=_bind,
    division=_division,
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    plain_jax=_in_plain_jax,
    scratch=_scratch,
)
