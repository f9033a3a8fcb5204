"""Show the examples of docstrings as code: to Markdown `>>>` is a quotation of a quotation of a quotation."""

import re
from typing import Any

import griffe

# A prompt, and all up to the next empty line: its continuations and what it prints.
_EXAMPLE = re.compile(r"^>>> .*\n?(?:.+\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put fences around them, before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the fences into one docstring. Griffe calls this for every object that it has found."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m.group().rstrip()}\n```\n", obj.docstring.value)
