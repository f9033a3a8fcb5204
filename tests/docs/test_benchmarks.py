"""The benchmarks compare what is the same, and draw the right conclusions."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from row_programs import programs

from benchmarks import __main__ as command
from benchmarks import measure, memory, report, sizes
from benchmarks.cases import CASES, PORTED, RIVALS, Point, points, rivals_of
from benchmarks.environments import python_of
from benchmarks.rivals import Unsupported, in_jax
from benchmarks.rivals import programs as texts
from benchmarks.targets import Line, curves, exponent, is_quadratic, targets

pytestmark = pytest.mark.slow

#: Equinox says not to write a row twice and not to read one that is written later, and gives wrong gradients then.
#: The others are what JAX 0.12 does.
WRONG = {
    ("many_rows", "eqx_checkpointed"),
    ("many_rows", "eqx_bounded"),
    ("triangular", "eqx_checkpointed"),
    ("checkpointed", "new_ref"),
    ("checkpointed", "eqx_checkpointed"),
}
UNSUPPORTED = (Unsupported, NotImplementedError, ValueError, AttributeError)


def answer(case, rival, derivative, T, row):
    prepared = in_jax.prepare(case, rival, derivative, T, row)
    return prepared.answer(prepared.run())


OTHERS = [n for n, case in CASES.items() if case.group != "programs" and not n.endswith(("_loose", "_layers"))]


@pytest.mark.parametrize("name", ["many_rows", "checkpointed", *OTHERS[::3]])  # the command compares what it times
def test_the_sides_of_a_case_agree(name):
    case = CASES[name]
    derivative = case.derivatives[-1] if len(case.derivatives) < 3 else "gradient"
    size = 1 if name.startswith("large") else 6
    point = Point(case, derivative, 3, (size,))
    compared = 0
    with jax.enable_x64(False):
        expected = answer(name, "ours", derivative, size, 3)
        for rival in rivals_of(point)[1:]:
            if RIVALS[rival][0] != "jax" or (name, rival) in WRONG:
                continue
            try:
                found = answer(name, rival, derivative, size, 3)
            except UNSUPPORTED:
                continue
            assert not found or measure.equal(found, expected), rival
            compared += bool(found)
    assert compared or name == "eager_write"


def test_what_other_frameworks_have_is_named_as_here():
    for name in PORTED:
        assert name in programs and callable(getattr(texts, name))
    for case in CASES.values():
        assert case.rivals[0] == "ours" or case.name == "triangular"
        assert set(case.rivals) <= set(RIVALS)


def test_a_run_is_narrowed():
    found = list(points(["write", "ops"], ["forward"], [500, 10**7], [64]))
    assert {point.case.name for point in found} == {"write", "gather", "scatter", "scatter_add", "stack"}
    assert all(point.derivative == "forward" and point.row == 64 for point in found)
    assert next(point.sizes for point in found if point.case.name == "write") == (500,)  # 10**7 rows are too large


def test_a_process_of_its_own_times_and_compares():
    limits = measure.Limits(repeat=2, compilations=1)
    environment = measure.Environment("jax", Path(sys.executable), limits)
    point = Point(CASES["write"], "gradient", 4, (8, 16))
    try:
        sides = [measure.Side(rival, environment) for rival in ("ours", "plain")]
        small, large = measure.measure(point, sides, limits)
        assert [r["T"] for r in (*small, *large)] == [8, 8, 16, 16]
        for result in (*small, *large):
            assert len(result["seconds"]) == 2 and min(result["seconds"]) > 0
            assert result["note"] is None and result["temp_bytes"] > 0 and result["compile_seconds"] > 0
        assert all(len(result["compilations"]) == 1 for result in small)
        with pytest.raises(measure.Unable, match="not supported: AttributeError"):
            environment.ask("prepare", "key", ["no such case", "ours", "forward", 8, 4])
    finally:
        environment.stop()


class Answers:
    """A worker that says what it is told to say."""

    def __init__(self, seconds, answers):
        self.seconds, self.answers, self.asked, self.started = seconds, answers, [], 1

    def ask(self, do, rival, *args):
        self.asked.append((do, rival))
        if do == "prepare":
            self.T = args[0][3]
            return {"compile_seconds": 0.1, "temp_bytes": 8, "copies": 0}
        if do == "first":
            np.savez(args[0], np.full(3, self.answers[rival]))
            return {"seconds": self.seconds[rival](self.T), "resident_bytes": 8}
        return self.seconds[rival](self.T) if do == "sample" else None


def test_a_wrong_answer_has_no_time_and_a_slow_side_stops():
    linear, quadratic = (lambda T: T * 1e-6), (lambda T: T**2 * 1e-6)
    worker = Answers(
        {"ours": linear, "plain": quadratic, "new_ref": linear}, {"ours": 1.0, "plain": 1.0, "new_ref": 1.1}
    )
    sides = [measure.Side(rival, worker) for rival in ("ours", "plain", "new_ref")]
    point = Point(CASES["write"], "forward", 64, (100, 1000, 10_000, 100_000))
    results = [r for at_one in measure.measure(point, sides, measure.Limits(repeat=2)) for r in at_one]
    notes = {(r["rival"], r["T"]): r["note"] for r in results}
    assert notes["new_ref", 100] == "wrong" and ("new_ref", 1000) not in notes
    assert ("sample", "new_ref") not in worker.asked
    assert not next(r for r in results if r["rival"] == "new_ref")["seconds"]
    assert notes["plain", 1000] is None and notes["plain", 10_000] == "predicted 100 s"
    assert notes["ours", 100_000] is None


def result(case, rival, T, seconds, derivative="gradient", row=64, **more):
    labels = {"case": case, "rival": rival, "derivative": derivative, "T": T, "row": row, "group": CASES[case].group}
    return {**labels, "seconds": [seconds], "note": None, **more}


def test_the_arithmetic_of_the_targets():
    results = [
        *(result("write", "ours", T, 2e-6 * T, compilations=[0.2]) for T in (1000, 8000, 100_000)),
        *(result("write", "new_ref", T, 1e-6 * T) for T in (1000, 8000, 100_000)),
        *(result("write", "stacked", T, 0.8e-6 * T) for T in (1000, 8000, 100_000)),
        *(result("write", "plain", T, 1e-7 * T**2, compilations=[0.1]) for T in (500, 1000)),
        result("gather", "ours", 64, 0.010, "forward", 2**18),
        result("gather", "memcpy", 64, 0.008, "forward", 2**18),
    ]
    found = {
        line.target: line for line in targets({"results": results, "import": [[0.4, 0.07], [0.4, 0.03], [0.4, 0.04]]})
    }
    assert found[1].measured == pytest.approx(1) and found[1].reached
    assert found[2].measured == pytest.approx(2) and not found[2].reached and "new_ref" in found[2].remark
    # 0.1 s at T = 1000 is at least 0.8 s at 8000, where ours takes 0.016 s.
    assert found[3].measured == pytest.approx(50) and found[3].remark == "plain JAX, at least, from T = 1000"
    assert found[4].measured == pytest.approx(2.5) and not found[4].reached
    assert found[5].measured == pytest.approx(0.8) and not found[5].reached
    assert found[6].measured == pytest.approx(2) and not found[6].reached  # the last of target 6: to compile
    assert Line(6, "", 40.0, 50).reached
    assert Line(3, "", 40.0, 50, at_most=False, at_least=True).reached is None


def test_growth():
    assert exponent({1000: 1.0, 10_000: 10.0, 100_000: 100.0}) == pytest.approx(1)
    assert exponent({1000: 1.0}) is None
    assert is_quadratic({1000: 1.0, 2000: 4.0}) and not is_quadratic({1000: 1.0, 2000: 2.1})
    assert curves([result("write", "ours", 8, 1.0) | {"seconds": []}]) == {}


def test_a_report_has_tables_and_plots(tmp_path):
    results = [
        result("write", rival, T, seconds * T, temp_bytes=2**20, resident_bytes=2**21, copies=n, compile_seconds=0.1)
        for T in (1000, 8000)
        for n, (rival, seconds) in enumerate({"ours": 1e-6, "plain": 2e-5}.items())
    ]
    made = {
        "date": "2026-01-01T00:00:00+00:00",
        "label": "",
        "machine": {"cpu": "a CPU", "cores": 2, "platform": "Linux", "load before": 0.0},
        "versions": {"jax": {"jax": "0.12"}},
        "import": [[0.4, 0.03]],
        "results": results,
    }
    file = tmp_path / "run.json"
    command.write(made, file)
    assert json.loads(file.read_text()) == made
    text = "\n".join([*report.header(made), *report.tables(made), *report.target_tables(made)])
    assert "plain JAX" in text and "20.0" in text and "1 of 1 reached" in text
    marked = "<!-- figures: gradients -->\nold\n<!-- end of figures -->"
    assert "| write into the carry | 20.0 | 20.0 | 1 | 1.00 | 1.00 |  | 0 | 20 |" in report.readme(marked, made)
    assert {path.suffix for path in report.plots(made, file)} == {".png"}


@pytest.mark.skipif(not command.COMMITTED.exists(), reason="no results are committed")
@pytest.mark.parametrize("page", command.PAGES, ids=str)
def test_pages_have_the_figures_of_the_committed_results(page):
    text = page.read_text()
    assert text.count("<!-- figures: ") == text.count("<!-- end of figures -->") > 0
    assert report.readme(text, json.loads(command.COMMITTED.read_text())) == text, "run `python -m benchmarks readme`"


def test_the_command_knows_its_environments():
    assert python_of("torch").parts[-4:] == (".benchmarks", "torch", "bin", "python")
    given = command.parser().parse_args(["run", "--python", "jax=/usr/bin/python3"])
    assert given.python == [("jax", Path("/usr/bin/python3"))]


@pytest.mark.parametrize("program", memory.PROGRAMS)
def test_all_ways_of_keeping_what_a_gradient_needs_give_the_same(program):
    found = {way: memory.one(program, way, 9, 0) for way in memory.WAYS}
    for way, figures in found.items():
        assert figures["answer"] == pytest.approx(found["lax.scan"]["answer"], rel=1e-3), way
        assert figures["cpu"] > 0 and figures["microseconds"] > 0


def test_the_tables_of_sizes_compare_arrays_that_give_the_same():
    of_ways = [line for line in sizes.growth_table(5, 0) if line.startswith("| ")]
    assert len(of_ways) == 1 + len(sizes.PUTS)
    of_lengths = [line for line in sizes.lengths_table(2, 0) if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in of_lengths[1:3]] == ["| `growing`", "| `max_size` of the longest"]
