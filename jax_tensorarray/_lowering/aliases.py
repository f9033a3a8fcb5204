"""Alias analysis of the calls of other libraries: which results share the memory of an operand, updated in place."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import primitives

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray._types import Equation


def aliased(eqn: Equation) -> Sequence[tuple[int, int]]:
    """Return pairs (operand, result), by number, that share memory.

    `jax.ffi` and Pallas state the pairs in a parameter. The lowering rule of another primitive may also make such a
    call, so we lower the primitive once for each type of its operands.
    """
    if (pairs := eqn.params.get("input_output_aliases")) is not None:
        return [*pairs.items()] if isinstance(pairs, dict) else list(pairs)
    if _is_of_jax(eqn) or jaxprs.is_of_ours(eqn) or eqn.effects:
        return ()
    if any(True for _ in jaxprs.jaxprs_in(eqn.params)) or _compat.traced_lowering(eqn.primitive) is not None:
        return ()
    key = eqn.primitive, str(sorted(eqn.params.items())), tuple(v.aval for v in eqn.invars)
    if key not in _cache:
        _cache[key] = _aliases_in_text(eqn)
    return _cache[key]


_cache: dict[Any, Sequence[tuple[int, int]]] = {}


def _is_of_jax(eqn: Equation) -> bool:
    return getattr(primitives, f"{eqn.primitive.name}_p".replace("-", "_"), None) is eqn.primitive


def _aliases_in_text(eqn: Equation) -> Sequence[tuple[int, int]]:
    """Return the pairs of the only custom call in the lowering of an equation."""

    def call(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    try:
        text = jax.jit(call).trace(*(v.aval for v in eqn.invars)).lower().as_text()
    except Exception:  # the rule of another library may raise anything if the call is lowered alone
        return ()
    call_text = re.search(r"stablehlo\.custom_call @[\w.]+\((.*?)\)(.*)", text)
    if call_text is None:
        return ()
    behind_barriers = {
        f"{name}#{k}" if count else name: operand
        for name, count, operands in re.findall(r"(%\w+)(:\d+)? = stablehlo\.optimization_barrier ([^:]*) :", text)
        for k, operand in enumerate(operands.split(", "))
    }
    operands = [re.fullmatch(r"%arg(\d+)", behind_barriers.get(x.strip(), x.strip())) for x in call_text[1].split(",")]
    pairs = [(operands[int(k)], int(n or 0)) for n, k in _ALIAS.findall(call_text[2])]
    return [(int(operand[1]), n) for operand, n in pairs if operand is not None and n < len(eqn.outvars)]


_ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")
