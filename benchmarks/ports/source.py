"""A program as it is published, and what has to change in it: names by a table, lines by a list with reasons."""

import ast
import functools
import re
import subprocess
import sys
import textwrap
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environments import FOLDER
from benchmarks.ports.names import NAMES

WHEELS = FOLDER / "wheels"

#: A line that has to do with an array or a loop.
_OF_ARRAYS = re.compile(
    r"TensorArray|_ta\b|while_loop|fold[lr]|in tf\.range|max_steps|\bsize="
    r"|(?<!\btf)\.(?:read|write|gather|scatter|stack|unstack|size)\("
)
_COMMENT = re.compile(r"^ *#.*", re.MULTILINE)
_NAME = re.compile(r"\b(?:tf1?|ps)\.(?:\w+\.)*\w+")


class Wheel(NamedTuple):
    """A package on PyPI. The code for which Python and machine it was built does not matter: it is only read."""

    package: str
    version: str
    python: str = "3.10"

    def file(self) -> Path:
        """The wheel, downloaded if it is not there yet.

        Raises:
            subprocess.CalledProcessError: pip cannot download it.
        """
        pattern = f"{self.package}-{self.version}-*.whl"
        if not list(WHEELS.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
            kind = ["--no-deps", "--only-binary=:all:", "--platform=manylinux2014_x86_64", "--platform=any"]
            kind += [f"--python-version={self.python}", f"--dest={WHEELS}"]
            subprocess.run([*command, *kind, f"{self.package}=={self.version}"], check=True, timeout=300)
        return next(WHEELS.glob(pattern))

    def read(self, path: str) -> str:
        with zipfile.ZipFile(self.file()) as wheel:
            return wheel.read(path).decode()


class Change(NamedTuple):
    """Lines of a program, what is written instead, and why. `old` occurs `times` times."""

    old: str
    new: str
    why: str
    times: int = 1


class Program(NamedTuple):
    """A program, and what its port needs."""

    title: str
    wheel: Wheel
    #: path -> the functions, classes and methods (`Class.method`) taken from there
    parts: dict[str, Sequence[str]]
    changes: Sequence[Change]
    #: what the program finds under the names of its own package, from the operations of TensorFlow or ours
    own_names: Callable[[Any], dict[str, Any]]
    #: runs the program, from its names and the operations of TensorFlow or ours to arrays by name
    run: Callable[[Any, Any], dict[str, Any]]
    #: what rows of a result are that the original does not have, by the last word of its name; zeros if it is not there
    filler: dict[str, Any] = {}  # noqa: RUF012

    def source(self) -> str:
        return "\n\n".join(_definitions(self.wheel, path, tuple(names)) for path, names in self.parts.items())

    def original(self, ops: Any) -> dict[str, Any]:
        """The names of the program as it is."""
        names = {"tf": ops.tf, "tf1": ops.tf.compat.v1, **self.own_names(ops)}
        exec(compile(self.source(), self.title, "exec"), names)
        return names

    def port(self, ops: Any) -> dict[str, Any]:
        """The names of the program as it is ported."""
        names = {**ops.NAMESPACE, **self.own_names(ops)}
        exec(compile(renamed(self.changed()), self.title, "exec"), names)
        return names

    def changed(self) -> str:
        """The source with the changes made, and names as they were.

        Raises:
            ValueError: lines that are to change are not there as often as they should be.
        """
        source = self.source()
        for change in self.changes:
            if source.count(change.old) != change.times:
                raise ValueError(f"{self.title}: there {change.times} times are not {change.old!r}")
            source = source.replace(change.old, change.new)
        return source


class Count(NamedTuple):
    """Lines of code: without comments, docstrings and empty lines."""

    lines: int
    of_arrays: int
    renamed: int
    changed: int
    changed_of_arrays: int


def count(program: Program) -> Count:
    before, after = code_lines(program.source()), code_lines(program.changed())
    kept = Counter(before) & Counter(after)
    changes = [(lines_of(program, change), of_arrays(change)) for change in program.changes]
    return Count(
        lines=len(before),
        of_arrays=sum(bool(_OF_ARRAYS.search(line)) for line in before),
        renamed=sum(renamed(line) != line for line in kept.elements()),
        changed=sum(lines for lines, _ in changes),
        changed_of_arrays=sum(lines for lines, flag in changes if flag),
    )


def of_arrays(change: Change) -> bool:
    """Whether a change is one of an array or a loop, in its code."""
    return bool(_OF_ARRAYS.search(_COMMENT.sub("", change.old)) or _OF_ARRAYS.search(_COMMENT.sub("", change.new)))


def lines_of(program: Program, change: Change) -> int:
    """How many lines of code a change is, of the old ones or the new ones, whichever are more."""
    before, after = code_lines(program.source()), code_lines(program._replace(changes=[change]).changed())
    return max(len(before), len(after)) - sum((Counter(before) & Counter(after)).values())


def renamed(source: str) -> str:
    """The source with the names of TensorFlow replaced by those of JAX, of this library, and of `jax_ops`."""
    return _NAME.sub(lambda found: NAMES.get(found.group(), found.group()), source)


def unknown_names(program: Program) -> set[str]:
    """Names of TensorFlow in the port for which there is nothing else."""
    return {name for line in code_lines(program.changed()) for name in _NAME.findall(line) if name not in NAMES}


def own_operations(program: Program) -> set[str]:
    """Names of TensorFlow's in the port that JAX has under no name, so that a function stands for them."""
    found = {NAMES[name] for line in code_lines(program.changed()) for name in _NAME.findall(line) if name in NAMES}
    return {name for name in found if name.startswith("ops.")}


def code_lines(source: str) -> list[str]:
    """Lines that are neither empty nor comment nor docstring."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.split("\n"), 1)
    return [line for n, line in lines if n not in skipped and line.strip() and not line.lstrip().startswith("#")]


@functools.cache
def _definitions(wheel: Wheel, path: str, names: Sequence[str]) -> str:
    source = wheel.read(path)
    lines, module = source.split("\n"), ast.parse(source)
    found = [_found(module, name.split(".")) for name in names]
    return "\n\n\n".join(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in found)


def _found(scope: Any, path: Sequence[str]) -> Any:
    """The definition of a function, a class or a method."""
    for name in path:
        kinds = ast.FunctionDef | ast.ClassDef
        scope = next(node for node in scope.body if isinstance(node, kinds) and node.name == name)
    return scope
