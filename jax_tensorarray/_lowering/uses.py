"""Answers who uses the buffers of a program."""

from typing import Any

from jax.extend.core import Literal

from jax_tensorarray._lowering.ownership import Ownership
from jax_tensorarray._lowering.scopes import Scope


class Uses:
    """Answers who uses the buffers of a program."""

    def __init__(self, *_: Any) -> None:
        self.ownership = Ownership()

    def is_updated_in(self, scope: Scope, value: Any) -> bool:
        return value in self.ownership.values(scope.closed, self.ownership.owns)

    def is_never_updated(self, scope: Scope, value: Any) -> bool:
        if isinstance(value, Literal):
            return True
        if self.is_updated_in(scope, value):
            return False
        home, found = scope, value
        while isinstance(home.role, int) and (operand := home.operand(found)) is not None:
            if isinstance(operand, Literal):
                return True
            home, found = home.outer, operand
        if home.maker(found) is not None:
            if home is not scope:
                return False
            return home.outer is not None or all(v is not found for v in home.jaxpr.outvars)
        number = home.carried(found)
        if number is not None:
            return number in self.ownership.invariants(home.eqn)
        return home.role in (None, "body", "condition")
