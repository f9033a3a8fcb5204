"""The doctor looks at programs that know nothing of it: what it finds, what it tries, and what it leaves alone."""

import contextlib
import dataclasses
import functools
import html
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import _compat, _links, doctor, in_place, ta_read, ta_write
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._in_place.checking import tolerance_of
from jax_tensorarray.doctor import LoopCopyError, _command, _compare, _trace, _trial, _why, forbid_copies, watch
from jax_tensorarray.doctor._advice import ADVICE
from jax_tensorarray.doctor._command import main
from jax_tensorarray.doctor._growth import Measurement
from jax_tensorarray.doctor._reasons import REASONS
from jax_tensorarray.doctor._report import html as page

pytestmark = pytest.mark.slow(but=2)

PROGRAM = """
import functools, sys
import jax, jax.numpy as jnp

@functools.partial(jax.jit, static_argnames="n")
def train(xs, n):
    def body(i, b):
        return b.at[i].set(jnp.sin(b[i - 1]) + b[(7 * i) % n])
    return jax.grad(lambda xs: jnp.sum(jax.lax.fori_loop(1, n, body, xs) ** 2))(xs)

@jax.jit
def in_place_already(xs):
    return jax.lax.fori_loop(1, 300, lambda i, b: b.at[i].set(b[i - 1] * 2), xs)

@jax.jit
def small(xs):
    loss = lambda xs: jax.lax.fori_loop(1, 40, lambda i, b: b.at[i].set(b[i - 1] * 2), xs).sum()
    return jax.grad(loss)(xs)

if __name__ == "__main__":
    print(float(jnp.sum(train(0.1 * jnp.ones((1000, 64)), n=1000))), sys.argv[1:])
    in_place_already(jnp.ones((300, 64)))
    small(jnp.ones((40, 32)))
    sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""

#: A step that copies its argument in every call.
COUNTING = """
    count, counts = jax.jit(lambda c, i: (c.at[i].add(1.0), c[i]), donate_argnums=0), jnp.ones(2000)
    for i in range(3):
        counts, _ = count(counts, i)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def run(folder, *arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def inspect(folder, *arguments):
    return run(folder, "-m", "jax_tensorarray.doctor", *arguments)


def test_a_program_runs_as_it_is_and_its_worst_loop_is_named(folder):
    plain, found = run(folder, "program.py", "3", "--all"), inspect(folder, "program.py", "3", "--all")
    assert (found.returncode, found.stdout) == (plain.returncode, plain.stdout) == (3, plain.stdout)
    assert "['3', '--all']" in plain.stdout
    report = found.stderr
    assert re.search(r"\d+ programs were compiled, with \d loops: \d copy whole buffers, \d do not\.", report)
    assert re.search(r"1\. train: \d+ MiB copied per run", report)
    assert "program.py:8\n       return b.at[i].set(jnp.sin(b[i - 1]) + b[(7 * i) % n])" in report
    assert re.search(r"\b999\s+steps", report)
    assert "backward pass" in report
    assert re.search(r"under in_place: nothing left to copy; \S+ ms -> \S+ ms, \S+ times as fast", report)
    assert "in_place_already" not in report
    assert max(map(len, report.splitlines())) <= 80
    assert "\x1b" not in report


def test_a_module_can_be_looked_at_ci_can_fail_and_what_is_small_is_only_counted(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["--no-trial", "--fail", "--json", "report.json", "-m", "program"]) == 1
    report = json.loads((folder / "report.json").read_text())
    first = report["cases"][0]
    assert (first["program"], first["in_place"], report["status"]) == ("train", None, 0)
    copy = first["copies"][0]
    assert (copy["shape"], copy["steps"], copy["line"]) == ([1000, 64], 999, 8)
    assert copy["cost"] == 999 * copy["num_bytes"]
    text = capsys.readouterr().err
    assert "small" not in text and re.search(r"\d more move less than a thousandth of the first", text)
    assert main(["--no-trial", "--min-bytes", "1000000", "--fail", "program.py"]) == 0
    assert "all in place" in capsys.readouterr().err


#: What a browser makes of a page: how wide it is, the bars in it, and the lines that are marked.
MEASURE = """<script>
const width = bar => bar.getBoundingClientRect().width / bar.parentElement.getBoundingClientRect().width
const bars = [...document.querySelectorAll(".bar")].map(bar => [bar.className, width(bar)])
const lines = [...document.querySelectorAll(".hit")].map(line => line.innerText)
const fits = document.documentElement.scrollWidth <= window.innerWidth
document.body.textContent = JSON.stringify({ title: document.title, bars, lines, fits })
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
def test_a_browser_shows_the_page(tmp_path):
    text = "<loss> & sum"
    (tmp_path / "program.py").write_text(PROGRAM.replace("b[(7 * i) % n])", f"b[(7 * i) % n])  # {text}"))
    report = inspect(tmp_path, "--html", "page.html", "--json", "report.json", "program.py")
    assert report.returncode == 0, report.stderr
    page = tmp_path / "page.html"
    page.write_text(page.read_text() + MEASURE)
    options = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    for width in (1000, 420):
        more = [f"user-data-dir={tmp_path / 'profile'}", f"window-size={width},2000", "dump-dom"]
        command = ["chromium", *(f"--{option}" for option in options + more), page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        shown = json.loads(html.unescape(re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)[1]))
        assert shown["title"] == "program.py: loops that copy"
        assert shown["fits"]
        assert [line.split(None, 1) for line in shown["lines"]] == [
            ["8", f"return b.at[i].set(jnp.sin(b[i - 1]) + b[(7 * i) % n])  # {text}"]
        ]
        (unchanged, before), (tried, after), *moved = shown["bars"]
        trial = json.loads((tmp_path / "report.json").read_text())["cases"][0]["in_place"]
        assert (unchanged, tried, before) == ("bar", "bar cured", 1)
        assert after == pytest.approx(trial["after"] / trial["before"], abs=0.02)
        assert max(bar for _, bar in moved) == 1


#: A library that jits by a name that `--compare` does not replace.
LIBRARY = """
import jax, jax.numpy as jnp
from jax._src.api import jit

@jit
def swell(xs):
    return jax.grad(lambda xs: jax.lax.fori_loop(1, 300, lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), xs).sum())(xs)
"""


def test_comparing_runs_it_twice_and_says_what_was_gained_and_that_values_are_the_same(folder, monkeypatch, capfd):
    """In the packages too in which something is found, however they come by `jax.jit`."""
    (folder / "waves").mkdir()
    (folder / "waves" / "__init__.py").write_text(LIBRARY)
    program = PROGRAM.replace(
        "small(jnp", "import waves\n    print(waves.swell(jnp.ones((300, 64))).sum())\n    small(jnp"
    )
    program = program.replace("    sys.exit", COUNTING + "    sys.exit")
    (folder / "program.py").write_text(program)
    monkeypatch.chdir(folder)
    assert main(["--compare", "--fail", "--html", "page.html", "--json", "report.json", "program.py"]) == 0
    printed, report = capfd.readouterr()
    first, second = np.split(np.array(re.findall(r"^\S+", printed, re.MULTILINE), float), 2)
    assert len(first) == 2
    np.testing.assert_allclose(first, second, rtol=1e-5)
    said = " ".join(report[report.rindex("--- program.py:") :].split())
    assert re.search(r"copies: \d+ operations on whole buffers in loops unchanged, 0 under in_place", said)
    assert "1 argument is copied in every call unchanged, 0 under in_place" in said
    assert re.search(
        r"times: (slower, )?\S+ s unchanged, \S+ s under in_place, for the whole program with its imports, plus", said
    )
    assert re.search(
        r"compared: the results of \d+ calls of \d+ jitted functions. Numbers of float32 may differ", said
    ), said
    assert "values: the same" in said and "output: the same" in said
    assert "To keep what waves gains, begin with jax_tensorarray.in_place_package('waves')." in report
    unchanged, rewritten, values = json.loads((folder / "report.json").read_text()).values()
    assert unchanged["packages"] == rewritten["rewritten"] == ["waves"] and rewritten["cases"] == []
    assert all(0 < run["compiling"] < run["seconds"] for run in (unchanged, rewritten))
    assert (values["calls"], values["difference"]) == (7, "")
    page = (folder / "page.html").read_text()
    before, after = re.search(r"Unchanged</h2>(.*)Under in_place</h2>(.*)", page, re.DOTALL).groups()
    assert "waves/__init__.py:7" in before and "none copies a buffer" in after
    assert page.count("<h1>") == page.count("<body>") == 1


def test_a_trace_has_all_that_a_bug_report_needs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["--no-trial", "--trace", "trace", "program.py", "0", "--data=x"]) == 0
    assert "To report a bug, attach trace/trace.zip." in capsys.readouterr().err
    trace = folder / "trace"
    first = trace / "01_train"
    with zipfile.ZipFile(trace / "trace.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    for name, text in files.items():
        assert (folder / name).read_text() == text
    assert "1. train: " in files["trace/report.txt"] and "1. train: " in files["trace/report.html"]
    assert json.loads(files["trace/report.json"])["cases"][0]["program"] == "train"
    for said in (
        f"jax {jax.__version__}, jaxlib ",
        f"Python {platform.python_version()}",
        f"numpy     {np.__version__}",
    ):
        assert said in files["trace/versions.txt"]
    assert re.search(r"^kernels .*^command   program\.py 0 --data=x$", files["trace/versions.txt"], re.M | re.S)
    before, after = ((first / f"{when}.jaxpr").read_text() for when in ("before", "after"))
    assert "ta_" not in before and "ta_write" in after
    assert re.search(r"# .*program\.py:8", before)
    before, after = (hlo_text.Hlo((first / f"loops_{when}.hlo").read_text()) for when in ("before", "after"))
    assert len(before.loops) == len(after.loops) == 2
    for hlo in (before, after):
        called = {callee for found in hlo.computations.values() for i in found.values() for callee in i.callees()}
        assert set(hlo.loops) <= called & set(hlo.computations)


def test_what_cannot_be_written_is_said_before_the_program_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").touch()
    for options, text in (
        (["--trace", "full"], "--trace: full is not empty: it has mine.txt"),
        (["--trace", "program.py/x"], "--trace: cannot write to program.py/x: Not a directory"),
        (["--json", "no/report.json"], "--json: cannot write no/report.json: no such folder"),
        (["--html", "full"], "--html: cannot write full: it is a folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*options, "program.py"])
        assert text in capsys.readouterr().err
    assert sorted(file.name for file in (folder / "full").iterdir()) == ["mine.txt"]


def test_a_trace_says_why_in_place_failed(tmp_path, monkeypatch):
    def fails(f):
        raise ValueError("what is this?")

    with _trace.recorded() as programs, watch() as report:
        fresh(plain)(X)
    monkeypatch.setattr(_trace, "in_place", fails)
    _trace.write(tmp_path, [programs[0], programs[0]._replace(name="a/b", jaxpr=None)], report, "x")
    assert "ValueError: what is this?" in next(tmp_path.glob("01_*/error.txt")).read_text()
    assert "JAX had traced it before" in (tmp_path / "02_a_b" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("end", "code"), [("1 / 0", 1), ("sys.exit('no')", 1), ("sys.exit()", 0), ("raise KeyboardInterrupt", 130)]
)
def test_the_report_comes_however_the_program_ends(folder, capsys, end, code):
    script = folder / "ends.py"
    script.write_text(f"import sys, jax\njax.jit(lambda x: x + {code})(1)\n{end}\n")
    before = sys.argv, sys.path[:]
    assert main([str(script)]) == code
    assert (sys.argv, sys.path) == before
    report = capsys.readouterr().err
    assert re.search(r"[1-9] programs? (was|were) compiled, with 0 loops\.", report)
    assert ("ZeroDivisionError" in report) == (end == "1 / 0")
    assert ("no\n" in report) == ("no" in end)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no.py"], "there is no file no.py"),
        (["--min-bytes", "-1", "no.py"], "--min-bytes must not be negative"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_what_is_no_program_is_refused(capsys, arguments, text):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert text in capsys.readouterr().err


def loss(write, read, x):
    return jnp.sum(
        lax.fori_loop(1, len(x), lambda i, b: write(b, i, jnp.sin(read(b, i - 1) + read(b, i // 2))), x) ** 2
    )


def plain(x):
    return loss(lambda b, i, row: b.at[i].set(row), lambda b, i: b[i], x)


def ours(x):
    return loss(ta_write, ta_read, x)


def fresh(f):
    """A function that JAX has not compiled."""
    return jax.jit(lambda x: f(x))


X = np.linspace(0, 1, 300 * 32).reshape(300, 32)


def test_watching_sees_programs_of_a_block_and_of_nothing_else():
    with watch() as report:
        got = fresh(jax.grad(plain))(X)
        fresh(jax.grad(ours))(X)
    fresh(jax.grad(plain))(X)
    (case,) = report.cases
    assert {copy.shape for copy in case.copies} == {(300, 32)}
    assert {copy.steps for copy in case.copies} == {299}
    assert all(copy.code and copy.file == __file__ for copy in case.copies)
    report.try_in_place()
    assert case.trial.left == 0
    assert "under in_place: nothing left to copy" in str(report)
    np.testing.assert_allclose(got, jax.grad(plain)(X))


def test_a_line_is_listed_once_for_the_shape_that_costs_most():
    def train(x):
        return jax.grad(lambda x: loss(lambda b, i, row: b.at[i].set(row), lambda b, i: b[i], x))(x)

    with watch() as report:
        for n in (100, 300, 200):
            jax.jit(train)(jnp.ones((n, 32)))
    assert [case.copies[0].shape for case in report.cases] == [(300, 32), (200, 32), (100, 32)]
    text = " ".join(str(report).split())
    assert re.findall(r"\d\. train: ", text) == ["1. train: "]
    assert "(300, 32)" not in text and "float64[300, 32]" in text and "[200, 32]" not in text
    assert text.count("299 steps. It is compiled 3 times.") == len({copy.in_gradient for copy in report.copies})
    assert "are not listed" not in text


def test_what_is_slower_under_in_place_comes_first_and_none_left_is_no_praise():
    with watch() as report:
        fresh(jax.grad(plain))(X)
    assert report.try_in_place(timed=False) is report
    (case,) = report.cases
    assert "under in_place: nothing left to copy; not timed" in str(report)
    assert report.slower == []
    for after, first in (
        (0.020, "in_place makes these programs slower. Leave them unchanged:"),
        (0.011, "no faster"),
        (0.001, "fast"),
    ):
        case.trial = case.trial._replace(before=0.010, after=after)
        shown = [str(report), page(report, "a page").partition("<h1>")[2], report._repr_html_()]
        assert bool(report.slower) == (after == 0.020)
        assert str(report).startswith(first) == bool(report.slower)
        for text in shown:
            assert first in text
            assert ("To keep this" in text) == (after == 0.001)
            assert text.index("10 ms") < text.index("compiled") or not report.slower


def line_of(*programs):
    """The code that the report says to write for a jitted function, after a call."""
    with watch() as report:
        for program in programs:
            program()
    report.try_in_place(timed=False)
    lines = [case.trial.line for case in report.cases]
    assert all("To keep this, put " in line.said for line in lines)
    number = plain.__code__.co_firstlineno
    is_of_plain = rf"inside of jax.jit \(plain, .*test_command.py:{number}\):$"
    assert all(re.search(is_of_plain, line.said) for line in lines if "grad(plain)" in str(line.code))
    return [line.code for line in lines]


@functools.partial(jax.jit, static_argnames="n")
def decorated(x, *, n=300):
    return jax.grad(lambda x: jnp.sum(lax.fori_loop(1, n, lambda i, b: b.at[i].set(jnp.sin(b[i - 1]) + b[i // 2]), x)))(
        x
    )


def test_the_line_to_write_is_that_of_the_program():
    expected = ("@functools.partial(jax.jit, static_argnames='n')", "@in_place", "def decorated(x, *, n=300):")
    assert line_of(lambda: decorated(X)) == [expected]
    assert line_of(lambda: jax.jit(jax.grad(plain))(X)) == [("jax.jit(in_place(jax.grad(plain)))",)]
    assert line_of(lambda: jax.jit(lambda x: jax.grad(plain)(x))(X)) == [("jax.jit(in_place(lambda x: ...))",)]
    eager = line_of(lambda: jax.grad(plain)(X))
    assert eager and set(eager) == {()}  # it is not jitted


def test_the_line_to_write_is_that_of_the_framework():
    equinox, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")

    @equinox.filter_jit
    def of_equinox(net, x):
        return equinox.filter_grad(lambda net: plain(jax.vmap(net)(x)))(net)

    @nnx.jit
    def of_nnx(layer, x):
        return nnx.grad(lambda layer: plain(layer(x)))(layer)

    x = jnp.asarray(X, jnp.float32)
    net, layer = equinox.nn.Linear(32, 32, key=jax.random.key(0)), nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    assert line_of(lambda: of_equinox(net, x)) == [("@equinox.filter_jit", "@in_place", "def of_equinox(net, x):")]
    assert line_of(lambda: of_nnx(layer, x)) == [("@nnx.jit", "@in_place", "def of_nnx(layer, x):")]


def jitted_with_nnx(nnx, optax):
    """A step as users write it: it normalizes, counts its calls, and updates its parameters."""

    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return plain(self.norm(x))

    @nnx.jit
    def train_step(net, optimizer, x):
        value, grads = nnx.value_and_grad(lambda net: net(x))(net)
        optimizer.update(net, grads)
        return value

    net = Net()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    return train_step, net, optimizer, jnp.ones((100, 16), jnp.float32)


@pytest.mark.parametrize("is_traced_again", [True, False])
def test_the_line_to_write_is_that_of_a_whole_step(monkeypatch, is_traced_again):
    """It names file and line, also if only the finished program can be tried."""
    step, *args = jitted_with_nnx(pytest.importorskip("flax.nnx"), pytest.importorskip("optax"))
    if not is_traced_again:
        monkeypatch.setattr(_trial, "under_in_place", lambda *args: None)
    with watch() as report:
        step(*args)
    report.try_in_place(timed=False)
    (case,) = report.cases
    assert case.trial.line.code == ("@nnx.jit", "@in_place", "def train_step(net, optimizer, x):")
    assert re.search(r"put @in_place under @nnx.jit \(train_step, .*test_command.py:\d+\):", case.trial.line.said)
    assert case.trial.how.endswith("finished program") == (not is_traced_again)
    case.function = None
    said = _trial._line_otherwise(case).said
    assert re.search(r"directly inside your jit, around .* contains .*test_command.py:\d+\.$", said), said


def test_in_place_is_tried_though_it_is_off(monkeypatch):
    monkeypatch.setenv("JAX_TENSORARRAY_IN_PLACE", "0")
    with watch() as report:
        fresh(jax.grad(plain))(X)
    assert report.try_in_place(timed=False).cases[0].trial.left == 0
    assert "in_place is off (JAX_TENSORARRAY_IN_PLACE=0)" in " ".join(str(report).split())
    monkeypatch.delenv("JAX_TENSORARRAY_IN_PLACE")
    assert "in_place is off" not in str(report)


def test_the_second_run_is_under_in_place_though_it_is_off(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAX_TENSORARRAY_IN_PLACE", "0")
    found = []

    def run(command, environment):
        found.append(environment["JAX_TENSORARRAY_IN_PLACE"])
        empty = {"seconds": 2.0, "compiling": 1.0, "packages": [], "rewritten": [], "cases": []}
        folder = Path(command[command.index("--record") + 1])
        (folder / _command._JSON).write_text(json.dumps(empty))
        (folder / _command._FRAGMENT).write_text("")
        with _compare.recorded(folder / _command._RESULTS):
            return 0, ""

    monkeypatch.setattr(_compare, "run", run)
    assert main(["--compare", "program.py"]) == 0
    assert found == ["0", "1"]
    said = " ".join(capsys.readouterr().err.split())
    assert "off: JAX_TENSORARRAY_IN_PLACE=0 turns in_place off, and the run under in_place has turned it on." in said
    assert "1.0 s unchanged, 1.0 s under in_place, for the whole program with its imports, plus 1.0 s" in said


def test_runs_and_checks_have_one_tolerance():
    for dtype in ("float64", "float32", "bfloat16", "complex64"):
        relative, absolute = tolerance_of(dtype)
        before = np.array([4.0, 1.0])
        for part, is_wrong in ((0.9, False), (1.1, True)):
            after = before + np.array([0, part * (4 * relative + absolute)])
            assert _compare._wrong(before, after, dtype).tolist() == [False, is_wrong]
    assert _compare._wrong(np.array([1]), np.array([2]), "int4").all()
    x = jnp.array([3e38, 1.0], jnp.bfloat16)
    np.testing.assert_array_equal(_compare._sample(x), np.asarray(x, np.float32))


def test_what_grows_though_nothing_is_copied_is_measured_again(monkeypatch):
    jaxpr = jax.make_jaxpr(lambda x: lax.scan(lambda c, x: (c + x, c), 0.0, x))(jnp.ones(400))
    program = _trial._of_jaxpr(jaxpr, frozenset())
    busy = Measurement(1, 0.025, 0)
    for times, ratio, is_explained in (([0.001, 0.001, 0.004], 4, False), ([0.001] + 3 * [0.001, 0.02], 20, True)):
        left = iter(times)
        monkeypatch.setattr(_trial, "seconds_of", lambda *args, left=left: next(left))
        growth = program.grown(busy, doubts=True)
        assert growth.time_ratio == pytest.approx(ratio) and not [*left]
        monkeypatch.setattr(_trial, "_load", lambda: 1000.0)
        note = _trial._why_it_grows(growth, jaxpr)
        assert note.endswith("Run the doctor again when the machine is idle") == is_explained
        assert bool(note) == is_explained
    monkeypatch.setattr(_trial, "_load", lambda: 0.0)
    assert "may be chance" in _trial._why_it_grows(growth, jaxpr)
    attends = jax.make_jaxpr(lambda q: lax.scan(lambda c, i: (q @ c, None), q[0], jnp.arange(400)))(
        jnp.ones((400, 400))
    )
    assert "computes with all rows" in _trial._why_it_grows(growth, attends)


def test_the_line_to_write_is_that_of_haiku():
    hk = pytest.importorskip("haiku")
    f = hk.without_apply_rng(hk.transform(lambda x: plain(x @ hk.get_parameter("w", (32, 32), init=jnp.ones))))
    params = f.init(jax.random.key(0), jnp.asarray(X))
    assert line_of(lambda: jax.jit(jax.grad(f.apply))(params, X)) == [("jax.jit(in_place(jax.grad(f.apply)))",)]


#: A step that differentiates its loop inside: attention over a cache, of which some rows are masked.
TRAINING = """
import jax, jax.numpy as jnp
from jax import lax

N, D = 200, 32

def loss(w, xs):
    def step(i, c):
        cache, q = c
        scores = jnp.where(jnp.arange(N) < i, cache @ q, -1e9)
        q = jnp.tanh(w @ (xs[i] + jax.nn.softmax(scores) @ cache))
        return jnp.where(xs[i, 0] > -2, cache.at[i].set(q), cache), q

    cache, q = lax.fori_loop(1, N, step, (jnp.zeros((N, D)), xs[0]))
    return jnp.mean(cache**2)

@jax.jit
def train_step(w, xs):
    value, grad = jax.value_and_grad(loss)(w, xs)
    return w - 0.1 * grad, value

w, xs = jnp.eye(D) / 2, jax.random.normal(jax.random.key(0), (N, D))
for _ in range(3):
    w, value = train_step(w, xs)
print(f"{value:.4f}")
"""


def test_in_place_is_tried_on_the_function_that_was_jitted(folder, monkeypatch, capsys):
    """The finished gradient keeps the buffer for each step, whatever is done to it."""
    monkeypatch.chdir(folder)
    (folder / "training.py").write_text(TRAINING)
    assert main(["--json", "report.json", "training.py"]) == 0
    (case,) = json.loads((folder / "report.json").read_text())["cases"]
    before, after = case["in_place"]["memory"]
    assert after < before / 8
    assert case["in_place"]["after"] < case["in_place"]["before"]
    report = capsys.readouterr().err
    assert re.search(r"^trying in_place on \d programs? \(--no-trial skips this\)$", report, re.MULTILINE)
    keep = r"put @in_place under @jax\.jit \(train_step,\s+training\.py:17\):\n"
    keep += r" +@jax\.jit\n +@in_place\n +def train_step\(w, xs\):\n"
    assert re.search(keep, report), report
    assert "finished" not in report and report.count("Put in_place around the function: it writes one row") == 1
    kept = report[: report.index("the gradient keeps float")].splitlines()[-2]
    assert kept.strip().startswith("cache, q = lax.fori_loop(")  # not the line of the loss
    (folder / "repaired.py").write_text(
        TRAINING.replace("import jax,", "from jax_tensorarray import in_place\nimport jax,").replace(
            "@jax.jit\n", "@jax.jit\n@in_place\n"
        )
    )
    assert main(["--json", "after.json", "--no-trial", "repaired.py"]) == 0
    (repaired,) = json.loads((folder / "after.json").read_text())["cases"]
    assert len(repaired["copies"]) == case["in_place"]["left"] < len(case["copies"])  # it is what was tried


WRONG = """
import jax, jax.numpy as jnp

@jax.jit
def f(x):
    return {"a": 2 * x, "b": x.sum()}

is_rewritten = jax.jit.__code__.co_name == "jit_in_place" if hasattr(jax.jit, "__code__") else False
for i in range(5):
    x = jnp.arange(4.0)
    x = x.at[2].add(is_rewritten * (1e-6 if i < 3 else 0.5))
    f(x)
print("x", 3 + is_rewritten * 0.1)
raise SystemExit(STATUS)
"""


def test_comparing_names_the_first_value_that_differs(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    (folder / "wrong.py").write_text(WRONG.replace("STATUS", "0"))
    assert main(["--compare", "wrong.py"]) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "values: different, first in call 4 of f, result['a'][2]: 4.0 unchanged, 5.0 under in_place." in said
    assert "output: different, first in line 1: 'x 3.0' unchanged, 'x 3.1' under in_place" in said
    (folder / "wrong.py").write_text(WRONG.replace("STATUS", "3 * is_rewritten"))
    assert main(["--compare", "wrong.py"]) == 3
    said = capfd.readouterr().err
    assert "ended with status 3 under in_place and with status 0 unchanged. Nothing was compared." in said


def test_a_name_in_brackets_is_explained(capsys):
    assert main(["--why", "[whole-select]"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("whole-select\n") and "    def selected(b):" in shown and "```" not in shown
    with pytest.raises(SystemExit, match="2"):
        main(["--why", "whole-selekt"])
    error = capsys.readouterr().err
    assert "there is no tag 'whole-selekt'. The tags, the nearest first: whole-select, " in error
    assert set(_why.sections()) == {*ADVICE, *REASONS}
    assert all(name in error for name in _why.sections())


def test_links_have_the_address_of_the_site_if_there_is_one(monkeypatch):
    settings = (Path(__file__).parents[2] / "mkdocs.yml").read_text()
    site = re.search(r"^site_url: *(\S+)", settings, re.MULTILINE)
    assert site is None or site.group(1) == _links.SITE
    command = "python -m jax_tensorarray.doctor --why all-rows"
    assert _links.why("all-rows") == command  # nobody can open a placeholder
    monkeypatch.setattr(_links, "SITE", "https://example.org/jta/")
    assert _links.why("all-rows") == f"https://example.org/jta/reference/messages/#all-rows or {command}"


def test_help_has_an_example_and_the_name_by_which_it_was_called(monkeypatch, capsys):
    for called, name in (
        ("/bin/jax-tensorarray-doctor", "jax-tensorarray-doctor"),
        ("x", "python -m jax_tensorarray.doctor"),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        shown = capsys.readouterr().out
        assert f"{name} train.py --steps 1000" in shown
        assert re.search(r"SCRIPT +the program", shown) and re.search(r"ARGS +the arguments of the program", shown)


def test_results_are_frozen():
    with watch() as report:
        fresh(jax.grad(plain))(X)
    [copy, *_] = report.copies
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.kind = "select"
    with pytest.raises(TypeError, match="positional"):
        doctor.Kept("float32")
    for kind in (doctor.LoopCopy, doctor.Explained, doctor.ArgumentCopy, doctor.Kept, doctor.Growth, doctor.Report):
        fields = [field for field in dataclasses.fields(kind) if field.init]
        assert all(field.kw_only and not field.name.startswith("_") for field in fields)


def test_a_notebook_shows_the_page():
    with watch() as report:
        fresh(jax.grad(plain))(X)
    shown = report._repr_html_()
    assert shown.startswith('<div class="jta"><style>') and shown.endswith("</div>")
    assert "<body" not in shown
    assert '<span class="hit">' in shown
    assert "`" not in shown and "<code>b[i]</code>" in shown


@pytest.mark.parametrize(
    ("version", "flags", "says"),
    [
        ("0.11.1", "", True),
        ("0.11.1", "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0", False),
        ("0.11.2", "", False),
    ],
)
def test_it_warns_of_the_jaxlib_whose_own_loops_are_quadratic(monkeypatch, version, flags, says):
    monkeypatch.setattr(jaxlib.version, "__version__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    with watch() as report:
        jax.jit(lambda x: lax.fori_loop(0, 9, lambda i, x: x + i, x)).lower(1.0).compile()
    flag = "XLA_FLAGS=--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"
    assert report.loops == 1
    assert (flag in str(report).splitlines()) == (flag in page(report, "a page")) == says


def test_steps_of_nested_loops_are_multiplied_and_never_guessed():
    def twice(x):
        return jnp.sum(lax.fori_loop(0, 5, lambda _, x: lax.fori_loop(1, 300, body, x), x))

    def body(i, b):
        return b.at[i].set(jnp.sin(b[i - 1]) + b[i // 2])

    def while_it_is_small(x):
        return lax.while_loop(lambda c: c[1][c[0], 0] < 9, lambda c: (c[0] + 1, body(c[0], c[1]) + 0 * c[1]), (1, x))[1]

    with watch() as report:
        fresh(jax.grad(twice))(X)
    assert {copy.steps for copy in report.copies} == {5 * 299}
    with watch() as report:
        jax.jit(while_it_is_small).lower(X).compile()
    assert {copy.steps for copy in report.copies} == {None}
    report.try_in_place()
    (case,) = report.cases
    assert case.trial.before is None  # it might never end on zeros
    assert "steps that XLA cannot\n   count" in str(report) or "steps that XLA cannot count" in str(report)


def test_a_loop_counts_as_in_place_if_only_small_buffers_are_copied_in_it():
    def both(large, small):
        return plain(large) + plain(small)

    for min_bytes, in_place_ones in ((10_000, 2), (0, 0)):
        with watch(min_bytes=min_bytes) as report:
            fresh(lambda x: jax.grad(both, (0, 1))(x, x[:40, :4]))(X)
        assert (report.loops, report.in_place) == (4, in_place_ones)
        assert {copy.shape for copy in report.copies} == ({(300, 32)} if min_bytes else {(300, 32), (40, 4)})


def test_copies_can_be_forbidden():
    with forbid_copies():
        fresh(in_place(jax.grad(plain)))(X)
        fresh(jax.grad(ours))(X)
    with forbid_copies(min_bytes=10**6):
        fresh(jax.grad(plain))(X)
    f = fresh(jax.grad(plain))
    with (
        pytest.raises(LoopCopyError, match=r"(?s)forbid_copies: in .*test_command.py:\d+\n.*ta_write") as error,
        forbid_copies(),
    ):
        f(X)
    assert error.value.copies[0].shape == (300, 32)
    f(X)  # elsewhere it runs


def test_nothing_is_left_behind():
    def replaced():
        lower, compile_ = ("interpreters.mlir", "lower_jaxpr_to_module"), ("compiler", "compile_or_get_cached")
        return [*_compat.private_names(*lower), *_compat.private_names(*compile_), jax.jit]

    _compat.first_use()
    before = replaced()
    with watch():
        assert replaced() != before
    with pytest.raises(ZeroDivisionError), watch(), forbid_copies():
        1 / 0  # noqa: B018
    assert before == replaced()


def test_whoever_watches_longer_sees_what_others_do_not():
    with contextlib.ExitStack() as first:
        mine = first.enter_context(watch())
        theirs = watch()
        others = theirs.__enter__()
        fresh(plain)(X)
        first.close()
        fresh(jax.grad(plain))(X)
        theirs.__exit__(None, None, None)
    assert (mine.programs, mine.cases) == (1, [])
    assert [case.copies[0].shape for case in others.cases] == [(300, 32)]


def test_a_program_goes_on_where_its_hlo_cannot_be_read(monkeypatch):
    def fails(hlo, min_bytes, findings):
        raise ValueError("what is this?")

    monkeypatch.setattr("jax_tensorarray.doctor._watch.copies_in", fails)
    with watch() as report:
        fresh(plain)(X)
    assert (report.unread, report.cases) == (1, [])
    assert "(1 could not be read)" in str(report)


def test_pytest_has_a_marker_and_a_fixture(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["jax_tensorarray.pytest_plugin"]\n')
    tests = """
        import jax, jax.numpy as jnp, pytest

        def run(n):
            loss = lambda x: jax.lax.fori_loop(1, n, lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x).sum()
            jax.jit(jax.grad(loss))(jnp.ones((n, 16)))

        def test_free(): run(200)

        @pytest.mark.forbid_copies
        def test_marked(): run(201)

        @pytest.mark.forbid_copies(min_bytes=10**6)
        def test_marked_for_large_ones(): run(202)

        def test_asked(forbid_copies): run(203)
    """
    (tmp_path / "test_it.py").write_text(textwrap.dedent(tests))
    done = run(tmp_path, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "test_it.py")
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    failed = re.findall(r"^FAILED test_it\.py::(\w+) ", done.stdout, re.MULTILINE)
    assert set(failed) == {"test_marked", "test_asked"}
