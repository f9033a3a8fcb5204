"""Sort the positions of an index by row, for a GPU that visits many at once.

On a GPU one thread does one position, and must know which others address its row (see csrc/gpu_kernels.h). With few
positions it reads the whole index. With many this would take quadratic time, so XLA sorts the index first, and each
thread finds the positions of its row next to its own.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_tensorarray import _gates
from jax_tensorarray._ops import reference, starts
from jax_tensorarray._types import Array

#: Platforms whose kernels use one thread per position. A CPU visits them in order.
PLATFORMS = {"cuda", "rocm"}


def is_sorted(platform: str, size: int, count: int) -> bool:
    """Return whether the kernel for `count` positions of a buffer of `size` rows gets them sorted."""
    return platform in PLATFORMS and count > _gates.SCANNED_POSITIONS and size < jnp.iinfo(jnp.uint32).max


def visiting_order(buffer: Any, index: Array, *where: Array, **params: Any) -> list[Array]:
    """Return the positions `[*batch, count]` sorted by row, and within one row in the order of the op.

    Positions that address no row come last. `params` are those of the row op.
    """
    batch_dims, reverse = params["batch_dims"], params["reverse"]
    batch, size = buffer.shape[:batch_dims], math.prod(starts.sizes_of(buffer, params))
    numbers, *masks = starts.numbers_of_rows(buffer, index, *where, **params)
    row, is_inside = reference.clamped_row(numbers, reference.mask_like(numbers, masks), size)
    row = jnp.where(is_inside, row.astype(jnp.uint32), jnp.uint32(size)).reshape(*batch, -1)
    position = lax.broadcasted_iota(jnp.int32, row.shape, batch_dims)
    if reverse:
        row, position = (lax.rev(x, (batch_dims,)) for x in (row, position))
    return [lax.sort((row, position), dimension=batch_dims, num_keys=1, is_stable=True)[1]]
