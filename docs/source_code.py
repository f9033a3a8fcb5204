"""Pages show code of the repository. `python docs/source_code.py` copies it there, and a test says if it is old.

A page asks for code by a comment, such as `<!-- code: csrc/rows.h -->`. After a comma comes the part that is shown: the
title of a section, which is a comment such as `# --- lowering ---`; the begin of the first line of a function or a
table; or the begins of a first and a last line, `FIRST ... LAST`. Pages of the API get a table of names, for readers
without the site. MkDocs calls `on_page_markdown`: a link to a file outside of this folder becomes the name of the file,
and `<!-- include: CHANGELOG.md -->` becomes the file.
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
TEMPLATE = ROOT / "jax_tensorarray" / "template" / "project"

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


def with_names(markdown: str) -> str:
    """Return a page of the API with a table of the names in each section, for readers who do not build the site."""

    def section(text: str) -> str:
        names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
        title, rest = text.split("\n", 1)
        if not names:
            return text
        rows = [
            f"| `{name.removeprefix('jax_tensorarray.')}` | {_summary(name)} | *{stability(name)}* |\n"
            for name in names
        ]
        rest = re.sub(r"^\|.*\n", "", rest, flags=re.MULTILINE).strip("\n")
        return f"{title}\n\n| name | | |\n|---|---|---|\n{''.join(rows)}\n{rest}\n\n"

    return "".join(map(section, re.split(r"^(?=## )", markdown, flags=re.MULTILINE))).rstrip("\n") + "\n"


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
        return f"`{file}`" if text == file or text == target.name else f"{match.group(1)} (`{file}`)"

    return LINK.sub(named, markdown)


def with_files(markdown: str, page: Path) -> str:
    """Return a page with the files that it includes. Their links are relative to the root of the repository."""

    def included(match: re.Match[str]) -> str:
        text = (ROOT / match.group(1)).read_text()
        return re.sub(r"\]\((?!\w+:|#)([^)#]+)", lambda link: f"]({os.path.relpath(ROOT / link[1], page.parent)}", text)

    return _INCLUDE.sub(included, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Include files, and make names of links to files that are not a part of the site. MkDocs calls this."""
    file = DOCS / page.file.src_uri
    return without_files(with_files(markdown, file), file)


if __name__ == "__main__":
    for file in sorted(DOCS.rglob("*.md")):
        file.write_text(with_code(file.read_text()))
    for file in REFERENCE:
        file.write_text(with_names(file.read_text()))
