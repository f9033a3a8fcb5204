"""What the drawings of `draw_memory.py` and `draw_whole_reads.py` share."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

#: By the title of a panel and the label of a line in it, what was found for each size.
Found = Mapping[str, Mapping[str, Sequence[float]]]


def draw(file: str, found: Found, sizes: Sequence[int], *, x: str, y: str) -> None:
    """Draw panels side by side, with logarithmic axes. They share the second."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        for label, values in lines.items():
            axes.loglog(sizes, values, "o-", label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xticks(sizes, list(map(str, sizes)))
        axes.minorticks_off()
        axes.set_xlabel(x)
        axes.tick_params(labelsize=8)
        axes.grid(True, color="0.9")
        axes.legend(frameon=False, fontsize=9)
    figure.get_axes()[0].set_ylabel(y)
    figure.savefig(file, metadata={"Date": None})
