"""Use-def chains of a jaxpr, and which variables are versions of one buffer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import kinds, registry
from jax_tensorarray._ops.primitive import updates_rows
from jax_tensorarray._types import Equation


class Use(NamedTuple):
    """A use of a variable as an operand of an equation."""

    eqn: Any  #: an `Equation`; None for the outputs of the jaxpr
    operand: int  #: its number


class Uses:
    """The definitions and uses of the variables of a jaxpr, without nested jaxprs."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = _compat.opened(jaxpr)
        self._makers: dict[Any, Any] = {}
        self._uses: dict[Any, list[Use]] = {}
        for eqn in self.jaxpr.eqns:
            self._makers.update(dict.fromkeys(eqn.outvars, eqn))
            self._add(eqn, eqn.invars)
        self._add(None, self.jaxpr.outvars)

    def _add(self, eqn: Equation | None, operands: Sequence[Any]) -> None:
        for k, v in enumerate(operands):
            if not isinstance(v, Literal):
                self._uses.setdefault(v, []).append(Use(eqn, k))

    def maker(self, v: Any) -> Any:
        """Return the equation that makes a variable; None for an input, a constant or a literal."""
        return None if isinstance(v, Literal) else self._makers.get(v)

    def of(self, v: Any) -> list[Use]:
        """Return the uses of a variable, in their order."""
        return self._uses.get(v, [])

    def root(self, v: Any) -> int | None:
        """Return the number of the input that a variable is a version of, or None.

        Updates of rows, one after the other, make versions, perhaps in a `jit`.
        """
        while (eqn := self.maker(v)) is not None:
            if (inner := registry.inlined(eqn)) is not None:
                number = Uses(inner).root(_compat.opened(inner).outvars[eqn.outvars.index(v)])
                if number is None:
                    return None
                v = eqn.invars[number]
            elif v is eqn.outvars[0] and updates(eqn):
                v = eqn.invars[0]
            else:
                return None
        return next((k for k, w in enumerate(self.jaxpr.invars) if w is v), None)


def updates(eqn: Equation) -> bool:
    """Return whether the first result of an equation is its first operand with some rows replaced."""
    return kinds.is_update(eqn) or updates_rows(eqn.primitive)
