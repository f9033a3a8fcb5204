"""The snippets of a Markdown file: read, run where their lines are in the file, and compared with what they print."""

import contextlib
import doctest
import io
import re
from pathlib import Path
from typing import NamedTuple


class Snippet(NamedTuple):
    """A fenced block of code, and the block of text that follows it at once: what it prints."""

    file: Path
    line: int
    code: str
    output: str | None

    def run(self, names=None):
        """Execute it; what it defines is added to `names` and returned. Errors and lines are those of the file."""
        names = {} if names is None else names
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * self.line + self.code, str(self.file), "exec"), names)
        if self.output is not None:
            assert doctest.OutputChecker().check_output(self.output, printed.getvalue(), doctest.ELLIPSIS), (
                f"{self.file}:{self.line} printed\n{printed.getvalue()}\ninstead of\n{self.output}"
            )
        return names


def snippets(file, fence):
    """All blocks that begin with ```fence."""
    text = file.read_text()
    block = re.compile(rf"^```{fence}\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
    return [
        Snippet(file, text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2))
        for match in block.finditer(text)
    ]
