"""Draw the memory that gradients of loops take against the number of steps: `python docs/draw_memory.py FILE.svg`.

The programs are in `docs/loops.md`. They are compiled, not run.
"""

import re
import sys
from pathlib import Path
from typing import Any

from drawing import draw

from jax_tensorarray.residuals import Checkpoint

PAGE = Path(__file__).parent / "loops.md"
SIZES = (64, 256, 1024, 4096)
PANELS = {
    "layers": ("four layers of 64 a step", ("tape", "recompute", Checkpoint(10))),
    "attention": ("a step attends to all rows", ("tape", "undo")),
}


def programs() -> dict[str, Any]:
    """Return what the snippets of the page define."""
    names: dict[str, Any] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(snippet, names)
    return names


if __name__ == "__main__":
    defined = programs()
    found = {
        title: {str(mode): [defined[name](T, residuals=mode) / 2**20 for T in SIZES] for mode in modes}
        for name, (title, modes) in PANELS.items()
    }
    draw(sys.argv[1], found, SIZES, x="T, steps of the loop", y="temporary memory, MiB")
