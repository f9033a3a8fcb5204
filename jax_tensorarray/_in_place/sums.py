"""Sums of two buffers of which one is zeros but for a few rows: what the gradient of a plain read is made of."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from jax_tensorarray._in_place.values import Value


def broadcast_in_dim(eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Zeros, to which no row has been added so far."""
    (v, *_), result = eqn.invars, eqn.outvars[0].aval
    is_number = isinstance(v, jex.Literal) and np.ndim(v.val) == 0
    if not is_number or v.val != 0 or result.weak_type or not result.ndim:
        return None
    return [Value(_as_it_is(eqn, operands), only=())]


def _as_it_is(eqn: Any, operands: Sequence[Value]) -> Any:
    from jax_tensorarray._loops import bodies

    return bodies.bind(eqn, [x.array for x in operands])[0]


def add(eqn: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Adds to the rows in place."""
    if any(x.only is None for x in operands):
        whole, some = sorted(operands, key=lambda x: x.only is not None)
        if some.only is None:
            return None
        for update in some.only:
            whole = whole.updated(update)
        return [whole]
    first, second = operands
    return [Value(_as_it_is(eqn, operands), only=(*first.only, *second.only))]


RULES = {"broadcast_in_dim": broadcast_in_dim, "add_any": add, "add": add}
