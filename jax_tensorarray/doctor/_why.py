"""The sections of the page of messages, for `--why TAG`: a terminal cannot open a page."""

import difflib
import re
from pathlib import Path

#: The page in a checkout. The build of a wheel installs it beside this file, see CMakeLists.txt.
_IN_CHECKOUT = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
_INSTALLED = Path(__file__).with_name("messages.md")

#: The heading of a section.
_HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)


def sections() -> dict[str, str]:
    """Return the text of each section, by its tag.

    Raises:
      FileNotFoundError: the page is missing, as in a wheel that was built without it.
    """
    page = next((page for page in (_IN_CHECKOUT, _INSTALLED) if page.is_file()), None)
    if page is None:
        raise FileNotFoundError(f"{_INSTALLED} is missing")
    parts = _HEADING.split(re.sub(r"^## .*\n(?:(?!^#).*\n)*", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    return {tag: text.strip() for tag, text in zip(parts[1::2], parts[2::2], strict=True)}


def why(tag: str) -> str:
    """Return the section of a tag, which may stand in brackets as in reports.

    Raises:
      LookupError: there is no such tag. The message lists those that exist, the nearest first.
    """
    known = sections()
    name = tag.strip("[]` ")
    if name in known:
        return f"{name}\n\n{_plain(known[name])}"
    near = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
    raise LookupError(f"there is no tag {name!r}. The tags, the nearest first: {', '.join(near)}")


def _plain(text: str) -> str:
    """Return Markdown as a terminal shows it: without the fences of code and the targets of links."""
    lines, is_code = [], False
    for line in re.sub(r"\[([^\]\n]*(?:\n[^\]\n]*)?)\]\([^)\s]*\)", r"\1", text).split("\n"):
        if line.startswith("```"):
            is_code = not is_code
        else:
            lines.append(f"    {line}".rstrip() if is_code else line)
    return "\n".join(lines)
