"""What the documentation shows is true: its snippets run, print what it says, and nothing public is left out."""

import importlib.util
import inspect
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from snippets import snippets

import jax_tensorarray
from jax_tensorarray import doctor, residuals, tf

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


#: Modules with public names, and how the reference calls them.
MODULES = {
    jax_tensorarray: "jax_tensorarray",
    doctor: "doctor",
    residuals: "residuals",
    tf: "tf",
}

#: Libraries that a page may need and that are optional.
FRAMEWORKS = {"equinox", "flax", "haiku", "optax"}


def pages_with(fence):
    """All pages with such blocks. Pages that are notebooks too are tested as such."""
    pages = (page for page in PAGES if snippets(page, fence) and not page.with_suffix(".ipynb").exists())
    return [pytest.param(page, id=page.relative_to(DOCS).as_posix()) for page in pages]


@pytest.fixture(autouse=True)
def as_users_run_them():
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_snippets_of_a_page_print_what_it_says(page):
    names = {}
    for snippet in snippets(page, "python"):
        try:
            snippet.run(names)
        except ModuleNotFoundError as error:
            if error.name not in FRAMEWORKS:
                raise
            pytest.skip(f"{error.name} is not installed: pip install '.[test-frameworks]'")


@pytest.mark.parametrize("page", pages_with("py"))
@pytest.mark.filterwarnings("ignore")
def test_the_snippets_of_tensorflow_run_and_print_what_the_page_says(page):
    pytest.importorskip("tensorflow", reason="TensorFlow is an optional extra: pip install '.[tensorflow]'")
    names = {}
    for snippet in snippets(page, "py"):
        snippet.run(names)


def source_code():
    specification = importlib.util.spec_from_file_location("source_code", DOCS / "source_code.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def names_in_the_reference():
    return [name for page in source_code().REFERENCE for name in source_code().names(page.read_text())]


def test_every_public_name_is_in_the_reference():
    text = ""
    for page in source_code().REFERENCE:
        assert source_code().with_names(page.read_text()) == page.read_text(), "run python docs/source_code.py"
        text += page.read_text()
    for module, prefix in MODULES.items():
        prefix = "jax_tensorarray" if module is jax_tensorarray else f"jax_tensorarray.{prefix}"
        named = {name for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
        missing = {f"{prefix}.{name}" for name in named} - {*names_in_the_reference()}
        assert all(f"`{name}`" in text for name in missing), missing  # in a sentence: a base class, a second name
    for name in jax_tensorarray.primitives.__all__:
        assert name in text


def test_the_reference_says_of_each_name_whether_it_is_stable():
    assert {name.rpartition(".")[2] for name in names_in_the_reference()} >= source_code().EXPERIMENTAL


def test_the_site_shows_the_docstring_of_each_name_of_the_reference():
    for page in source_code().REFERENCE:
        shown = re.findall(r"^::: (\S+)$", source_code().with_docstrings(page.read_text()), re.MULTILINE)
        assert shown == source_code().names(page.read_text()) != []


#: Of `tf.TensorArray`.
METHODS = {
    *("close", "concat", "dtype", "dynamic_size", "element_shape", "flow", "gather", "grad", "handle", "identity"),
    *("read", "scatter", "size", "split", "stack", "unstack", "write"),
}


def test_the_table_for_tensorflow_has_every_method():
    first_columns = re.findall(r"^\| (.*?) \|", (DOCS / "reference/tensorflow.md").read_text(), re.MULTILINE)
    for name in METHODS:
        assert any(re.search(rf"`\.{name}(\(.*\))?`", column) for column in first_columns), name


def test_the_beam_search_for_tensorflow_finds_the_best_sentences():
    (page,) = (page for page in PAGES if page.relative_to(DOCS).as_posix() == "how-to/tensorflow.md")
    (recipe,) = (snippet for snippet in snippets(page, "python") if "def beam_search" in snippet.code)
    beam_search = recipe.run({"jax": jax, "jnp": jax.numpy, "tf": tf})["beam_search"]
    words, steps = 3, 4
    chances = np.random.default_rng(0).dirichlet(np.ones(words), words)

    def probability(sentence):
        return np.prod([chances[a, b] for a, b in itertools.pairwise([0, *sentence])])

    every = sorted(map(probability, itertools.product(range(words), repeat=steps)), reverse=True)
    beams = words ** (steps - 1)  # with so many no prefix is left out
    sentences, found = jax.jit(beam_search, static_argnums=(1, 2))(np.log(chances), steps, beams)
    np.testing.assert_allclose(found, every[:beams], rtol=1e-5)
    np.testing.assert_allclose(found, [probability(sentence) for sentence in np.asarray(sentences)], rtol=1e-5)
    assert len(np.unique(sentences, axis=0)) == beams


def test_these_are_all_methods_that_tensorflow_has():
    tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is an optional extra")
    assert {name for name in dir(tensorflow.TensorArray) if not name.startswith("_")} == METHODS


def test_the_code_and_files_that_pages_name_are_there():
    with_code, files_named = source_code().with_code, source_code().files_named
    assert "ad.instantiate_zeros, cts" in (DOCS / "primitive/rules.md").read_text()
    for page in PAGES:
        text = page.read_text()
        assert with_code(text) == text, f"{page.name}: run python docs/source_code.py"  # or it is not there
        for file in files_named(text, page):
            assert file.is_file(), f"{page.name}: {file}"


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    named = re.findall(r"(\w[\w/-]*\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == [
        page.relative_to(DOCS).as_posix() for page in sorted(PAGES, key=lambda page: page.as_posix())
    ]


def test_the_addresses_of_the_project_are_written_in_one_place():
    settings = (DOCS.parent / "mkdocs.yml").read_text()
    assert re.search(r"^site_url: https://", settings, re.MULTILINE)
    assert re.search(r"^repo_url: https://", settings, re.MULTILINE)
