"""The doctor's report as one page of HTML, with excerpts of the source and bars."""

import linecache
from collections.abc import Iterable, Sequence
from html import escape

from jax_tensorarray import _compat
from jax_tensorarray.inspect import _arguments
from jax_tensorarray.inspect._advice import OF_GROWTH, OF_JAXLIB
from jax_tensorarray.inspect._copies import LoopCopy, advice_of
from jax_tensorarray.inspect._kept import LISTED, in_all
from jax_tensorarray.inspect._text import milliseconds, readable
from jax_tensorarray.inspect._watch import (
    Case,
    Report,
    alike,
    cost,
    headline,
    how_it_grows,
    is_kept_listed,
    name_of_file,
    summary,
    what_and_how_often,
    what_it_needs,
    worth_listing,
)

#: Lines of source that are shown above and below one that copies.
_AROUND = 4

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d9dee3, #3a4148); --soft: light-dark(#f5f7f9, #1c2126);
  --bar: #d9480f; --cured: #2b8a3e; --hit: light-dark(#ffe8cc, #5c3210) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin: 0 }
section { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0 }
article { border-top: 1px solid var(--line); margin-top: 1rem; padding-top: 1rem }
code, pre { font: 0.85rem/1.45 ui-monospace, monospace }
pre { background: var(--soft); border-radius: 6px; padding: 0.5rem 0; margin: 0.5rem 0; overflow-x: auto }
pre span { display: block; padding: 0 0.75rem; width: fit-content; min-width: 100%; box-sizing: border-box }
pre .hit { background: var(--hit) }
pre i { display: inline-block; width: 3.5em; opacity: 0.55; font-style: normal; user-select: none }
h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
table { border-spacing: 0; width: 100% } td { padding: 0.15rem 0.75rem 0.15rem 0; white-space: nowrap }
td:last-child { width: 100%; padding-right: 0 }
.bar { height: 0.9rem; min-width: 2px; border-radius: 3px; background: var(--bar) }
.cured { background: var(--cured) }
p { margin: 0.5rem 0; overflow-wrap: anywhere }
"""


def html(report: Report, title: str) -> str:
    """Return the page: self-contained, without scripts."""
    text = f"{report.programs} programs were compiled, with {report.loops} loops"
    text = summary(report, text) if report.cases else f"{text}."
    listed = worth_listing(report)
    worst = max((sum(map(cost, group)) for _, copies in listed for group in alike(copies)), default=0)
    body = [_case(number, case, copies, worst) for number, (case, copies) in enumerate(listed, 1)]
    if not report.cases:
        body = ["<p>No loop copies a buffer.</p>" if report.loops else "<p>There are no loops.</p>"]
    elif any(case.trial is not None for case in report.cases):
        body.append("<p>To keep what was tried, write <code>jax.jit(jax_tensorarray.in_place(f))</code>.</p>")
    if report.loops and _compat.small_loops_are_quadratic():
        body.append(f"<p>{escape(OF_JAXLIB)}</p>")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}: loops that copy</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(text)}</p>",
            *body,
            "</body></html>\n",
        ]
    )


def _case(number: int, case: Case, copies: Sequence[LoopCopy], worst: int) -> str:
    parts = [f"<section><h2>{number}. {escape(case.program)}: {escape(headline(case, copies))}</h2>"]
    if case.trial is not None:
        parts.append(f"<p>{escape(f'{case.trial.how}: {case.trial}')}.</p>")
        if case.trial.growth:
            parts.append(f"<p>{escape(how_it_grows(case.trial))}.</p>")
        if case.trial.before and case.trial.after:
            longest = max(case.trial.before, case.trial.after)
            rows = [("as it is", case.trial.before, "bar"), ("in_place", case.trial.after, "bar cured")]
            bars = (_row(name, milliseconds(took), took / longest, kind) for name, took, kind in rows)
            parts.append(f"<table>{''.join(bars)}</table>")
    elif case.failed:
        parts.append(f"<p><code>in_place</code> could not be tried: {escape(case.failed)}</p>")
    groups = alike(copies)
    for where in dict.fromkeys((group[0].file, group[0].line) for group in groups):
        parts.append(_place(*where, [group for group in groups if (group[0].file, group[0].line) == where], worst))
    for arguments in _arguments.alike(case.copies.arguments):
        parts.append(_line(arguments[0].file, arguments[0].line, _arguments.sentences(arguments)))
    if case.loop is not None:
        parts.append(_line(case.loop.file, case.loop.line, [OF_GROWTH]))
    if is_kept_listed(case, copies):
        kept = "".join(f"<li>{escape(k.at(k.file and name_of_file(k.file)))}</li>" for k in case.copies.kept[:LISTED])
        parts.append(f"<p>{escape(in_all(case.copies.kept))}</p><ul>{kept}</ul>")
        if case.trial is not None and case.trial.memory:
            parts.append(f"<p>{escape(what_it_needs(case.trial))}</p>")
    return "\n".join([*parts, "</section>"])


def _place(file: str | None, line: int | None, groups: Sequence[Sequence[LoopCopy]], worst: int) -> str:
    """Return the part of the page about one line of source."""
    parts = []
    for group in groups:
        moved = sum(map(cost, group))
        bar = _row("moved", readable(moved), moved / worst, "bar")
        parts.append(f"<p>{escape(what_and_how_often(group))}</p><table>{bar}</table>")
    return _line(file, line, dict.fromkeys(advice_of(group[0]) for group in groups), parts)


def _line(file: str | None, line: int | None, texts: Iterable[str], parts: Iterable[str] = ()) -> str:
    """Return a line of source, with what is said about it."""
    where = f"{name_of_file(file)}:{line}" if file else "a line that XLA does not tell"
    excerpt = [_excerpt(file, line)] if file and line else []
    said = (f"<p>{escape(text)}</p>" for text in texts)
    return "\n".join([f"<article><h3><code>{escape(where)}</code></h3>", *excerpt, *parts, *said, "</article>"])


def _row(name: str, value: str, part: float, kind: str) -> str:
    bar = f'<div class="{kind}" style="width: {100 * min(part, 1):.1f}%"></div>'
    return f"<tr><td>{name}</td><td>{value}</td><td>{bar}</td></tr>"


def _excerpt(file: str, line: int) -> str:
    source = linecache.getlines(file)
    first = max(line - _AROUND, 1)
    shown = []
    for n, text in enumerate(source[first - 1 : line + _AROUND], first):
        hit = ' class="hit"' if n == line else ""
        shown.append(f"<span{hit}><i>{n}</i>{escape(text.rstrip())}</span>")
    return "<pre>" + "".join(shown) + "</pre>" if shown else ""
