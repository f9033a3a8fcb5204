"""The command: `python -m benchmarks --help`."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments

COMMITTED = Path(__file__).parent / "results" / "cpu.json"
#: The pages that have tables of a run.
PAGES = [environments.ROOT / name for name in ("benchmarks/README.md", "docs/background/evidence.md")]

#: A few cases of each kind, in less than two minutes.
QUICK: dict[str, list[Any]] = {
    "cases": ["write", "read_then_write", "while_read_earlier", "large_read"],
    "derivatives": ["forward", "gradient"],
    "sizes": [1000, 4000],
    "rows": [64, 2**18],
}


def setup(arguments: argparse.Namespace) -> None:
    for name in arguments.environment or environments.PACKAGES:
        environments.make(name)


def run(arguments: argparse.Namespace) -> None:
    from benchmarks import measure, report
    from benchmarks.cases import CASES, DERIVATIVES, RIVALS, points

    groups = {case.group for case in CASES.values()}
    check("case", arguments.cases, [*CASES, *sorted(groups)])
    check("rival", arguments.rivals, RIVALS)
    check("derivative", arguments.derivatives, DERIVATIVES)
    quick = QUICK if arguments.quick else {}
    narrowed = [getattr(arguments, key) or quick.get(key, []) for key in ("cases", "derivatives", "sizes", "rows")]
    todo = list(points(*narrowed))
    limits = measure.Limits(longest=arguments.longest, repeat=3 if arguments.quick else arguments.repeat)
    if arguments.quick:
        todo = [point for point in todo if point.row == 64 or point.case.fixed]
        limits = limits._replace(compilations=1, longest=min(limits.longest, 0.5))
    pythons = environments.found(dict(arguments.python))
    for name in environments.PACKAGES.keys() - pythons.keys():
        print(f"There is no environment for {name}, so it is left out: python -m benchmarks setup {name}")
    measured = measure.Run(pythons, arguments.rivals or list(RIVALS), limits, arguments.label)
    print(*report.header(measured.report), "", sep="\n", flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        for done, point in enumerate(todo, 1):
            results = [result for at_one_size in measured(point) for result in at_one_size]
            if results:
                print(*report.point_table(results), sep="\n")
            print(f"[{done}/{len(todo)}, {time.monotonic() - start:.0f} s]\n", flush=True)
            write(measured.report, arguments.output)
    finally:
        measured.close()
    print(*report.target_tables(measured.report), "", sep="\n")
    print(f"Wrote {arguments.output}", *draw(measured.report, arguments.output), sep=", ")


def check(what: str, given: Sequence[str], known: Iterable[str]) -> None:
    """A name that is misspelt measures nothing, which should not look like a result."""
    unknown = sorted(set(given).difference(known))
    if unknown:
        sys.exit(f"There is no {what} {', '.join(map(repr, unknown))}: give some of {', '.join(known)}")


def show(arguments: argparse.Namespace) -> None:
    from benchmarks import report

    found = json.loads(arguments.file.read_text())
    print(*report.header(found), "", *report.tables(found), *report.target_tables(found), sep="\n")
    draw(found, arguments.file)


def readme(arguments: argparse.Namespace) -> None:
    from benchmarks import report

    found = json.loads(arguments.file.read_text())
    for page in PAGES:
        page.write_text(report.readme(page.read_text(), found))


def show_cases(_: argparse.Namespace) -> None:
    from benchmarks.cases import CASES

    for case in CASES.values():
        print(f"{case.group:9} {case.name:24} {case.about}")


def write(found: dict[str, Any], file: Path) -> None:
    """JSON with a result on each line, so that a new run makes a difference that can be read."""
    head = {key: value for key, value in found.items() if key != "results"}
    lines = ",\n".join(json.dumps(rounded(result)) for result in found["results"])
    file.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "results": [\n{lines}\n]}}\n')


def rounded(value: object) -> object:
    """Four digits are more than a timing has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def draw(found: dict[str, Any], file: Path) -> list[Path]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("Plots need matplotlib: pip install '.[bench]'", file=sys.stderr)
        return []
    from benchmarks import report

    return report.plots(found, file)


def environment_and_path(text: str) -> tuple[str, Path]:
    name, found, path = text.partition("=")
    if not found or name not in environments.PACKAGES:
        raise argparse.ArgumentTypeError(f"{text}: give NAME=PATH, NAME one of {', '.join(environments.PACKAGES)}")
    return name, Path(path)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time this library against its rivals, all in one run and in turns. `run` is meant where no\n"
        "command is given: `python -m benchmarks --quick` takes less than two minutes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("setup", help="make the environments of the rivals, in .benchmarks/")
    one.add_argument("environment", nargs="*", help=f"of {', '.join(environments.PACKAGES)}; default: all")
    one.set_defaults(do=setup)

    one = commands.add_parser("run", help="measure, print tables, write JSON and plots")
    one.add_argument("--quick", action="store_true", help="a few cases at two small T")
    one.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="cases or groups; `list` shows them")
    one.add_argument(
        "--rivals", nargs="+", default=[], metavar="NAME", help="such as ours plain new_ref tf torch_stack"
    )
    one.add_argument("--derivatives", nargs="+", default=[], metavar="NAME", help="forward, gradient, second order")
    one.add_argument("--sizes", nargs="+", type=int, default=[], metavar="T", help="instead of each case's own")
    one.add_argument("--rows", nargs="+", type=int, default=[], metavar="N", help="floats in a row")
    one.add_argument("--repeat", type=int, default=7, help="samples of each case")
    one.add_argument("--longest", type=float, default=3.0, help="a rival goes no further in T after such a run (s)")
    one.add_argument("--label", default="", help="a sentence that says what is special about this run")
    one.add_argument("--output", type=Path, default=environments.FOLDER / "latest.json", help="default: %(default)s")
    one.add_argument(
        "--python",
        action="append",
        default=[],
        type=environment_and_path,
        metavar="ENV=PATH",
        help="use this interpreter for an environment",
    )
    one.set_defaults(do=run)

    one = commands.add_parser("report", help="tables, targets and plots of a run that was made before")
    one.add_argument("file", nargs="?", type=Path, default=COMMITTED)
    one.set_defaults(do=show)

    one = commands.add_parser("readme", help="write the tables of a run into the pages")
    one.add_argument("file", nargs="?", type=Path, default=COMMITTED)
    one.set_defaults(do=readme)

    commands.add_parser("list", help="all cases").set_defaults(do=show_cases)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or (given[0].startswith("--") and given[0] != "--help"):
        given.insert(0, "run")
    arguments = parser().parse_args(given)
    arguments.do(arguments)


if __name__ == "__main__":
    main()
