"""Show the examples of docstrings as code, and put *stable* or *experimental* beside each name of the reference."""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from source_code import stability

# A prompt, and all up to the next empty line: its continuations and its output. To Markdown `>>>` is a quotation of a
# quotation of a quotation.
_EXAMPLE = re.compile(r"^>>> .*\n?(?:.+\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put fences around them, before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the fences into one docstring. Griffe calls this for every object that it has found."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m.group().rstrip()}\n```\n", obj.docstring.value)
        if obj.parent is not None and obj.parent.is_module and not obj.is_module:
            obj.labels.add(stability(obj.name))
