"""What is written in more than one place is the same in all: versions, pins, and what a release is made of."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jax_tensorarray
from jax_tensorarray import __version__, _kernels

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "cuda13").exists(), reason="needs the sources of the build")


def settings(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def written_in(file, pattern):
    (found,) = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
    return found


def test_the_version_of_both_packages_is_read_where_it_is_written():
    for folder in (".", "cuda13"):
        config = settings(folder)
        assert "version" in config["project"]["dynamic"]
        file = ROOT / folder / config["tool"]["scikit-build"]["metadata"]["version"]["input"]
        assert file.resolve() == (ROOT / "jax_tensorarray" / "__init__.py").resolve()
    assert written_in("jax_tensorarray/__init__.py", r'^__version__ = "(.+)"$') == __version__


def test_the_changelog_and_the_citation_are_of_this_version():
    assert written_in("CITATION.cff", r"^version: (.+)$") == __version__
    newest = re.search(r"^## \[(.+?)\](?: - \d{4}-\d{2}-\d{2})?\n\n(.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == __version__ or (newest[1] == "Unreleased" and __version__ in newest[2])


def test_the_plugin_needs_this_package_in_its_own_version_and_has_the_right_name():
    config = settings("cuda13")
    assert config["project"]["name"].replace("-", "_") == _kernels.PLUGIN
    assert config["tool"]["scikit-build"]["metadata"]["dependencies"]["result"] == [
        "jax-tensorarray[cuda13]=={project[version]}"
    ]
    assert "cuda13" in settings(".")["project"]["optional-dependencies"]
    built = config["tool"]["scikit-build"]
    assert built["cmake"]["define"]["JAX_TENSORARRAY_PACKAGE"] == _kernels.PLUGIN
    (generated,) = built["generate"]
    assert generated["path"] == f"{_kernels.PLUGIN}/__init__.py"
    names = {}
    exec(generated["template"].replace("${version}", "1.2.3"), names)
    assert names["__version__"] == "1.2.3"


def test_both_packages_are_for_the_same_pythons_headers_and_compiler():
    main, plugin = settings("."), settings("cuda13")
    assert main["project"]["requires-python"] == plugin["project"]["requires-python"]
    assert main["tool"]["scikit-build"]["wheel"]["packages"] == ["jax_tensorarray"]
    assert plugin["tool"]["scikit-build"]["wheel"]["packages"] == []
    assert {p["tool"]["scikit-build"]["wheel"]["py-api"] for p in (main, plugin)} == {"cp312"}
    (pin,) = (p for p in main["build-system"]["requires"] if p.startswith("jaxlib"))
    assert pin in plugin["build-system"]["requires"]
    oldest = pin.replace("jaxlib==", "jax>=")
    assert oldest in main["project"]["dependencies"]
    compiler = {p for p in plugin["build-system"]["requires"] if p.startswith("nvidia-")}
    (override,) = main["tool"]["scikit-build"]["overrides"]
    assert compiler == set(override["build"]["requires"])
    assert compiler == set(re.findall(r"'(nvidia-.+?)'", (ROOT / "CMakeLists.txt").read_text()))


def test_wheels_for_pypi_are_tested_with_files_that_are_there():
    for command in settings(".")["tool"]["cibuildwheel"]["test-command"]:
        for file in re.findall(r"\S+\.py\b", command):
            assert (ROOT / file).exists(), file
    for file in settings(".")["tool"]["cibuildwheel"]["test-sources"]:
        assert (ROOT / file).exists(), file


WORKFLOWS = [*ROOT.glob(".github/workflows/*.yml"), *ROOT.glob("template/.github/workflows/*")]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_workflow_pins_its_actions_by_hash_and_says_what_it_may_do(file):
    text = file.read_text()
    assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE)
    actions = re.findall(r"^ *- uses: (.*)$", text, re.MULTILINE)
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_an_action_has_one_version():
    found = {action for file in WORKFLOWS for action in re.findall(r"uses: (.*)", file.read_text())}
    assert len(found) == len({action.split("@")[0] for action in found})


def test_linters_have_the_same_versions_in_ci_before_a_commit_and_by_hand():
    pin = re.compile(r"\b(ruff|mypy|clang-format)==([0-9.]+)")
    files = (".ci/run", ".pre-commit-config.yaml", "CONTRIBUTING.md")
    ci, *others = (set(pin.findall((ROOT / file).read_text())) for file in files)
    assert len(ci) == 3
    assert all(versions == ci for versions in others)


def test_the_oldest_jax_of_the_nightly_suite_is_the_oldest_that_is_supported():
    (command,) = re.findall(r"python\" -c '(import re\n.*?)'\)$", (ROOT / ".ci/nightly").read_text(), re.M | re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    (pin,) = (p for p in settings(".")["build-system"]["requires"] if p.startswith("jaxlib=="))
    assert f"jaxlib=={printed.stdout.strip()}" == pin


def test_a_script_that_is_given_another_word_says_what_it_takes():
    done = subprocess.run([ROOT / ".ci/nightly", "latest"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "usage: .ci/nightly nightly|newest|oldest [arguments of pytest]\n"


def test_the_package_is_described_in_one_sentence():
    (sentence,) = {
        settings(".")["project"]["description"],
        (jax_tensorarray.__doc__ or "").split("\n")[0],
        written_in("mkdocs.yml", r"^site_description: (.+)$"),
        written_in("CITATION.cff", r"^title: \"jax_tensorarray: (.+)\"$"),
    }
    assert sentence.endswith(".")
