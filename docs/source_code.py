"""Pages show code of the repository. `python docs/source_code.py` copies it there, and a test says if it is old.

A page asks for code by a comment, such as `<!-- code: csrc/rows.h -->`. After a comma comes the part that is shown: the
title of a section, which is a comment such as `# --- lowering ---`; the begin of the first line of a function or a
table; or the begins of a first and a last line, `FIRST ... LAST`. Pages of the API have tables of names, which get the
first sentence of each docstring. MkDocs calls `on_page_markdown`: below a table of names the whole docstrings appear, a
link to a file outside of this folder becomes the name of the file, and `<!-- include: CHANGELOG.md -->` becomes the
file.
"""

import inspect
import os
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TEMPLATE = ROOT / "template"

_LANGUAGES = {"py": "python", "h": "cpp", "cc": "cpp", "cu": "cpp", "txt": "cmake", "toml": "toml", "yml": "yaml"}

_END = "<!-- end of code -->"

#: What a page asks for, a file and maybe a part of it, and what it shows.
ASKED = re.compile(rf"^<!-- code: ([^,\s]+)(?:, ([^\n]+))? -->$(?:\n```.*?^```\n{_END}$)?", re.MULTILINE | re.DOTALL)

#: A link to a file, by a path that goes up.
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")

_INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)

#: The pages of the API.
REFERENCE = [DOCS / "reference" / f"{name}.md" for name in ("in_place", "loops", "row_ops", "tensorflow", "doctor")]

#: Names that may change in a minor release. All others in the reference are stable.
EXPERIMENTAL = {
    *("in_place_package", "growing", "Inverse", "register", "disabled_checks"),
    *("passes", "growth", "Growth", "forbid_growth", "GrowthError", "ArgumentCopy", "Kept"),
}

#: Classes whose public methods are those of a base, with the option that shows them.
INHERITING = {"jax_tensorarray.doctor.Report": "    options:\n      inherited_members: true\n"}

#: A public name, the first sentence of its docstring, and whether the name is stable.
_ROW = re.compile(r"^\| `([\w.]+)` \|.*\| \*(?:stable|experimental)\* \|$", re.MULTILINE)

_TABLE = re.compile(rf"(?:{_ROW.pattern}\n)+", re.MULTILINE)

_HEADING = re.compile(r"^(?:#|//) --- (.+?) -+\n", re.MULTILINE)


def part(code: str, title: str) -> str:
    """Return the section with that title, or else the code from there to where something else begins.

    A title `FIRST ... LAST` means the lines from the one that begins with FIRST to the next that begins with LAST.

    Raises:
        KeyError: there is neither.
    """
    if " ... " in title:
        return _lines(code.split("\n"), *title.split(" ... "))
    sections = _HEADING.split(code)
    titled = dict(zip(sections[1::2], sections[2::2], strict=True))
    if title in titled:
        return titled[title].strip("\n")
    block = re.search(rf"^{re.escape(title)}.*?(?=\n\n+\S|\Z)", code, re.MULTILINE | re.DOTALL)
    if block is None:
        raise KeyError(title)
    return block.group().strip("\n")


def _lines(lines: list[str], first: str, last: str) -> str:
    begins = [k for k, line in enumerate(lines) if line.strip().startswith(first)]
    ends = [k for k, line in enumerate(lines) if begins and k >= begins[0] and line.strip().startswith(last)]
    if not ends:
        raise KeyError(f"{first} ... {last}")
    return textwrap.dedent("\n".join(lines[begins[0] : ends[0] + 1]))


def with_code(markdown: str) -> str:
    """Return a page with the code that it asks for, instead of the code that it shows now."""

    def shown(match: re.Match[str]) -> str:
        file, title = ROOT / match.group(1), match.group(2)
        code = file.read_text().strip("\n") if title is None else part(file.read_text(), title)
        name = file.relative_to(TEMPLATE if TEMPLATE in file.parents else ROOT)
        asked = match.group().split("\n", 1)[0]
        return f'{asked}\n```{_LANGUAGES[file.suffix[1:]]} title="{name}"\n{code}\n```\n{_END}'

    return ASKED.sub(shown, markdown)


def names(markdown: str) -> list[str]:
    """Return the public names in the tables of a page of the API."""
    return [f"jax_tensorarray.{name}" for name in _ROW.findall(markdown)]


def with_names(markdown: str) -> str:
    """Return a page of the API with the first sentences of the docstrings in its tables of names."""

    def row(match: re.Match[str]) -> str:
        name = f"jax_tensorarray.{match.group(1)}"
        return f"| `{match.group(1)}` | {_summary(name)} | *{stability(name)}* |"

    return _ROW.sub(row, markdown)


def with_docstrings(markdown: str) -> str:
    """Return a page that asks mkdocstrings, below each table of names, for the docstrings of these names."""

    def asked(match: re.Match[str]) -> str:
        asks = (f"::: {name}\n{INHERITING.get(name, '')}" for name in names(match.group()))
        return f"{match.group()}\n{''.join(asks)}"

    return _TABLE.sub(asked, markdown)


def stability(name: str) -> str:
    """Return whether a public name is stable or experimental."""
    return "experimental" if name.rpartition(".")[2] in EXPERIMENTAL else "stable"


def _summary(name: str) -> str:
    lines = (inspect.getdoc(pkgutil.resolve_name(name)) or "").partition("\n\n")[0].split("\n")
    return " ".join(lines).replace("|", "\\|")


def files_named(markdown: str, page: Path) -> list[Path]:
    """Return the files outside of this folder that a page links."""
    targets = [(page.parent / match.group(2)).resolve() for match in LINK.finditer(markdown)]
    return [target for target in targets if not target.is_relative_to(DOCS)]


def without_files(markdown: str, page: Path) -> str:
    """Return a page in which links to files outside of this folder are the names of these files."""

    def named(match: re.Match[str]) -> str:
        target = (page.parent / match.group(2)).resolve()
        if target.is_relative_to(DOCS):
            return match.group()
        file, text = str(target.relative_to(ROOT)), match.group(1).strip("`")
        if file in text.split():  # the file, or a command that runs it
            return f"`{text}`"
        return f"`{file}`" if text == target.name else f"{match.group(1)} (`{file}`)"

    return LINK.sub(named, markdown)


def with_files(markdown: str, page: Path) -> str:
    """Return a page with the files that it includes. Their links are relative to the root of the repository."""

    def included(match: re.Match[str]) -> str:
        text = (ROOT / match.group(1)).read_text()
        return re.sub(r"\]\((?!\w+:|#)([^)#]+)", lambda link: f"]({os.path.relpath(ROOT / link[1], page.parent)}", text)

    return _INCLUDE.sub(included, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Include files and docstrings, and make names of links to files that are not a part of the site."""
    file = DOCS / page.file.src_uri
    if file in REFERENCE:
        markdown = with_docstrings(markdown)
    return without_files(with_files(markdown, file), file)


if __name__ == "__main__":
    for file in sorted(DOCS.rglob("*.md")):
        file.write_text(with_code(file.read_text()))
    for file in REFERENCE:
        file.write_text(with_names(file.read_text()))
