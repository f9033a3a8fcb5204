"""Types, bytes and times, as the reports write them."""

import os
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import TypeVar

from jax_tensorarray import _links

T = TypeVar("T")
K = TypeVar("K")

#: Columns of a text that a function returns, and of the report of a run, which is printed on a terminal.
WIDTH, REPORT_WIDTH = 100, 79

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


def more_about(tags: Iterable[str]) -> list[str]:
    """Return the last lines of a report: where to read about the names in brackets."""
    lines = [f"  {_links.why(tag)}" for tag in dict.fromkeys(tags) if tag]
    return ["More about the names in brackets, with code before and after:", *lines] if lines else []


def factor(times: float) -> str:
    """Return a ratio as text: `3.9`, `15`."""
    return f"{times:.0f}" if times >= 9.95 else f"{times:.1f}".removesuffix(".0")


def wrapped(text: str, first: str = "", width: int = WIDTH) -> list[str]:
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


def where(file: str | None, line: int | None) -> str:
    """Return a line of source as reports name it."""
    return f"{file}:{line}" if file else "a line that XLA does not name"


def name_of_file(file: str) -> str:
    """Return the path relative to the current folder, or to the folder of Python's packages."""
    text = os.path.relpath(file)
    if text.startswith(".."):
        text = file
        for folder in ("site-packages", "dist-packages"):
            text = text.rpartition(f"{folder}{os.sep}")[2]
    return text
