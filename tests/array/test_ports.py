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

pytestmark = pytest.mark.slow(but=5)

GUIDE = (Path(__file__).parents[2] / "benchmarks" / "results" / "ports.md").read_text()


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


def test_tensorflows_xla_gives_no_row_of_an_array_that_grows_in_a_loop():
    """The guide says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf = pytest.importorskip("tensorflow", reason="pip install 'jax-tensorarray[tensorflow]'")

        def f(n):
            ta = tf.TensorArray(tf.float32, size=0, dynamic_size=True, element_shape=[])
            body = lambda i, ta: (i + 1, ta.write(i, 1.0))  # noqa: E731
            return tf.while_loop(lambda i, _: i < n, body, (0, ta), maximum_iterations=5)[1].stack()

        assert tf.function(f)(tf.constant(3)).shape == (3,)
        assert tf.function(f, jit_compile=True)(tf.constant(3)).shape == (0,)


def test_every_name_of_tensorflow_in_the_port_has_another_one(program):
    assert not source.unknown_names(program)


def test_the_guide_has_the_lines_that_change(program):
    *_, counted = table([program]).split("\n")
    _, _, *changes = reasons([program]).split("\n")
    name = program.title.partition("'")[0]
    for row in (counted, *changes):
        assert f"{row}\n" in GUIDE
    assert GUIDE.count(f"\n| {name} | ") == len(changes)


def test_a_change_that_does_not_fit_the_program_is_an_error(program):
    change = source.Change("no line of the program", "", "never")
    with pytest.raises(ValueError, match="no line of the program"):
        program._replace(changes=[change]).changed()
