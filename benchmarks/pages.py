"""What a page of the documentation has between two marks."""

END = "<!-- end -->"


def filled(page: str, begin: str, text: str) -> str:
    """The page with a text between the mark `begin` and the next end."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{END}{rest.partition(END)[2]}"
