"""A page can show code of the repository, which is then written once: `<!-- code: csrc/rows.h -->`.

After a comma comes the part that is shown: the title of a section, which is a comment such as `# --- lowering ---`, or
how the first line of a function or a table begins. Links to files of the repository, which are not a part of the site,
become their names.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEMPLATE = ROOT / "jax_tensorarray" / "template" / "project"

_LANGUAGES = {"py": "python", "h": "cpp", "cc": "cpp", "cu": "cpp", "txt": "cmake", "toml": "toml", "yml": "yaml"}

#: What a page asks for: a file, and maybe a part of it.
ASKED = re.compile(r"^<!-- code: ([^,\s]+)(?:, (.+))? -->$", re.MULTILINE)

#: A link to a file outside of this folder.
LINK = re.compile(r"\[`?([^\]`]+)`?\]\(\.\./([^)#]+)\)")

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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the code where pages ask for it; MkDocs calls this for every page."""

    def shown(match: re.Match[str]) -> str:
        file, title = ROOT / match.group(1), match.group(2)
        code = file.read_text().strip("\n") if title is None else part(file.read_text(), title)
        name = file.relative_to(TEMPLATE if TEMPLATE in file.parents else ROOT)
        return f'```{_LANGUAGES[file.suffix[1:]]} title="{name}"\n{code}\n```'

    return LINK.sub(r"`\1`", ASKED.sub(shown, markdown))
