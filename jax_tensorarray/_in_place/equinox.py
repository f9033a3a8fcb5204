"""Rules for primitives of Equinox, which the loops of diffrax, lineax and optimistix are made of.

This is how a library's primitive gets a rule: an entry in `RULES`, by its name. `in_place` imports this file if Equinox
has been imported.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_tensorarray._in_place import explained, repair, selects
from jax_tensorarray._in_place.rows import has_rows
from jax_tensorarray._in_place.values import Left, Predicate, Value
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._loops.strategy import Tape
from jax_tensorarray._types import Array, Equation


def select_if_vmap(eqn: Equation, operands: Sequence[Value]) -> list[Value] | Left:
    """Select `yes` where `pred` is true. A `pred` that is not batched is true: then nothing is selected."""
    pred, yes, no = operands
    if not has_rows(no):
        return Left()

    def select(*values: Any) -> Array:
        return jaxprs.bind(eqn, values)[0]

    # The same primitive, of bools: true, unless `vmap` makes another mask of it.
    mask = select(pred.array, np.True_, pred.array)
    return selects.select_rows(Predicate(mask), no, yes, lambda: select(pred.array, yes.array, no.array))


def maybe_set(eqn: Equation, operands: Sequence[Value]) -> list[Value]:
    """Evaluate the definition that Equinox gives in plain JAX: a write that `pred` selects."""
    impl = functools.partial(eqn.primitive.impl, **eqn.params)
    jaxpr = jax.make_jaxpr(impl)(*(v.aval for v in eqn.invars))
    return repair.Repair(repair.Request(None, Tape()), in_loop=True).evaluate(jaxpr, operands)


explained.KINDS.update(dict.fromkeys(("select_if_vmap", "maybe_set"), "select"))
repair.RULES.update({"select_if_vmap": [select_if_vmap], "maybe_set": [maybe_set]})
