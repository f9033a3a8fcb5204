"""`python -m jax_tensorarray.template` writes a package, or says why it cannot. CI builds and tests such a package."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_tensorarray import template

REPOSITORY = Path(__file__).parents[2]
NAME = "q8_gather2_x"


def imported(code):
    """The packages that a Python file imports something of."""
    nodes = list(ast.walk(ast.parse(code)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[0] for module in modules}


def test_a_package_is_written_and_the_next_two_commands_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["template", "new", NAME])
    monkeypatch.delitem(sys.modules, "jax_tensorarray.template")
    runpy.run_module("jax_tensorarray.template", run_name="__main__")
    shown = capsys.readouterr().out
    written = {str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert set(re.findall(r"^  (\S+)$", shown, re.MULTILINE)) == written
    assert {f"{NAME}/_op.py", f"tests/test_{NAME}.py", "pyproject.toml", ".gitignore", "csrc/cuda.cu"} <= written
    assert f"  {NAME.upper()}_CUDA=OFF python -m pip install -e './new[test]'\n  python -m pytest ./new\n" in shown


def test_a_clone_writes_a_package_without_an_installation(tmp_path):
    script = REPOSITORY / "jax_tensorarray" / "template.py"
    command = [sys.executable, "-S", script, tmp_path / "new", NAME]  # no site-packages, so no jax either
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "new" / NAME / "_op.py").exists()


def test_the_name_is_everywhere_and_that_of_the_template_nowhere(tmp_path):
    template.write(tmp_path, NAME)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert not re.search(r"decay.row", str(path.relative_to(tmp_path)) + path.read_text(), re.IGNORECASE), path
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert project["project"]["name"] == "q8-gather2-x"
    assert project["tool"]["scikit-build"]["wheel"]["packages"] == [NAME]
    assert f'{{"{NAME}_update", update}}' in (tmp_path / "csrc" / "handlers.h").read_text()
    assert "set(Q8_GATHER2_X_CUDA AUTO" in (tmp_path / "CMakeLists.txt").read_text()


def test_the_template_is_the_package_of_its_own_name(tmp_path):
    for path in template.write(tmp_path, template.NAME):
        assert (tmp_path / path).read_bytes() == (template.PROJECT / path).read_bytes()


def test_the_code_compiles_and_needs_nothing_but_jax(tmp_path):
    known = {NAME, f"test_{NAME}", "helpers", "jax", "jaxlib", "numpy", "pytest"}
    template.write(tmp_path, NAME)
    for path in tmp_path.rglob("*.py"):
        code = path.read_text()
        compile(code, path, "exec")
        assert imported(code) <= known | sys.stdlib_module_names, path
        assert "jax._src" not in code, path


def test_it_is_built_with_the_oldest_jax_that_it_and_this_library_support():
    ours, its = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (REPOSITORY, template.PROJECT))
    assert its["build-system"] == ours["build-system"]
    assert its["project"]["dependencies"] == ours["project"]["dependencies"]
    assert its["project"]["requires-python"] == ours["project"]["requires-python"]


def test_the_licence_is_one_to_fill_in(tmp_path):
    template.write(tmp_path, NAME)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["license"] == "MIT" and project["license-files"] == ["LICENSE"]
    assert "Copyright (c) YEAR YOUR NAME" in (tmp_path / "LICENSE").read_text()


#: Words of Python, and names that the package uses for something else: modules, arguments, folders.
TAKEN = ["class", "nonlocal", "json", "jax", "pytest", "jax_tensorarray", "buffer", "sum", "csrc", "build", "package"]
REFUSED = {
    "lower snake case, such as my_op.* got {}": ["Op", "my-op", "9op", "_op", "op_", "my__op", "a b", "für", "op\n"],
    "must not be {}, a word of Python or of the files of the package": TAKEN,
}


@pytest.mark.parametrize(("text", "name"), [(text, name) for text, names in REFUSED.items() for name in names])
def test_a_name_that_cannot_be_that_of_a_package_is_refused(tmp_path, text, name):
    with pytest.raises(ValueError, match=text.format(re.escape(repr(name)))):
        template.write(tmp_path, name)
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for folder in (tmp_path, mine):
        with pytest.raises(SystemExit):
            template.main([str(folder), NAME])
        assert "is there already, and nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert mine.read_text() == "mine"


def test_an_installed_library_has_the_template_beside_itself(tmp_path):
    """Whatever is called `template` in `site-packages` is not ours."""
    shutil.copytree(template.PROJECT, tmp_path / "jax_tensorarray" / "_template")
    (tmp_path / "template").mkdir()
    script = shutil.copy(template.__file__, tmp_path / "jax_tensorarray")
    subprocess.run([sys.executable, "-S", script, tmp_path / "new", NAME], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "new" / NAME / "_op.py").exists()
