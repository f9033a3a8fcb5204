"""Public TensorFlow programs and their literal ports give the same, and the guide counts the lines that change.

The programs come from PyPI, and are not kept here.
"""

import subprocess
import warnings
from pathlib import Path

import jax
import pytest

from benchmarks.ports import source
from benchmarks.ports.report import PROGRAMS, reasons, table

GUIDE = (Path(__file__).parent.parent / "docs" / "porting.md").read_text()


@pytest.fixture(params=PROGRAMS)
def program(request):
    found = PROGRAMS[request.param]
    try:
        found.wheel.file()
    except subprocess.SubprocessError:
        pytest.skip(f"{found.wheel.package} {found.wheel.version} cannot be downloaded")
    return found


def test_the_port_compiled_gives_what_the_program_gives_in_tensorflow(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tensorflow", reason="pip install 'jax-tensorarray[tensorflow]'")
        from benchmarks.ports.__main__ import compared

        with jax.enable_x64(False):  # as users run it, and as the numbers of TensorFlow are
            assert not compared(program)


def test_every_name_of_tensorflow_in_the_port_has_another_one(program):
    assert not source.unknown_names(program)


def test_the_guide_has_the_lines_that_change(program):
    titles = program.title, program.title.partition("'")[0]
    for made in (table([program]), reasons([program])):
        rows = [line for line in made.split("\n") if line.startswith(tuple(f"| {title}" for title in titles))]
        assert rows
        for row in rows:
            assert row in GUIDE


def test_a_change_that_does_not_fit_the_program_is_an_error(program):
    change = source.Change("no line of the program", "", "never")
    with pytest.raises(ValueError, match="no line of the program"):
        program._replace(changes=[change]).changed()
