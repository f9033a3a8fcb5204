"""Draw the pictures of the pages of examples: `python docs/draw_examples.py [NAME...]`.

Most are drawn from the output that the page shows. The others take seconds to compute.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import rcParams
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
PAGES = DOCS / "examples"


def rows(page: str, pattern: str) -> np.ndarray:
    """Return the numbers of all lines of a page that match a pattern, one row each."""
    found = re.findall(pattern, (PAGES / f"{page}.md").read_text(), re.MULTILINE)
    return np.array([[float(x) for x in (row if isinstance(row, tuple) else (row,))] for row in found])


def new(height: float = 2.6, panels: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, height), layout="constrained")
    axes = figure.subplots(1, panels)
    for one in np.atleast_1d(axes):
        one.tick_params(labelsize=8)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def lines(page: str, pattern: str, labels: list[str], x: str, y: str, log: bool = True) -> Figure:
    """Draw the columns of the numbers on a page against the first column."""
    figure, axes = new()
    data = rows(page, pattern)
    for column, label in enumerate(labels, start=1):
        (axes.loglog if log else axes.plot)(data[:, 0], data[:, column], "o-", label=label)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if log:
        axes.set_xticks(data[:, 0], [f"{size:.0f}" for size in data[:, 0]])
        axes.minorticks_off()
    axes.grid(True, color="0.9")
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=9)
    return figure


def script(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, DOCS.parent / "examples" / f"{name}.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def snippets(page: str) -> dict[str, Any]:
    """Return the names that the snippets of a page define."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE):
        exec(code, names)
        if "train_step(" in code:
            break
    return names


def flax_training() -> Figure:
    pattern = r"^ +(\d+) +(\d+\.\d) +(\d+\.\d) +\d+\.\d$"
    return lines("flax_training", pattern, ["plain JAX", "in_place"], "lines of a program", "ms per training step")


def tree_search() -> Figure:
    pattern = r"^ +(\d+) +(\d+\.\d) +(\d+\.\d) +\d+\.\d$"
    return lines("tree_search", pattern, ["plain JAX", "in_place"], "simulations", "µs per simulation")


def replay_buffer() -> Figure:
    pattern = r"^ +(\d+) +(\d+) +(\d+)$"
    return lines("replay_buffer", pattern, ["donated", "not donated"], "room for transitions", "µs per transition")


def beam_search() -> Figure:
    pattern = r"^update +(\d+): (\d+\.\d+) letters"
    return lines("beam_search", pattern, [""], "update", "wrong letters in a word", log=False)


def data_parallel() -> Figure:
    data = rows("data_parallel", r"^  update +(\d+): loss (\d+\.\d+)$")
    figure, axes = new()
    half = len(data) // 2
    for part, label, style in ((data[:half], "divided by examples", "o-"), (data[half:], "by features", "x--")):
        axes.semilogy(part[:, 0], part[:, 1], style, label=label)
    axes.set_xlabel("update", fontsize=9)
    axes.set_ylabel("loss", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    return figure


def rnnt() -> Figure:
    """Draw the path of the first recording on the page: right for a frame, up for a letter."""
    text = (PAGES / "rnnt.md").read_text()
    found = re.search(r"^(\w+) +(\w+) +((?:\d+ )+) +(\d+) +(\d+) ", text, re.MULTILINE)
    assert found
    letters, frames, length = found[2], list(map(int, found[3].split())), int(found[4])
    figure, axes = new()
    xs, ys = [0], [0]
    for t in range(length):
        for _ in range(frames.count(t)):
            xs.append(t)
            ys.append(ys[-1] + 1)
        xs.append(t + 1)
        ys.append(ys[-1])
    axes.plot(xs, ys, "-")
    axes.plot(frames, range(1, len(frames) + 1), "o")
    axes.set_xlabel("frame", fontsize=9)
    axes.set_yticks(range(1, len(letters) + 1), list(letters))
    return figure


def squares(axes: Any, values: np.ndarray) -> None:
    """Draw a matrix as squares whose areas are its elements."""
    i, j = np.nonzero(values > 0.05)
    axes.scatter(j, i, s=60 * values[i, j], marker="s", color="#2b8a3e")
    axes.set_xlim(-0.5, values.shape[1] - 0.5)
    axes.set_ylim(values.shape[0] - 0.5, -0.5)


def soft_alignment() -> Figure:
    module = script("soft_alignment")
    words, other = "saturday", "sunday"
    replace = jnp.array([[float(a != b) for b in other] for a in words])
    figure, panels = new(panels=3)
    for axes, temperature in zip(panels, (1.0, 0.4, 0.1), strict=True):

        def distance(costs: Any, temperature: float = temperature) -> Any:
            return module.soft_edit_distance(costs, temperature, len(words), len(other))

        aligned = np.asarray(jax.grad(distance)(replace))
        squares(axes, aligned)
        axes.set_xticks(range(len(other)), list(other))
        axes.set_yticks(range(len(words)), list(words))
        axes.set_title(f"temperature {temperature}", fontsize=9)
    return figure


def ode() -> Figure:
    jax.config.update("jax_enable_x64", True)
    module = script("ode")
    times = np.linspace(module.YEARS[0], module.YEARS[-1], 200)
    computed = np.asarray(module.populations(jnp.log(jnp.asarray(module.PUBLISHED)), jnp.asarray(times))[0])
    figure, axes = new()
    for k, (name, color) in enumerate((("hares", "#1f77b4"), ("lynxes", "#d9480f"))):
        axes.plot(times, computed[:, k], "-", color=color, label=name)
        axes.plot(module.YEARS, np.asarray(module.PELTS)[:, k], "o", color=color)
    axes.set_xticks(range(1900, 1921, 5))
    axes.set_ylabel("thousands of pelts", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    return figure


def attention_decoder() -> Figure:
    names = snippets("attention_decoder")
    figure, axes = new(3.2)
    squares(axes, np.asarray(names["looked"])[1:-1])
    letters = [chr(ord("a") + int(k)) for k in names["text"]]
    axes.set_xticks(range(len(letters)), letters)
    axes.set_yticks(range(len(letters) - 2), letters[1:-1])
    axes.set_xlabel("row", fontsize=9)
    axes.set_ylabel("letter that is read", fontsize=9)
    return figure


def training_loop() -> Figure:
    import time

    from jax_tensorarray import in_place

    names = snippets("training_loop")
    params = names["state"][0]
    figure, axes = new()
    sizes = (250, 500, 1000, 2000)
    for label, transform in (("plain JAX", lambda f: f), ("in_place", in_place)):
        seconds = []
        for size in sizes:
            batch = names["make_batch"](jax.random.key(0), length=size)
            f = jax.jit(transform(jax.grad(names["loss"])))
            jax.block_until_ready(f(params, *batch))
            samples = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(f(params, *batch))
                samples.append(time.perf_counter() - start)
            seconds.append(1e3 * min(samples))
        axes.loglog(sizes, seconds, "o-", label=label)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.minorticks_off()
    axes.set_xlabel("length of a sequence", fontsize=9)
    axes.set_ylabel("ms per gradient", fontsize=9)
    axes.grid(True, color="0.9")
    axes.legend(frameon=False, fontsize=9)
    return figure


DRAWN = [
    *(flax_training, tree_search, replay_buffer, beam_search, data_parallel, rnnt, soft_alignment),
    *(training_loop, attention_decoder, ode),
]

if __name__ == "__main__":
    rcParams["svg.fonttype"], rcParams["svg.hashsalt"] = "none", "jax_tensorarray"
    for draw in DRAWN:
        if not sys.argv[1:] or draw.__name__ in sys.argv[1:]:
            draw().savefig(PAGES / f"{draw.__name__}.svg", metadata={"Date": None})
            print(draw.__name__)
