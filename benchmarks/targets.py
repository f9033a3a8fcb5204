"""What this library wants to reach on a CPU, and whether a run says that it has."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.cases import CASES, DERIVATIVES, OURS, RIVALS

#: A rival whose time grows faster than this power of T is called quadratic. What is constant makes a quadratic one
#: look better than it is, and caches make a linear one look worse, up to 1.2.
LINEAR = 1.3

#: `lax.scan` stacks its outputs without any buffer in its carry: target 4 compares with it, 2 and 3 do not.
#: The others are not rivals but limits and other ways to use this library.
NOT_RIVALS = {*OURS, "stacked", "memcpy"}


class Key(NamedTuple):
    """A curve: time against T."""

    case: str
    derivative: str
    row: int
    rival: str


class Line(NamedTuple):
    """One figure beside what it should be."""

    target: int
    what: str
    measured: float
    bound: float
    at_most: bool = True
    remark: str = ""
    at_least: bool = False  # what was measured is a bound from below

    @property
    def reached(self) -> bool | None:
        """None if there is no telling."""
        if self.at_most:
            return self.measured <= self.bound
        return True if self.measured >= self.bound else None if self.at_least else False


TITLES = {
    1: "exponent of time in T, from 1e3 to 1e5: at most 1.05",
    2: "time over that of the best linear rival: at most 1.0 (rows of 1024 and more), 1.5 (64), 3 (1)",
    3: "time of every quadratic rival over ours, T = 8000, rows of 64: at least 50",
    4: "gradient of the loop that writes, over scan with stacked outputs: at most 1.25 (rows of 1024), 2 (64)",
    5: "large rows and bulk ops: at least 0.9 of the speed of memcpy",
    6: "import: at most 50 ms more than jax; compile time: at most 1.3 of plain JAX's",
}


def curves(results: Sequence[dict[str, Any]]) -> dict[Key, dict[int, float]]:
    """Medians in seconds, by T. What was wrong or has not run is not there."""
    found: dict[Key, dict[int, float]] = {}
    for r in results:
        if r["seconds"]:
            key = Key(r["case"], r["derivative"], r["row"], r["rival"])
            found.setdefault(key, {})[r["T"]] = statistics.median(r["seconds"])
    return found


def exponent(curve: dict[int, float], smallest: float = 0, largest: float = math.inf) -> float | None:
    """The power of T that time grows with: the slope of a line through the logarithms."""
    points = [(math.log(T), math.log(seconds)) for T, seconds in curve.items() if smallest <= T <= largest]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def is_quadratic(curve: dict[int, float]) -> bool | None:
    """Whether time grows faster than T; None if there is no telling."""
    found = exponent(curve)
    return None if found is None else found > LINEAR


def at_least(curve: dict[int, float], T: int) -> float:
    """Seconds at T; where it has not run there, a bound from below: it does not grow slower than T."""
    near = max(size for size in curve if size <= T)
    return curve[near] * T / near


def _programs(found: dict[Key, dict[int, float]]) -> Iterator[tuple[Key, dict[int, float]]]:
    for key, curve in found.items():
        case = CASES[key.case]
        if key.rival == "ours" and case.group != "ops" and not case.fixed and key.derivative in DERIVATIVES[:2]:
            yield key, curve


def _against(found: dict[Key, dict[int, float]], key: Key) -> dict[str, dict[int, float]]:
    return {
        rival: found[key._replace(rival=rival)]
        for rival in RIVALS
        if rival not in NOT_RIVALS and key._replace(rival=rival) in found
    }


def _exponents(found: dict[Key, dict[int, float]]) -> Iterator[Line]:
    for key, curve in _programs(found):
        if key.row == 64 and (power := exponent(curve, 1e3, 1e5)) is not None:
            # Where even the best of all grows faster than T, it is the machine: caches, and pages that are new.
            limit = {"stacked": found.get(key._replace(rival="stacked"), {})}
            others = (_against(found, key) | limit).items()
            known = [(e, RIVALS[rival][1]) for rival, other in others if (e := exponent(other, 1e3, 1e5)) is not None]
            remark = "least of the others: {1}, {0:.2f}".format(*min(known)) if known else ""
            yield Line(1, _name(key), power, 1.05, remark=remark)


def _linear_rivals(found: dict[Key, dict[int, float]]) -> Iterator[Line]:
    for key, curve in _programs(found):
        ratios = {}
        for rival, other in _against(found, key).items():
            common = set(curve) & set(other)
            # Rows of 1 MiB are too few to tell, so there every rival counts.
            if common and (key.row > 1024 or is_quadratic(other) is False):
                T = max(common)
                ratios[rival] = curve[T] / other[T], T
        if ratios:
            rival = max(ratios, key=lambda rival: ratios[rival][0])
            bound = 1.0 if key.row >= 1024 else 1.5 if key.row >= 64 else 3.0
            ratio, T = ratios[rival]
            yield Line(2, _name(key), ratio, bound, remark=f"{RIVALS[rival][1]}, T = {T}")


def _quadratic_rivals(found: dict[Key, dict[int, float]]) -> Iterator[Line]:
    T = 8000
    for key, curve in _programs(found):
        if key.row != 64 or T not in curve:
            continue
        for rival, other in _against(found, key).items():
            if is_quadratic(other):
                remark = RIVALS[rival][1] + ("" if T in other else f", at least, from T = {max(other)}")
                yield Line(3, _name(key), at_least(other, T) / curve[T], 50, False, remark, T not in other)


def _stacked_outputs(found: dict[Key, dict[int, float]]) -> Iterator[Line]:
    for row, bound in ((1024, 1.25), (64, 2.0)):
        key = Key("write", "gradient", row, "ours")
        curve, other = found.get(key, {}), found.get(key._replace(rival="stacked"), {})
        if common := set(curve) & set(other):
            T = max(common)
            yield Line(4, _name(key), curve[T] / other[T], bound, remark=f"T = {T}")


def _bandwidths(found: dict[Key, dict[int, float]]) -> Iterator[Line]:
    for key, curve in found.items():
        copy = found.get(key._replace(rival="memcpy"), {})
        if key.rival == "ours":
            for T in sorted(set(curve) & set(copy)):
                mib = T * key.row * 4 / 2**20 / (2 if key.case == "stack" else 1)
                # memcpy reads and writes what an addition reads twice and writes.
                moved = 1.5 if key.case == "scatter_add" else 1.0
                yield Line(5, _name(key), moved * copy[T] / curve[T], 0.9, False, f"{mib:.0f} MiB")


def _imports(report: dict[str, Any]) -> Iterator[Line]:
    if report["import"]:
        added = statistics.median(ours for _, ours in report["import"])
        jax = statistics.median(jax for jax, _ in report["import"])
        yield Line(6, "import, ms", 1e3 * added, 50, remark=f"jax: {1e3 * jax:.0f} ms")


def _compilations(results: Sequence[dict[str, Any]]) -> Iterator[Line]:
    by_key = {
        Key(r["case"], r["derivative"], r["row"], r["rival"]): statistics.median(r["compilations"])
        for r in results
        if r.get("compilations") and r["row"] == 64
    }
    for key, seconds in by_key.items():
        other = by_key.get(key._replace(rival="plain"))
        if key.rival == "ours" and other is not None:
            yield Line(6, f"compile {_name(key)}", seconds / other, 1.3, remark=f"{1e3 * seconds:.0f} ms")


def _name(key: Key) -> str:
    return f"{key.case}, {key.derivative}, rows of {key.row}"


def targets(report: dict[str, Any]) -> list[Line]:
    """All figures that a run has for the targets."""
    found = curves(report["results"])
    parts: tuple[Callable[[dict[Key, dict[int, float]]], Iterator[Line]], ...]
    parts = (_exponents, _linear_rivals, _quadratic_rivals, _stacked_outputs, _bandwidths)
    return [line for part in parts for line in part(found)] + [*_imports(report), *_compilations(report["results"])]
