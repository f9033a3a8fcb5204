"""The doctor's report as one page of HTML, with excerpts of the source and bars."""

import linecache
import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape

from jax_tensorarray.doctor._programs import Programs
from jax_tensorarray.doctor._report import Bar, Finding, Section, tree
from jax_tensorarray.doctor._text import grouped, name_of_file, where

#: Lines of source that are shown above and below one that copies.
_AROUND = 4

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


def html(report: Programs, title: str) -> str:
    """Return the page: self-contained, without scripts."""
    return _page(title, [_of(report)])


def html_of_two(
    unchanged: str, rewritten: str, title: str, summary: Sequence[str], seconds: tuple[float, float]
) -> str:
    """Return the page of a program that has run twice, with the fragments of both reports."""
    names, gains = ("unchanged", "under in_place"), (False, seconds[1] <= seconds[0])
    pairs = zip(names, seconds, gains, strict=True)
    bars = [Bar(name, f"{took:.1f} s", took / max(seconds), is_gain) for name, took, is_gain in pairs]
    listed = "".join(f"<li>{escape(line)}</li>" for line in summary)
    parts = [f"<ul>{listed}</ul>{_table(bars)}"]
    for name, fragment_of_one in zip(names, (unchanged, rewritten), strict=True):
        parts += [f'<h2 class="run">{escape(name.capitalize())}</h2>', fragment_of_one]
    return _page(title, parts)


def fragment(report: Programs) -> str:
    """Return a part of a page, for a notebook, with its style."""
    return f'<div class="jta"><style>{_STYLE}</style>{_of(report)}</div>'


def _page(title: str, parts: Sequence[str]) -> str:
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


def _of(report: Programs) -> str:
    """Return the content of a page for a report."""
    said = tree(report)
    body = [f'<p class="slower">{escape(said.first)}</p>'] if said.first else []
    body += [f"<p>{escape(said.summary)}</p>", *map(_section, said.sections)]
    body += [f"<p>{escape(said.unlisted)}</p>"] if said.unlisted else []
    if said.more:
        first, *links = said.more
        body.append(f"<p>{escape(first)}</p><ul>{''.join(f'<li>{_linked(link.strip())}</li>' for link in links)}</ul>")
    return "\n".join([*body, *([f"<p>{escape(said.of_jaxlib)}</p>"] if said.of_jaxlib else [])])


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.title)}</h2>", *(f"<p>{escape(text)}.</p>" for text in section.tried)]
    if section.keep is not None:
        code = "".join(f"<span>{escape(line)}</span>" for line in section.keep.code)
        parts.append(f"<p>{escape(section.keep.said)}</p>{code and f'<pre>{code}</pre>'}")
    if section.hint:
        parts.append(f"<p>{escape(section.hint)}</p>")
    if section.times:
        parts.append(_table(section.times))
    if section.failed:
        parts.append(f"<p><code>in_place</code> could not be tried: {escape(section.failed)}</p>")
    for findings in grouped(section.findings, lambda finding: finding.at[:2]).values():
        parts.append(_line(findings))
    if section.kept:
        in_all, *arrays = section.kept
        listed = "".join(f"<li>{escape(array)}</li>" for array in arrays)
        parts.append(f"<p>{escape(in_all)}</p><ul>{listed}</ul>")
        parts += [f"<p>{escape(section.needs)}</p>"] if section.needs else []
    return "\n".join([*parts, "</section>"])


def _line(findings: Sequence[Finding]) -> str:
    """Return a line of source, with what is said about it."""
    file, line, _ = findings[0].at
    parts = [f"<article><h3><code>{escape(where(file and name_of_file(file), line))}</code></h3>"]
    parts += [_excerpt(file, line)] if file and line else []
    for finding in findings:
        parts += [f"<p>{_prose(text)}</p>" for text in finding.said if text]
        parts += [_table([finding.moved])] if finding.moved else []
    advice = dict.fromkeys(finding.advice for finding in findings if finding.advice)
    return "\n".join([*parts, *(f"<p>{_prose(text)}</p>" for text in advice), "</article>"])


def _linked(text: str) -> str:
    """Return where to read about a name: an address as a link, a command as code."""
    address, _, command = text.rpartition(" or ")
    link = f'<a href="{escape(address)}">{escape(address)}</a> or ' if address else ""
    return f"{link}<code>{escape(command)}</code>"


def _table(bars: Iterable[Bar]) -> str:
    return f"<table>{''.join(map(_row, bars))}</table>"


def _prose(text: str) -> str:
    """Return a text as HTML, with code between backticks."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


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
