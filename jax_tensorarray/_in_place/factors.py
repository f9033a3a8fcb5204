"""Update rows by `.at[].divide` and `.at[].power`, which JAX computes with all rows.

    b = b / jnp.ones_like(b).at[i].multiply(x)
    # becomes
    b = ta_write(b, i, ta_read(b, i) / x)

If a row occurs several times, it is divided by the product.
"""

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _gates
from jax_tensorarray._in_place import rows
from jax_tensorarray._in_place.values import Broadcast, Left, Value, arrays
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import along_axes, in_range, sizes_of
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Array, Equation


def _are_ones(x: Value) -> bool:
    while isinstance(x.form, Broadcast):
        x = x.form.source
    return bool(x.literal == 1)


def scatter_mul(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Multiply rows of ones: write the products. Positions of the same row are multiplied in a small array first."""
    ones, indices, updates = operands
    found = rows.gathered(eqn) if _are_ones(ones) else Left()
    if isinstance(found, Left):
        return found
    address, size = found.address, math.prod(ones.shape[found.address.batch :])
    count, each = math.prod(indices.shape[address.batch : -1]), size // math.prod(address.sizes)
    work = count * (count + 8 * each + 128)
    if math.prod(address.taken) > 1 or not 0 < work <= _gates.COMPARED_SHARE * size:
        return Left()
    at, factors = arrays([indices, updates])
    same = []
    for axis, start in found.starts(at).items():
        x = rows.as_int32(start, ones.shape[axis]).reshape(-1, count)
        x = x if address.drops else rows.clamped(x, ones.shape[axis] - found.taken[axis])
        same.append(x[:, :, None] == x[:, None, :])
    first = jnp.argmax(functools.reduce(operator.and_, same), 2)  # of the positions that are the same

    def multiplied(first: Array, factors: Array) -> Array:
        return jnp.ones_like(factors).at[first].multiply(factors, mode="promise_in_bounds")[first]

    order = found.order(factors.ndim)
    factors = jnp.transpose(factors, np.argsort(order).tolist())
    products = jax.vmap(multiplied)(first, factors.reshape(len(first), count, -1)).reshape(factors.shape)
    written = {"update_jaxpr": None, "update_consts": (), "unique_indices": True}
    once = eqn.replace(primitive=jax_primitives.scatter_p, params=eqn.params | written)
    return rows.scatter(once, [ones, indices, Value(jnp.transpose(products, order))])


def with_rows(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Combine a buffer with ones and some rows: only these rows change."""
    buffer, factors = operands
    ones, update = factors.before, factors.update
    if ones is None or update is None or update.primitive is not ta_write_p or update.where is not None:
        return Left()
    if not _are_ones(ones) or buffer.shape != factors.shape:
        return Left()
    params, new = update.params, update.rows
    old = ta_read_p.bind(*arrays([buffer]), update.index, **params)
    if params["mode"] == "drop":  # nothing is known of a row that is left out, and it has no derivative
        starts = along_axes(jnp.asarray(update.index), params["index_dims"])
        inside = in_range(starts, sizes_of(buffer, params), params["window"])
        new = lax.select(lax.broadcast_in_dim(inside, new.shape, range(inside.ndim)), new, lax.full_like(new, 1))
    return [buffer.updated(update._replace(rows=jaxprs.bind(eqn, [old, new])[0]))]


RULES = {"scatter-mul": scatter_mul, "div": with_rows, "pow": with_rows}
