"""The findings of the doctor: each is about an array, at a line of Python."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.doctor._blocks import Bar, Bars, Block, Group, Source, Text
from jax_tensorarray.doctor._text import SourceLine, dtype_of, grouped, readable, shape_of, source_line, where


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An array, and the line that a report names for it.

    A finding of a report has more: `advice`, and `cost`, the bytes that it moves. A reader takes findings with equal
    `key` for one, in other programs or shapes too. `describe` describes findings of one program with equal `alike`.
    """

    dtype: str
    shape: tuple[Any, ...]
    file: str | None
    line: int | None
    code: str

    reason = ""  # the name of the advice, if it has one

    @property
    def at(self) -> SourceLine:
        """The line."""
        return SourceLine(self.file, self.line, self.code)

    @property
    def array(self) -> str:
        """The type of the array as text."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def what(self) -> str:
        """A description, without the line."""
        return self.array

    def __str__(self) -> str:
        return f"{where(self.file, self.line)}: {self.what}"


def array_at(array: str, frame: hlo_text.Frame | None) -> dict[str, Any]:
    """Return the attributes of a finding about an HLO array: the type of the array, its size and its line."""
    at = SourceLine() if frame is None else source_line(*frame)
    num_bytes = int(hlo_text.array_bytes(array))
    return {"dtype": dtype_of(array), "shape": shape_of(array), "num_bytes": num_bytes, **at._asdict()}


def alike(findings: Iterable[Any]) -> list[list[Any]]:
    """Group the findings that a report describes together, the most expensive first."""
    return list(grouped(sorted(findings, key=lambda x: x.cost, reverse=True), lambda x: x.alike).values())


def moved(findings: Sequence[Any]) -> int:
    """Return the bytes that findings move in all."""
    return sum(finding.cost for finding in findings)


def blocks_of(findings: Iterable[Any], compiled: Counter[Any], told: set[str], worst: int = 0) -> list[Block]:
    """Describe findings line by line, the most expensive first.

    `compiled` has the number of programs with a finding, by its key. `told` has the advice above, which is not
    repeated. With `worst`, the most bytes that a group of findings moves, a page has bars.
    """
    blocks: list[Block] = []
    for at, groups in grouped(alike(findings), lambda group: group[0].at).items():
        of_line, advice = list[Block]([Source(at)]), dict[str, None]()
        for group in groups:
            first, texts = group[0], group[0].describe(group)
            if first.file and compiled[first.key] > 1:
                texts.append(f"It is compiled {compiled[first.key]} times.")
            of_line += map(Text, texts)
            if worst and (num_bytes := moved(group)):
                of_line.append(Bars([Bar("moved", readable(num_bytes), num_bytes / worst)]))
            named = f" [{first.reason}]" if first.reason else ""
            if (text := f"{first.advice}{named}") not in told:
                told.add(text)
                advice[text] = None
            elif named and text not in advice:
                advice[f"See above{named}."] = None
        blocks.append(Group([*of_line, *map(Text, advice)], "article"))
    return blocks
