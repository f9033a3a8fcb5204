"""Types, bytes, times and lines, as the reports write them."""

import linecache
import os
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
K = TypeVar("K")

_DTYPES = {"f": "float", "s": "int", "u": "uint", "c": "complex", "pred": "bool", "bf": "bfloat", "f8": "float8_"}


def dtype_of(array: str) -> str:
    """Return JAX's name of the element type of an HLO array: of `f32[2]` it is float32."""
    dtype = array.partition("[")[0]
    match = re.fullmatch(r"(f8|bf|[a-z]+)(.*)", dtype)
    return _DTYPES.get(match.group(1), match.group(1)) + match.group(2) if match else dtype


def shape_of(array: str) -> tuple[int, ...]:
    """Return the shape of an HLO array."""
    return tuple(int(d) for d in re.findall(r"\d+", array.partition("[")[2]))


def readable(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 10 else f"{size:.1f} {unit}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 loop", "2 loops"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def factor(times: float) -> str:
    """Return a ratio as text: `3.9`, `15`."""
    return f"{times:.0f}" if times >= 9.95 else f"{times:.1f}".removesuffix(".0")


def wrapped(text: str, first: str = "", width: int = 100) -> list[str]:
    """Return the lines of a paragraph. It begins with `first`, whose room the other lines leave free."""
    later = " " * len(first)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group things by their key, in the order given."""
    groups: dict[K, list[T]] = {}
    for x in items:
        groups.setdefault(key(x), []).append(x)
    return groups


class SourceLine(NamedTuple):
    """A line of Python and its text; None and empty if they are not known."""

    file: str | None = None
    line: int | None = None
    code: str = ""

    @property
    def place(self) -> str:
        """The file, relative to the current folder or to that of Python's packages, and the number of the line."""
        return where(self.file and name_of_file(self.file), self.line)


def source_line(file: str, line: int) -> SourceLine:
    """Return a line with its text, which is empty if the file cannot be read."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def first_line(places: Iterable[str]) -> SourceLine:
    """Return the first line that JAX names in some summaries, such as "train.py:7:12 (step)"."""
    match = next(filter(None, (re.match(r"(.+?):(\d+)", place) for place in places)), None)
    return source_line(match.group(1), int(match.group(2))) if match else SourceLine()


def where(file: str | None, line: int | None) -> str:
    """Return a line of source as reports name it."""
    return f"{file}:{line}" if file else "a line that XLA does not name"


def check_is_function(name: str, fun: Any) -> None:
    """Raise a TypeError if the first argument of one of the doctor's functions is not a function."""
    if not callable(fun):
        raise TypeError(
            f"{name}: the first argument must be a function, not {type(fun).__name__}. "
            f"Write {name}(f)(x), not {name}(f(x))."
        )


def name_of_file(file: str) -> str:
    """Return the path relative to the current folder, or to the folder of Python's packages."""
    text = os.path.relpath(file)
    if text.startswith(".."):
        text = file
        for folder in ("site-packages", "dist-packages"):
            text = text.rpartition(f"{folder}{os.sep}")[2]
    return text
