"""Merge reads of the same row of the same version of a buffer: common subexpression elimination.

    y = f(ta_read(b, i)) + g(ta_read(b, i))
    # becomes
    row = ta_read(b, i)
    y = f(row) + g(row)

XLA merges equal slices too, but not across a barrier. A step that attends to `cache[k]` reads it for the scores and for
the sum, and each read of 32 KB would allocate an array (forward, it takes 1.3 times as long as plain JAX).
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jax_tensorarray._jaxprs import jaxprs, kinds
from jax_tensorarray._lowering.equations import Block
from jax_tensorarray._lowering.scopes import Scope, is_strict, rebuilt
from jax_tensorarray._ops.calls import TAPE_PARAM
from jax_tensorarray._ops.read import ta_read_p
from jax_tensorarray._types import Equation

#: How many equations back two indices are compared.
_FAR = 32


def read_once(jaxpr: Any) -> Any:
    """Replace each read of a row by an earlier read of the same row in the same jaxpr."""
    numbers, first = _ScopedNumbers(), dict[Hashable, Any]()

    def once(scope: Scope, eqn: Equation, block: Block) -> Equation | None:
        if eqn.primitive is not ta_read_p or is_strict(eqn) or eqn.params[TAPE_PARAM]:
            return eqn
        key = scope, numbers.of_result(scope, eqn)
        if key not in first:
            first[key] = eqn.outvars[0]
            return eqn
        block.rename(eqn.outvars, [block.read(first[key])])
        return None

    return rebuilt(Scope(jaxpr), once)


class _ScopedNumbers(jaxprs.ValueNumbers):
    """Numbers the values of scopes."""

    def __init__(self) -> None:
        super().__init__()
        self.of_value: dict[tuple[Scope, Any], int] = {}

    def of(self, scope: Scope, atom: Any, far: int = _FAR) -> int:
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return self.number("literal", value.dtype, value.shape, value.tobytes())
        key = scope, atom
        if key not in self.of_value:
            maker = scope.maker(atom, "iota", *kinds.OF_INDICES) if far else None
            self.of_value[key] = self.number(atom) if maker is None else self.of_result(scope, maker, far - 1)
        return self.of_value[key]

    def of_result(self, scope: Scope, eqn: Equation, far: int = _FAR) -> int:
        """Return the number of the result of an equation."""
        operands = [self.of(scope, x, far) for x in eqn.invars]
        return self.number(eqn.primitive, *sorted(eqn.params.items(), key=lambda item: item[0]), *operands)
