"""A page can show a section of the README, which is then written once: `<!-- README: Sharp bits -->`."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"

#: Where the sections are that the README links to.
_PAGES = {
    "on-a-gpu": "devices.md#on-a-gpu",
    "the-index-rule": "sharp-bits.md#the-index-rule",
    "slices-and-kernels": "linear.md#slices-and-kernels",
}


def section(title: str) -> str:
    """What the README says under a heading of the second level.

    Raises:
        KeyError: it has no such heading.
    """
    sections = re.split(r"^## (.+)\n", README.read_text(), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))[title].strip()


def _link(match: re.Match[str]) -> str:
    text, target = match.groups()
    if target.startswith("https://"):
        return match.group()
    # A file of the repository, which is not a part of the site, is named and not linked to.
    return f"[{text}]({_PAGES[target[1:]]})" if target.startswith("#") else f"{text} (`{target}`)"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the sections where pages ask for them; MkDocs calls this for every page."""

    def shown(match: re.Match[str]) -> str:
        return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", _link, section(match.group(1)))

    return re.sub(r"^<!-- README: (.+) -->$", shown, markdown, flags=re.MULTILINE)
