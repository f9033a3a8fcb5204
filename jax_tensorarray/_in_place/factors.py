"""Update rows by `.at[].divide` and `.at[].power`.

JAX multiplies some rows of ones, and divides the whole buffer by them, or raises it to them as powers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_tensorarray._in_place.values import Left, Value, arrays
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._ops.starts import along_axes, in_range, sizes_of
from jax_tensorarray._ops.write import ta_write_p
from jax_tensorarray._types import Equation


def broadcast_in_dim(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Make ones."""
    number = operands[0].literal
    if number is None or operands[0].dtype == jax.dtypes.float0 or number != 1:
        return Left()
    value = Value(jaxprs.bind(eqn, [operands[0].array])[0])
    value.is_ones = True
    return [value]


def with_rows(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Combine a buffer with ones and some rows: only these rows change."""
    buffer, factors = operands
    ones, update = factors.before, factors.update
    if ones is None or update is None or update.primitive is not ta_write_p or update.where is not None:
        return Left()
    if not (ones if ones.shared is None else ones.shared).is_ones or buffer.shape != factors.shape:
        return Left()
    params, rows = update.params, update.rows
    old = ta_read_p.bind(*arrays([buffer]), update.index, **params)
    if params["mode"] == "drop":  # nothing is known of a row that is left out, and it has no derivative
        starts = along_axes(jnp.asarray(update.index), params["index_dims"])
        inside = in_range(starts, sizes_of(buffer, params), params["window"])
        rows = lax.select(lax.broadcast_in_dim(inside, rows.shape, range(inside.ndim)), rows, lax.full_like(rows, 1))
    return [buffer.updated(update._replace(rows=jaxprs.bind(eqn, [old, rows])[0]))]


RULES = {"broadcast_in_dim": broadcast_in_dim, "div": with_rows, "pow": with_rows}
