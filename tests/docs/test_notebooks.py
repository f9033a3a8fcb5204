"""The notebooks are those of their pages, and their cells run and print what they show. Jupyter is not needed."""

import contextlib
import importlib.util
import io
import json
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def notebooks():
    specification = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


MODULE = notebooks()


@pytest.mark.parametrize("file", MODULE.NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_is_that_of_its_page(file):
    assert MODULE.notebook(file.with_suffix(".md").read_text()) == file.read_text(), "run python docs/notebooks.py"


@pytest.mark.parametrize("file", MODULE.NOTEBOOKS, ids=lambda file: file.name)
def test_the_cells_of_a_notebook_run_and_print_what_they_show(file):
    pytest.importorskip("optax", reason="optax is not installed: pip install '.[test-frameworks]'")
    made, names = json.loads(file.read_text()), {}
    cells = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert made["nbformat"] == 4 and len(cells) > 2
    with jax.enable_x64(False):
        for cell in cells:
            printed, shown = io.StringIO(), "".join(text for out in cell["outputs"] for text in out["text"])
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), file.name, "exec"), names)
            assert not shown or printed.getvalue() == shown
