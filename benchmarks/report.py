"""Tables, plots and the README's figures, all from the JSON of a run."""

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, DERIVATIVES, OURS, RIVALS
from benchmarks.targets import TITLES, Key, Line, at_least, curves, exponent, targets

Report = dict[str, Any]
Result = dict[str, Any]


def number(value: float | None) -> str:
    """Three digits, or so."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of text, the first column flush left and the others flush right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, the first column flush left, of the rows that say something."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *(row for row in rows if any(row[2:]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- tables of a run -----------------------------------------------------------------------------------------------


def point_table(results: Sequence[Result]) -> Iterator[str]:
    """Draw the times of all rivals for one case, derivative and size of rows: microseconds per step against T."""
    first = results[0]
    sizes = sorted({r["T"] for r in results})
    found = curves(results)
    rows = [
        ["microseconds per step", *(f"T = {T}" for T in sizes), "exponent", "MiB", "temp MiB", "compile ms", "copies"]
    ]
    for rival, (_, name) in RIVALS.items():
        own = {r["T"]: r for r in results if r["rival"] == rival}
        if not own:
            continue
        curve = found.get(Key(first["case"], first["derivative"], first["row"], rival), {})
        cells = [number(1e6 * curve[T] / T) if T in curve else own[T]["note"] if T in own else "" for T in sizes]
        ran = [own[T] for T in sizes if T in curve]
        last = ran[-1] if ran else {}
        power = exponent(curve)
        memory = [last.get("resident_bytes"), last.get("temp_bytes")]
        compiled = next((seconds for r in ran if (seconds := compile_seconds(r)) is not None), None)
        rows.append(
            [
                name,
                *(cell if len(cell) < 30 else cell[:29] + "…" for cell in cells),
                "-" if power is None else f"{power:.2f}",
                *("-" if value is None else number(value / 2**20) for value in memory),
                "-" if compiled is None else f"{1e3 * compiled:.0f}",
                "-" if last.get("copies") is None else str(last["copies"]),
            ]
        )
    yield f"{first['case']}, {first['derivative']}, rows of {first['row']} ({CASES[first['case']].about})"
    yield from columns(rows)


def compile_seconds(result: Result) -> float | None:
    """The median where it was compiled more than once."""
    return statistics.median(result["compilations"]) if result.get("compilations") else result.get("compile_seconds")


def tables(report: Report) -> Iterator[str]:
    """Every point of a run. Memory is that at the largest T that a rival has run at."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for r in report["results"]:
        groups.setdefault((r["case"], r["derivative"], r["row"]), []).append(r)
    for results in groups.values():
        yield from point_table(results)
        yield ""


def target_tables(report: Report) -> Iterator[str]:
    """How many of the figures are where they should be, the worst, and all of them."""
    lines = targets(report)
    yield "Targets: measured, and reached or not"
    for target, title in TITLES.items():
        mine = [line for line in lines if line.target == target]
        reached = sum(line.reached is True for line in mine)
        yield ""
        yield f"{target}. {title}: {f'{reached} of {len(mine)} reached' if mine else 'not measured'}"
        if mine:
            yield from columns([["", "measured", "target", "reached", ""], *map(_target_row, mine)])


def _target_row(line: Line) -> list[str]:
    bound = f"{'<=' if line.at_most else '>='} {line.bound:g}"
    return [line.what, number(line.measured), bound, {True: "yes", False: "NO", None: "?"}[line.reached], line.remark]


def header(report: Report) -> Iterator[str]:
    """When, where, and with what."""
    yield f"{report['date']}{': ' + report['label'] if report['label'] else ''}"
    machine = report["machine"]
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['platform']}, load {machine['load before']}"
    for name, versions in report["versions"].items():
        yield f"{name}: " + ", ".join(f"{package} {version}" for package, version in versions.items())


# --- plots ---------------------------------------------------------------------------------------------------------

_STYLES = {
    "ours": ("tab:blue", "s-"),
    "ours_class": ("tab:cyan", "s-"),
    "plain": ("tab:red", "o-"),
    "new_ref": ("tab:orange", "o-"),
    "stacked": ("black", "_--"),
    "eqx_checkpointed": ("tab:green", "^-"),
    "eqx_bounded": ("tab:olive", "v-"),
    "tf": ("tab:purple", "D-"),
    "tf_xla": ("tab:pink", "d-"),
    "torch_rows": ("tab:brown", "P-"),
    "torch_stack": ("tab:gray", "X-"),
}


def plot_times(report: Report, derivative: str, file: Path, row: int = 64) -> None:
    """Time against T, both axes logarithmic, a panel for each case."""
    from matplotlib.figure import Figure

    found = {key: c for key, c in curves(report["results"]).items() if key.derivative == derivative and key.row == row}
    names = [name for name in CASES if CASES[name].group != "ops" and any(key.case == name for key in found)]
    if not names:
        return
    across = min(6, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(2.7 * across + 0.6, 2.2 * down + 1.2), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for ax, name in zip(axes, names, strict=False):
        for rival, (colour, style) in _STYLES.items():
            if curve := found.get(Key(name, derivative, row, rival)):
                ax.loglog(list(curve), list(curve.values()), style, color=colour, label=RIVALS[rival][1], markersize=4)
        ax.set_title(name, fontsize=9)
        ax.minorticks_off()
        ax.grid(True, color="0.9")
        ax.tick_params(labelsize=7)
    for ax in axes[len(names) :]:
        ax.set_axis_off()
    labels = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    figure.supxlabel("T, steps of the loop", fontsize=9)
    figure.supylabel(f"seconds, {derivative}", fontsize=9)
    figure.savefig(file, dpi=110)


def plot_ratios(report: Report, derivative: str, file: Path, row: int = 64, T: int = 8000) -> None:
    """Time of each rival over ours, as bars, a group for each case."""
    from matplotlib.figure import Figure

    found = curves(report["results"])
    ratios: dict[str, dict[str, float]] = {}
    for name in CASES:
        ours = found.get(Key(name, derivative, row, "ours"), {})
        for rival in _STYLES:
            other = found.get(Key(name, derivative, row, rival), {})
            if rival not in OURS and T in ours and other and min(other) <= T:
                ratios.setdefault(name, {})[rival] = at_least(other, T) / ours[T]
    if not ratios:
        return
    figure = Figure(figsize=(0.62 * len(ratios) + 3, 4.5), layout="constrained")
    ax = figure.subplots()
    shown = [rival for rival in _STYLES if any(rival in of_case for of_case in ratios.values())]
    width = 0.85 / len(shown)
    for k, rival in enumerate(shown):
        at = [n + (k - len(shown) / 2) * width for n, name in enumerate(ratios) if rival in ratios[name]]
        heights = [of_case[rival] for of_case in ratios.values() if rival in of_case]
        ax.bar(at, heights, width, align="edge", color=_STYLES[rival][0], label=RIVALS[rival][1])
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_yscale("log")
    ax.set_xticks(range(len(ratios)), list(ratios), rotation=60, ha="right", fontsize=8)
    ax.set_ylabel(f"time over ours, {derivative}, T = {T}, rows of {row}", fontsize=8)
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110)


def plots(report: Report, stem: Path) -> list[Path]:
    """All plots, beside the JSON; those that have something to show."""
    files = []
    for derivative in DERIVATIVES[:2]:
        for kind, plot in (("times", plot_times), ("ratios", plot_ratios)):
            file = stem.with_name(f"{stem.stem}-{kind}-{derivative}.png")
            plot(report, derivative, file)
            files += [file] if file.exists() else []
    return files


# --- the README ----------------------------------------------------------------------------------------------------

_SHOWN = {
    "write": "write into the carry",
    "read_then_write": "read an earlier row, write the next",
    "read_beside_write": "a read before a write that does not depend on it",
    "cross": "two buffers, each written from the other",
    "swap": "swap: put a row, take the old one",
    "branches": "cond: write in one branch, read in the other",
    "inner_writes": "inner loop writes, outer loop reads",
    "many_rows": "gather and scatter four rows per step",
    "checkpointed": "`jax.checkpoint` around the body",
    "issue_15906": "the loop of [jax issue 15906](https://github.com/jax-ml/jax/issues/15906)",
    "closed_over": "read a closed-over buffer (never written)",
}
_PORTED = {
    "write": "write each step",
    "read_then_write": "read an earlier row, write",
    "read_beside_write": "read a row beside the write",
    "decoder": "decoder (a matrix product per step)",
    "append": "append with `dynamic_size`",
    "map_rows": "unstack, read, write, stack",
    "lstm": "LSTM decoder",
    "beam_search": "beam search",
}
_FAMILIES = {
    "ours": ("ours",),
    "plain JAX": ("plain",),
    "`new_ref`": ("new_ref",),
    "Equinox": ("eqx_checkpointed", "eqx_bounded"),
    "TensorFlow": ("tf", "tf_xla"),
    "PyTorch": ("torch_rows", "torch_stack"),
    "scan outputs": ("stacked",),
}


class _Figures:
    """Cells of the README's tables."""

    def __init__(self, report: Report) -> None:
        self.found = curves(report["results"])
        self.by_key = {(r["case"], r["derivative"], r["row"], r["rival"], r["T"]): r for r in report["results"]}

    def step(self, case: str, rival: str, T: int, derivative: str = "gradient", row: int = 64) -> float | None:
        """Microseconds."""
        seconds = self.found.get(Key(case, derivative, row, rival), {}).get(T)
        return None if seconds is None else 1e6 * seconds / T

    def cell(self, case: str, rival: str, T: int, derivative: str = "gradient") -> str:
        """The same, or why there is none."""
        if (step := self.step(case, rival, T, derivative)) is not None:
            return number(step)
        notes = {r["note"] for key, r in self.by_key.items() if key[:4] == (case, derivative, 64, rival) and r["note"]}
        curve = self.found.get(Key(case, derivative, 64, rival), {})
        if notes and any(size < T for size in curve):
            return f"> {number(1e6 * at_least(curve, T) / T)}"
        return "wrong" if "wrong" in notes else "not supported" if notes else ""

    def copies(self, case: str, rival: str, T: int) -> str:
        result = self.by_key.get((case, "gradient", 64, rival, T), {})
        return str(result.get("copies", ""))

    def ratio(self, case: str, T: int) -> str:
        mine, theirs = self.step(case, "ours", T), self.step(case, "plain", T)
        return (
            ""
            if mine is None or theirs is None
            else f"{theirs / mine:.0f}"
            if theirs > 9.5 * mine
            else f"{theirs / mine:.1f}"
        )


def _gradients(figures: _Figures) -> str:
    head = ["loop, gradient", "plain JAX: T = 1000", "8000", "copies", "ours: T = 1000", "8000", "100 000", "copies"]
    rows = []
    for case, about in _SHOWN.items():
        plain = [figures.cell(case, "plain", T) for T in (1000, 8000)]
        ours = [figures.cell(case, "ours", T) for T in (1000, 8000, 100_000)]
        copies = [figures.copies(case, rival, 1000) for rival in ("plain", "ours")]
        rows.append([about, *plain, copies[0], *ours, copies[1], figures.ratio(case, 8000)])
    return markdown([*head, "plain / ours, T = 8000"], rows)


def _rivals(figures: _Figures) -> str:
    rows = []
    for case in _SHOWN | {"decoder": "", "lstm": "", "beam_search": "", "while_read_earlier": ""}:
        about = _about(case)
        for derivative in DERIVATIVES[:2]:
            cells = [_best(figures, case, rivals, derivative) for rivals in _FAMILIES.values()]
            rows.append([about if derivative == "forward" else "", derivative, *cells])
    return markdown(["loop, T = 8000", "", *_FAMILIES], rows)


#: The loops of the README.
_FEW = ("write", "read_then_write", "read_beside_write", "swap", "decoder", "beam_search", "while_read_earlier")


def _gradients_of_rivals(figures: _Figures) -> str:
    """A few lines of `_rivals`."""
    rows = [
        [_about(case), *(_best(figures, case, rivals, "gradient") for rivals in _FAMILIES.values())] for case in _FEW
    ]
    return markdown(["loop, gradient", *_FAMILIES], rows)


def _about(case: str) -> str:
    return _SHOWN.get(case) or _PORTED.get(case) or "loop with the number of steps known at run time"


def _best(figures: _Figures, case: str, rivals: Sequence[str], derivative: str) -> str:
    """The fastest of a family."""
    steps = [step for rival in rivals if (step := figures.step(case, rival, 8000, derivative)) is not None]
    if steps:
        return number(min(steps))
    cells = [cell for rival in rivals if (cell := figures.cell(case, rival, 8000, derivative))]
    return min(cells, key=lambda cell: (not cell.startswith(">"), cell != "wrong", len(cell)), default="")


def _tensorflow(figures: _Figures) -> str:
    head = ["loop, gradient", "T = 1000: ours", "TF", "TF with XLA", "T = 8000: ours", "TF", "TF with XLA"]
    rows = [
        [about]
        + [figures.cell(case, rival, T) for T in (1000, 8000) for rival in ("ours", "tf", "tf_xla")]
        + [figures.cell(case, "ours", 100_000)]
        for case, about in _PORTED.items()
    ]
    return markdown([*head, "T = 100 000: ours"], rows)


def _made_on(report: Report) -> str:
    versions = {package: v for of in report["versions"].values() for package, v in of.items()}
    named = {"jax": "jax", "equinox": "Equinox", "tensorflow": "TensorFlow", "torch": "PyTorch"}
    what = ", ".join(f"{name} {versions[package]}" for package, name in named.items() if package in versions)
    machine = report["machine"]
    label = f" {report['label']}" if report["label"] else ""
    return (
        f"<sub>{report['date'][:10]}: {what}; {machine['cores']} cores of {machine['cpu']}. Microseconds per step, "
        f"rows of 64 float32, medians.{label}</sub>"
    )


def _summary(report: Report) -> str:
    lines = targets(report)
    rows = []
    for target, title in TITLES.items():
        mine = [line for line in lines if line.target == target]
        if mine:
            known = [line for line in mine if line.reached is not None] or mine
            worst = (max if mine[0].at_most else min)(known, key=lambda line: line.measured / line.bound)
            reached = f"{sum(line.reached is True for line in mine)} of {len(mine)}"
            rows.append([title, reached, f"{number(worst.measured)} ({worst.what})"])
    return markdown(["target", "reached", "worst"], rows)


def readme(text: str, report: Report) -> str:
    """A page with the figures of a run between the marks `<!-- figures: NAME -->` and `<!-- end of figures -->`."""
    figures = _Figures(report)
    made = {
        "gradients": lambda: _gradients(figures),
        "rivals": lambda: _rivals(figures),
        "best": lambda: _gradients_of_rivals(figures),
        "tensorflow": lambda: _tensorflow(figures),
        "targets": lambda: _summary(report),
    }

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}\n{made[match[2]]()}\n\n{_made_on(report)}\n{match[3]}"

    return re.sub(r"(<!-- figures: (\w+) -->)\n.*?(<!-- end of figures -->)", filled, text, flags=re.DOTALL)
