"""Draw the memory of gradients of loops that read all they have written: `python docs/draw_whole_reads.py FILE.svg`.

The programs are in `benchmarks/whole_reads.py`. They are compiled, not run.
"""

import sys
from pathlib import Path

import jax
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.whole_reads import PROGRAMS
from jax_tensorarray import in_place

SIZES = (128, 256, 512, 1024, 2048)
SHOWN = {
    "arnoldi": "Arnoldi, rows of 64",
    "attention": "attention over a cache",
    "gaussian_process": "Gaussian process",
}


def megabytes(f, args) -> float:
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 1e6


def draw(file: str) -> None:
    """Draw one panel for each program: plain JAX and under `in_place`."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(SHOWN), sharey=True), SHOWN.items(), strict=True):
        programs = [PROGRAMS[name](T) for T in SIZES]
        for label, transform in {"plain JAX": lambda f: f, "in_place": in_place}.items():
            found = [megabytes(jax.grad(transform(f), tuple(range(len(args)))), args) for f, args in programs]
            axes.loglog(SIZES, found, "o-", label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xticks(SIZES, [str(T) for T in SIZES])
        axes.minorticks_off()
        axes.set_xlabel("steps T", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("megabytes of the gradient", fontsize=9)
    figure.axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(sys.argv[1])
