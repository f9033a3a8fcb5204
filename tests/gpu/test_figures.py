"""No step touches a whole buffer, or costs more than figures.json says, or less: a better figure is committed too."""

from itertools import product

import figures
import jax.numpy as jnp
import pytest
from in_place import compiled
from jax import lax

from jax_tensorarray._hlo import text as hlo_text

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("fusions_of_users")
def test_figures_are_those_that_are_committed():
    """Those of a GPU: test_gpu_hlo."""
    kind = figures.KINDS["cpu"]
    if reason := kind.why_not():
        pytest.skip(reason)
    version, committed = kind.version(), figures.committed().get("cpu", {})
    assert not [program for program, figure in kind.count().items() if figure["whole buffer"]]  # on any version
    if version not in committed:
        pytest.skip(f"there are figures for {', '.join(committed) or 'nothing'}, not for {version}: {figures.COMMAND}")
    changed = figures.differences(committed[version], kind.count())
    assert not changed, "\n".join([*changed, f"If this is meant: {figures.COMMAND}"])


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_there_is_a_figure_for_each_program_and_for_nothing_else(kind):
    for figures_of in figures.committed()[kind].values():
        assert list(figures_of) == [f"{name}, {by}" for name, by in product(figures.FUNCTIONS, figures.TRANSFORMS)]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"write": {"all": 2}}, {"write": {"all": 2}}, []),
        ({"write": {"all": 2, "copy": 2}}, {"write": {"all": 1, "copy": 1}}, ["write: all 2 -> 1, copy 2 -> 1"]),
        ({"write": {"all": 1}}, {"read": {"all": 2}}, ["write: 1 all -> nothing", "read: nothing -> 2 all"]),
    ],
)
def test_what_differs_is_said(before, now, said):
    assert figures.differences(before, now) == said


def test_operations_on_a_whole_buffer_are_counted_apart():
    def f(x):
        return lax.fori_loop(0, 50, lambda i, b: jnp.sin(b) + i, x)

    x = jnp.zeros((100, 64))
    text = compiled(f, x).as_text()
    assert figures.operations(list(hlo_text.operations_in_loops(text)), text, x.nbytes)["whole buffer"] == 1


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "COMMITTED", tmp_path / "figures.json")
    written = {"cpu": {"jax 0.12": {"write": {"all": 1}, "read": {"all": 2}}, "jax 0.10": {}}, "gpu": {}}
    figures.write(written)
    assert figures.committed() == written
