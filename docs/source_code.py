"""A page can show code of the repository, `python docs/source_code.py` puts it there, and a test says if it is old.

A page asks by a comment, such as `<!-- code: csrc/rows.h -->`. After a comma comes the part that is shown: the title of
a section, which is a comment such as `# --- lowering ---`, or how the first line of a function or a table begins. Links
to files of the repository, which are not a part of the site, become their names there. The reference gets a table of
names, for readers without the site.
"""

import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "jax_tensorarray" / "template" / "project"

_LANGUAGES = {"py": "python", "h": "cpp", "cc": "cpp", "cu": "cpp", "txt": "cmake", "toml": "toml", "yml": "yaml"}

_END = "<!-- end of code -->"

#: What a page asks for, a file and maybe a part of it, and what it shows.
ASKED = re.compile(rf"^<!-- code: ([^,\s]+)(?:, ([^\n]+))? -->$(?:\n```.*?^```\n{_END}$)?", re.MULTILINE | re.DOTALL)

DOCS = Path(__file__).parent

_HEADING = re.compile(r"^(?:#|//) --- (.+?) -+\n", re.MULTILINE)


def part(code: str, title: str) -> str:
    """Return the section with that title, or else the code from there to where something else begins.

    Raises:
        KeyError: there is neither.
    """
    sections = _HEADING.split(code)
    titled = dict(zip(sections[1::2], sections[2::2], strict=True))
    if title in titled:
        return titled[title].strip("\n")
    block = re.search(rf"^{re.escape(title)}.*?(?=\n\n+\S|\Z)", code, re.MULTILINE | re.DOTALL)
    if block is None:
        raise KeyError(title)
    return block.group().strip("\n")


def with_code(markdown: str) -> str:
    """Return a page with the code that it asks for, in place of what it shows now."""

    def shown(match: re.Match[str]) -> str:
        file, title = ROOT / match.group(1), match.group(2)
        code = file.read_text().strip("\n") if title is None else part(file.read_text(), title)
        name = file.relative_to(TEMPLATE if TEMPLATE in file.parents else ROOT)
        asked = match.group().split("\n", 1)[0]
        return f'{asked}\n```{_LANGUAGES[file.suffix[1:]]} title="{name}"\n{code}\n```\n{_END}'

    return ASKED.sub(shown, markdown)


def with_names(markdown: str) -> str:
    """Return the reference with a table of the names in each section, for readers who do not build the site."""

    def section(text: str) -> str:
        names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
        title, rest = text.split("\n", 1)
        if not names:
            return text
        rows = [f"| `{name.removeprefix('jax_tensorarray.')}` | {_summary(name)} |\n" for name in names]
        rest = re.sub(r"^\|.*\n", "", rest, flags=re.MULTILINE).strip("\n")
        return f"{title}\n\n| name | what it is |\n|---|---|\n{''.join(rows)}\n{rest}\n\n"

    return "".join(map(section, re.split(r"^(?=## )", markdown, flags=re.MULTILINE))).rstrip("\n") + "\n"


def _summary(name: str) -> str:
    lines = (inspect.getdoc(pkgutil.resolve_name(name)) or "").partition("\n\n")[0].split("\n")
    return " ".join(lines).replace("|", "\\|")


def links_outside(page: str) -> re.Pattern[str]:
    """Return what a link to a file outside of the documentation looks like on a page, whose path is in `docs/`."""
    up = "../" * (page.count("/") + 1)
    return re.compile(rf"\[`?([^\]`]+)`?\]\({re.escape(up)}([^)#]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside of the documentation by their names; MkDocs calls this for every page."""
    return links_outside(page.file.src_uri).sub(r"`\1`", markdown)


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(with_code(page.read_text()))
    reference = DOCS / "api.md"
    reference.write_text(with_names(reference.read_text()))
