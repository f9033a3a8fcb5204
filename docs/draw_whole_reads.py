"""Draw the memory of gradients of loops that read all they have written: `python docs/draw_whole_reads.py FILE.svg`.

The programs are in `benchmarks/whole_reads.py`. They are compiled, not run.
"""

import sys
from pathlib import Path

import jax
from drawing import draw

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


def gradients(name: str) -> dict[str, list[float]]:
    """Return what the gradient of a program needs at each size, in plain JAX and under `in_place`."""
    programs = [PROGRAMS[name](T) for T in SIZES]
    return {
        label: [megabytes(jax.grad(transform(f), tuple(range(len(args)))), args) for f, args in programs]
        for label, transform in {"plain JAX": lambda f: f, "in_place": in_place}.items()
    }


if __name__ == "__main__":
    found = {title: gradients(name) for name, title in SHOWN.items()}
    draw(sys.argv[1], found, SIZES, x="T, steps of the loop", y="megabytes of the gradient")
