"""The main job: what it prints, and when it fails."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_tensorarray import _selfcheck
from jax_tensorarray._selfcheck import Program, ours, programs
from jax_tensorarray.doctor import _header

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_32_bits():
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.fixture
def one_small_loop(monkeypatch):
    monkeypatch.setattr(_selfcheck, "programs", programs[2:3])
    monkeypatch.setattr(_selfcheck, "SIZES", (4, 64))


def row_of(output, name):
    return next(line for line in output.splitlines() if line.startswith(name + " "))


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
    for program in programs:
        assert f"  ok    {program.name}: the value and the gradient " in done.stdout
    assert max(map(len, lines)) <= 100
    assert not re.search(r"^[IWEF][0-9]{4} ", done.stderr, re.MULTILINE), done.stderr  # as XLA logs
    assert "Warning" not in done.stderr and "\r" not in done.stderr, done.stderr


def test_the_table_has_ratios_to_plain_jax(one_small_loop, capsys):
    assert _selfcheck.main([]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""  # no terminal, no progress
    assert max(map(len, output.partition("Checks:")[2].splitlines())) <= 100
    name, *sides = row_of(output, "read_then_write").split("|")
    theirs, *ours = (side.split() for side in sides)
    assert name.split() == ["read_then_write"] and int(theirs[2]) >= 1 and len(theirs) == 3
    for time, _, copies, faster in ours:
        assert copies == "0"
        assert float(faster) == pytest.approx(float(theirs[0]) / float(time), rel=0.1, abs=0.06)
    assert "With 16 times as many steps" in output


def test_absent_kernels_are_mentioned_once(one_small_loop, monkeypatch, capsys):
    monkeypatch.setattr(_header._kernels, "modules", {"cpu": None})
    monkeypatch.setattr(_header._kernels, "missing", {"_cuda": "No module named 'jax_tensorarray._cuda'"})
    _selfcheck.main(["--quick"])
    output = capsys.readouterr().out
    assert output.count("cuda") == output.count("not cuda (No module named 'jax_tensorarray._cuda')") + 1
    assert "the ops run as plain JAX there" in output


def test_a_failing_check_is_a_sentence_and_exit_code_1(monkeypatch, capsys):
    wrong = {
        "value": lambda ops, x: jnp.sum(x) + (1.0 if ops is ours else 0.0),
        "gradient": lambda ops, x: jnp.sum(jax.lax.stop_gradient(x) if ops is ours else x),
        "nan": lambda ops, x: jnp.sum(x) * (jnp.nan if ops is ours else 1.0),
    }
    odd = [Program(f"odd_{name}", "", f) for name, f in wrong.items()]
    monkeypatch.setattr(_selfcheck, "programs", (programs[2], *odd))
    monkeypatch.setattr(_selfcheck, "SIZES", (4, 64))
    assert _selfcheck.main([]) == 1
    output, errors = capsys.readouterr()
    for name, what in (("value", "value"), ("gradient", "gradient"), ("nan", "value")):
        assert f"FAIL  odd_{name}: the {what} of jax_tensorarray differs from plain JAX's by" in output
    assert "ok    read_then_write: the value and the gradient" in output
    assert "T=" not in output.replace("(T = 4)", "")
    assert errors == "3 of 4 checks failed, so nothing was timed.\n"


def test_help_names_the_loops(capsys):
    with pytest.raises(SystemExit) as stopped:
        _selfcheck.main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert all(f"{p.name} " in output and p.about in output for p in programs)


def test_progress_is_one_line_on_a_terminal(one_small_loop, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert _selfcheck.main([]) == 0
    errors = capsys.readouterr().err
    assert "\n" not in errors
    assert "compiling read_then_write, T = 64" in errors and "timing read_then_write, T = 4" in errors
    *shown, last = errors.split("\r")
    assert max(map(len, shown)) == 79 and last == ""
