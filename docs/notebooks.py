"""Write the pages that are notebooks too as `.ipynb`, without Jupyter: `python docs/notebooks.py`.

A fenced block of Python becomes a cell of code, and the text between becomes Markdown. A block of output is the output
of the cell before. The page is the source, and a test runs the cells of the notebook.
"""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOKS = [DOCS / "examples" / name for name in ("training_loop.ipynb", "attention_decoder.ipynb")]

_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def notebook(markdown: str) -> str:
    """Return a page as the text of a notebook."""
    cells: list[dict[str, Any]] = []
    parts = _BLOCK.split(markdown)
    for text, code, output in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
        if text.strip():
            cells.append(_cell("markdown", len(cells), text.strip()))
        if code is not None:
            outputs = [{"output_type": "stream", "name": "stdout", "text": _lines(output)}] if output else []
            cells.append(_cell("code", len(cells), code.strip(), execution_count=None, outputs=outputs))
    made = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, number: int, source: str, **more: Any) -> dict[str, Any]:
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": _lines(source), **more}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for file in NOTEBOOKS:
        file.write_text(notebook(file.with_suffix(".md").read_text()))
