"""Blocks of a page that a program writes, between a mark and the next end."""

END = "<!-- end -->"


def filled(page: str, begin: str, text: str) -> str:
    """Return the page with `text` between the mark `begin` and the next end."""
    before, mark, rest = page.partition(begin)
    if not mark:
        raise ValueError(f"the page has no mark {begin}")
    return f"{before}{begin}\n\n{text}\n\n{END}{rest.partition(END)[2]}"
