"""The residuals that a gradient stores for each step of its loops, by the jaxpr of the differentiated function."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import registry
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._types import bytes_of
from jax_tensorarray.doctor._blocks import Block, Items, Text
from jax_tensorarray.doctor._finding import Finding
from jax_tensorarray.doctor._text import SourceLine, first_line, readable


@dataclass(frozen=True, kw_only=True)
class Kept(Finding):
    """An array that a gradient stores for every step of a loop.

    Attributes:
      dtype: the element type of the array.
      shape: the shape of the array that one step makes.
      steps: the number of steps.
      num_bytes: the bytes that the gradient stores for all steps.
      file: the Python file that makes the array, or None if JAX does not know. An array that the loop hands to the step
        has the line of the loop.
      line: the number of the line.
      code: the text of the line; empty if the file cannot be read.
    """

    steps: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.array} for each of {self.steps} steps, {readable(self.num_bytes)}"


#: So many of them are listed, and all are counted.
LISTED = 5

#: To keep less than this is not worth mentioning.
_WORTH = 2**20


def total(kept: Sequence[Kept]) -> str:
    return readable(sum(k.num_bytes for k in kept))


def listed(kept: Sequence[Kept], has_buffer: bool) -> list[Block]:
    """Return how much a gradient keeps in all, and the largest arrays. Empty if it is little, and no buffer."""
    if not kept or not (has_buffer or sum(k.num_bytes for k in kept) >= _WORTH):
        return []
    more = f"; the largest {LISTED} of {len(kept)} arrays are" if len(kept) > LISTED else ", the largest first"
    arrays = [f"{k}, {k.at.place}" if k.file else str(k) for k in kept[:LISTED]]
    return [Text(f"The gradient keeps {total(kept)} for all steps{more}:"), Items(arrays)]


def kept_for_gradient(jaxpr: Jaxpr, min_bytes: int = 0) -> list[Kept]:
    """Return the arrays that one scan stacks and a scan in the other direction takes apart, the largest first.

    Arrays of fewer bytes than `min_bytes` in all steps are left out.
    """
    stacks: dict[Any, Kept] = {}
    _follow(jaxpr, [None] * len(_compat.opened(jaxpr).invars), stacks)
    large = [kept for kept in stacks.values() if kept.num_bytes >= min_bytes]
    return sorted(large, key=lambda kept: kept.num_bytes, reverse=True)


#: A scan, and which of its results.
_Stacked = tuple[Any, int]


def _follow(jaxpr: Jaxpr, stacked_inputs: Sequence[_Stacked | None], stacks: dict[Any, Kept]) -> list[_Stacked | None]:
    """Return which outputs a scan has stacked. `stacked_inputs` says this of the inputs."""
    inner = _compat.opened(jaxpr)
    stacked = dict(zip(inner.invars, stacked_inputs, strict=True))

    def of(v: Any) -> _Stacked | None:
        return None if isinstance(v, Literal) else stacked.get(v)

    for eqn in inner.eqns:
        called = registry.inlined(eqn, with_options=True)
        if called is not None:
            stacked.update(zip(eqn.outvars, _follow(called, [*map(of, eqn.invars)], stacks), strict=True))
        elif eqn.primitive.name == "scan":
            num_consts, num_carry = _compat.scan_counts(eqn.params)
            for source in map(of, eqn.invars[num_consts + num_carry :]):
                if source is not None and source[0].params["reverse"] != eqn.params["reverse"]:
                    stacks.setdefault((id(source[0]), source[1]), _kept(*source))
            stacked.update({v: (eqn, k) for k, v in enumerate(eqn.outvars) if k >= num_carry})
    return [*map(of, inner.outvars)]


def _kept(scan: Any, k: int) -> Kept:
    aval = scan.outvars[k].aval
    body = _compat.opened(scan.params["jaxpr"])
    made = [*_makers(body, body.outvars[k]), scan]
    return Kept(
        dtype=aval.dtype.name,
        shape=aval.shape[1:],
        steps=aval.shape[0],
        num_bytes=bytes_of([aval]),
        **line_of(made)._asdict(),
    )


def line_of(eqns: Sequence[Any]) -> SourceLine:
    """Return the line of the first of these equations that has one."""
    return first_line(source_info_util.summarize(eqn.source_info) for eqn in eqns)


def _makers(jaxpr: Jaxpr, v: Any) -> list[Any]:
    """Return the equations that make a variable, innermost first; none for an input."""
    eqn = Uses(jaxpr).maker(v)
    if eqn is None:
        return []
    called = registry.inlined(eqn, with_options=True)
    inner = None if called is None else _compat.opened(called)
    return [eqn] if inner is None else [*_makers(inner, inner.outvars[eqn.outvars.index(v)]), eqn]
