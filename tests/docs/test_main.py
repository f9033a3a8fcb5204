"""The main job: what it prints, when it fails, and what it draws."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_tensorarray._selfcheck import measure
from jax_tensorarray._selfcheck import report as main_job
from jax_tensorarray._selfcheck.programs import Program, ours, programs
from jax_tensorarray.inspect import _header


@pytest.fixture(autouse=True)
def in_32_bits():
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.fixture
def two_small_loops(monkeypatch):
    monkeypatch.setattr(main_job, "programs", {name: programs[name] for name in ("write", "issue_15906")})
    monkeypatch.setattr(main_job, "SIZES", (4, 16, 64))
    monkeypatch.setattr(main_job, "SIZES_15906", (4, 16, 64))


def row_of(output, name):
    return next(line for line in output.splitlines() if line.startswith(name + " "))


@pytest.mark.slow
def test_as_a_command_it_names_versions_kernels_and_a_handful_of_loops(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jax_tensorarray", "--quick"],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # not a source checkout, whose package has no compiled module
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},  # as users run it
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("jax_tensorarray ") and f"jax {jax.__version__}" in lines[0]
    assert re.search(r"^devices +cpu:0", done.stdout, re.MULTILINE)
    assert re.search(r"^kernels +cpu", done.stdout, re.MULTILINE)
    assert "FAIL" not in done.stdout
    for name in programs:
        assert row_of(done.stdout, name)
    assert max(map(len, lines)) <= 100
    assert not re.search(r"^[IWEF][0-9]{4} ", done.stderr, re.MULTILINE), done.stderr  # as XLA logs
    assert "Warning" not in done.stderr and "\r" not in done.stderr, done.stderr


def test_the_table_is_printed_and_the_plot_is_drawn(two_small_loops, tmp_path, capsys):
    file = tmp_path / "times.png"
    assert main_job.main(["--plot", str(file)]) == 0
    output = capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG") and str(file) in output
    assert "T=64 grows copies |" in output
    name, *sides = row_of(output, "write").split("|")
    assert name.split() == ["write"]
    theirs, *ours = (side.split() for side in sides)
    assert len(theirs) == 3 and int(theirs[2]) >= 1
    for time, _, copies, faster in ours:
        assert copies == "0"
        assert float(faster) == pytest.approx(float(theirs[0]) / float(time), rel=0.1, abs=0.06)
    assert "Second order" in output
    assert "With 16 times as many steps" in output


def test_absent_kernels_are_mentioned_once(two_small_loops, monkeypatch, capsys):
    monkeypatch.setattr(_header._kernels, "modules", {"cpu": None})
    monkeypatch.setattr(_header._kernels, "missing", {"_cuda": "No module named 'jax_tensorarray._cuda'"})
    main_job.main(["--quick"])
    output = capsys.readouterr().out
    assert output.count("cuda") == output.count("not cuda (No module named 'jax_tensorarray._cuda')") + 1
    assert "the ops run as plain JAX there" in output


def test_a_run_predicted_to_be_slow_is_left_out_and_said(two_small_loops, monkeypatch, capsys):
    monkeypatch.setattr(main_job, "programs", {"write": programs["write"]})
    for module in (main_job, measure):
        monkeypatch.setattr(module, "LONGEST_RUN", 0.0)
    assert main_job.main([]) == 0
    output = capsys.readouterr().out
    assert row_of(output, "write").split("|")[1].split()[:2] == ["-", "-"]
    assert "-: left out, since it was predicted to take more than 0 s." in output


def test_a_failing_check_is_a_sentence_and_exit_code_1(monkeypatch, capsys):
    wrong = {
        "value": lambda ops, x: jnp.sum(x) + (1.0 if ops is ours else 0.0),
        "gradient": lambda ops, x: jnp.sum(jax.lax.stop_gradient(x) if ops is ours else x),
        "nan": lambda ops, x: jnp.sum(x) * (jnp.nan if ops is ours else 1.0),
    }
    odd = {name: Program(f"odd_{name}", "", f) for name, f in wrong.items()}
    monkeypatch.setattr(main_job, "programs", {"write": programs["write"], **odd})
    assert main_job.main(["--quick"]) == 1
    output, errors = capsys.readouterr()
    for name, what in (("value", "value"), ("gradient", "gradient"), ("nan", "value")):
        assert f"FAIL  odd_{name}: the {what} of jax_tensorarray differs from plain JAX's by" in output
    assert "write: the value and the gradient" in output
    assert errors == "3 of 5 checks failed, so nothing was timed.\n"


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main_job.main(["--plot", "times.png"]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == "--plot needs matplotlib. Run `pip install 'jax-tensorarray[plot]'`.\n"


@pytest.mark.parametrize(
    ("file", "sentence"), [("times.doc", "must end in one of"), ("no/such/folder/times.png", "there is no folder")]
)
def test_plot_refuses_a_file_it_cannot_write_before_it_works(file, sentence, tmp_path, capsys):
    assert main_job.main(["--plot", str(tmp_path / file)]) == 1
    output, errors = capsys.readouterr()
    assert output == "" and sentence in errors


def test_help_names_the_loops(capsys):
    with pytest.raises(SystemExit) as stopped:
        main_job.main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert all(f"{p.name} " in output and p.about in output for p in programs.values())


def test_progress_is_one_line_on_a_terminal(two_small_loops, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(measure.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    assert main_job.main(["--quick"]) == 0
    errors = capsys.readouterr().err
    assert "\n" not in errors
    assert "compiling write, T = 16" in errors and "timing write, T = 16" in errors
    shown = errors.split("\r")
    assert max(map(len, shown)) == 79
    assert max(int(done) for done in re.findall(r"(\d+)/18 ", errors)) == 18
    assert shown[-1] == ""


def test_in_a_pipe_progress_is_a_line_now_and_then(two_small_loops, monkeypatch, capsys):
    monkeypatch.setattr(measure.Progress, "SECONDS", 0.0)
    assert main_job.main(["--quick"]) == 0
    errors = capsys.readouterr().err
    assert "\r" not in errors
    assert all(re.fullmatch(r"\d+/18  \d+ s  (compiling|timing) \w+, T = 16", line) for line in errors.splitlines())
    assert len(errors.splitlines()) == 18


@pytest.mark.parametrize(
    ("repeated", "shown"),
    [([1.0, 16.0], "1.0"), ([1.0, 64.0, 1.0, 64.0, 1.0, 64.0], "4.0"), ([1.0, 16.0 * 9, 3.0, 16.0 * 9] * 2, "~4.0")],
    ids=["it was noise", "it is so", "it is noisy"],
)
def test_a_growth_that_is_neither_linear_nor_quadratic_is_measured_again(repeated, shown, monkeypatch):
    case = measure.Case(programs["write"], measure.gradient, (2,), (1, 16))
    keys = {measure.Key(case, measure.OURS, T): None for T in case.sizes}
    seconds = iter([*repeated, *[1.0, 64.0] * 9])
    monkeypatch.setattr(measure, "seconds_of", lambda *_: next(seconds) / 1e6)
    times = [1.0, 4.0]
    is_noisy = measure.repeat(case, measure.OURS, keys, times)
    assert main_job._factor(measure.Measured(times, 0, 0).growth, is_noisy=is_noisy) == shown
