"""The doctor's report as one page of HTML, with excerpts of the source and bars."""

import linecache
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from jax_tensorarray import _compat
from jax_tensorarray.inspect import _arguments
from jax_tensorarray.inspect._advice import OF_GRADIENT, OF_GROWTH, OF_JAXLIB
from jax_tensorarray.inspect._copies import LoopCopy, advice_of
from jax_tensorarray.inspect._kept import LISTED, in_all
from jax_tensorarray.inspect._text import milliseconds, readable
from jax_tensorarray.inspect._watch import (
    Listed,
    Report,
    again,
    alike,
    cost,
    first_of_all,
    headline,
    how_it_grows,
    is_kept_listed,
    is_to_keep,
    name_of_file,
    place_of,
    summary,
    times_compiled,
    what_and_how_often,
    what_it_needs,
    worth_listing,
)

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


def html(report: Report, title: str) -> str:
    """Return the page: self-contained, without scripts."""
    return _page(title, [_of(report)])


def html_of_two(as_is: str, healed: str, title: str, summary: str, seconds: tuple[float, float]) -> str:
    """Return the page of a program that has run twice, with the fragments of both reports."""
    names = "as it is", "under in_place"
    kinds = "bar", "bar cured" if seconds[1] <= seconds[0] else "bar"
    bars = "".join(
        _row(name, f"{took:.1f} s", took / max(seconds), kind)
        for name, took, kind in zip(names, seconds, kinds, strict=True)
    )
    parts = [f"<p>{escape(summary)}</p><table>{bars}</table>"]
    for name, fragment_of_one in zip(names, (as_is, healed), strict=True):
        parts += [f'<h2 class="run">{escape(name.capitalize())}</h2>', fragment_of_one]
    return _page(title, parts)


def fragment(report: Report) -> str:
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


def _of(report: Report) -> str:
    """Return what a page says of a report."""
    text = f"{report.programs} programs were compiled, with {report.loops} loops"
    text = summary(report, text) if report.cases or report.loops else f"{text}."
    listed, compiled = worth_listing(report), times_compiled(report)
    worst = max((sum(map(cost, group)) for one in listed for group in alike(one.copies)), default=0)
    body = [f'<p class="slower">{escape(first)}</p>'] if (first := first_of_all(report)) else []
    body.append(f"<p>{escape(text)}</p>")
    body += [_case(number, one, worst, compiled) for number, one in enumerate(listed, 1)]
    if not report.cases:
        body.append("<p>No loop copies a buffer.</p>" if report.loops else "<p>There are no loops.</p>")
    elif is_to_keep(report):
        body.append("<p>To keep what was tried, write <code>jax.jit(jax_tensorarray.in_place(f))</code>.</p>")
    if report.loops and _compat.small_loops_are_quadratic():
        body.append(f"<p>{escape(OF_JAXLIB)}</p>")
    return "\n".join(body)


def _case(number: int, listed: Listed, worst: int, compiled: Counter[Any]) -> str:
    case = listed.case
    parts = [f"<section><h2>{number}. {escape(case.program)}: {escape(headline(listed))}</h2>"]
    if case.trial is not None:
        parts.append(f"<p>{escape(f'{case.trial.how}: {case.trial}')}.</p>")
        if case.trial.growth:
            parts.append(f"<p>{escape(how_it_grows(case.trial))}.</p>")
        if case.copies.kept and not case.trial.helps:
            parts.append(f"<p>{escape(OF_GRADIENT)}</p>")
        if case.trial.before and case.trial.after:
            longest = max(case.trial.before, case.trial.after)
            cured = "bar" if case.trial.is_slower else "bar cured"
            rows = [("as it is", case.trial.before, "bar"), (case.trial.how, case.trial.after, cured)]
            bars = (_row(name, milliseconds(took), took / longest, kind) for name, took, kind in rows)
            parts.append(f"<table>{''.join(bars)}</table>")
    elif case.failed:
        parts.append(f"<p><code>in_place</code> could not be tried: {escape(case.failed)}</p>")
    groups = alike(listed.copies)
    for where in dict.fromkeys((group[0].file, group[0].line) for group in groups):
        here = [group for group in groups if (group[0].file, group[0].line) == where]
        parts.append(_place(*where, here, worst, compiled))
    for arguments in _arguments.alike(listed.arguments):
        texts = _arguments.sentences(arguments, again(compiled[place_of(arguments[0])]))
        parts.append(_line(arguments[0].file, arguments[0].line, texts))
    if case.loop is not None:
        texts = [*filter(None, [again(compiled[place_of(case.loop)])]), OF_GROWTH]
        parts.append(_line(case.loop.file, case.loop.line, texts))
    if is_kept_listed(listed):
        kept = "".join(f"<li>{escape(k.at(k.file and name_of_file(k.file)))}</li>" for k in case.copies.kept[:LISTED])
        parts.append(f"<p>{escape(in_all(case.copies.kept))}</p><ul>{kept}</ul>")
        if case.trial is not None and case.trial.memory:
            parts.append(f"<p>{escape(what_it_needs(case.trial))}</p>")
    return "\n".join([*parts, "</section>"])


def _place(
    file: str | None, line: int | None, groups: Sequence[Sequence[LoopCopy]], worst: int, compiled: Counter[Any]
) -> str:
    """Return the part of the page about one line of source."""
    parts = []
    for group in groups:
        moved = sum(map(cost, group))
        bar = _row("moved", readable(moved), moved / worst, "bar")
        said = what_and_how_often(group, compiled[place_of(group[0])])
        parts.append(f"<p>{escape(said)}</p><table>{bar}</table>")
    return _line(file, line, dict.fromkeys(advice_of(group[0]) for group in groups), parts)


def _line(file: str | None, line: int | None, texts: Iterable[str], parts: Iterable[str] = ()) -> str:
    """Return a line of source, with what is said about it."""
    where = f"{name_of_file(file)}:{line}" if file else "a line that XLA does not name"
    excerpt = [_excerpt(file, line)] if file and line else []
    said = (f"<p>{_prose(text)}</p>" for text in texts)
    return "\n".join([f"<article><h3><code>{escape(where)}</code></h3>", *excerpt, *parts, *said, "</article>"])


def _prose(text: str) -> str:
    """Return a text in which what stands between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _row(name: str, value: str, part: float, kind: str) -> str:
    bar = f'<div class="{kind}" style="width: {100 * min(part, 1):.1f}%"></div>'
    return f"<tr><td>{name}</td><td>{value}</td><td>{bar}</td></tr>"


def _excerpt(file: str, line: int) -> str:
    source = linecache.getlines(file)
    first = max(line - _AROUND, 1)
    shown = []
    for n, text in enumerate(textwrap.dedent("".join(source[first - 1 : line + _AROUND])).splitlines(), first):
        hit = ' class="hit"' if n == line else ""
        shown.append(f"<span{hit}><i>{n}</i>{escape(text)}</span>")
    return "<pre>" + "".join(shown) + "</pre>" if shown else ""
