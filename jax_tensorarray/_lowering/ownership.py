"""Find the equation that updates a value in place (its owner) or has it as its buffer, in loops and branches too."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._lowering.aliases import aliased
from jax_tensorarray._ops.primitive import KERNEL_OPS, ROW_OPS
from jax_tensorarray._types import Equation

#: A function of an equation and the number of an operand: whether the two have some relation.
Relation = Callable[[Equation, int], bool]


def updates(eqn: Equation) -> bool:
    """Return whether a call of ours updates its first operand in place, and returns it as the first result."""
    signature = KERNEL_OPS.get(eqn.primitive)
    return signature is not None and signature.in_place


def has_buffer(eqn: Equation) -> bool:
    """Return whether a call of ours gets its first operand as its buffer."""
    signature = KERNEL_OPS.get(eqn.primitive)
    return signature is not None and signature.operands[:1] == ("buffer",)


def waits_of(eqn: Equation) -> int:
    """Return how many of the last operands of a call of ours are only waited for."""
    count: int = eqn.params.get("waits", 0)
    return count


def operands_of(eqn: Equation) -> list[Any]:
    """Return the operands of a call of ours, without those that it only waits for."""
    return list(eqn.invars[: len(eqn.invars) - waits_of(eqn)])


def readers_of(eqn: Equation) -> list[Any]:
    """Return the operands that a call of ours only waits for: none if it needs no order."""
    return [] if eqn.params.get("unordered") else list(eqn.invars[len(eqn.invars) - waits_of(eqn) :])


def mask_of(eqn: Equation) -> Any:
    """Return the mask of a row op, or None."""
    operands, signature = operands_of(eqn), ROW_OPS[eqn.primitive]
    return operands[-1] if len(operands) == len(signature.operands) else None


def called_by(eqn: Equation) -> Any:
    """Return the only jaxpr of an equation if its arguments are the operands of the equation, else None."""
    if not eqn.params or eqn.primitive.name in ("while", "cond", "scan", "shard_map"):
        return None
    inner = list(jaxprs.jaxprs_in(eqn.params))
    return inner[0] if len(inner) == 1 and len(_compat.opened(inner[0]).invars) == len(eqn.invars) else None


class Ownership:
    """Follows the operands of an equation into its loops and branches."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, Any], tuple[Any, set[Any]]] = {}  #: by the id of the jaxpr beside it

    def owns(self, eqn: Equation, number: int) -> bool:
        """Return whether an equation, or one inside it, updates the operand. A loop updates changed carries."""
        name = eqn.primitive.name
        if name == "while":
            first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            return number >= first and number - first not in self.invariants(eqn)
        if name == "cond":
            return number > 0 and any(self._has(x, self.owns, number - 1) for x in eqn.params["branches"])
        if name == "scan":
            consts, carry = _compat.scan_counts(eqn.params)
            body = _compat.opened(eqn.params["jaxpr"])
            return 0 <= number - consts < carry and body.outvars[number - consts] is not body.invars[number]
        if (called := called_by(eqn)) is not None:
            return self._has(called, self.owns, number)
        if jaxprs.is_of_ours(eqn) or name == "dynamic_update_slice":
            return number == 0 and (updates(eqn) or name == "dynamic_update_slice")
        return any(operand == number for operand, _ in aliased(eqn))

    def holds(self, eqn: Equation, number: int) -> bool:
        """Return whether an equation, or a call of ours inside it, gets the operand as its buffer."""
        name = eqn.primitive.name
        if name == "while":
            first = eqn.params["cond_nconsts"]
            return number >= first and self._has(eqn.params["body_jaxpr"], self.holds, number - first)
        if name == "cond":
            return number > 0 and any(self._has(x, self.holds, number - 1) for x in eqn.params["branches"])
        if (called := called_by(eqn)) is not None:
            return self._has(called, self.holds, number)
        return number == 0 and has_buffer(eqn)

    def invariants(self, loop: Equation) -> set[int]:
        """Return the numbers of the carries of a loop that its body returns unchanged."""
        body, first = _compat.opened(loop.params["body_jaxpr"]), loop.params["body_nconsts"]
        return {k for k, v in enumerate(body.outvars) if v is body.invars[first + k]}

    def values(self, jaxpr: Any, relation: Relation) -> set[Any]:
        """Return the variables of a jaxpr that an equation `owns` or `holds`: the relation is one of these methods."""
        inner = _compat.opened(jaxpr)
        key = id(inner), relation.__name__
        if key not in self._cache:
            related = {
                v
                for eqn in inner.eqns
                for k, v in enumerate(eqn.invars)
                if not isinstance(v, Literal) and relation(eqn, k)
            }
            self._cache[key] = inner, related
        return self._cache[key][1]

    def _has(self, jaxpr: Any, relation: Relation, number: int) -> bool:
        return _compat.opened(jaxpr).invars[number] in self.values(jaxpr, relation)
