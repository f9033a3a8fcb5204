"""The residuals that a gradient stores for each step of its loops, by the jaxpr of the differentiated function."""

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Literal

from jax_tensorarray import _compat
from jax_tensorarray._jaxprs import registry
from jax_tensorarray._jaxprs.uses import Uses
from jax_tensorarray._types import bytes_of
from jax_tensorarray.doctor._text import readable


@dataclass(frozen=True, kw_only=True)
class Kept:
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

    dtype: str
    shape: tuple[int, ...]
    steps: int
    num_bytes: int
    file: str | None
    line: int | None
    code: str

    def at(self, file: str | None) -> str:
        """Describe it in one line, with this name of its file."""
        return f"{self}, {file}:{self.line}" if file else str(self)

    def __str__(self) -> str:
        array = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return f"{array} for each of {self.steps} steps, {readable(self.num_bytes)}"


#: So many of them are listed, and all are counted.
LISTED = 5

#: To keep less than this is not worth mentioning.
_WORTH = 2**20


def total(kept: Sequence[Kept]) -> str:
    return readable(sum(k.num_bytes for k in kept))


def worth_listing(kept: Sequence[Kept]) -> bool:
    return sum(k.num_bytes for k in kept) >= _WORTH


def in_all(kept: Sequence[Kept]) -> str:
    """Say how much is kept in all."""
    more = f"; the largest {LISTED} of {len(kept)} arrays are" if len(kept) > LISTED else ", the largest first"
    return f"The gradient keeps {total(kept)} for all steps{more}:"


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


class SourceLine(NamedTuple):
    """A line of Python and its text, None and empty where they are not known."""

    file: str | None
    line: int | None
    code: str


def line_of(eqns: Sequence[Any]) -> SourceLine:
    """Return the line of the first of these equations that has one."""
    lines = (re.match(r"(.*?):(\d+)(:\d+)? \(", source_info_util.summarize(eqn.source_info)) for eqn in eqns)
    where = next(filter(None, lines), None)
    if where is None:
        return SourceLine(None, None, "")
    file, line = where.group(1), int(where.group(2))
    return SourceLine(file, line, linecache.getline(file, line).strip())


def _makers(jaxpr: Jaxpr, v: Any) -> list[Any]:
    """Return the equations that make a variable, innermost first; none for an input."""
    eqn = Uses(jaxpr).maker(v)
    if eqn is None:
        return []
    called = registry.inlined(eqn, with_options=True)
    inner = None if called is None else _compat.opened(called)
    return [eqn] if inner is None else [*_makers(inner, inner.outvars[eqn.outvars.index(v)]), eqn]
