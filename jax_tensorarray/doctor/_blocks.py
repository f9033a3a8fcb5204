"""The blocks of a report, and the two forms in which they are written: text for a terminal, and HTML."""

import linecache
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

from jax_tensorarray import _links
from jax_tensorarray.doctor._text import SourceLine, wrapped

#: Columns of a text that a function returns, and of the report of a run, which is printed on a terminal.
WIDTH, REPORT_WIDTH = 100, 79

#: Lines of source that a page shows above and below the line of a finding.
_AROUND = 4


class Text(NamedTuple):
    """A paragraph."""

    text: str
    element: str = "p"  #: of HTML, perhaps with its class: "p.slower". On a terminal all but "p" are bold
    indent: int = 0


class Items(NamedTuple):
    """A list. On a terminal each item begins with a mark."""

    texts: Sequence[str]
    mark: str = "- "


class Code(NamedTuple):
    """Lines of code."""

    lines: Sequence[str]


class Source(NamedTuple):
    """A line of source. A page shows the lines around it too."""

    at: SourceLine


class Bar(NamedTuple):
    """A quantity, and which part of the largest one it is."""

    name: str
    value: str
    part: float
    is_gain: bool = False


class Bars(NamedTuple):
    """Quantities that a page compares. A terminal does not show them."""

    bars: Sequence[Bar]


class Group(NamedTuple):
    """Blocks that belong together. On a terminal an empty line is above them."""

    blocks: Sequence["Block"]
    element: str = "div"  #: of HTML
    indent: int = 0


Block: TypeAlias = Text | Items | Code | Source | Bars | Group


def more_about(tags: Iterable[str]) -> list[Block]:
    """Return where to read about the names in brackets."""
    links = [_links.why(tag) for tag in dict.fromkeys(tags) if tag]
    first = Text("More about the names in brackets, with code before and after:")
    return [Group([first, Items(links, "  ")])] if links else []


# --- for a terminal --------------------------------------------------------------------------------------------


def as_text(blocks: Iterable[Block], width: int = WIDTH, colours: bool = False) -> str:
    """Return blocks as text."""
    return "\n".join(_lines(blocks, width, colours, 0))


def _lines(blocks: Iterable[Block], width: int, colours: bool, indent: int) -> Iterator[str]:
    margin = " " * indent
    for block in blocks:
        match block:
            case Text(text, element, more):
                for line in wrapped(text, " " * (indent + more), width):
                    yield f"\x1b[1m{line}\x1b[0m" if colours and element != "p" else line
            case Items(texts, mark):
                for text in texts:
                    yield from wrapped(mark + text, margin, width)
            case Code(lines):
                yield from (f"{margin}    {line}"[:width] for line in lines)
            case Source(at):
                yield margin + at.place
                yield from _lines([Code([at.code] if at.code else [])], width, colours, indent)
            case Group(inner, _, more):
                yield ""
                yield from _lines(inner, width, colours, indent + more)


# --- for a browser ---------------------------------------------------------------------------------------------


def page(title: str, *parts: str) -> str:
    """Return a page: self-contained, without scripts."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}: loops that copy</title><style>{_STYLE}</style></head><body>",
            f'<main class="jta"><h1>{escape(title)}</h1>',
            *parts,
            "</main></body></html>\n",
        ]
    )


def fragment(blocks: Iterable[Block]) -> str:
    """Return a part of a page, for a notebook, with its style."""
    return f'<div class="jta"><style>{_STYLE}</style>{as_html(blocks)}</div>'


def as_html(blocks: Iterable[Block]) -> str:
    """Return blocks as HTML."""
    return "\n".join(map(_html, blocks))


def _html(block: Block) -> str:
    match block:
        case Text(text, element):
            name, _, of = element.partition(".")
            opening = f'{name} class="{of}"' if of else name
            return f"<{opening}>{_prose(text)}</{name}>"
        case Items(texts):
            return f"<ul>{''.join(f'<li>{_prose(text)}</li>' for text in texts)}</ul>"
        case Code(lines):
            return f"<pre>{''.join(f'<span>{escape(line)}</span>' for line in lines)}</pre>"
        case Source(at):
            return (
                f"<h3><code>{escape(at.place)}</code></h3>{_excerpt(at.file, at.line) if at.file and at.line else ''}"
            )
        case Bars(bars):
            return f"<table>{''.join(map(_row, bars))}</table>"
        case Group(inner, element):
            return f"<{element}>{as_html(inner)}</{element}>"


def _prose(text: str) -> str:
    """Return a text as HTML, with code between backticks, and with links."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return re.sub(r"https://\S+", r'<a href="\g<0>">\g<0></a>', text)


def _row(bar: Bar) -> str:
    kind = "bar cured" if bar.is_gain else "bar"
    shown = f'<div class="{kind}" style="width: {100 * min(bar.part, 1):.1f}%"></div>'
    return f"<tr><td>{bar.name}</td><td>{bar.value}</td><td>{shown}</td></tr>"


def _excerpt(file: str, line: int) -> str:
    source = linecache.getlines(file)
    first = max(line - _AROUND, 1)
    shown = []
    for n, text in enumerate(textwrap.dedent("".join(source[first - 1 : line + _AROUND])).splitlines(), first):
        hit = ' class="hit"' if n == line else ""
        shown.append(f"<span{hit}><i>{n}</i>{escape(text)}</span>")
    return "<pre>" + "".join(shown) + "</pre>" if shown else ""


_STYLE = """
.jta { color-scheme: light dark; --line: light-dark(#d9dee3, #3a4148); --soft: light-dark(#f5f7f9, #1c2126);
  --bar: #d9480f; --cured: #2b8a3e; --hit: light-dark(#ffe8cc, #5c3210); color: CanvasText; background: Canvas;
  font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; box-sizing: border-box;
  h1 { font-size: 1.5rem; margin: 0 0 0.5rem; overflow-wrap: anywhere }
  h2 { font-size: 1.2rem; margin: 0; overflow-wrap: anywhere }
  h2.run { margin: 2rem 0 0.5rem }
  section { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0 }
  article { border-top: 1px solid var(--line); margin-top: 1rem; padding-top: 1rem }
  code, pre { font: 0.85rem/1.45 ui-monospace, monospace }
  pre { background: var(--soft); color: inherit; border-radius: 6px; padding: 0.5rem 0; margin: 0.5rem 0 }
  pre span { display: block; padding: 0 0.75rem 0 4.25em; text-indent: -3.5em; white-space: pre-wrap;
    overflow-wrap: anywhere }
  pre .hit { background: var(--hit) }
  pre i { display: inline-block; width: 3.5em; text-indent: 0; opacity: 0.55; font-style: normal; user-select: none }
  h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
  table { border-spacing: 0; width: 100%; background: none; color: inherit; font: inherit }
  td { padding: 0.15rem 0.75rem 0.15rem 0; white-space: nowrap; text-align: left }
  td:last-child { width: 100%; padding-right: 0 }
  .bar { height: 0.9rem; min-width: 2px; border-radius: 3px; background: var(--bar) }
  .cured { background: var(--cured) }
  .slower { border-left: 4px solid var(--bar); padding-left: 0.75rem; font-weight: bold }
  p, ul { margin: 0.5rem 0; overflow-wrap: anywhere }
  .jta { padding: 0 }
}
"""
