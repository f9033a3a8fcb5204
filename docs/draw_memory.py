"""Draw the memory that gradients of loops take against the number of steps: `python docs/draw_memory.py FILE.svg`.

The programs are in `docs/loops.md`. They are compiled, not run.
"""

import re
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jax_tensorarray import Checkpoint

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


def draw(file: str) -> None:
    """Draw one panel for each program, with one line for each mode."""
    found = programs()
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for axes, (name, (title, modes)) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        for mode in modes:
            mebibytes = [found[name](T, residuals=mode) / 2**20 for T in SIZES]
            axes.loglog(SIZES, mebibytes, "o-", label=str(mode))
        axes.set_title(title, fontsize=10)
        axes.set_xticks(SIZES, [str(T) for T in SIZES])
        axes.minorticks_off()
        axes.set_xlabel("T, steps of the loop")
        axes.grid(True, color="0.9")
        axes.legend(frameon=False, fontsize=9)
    figure.get_axes()[0].set_ylabel("temporary memory, MiB")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(sys.argv[1])
