"""The row ops in plain JAX, unrolled over the positions of an index known in Python: no primitive of the library.

For derivatives that finite differences cannot give to all digits. Names and arguments are those of the library.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _positions(buffer: jax.Array, index: Any, where: Any) -> list[tuple[tuple[int, ...], int | None]]:
    """(position, row) in order; the row is None where the position is masked or out of range."""
    index = np.asarray(index)
    where = np.broadcast_to(True if where is None else where, index.shape)
    size = buffer.shape[0]
    return [(k, int(index[k]) if where[k] and 0 <= index[k] < size else None) for k in np.ndindex(index.shape)]


def ta_read(buffer: Any, index: Any, *, where: Any = None, mode: str | None = None) -> jax.Array:
    rows = [jnp.zeros_like(buffer[0]) if i is None else buffer[i] for _, i in _positions(buffer, index, where)]
    return jnp.stack(rows).reshape(np.shape(index) + buffer.shape[1:])


def ta_write(buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None) -> jax.Array:
    return ta_swap(buffer, index, value, where=where)[0]


def ta_swap(
    buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None
) -> tuple[jax.Array, jax.Array]:
    value = jnp.broadcast_to(value, np.shape(index) + buffer.shape[1:])
    old = []
    for k, i in _positions(buffer, index, where):
        old.append(jnp.zeros_like(value[k]) if i is None else buffer[i])
        buffer = buffer if i is None else buffer.at[i].set(value[k])
    return buffer, jnp.stack(old).reshape(value.shape)


def ta_add(buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None) -> jax.Array:
    value = jnp.broadcast_to(value, np.shape(index) + buffer.shape[1:])
    for k, i in _positions(buffer, index, where):
        buffer = buffer if i is None else buffer.at[i].add(value[k])
    return buffer


def ta_max(buffer: Any, index: Any, value: Any, *, where: Any = None, mode: str | None = None) -> jax.Array:
    """Each row is the `jnp.max` of the old one and of all that is put into it: equal ones share the derivative."""
    value = jnp.broadcast_to(value, np.shape(index) + buffer.shape[1:])
    positions = _positions(buffer, index, where)
    rows = [[row, *(value[k] for k, i in positions if i == n)] for n, row in enumerate(buffer)]
    return jnp.stack([jnp.max(jnp.stack(row), axis=0) for row in rows])


def ta_stack(buffer: Any, size: Any = None) -> jax.Array:
    return buffer if size is None else jnp.concatenate([buffer[:size], jnp.zeros_like(buffer[size:])])
