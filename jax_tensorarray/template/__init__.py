"""Begin a JAX primitive of your own: `python -m jax_tensorarray.template DIR NAME` writes a package that works.

The template is the package in `project/`, which our tests build and run. To write another package, `write` replaces its
name. The pages *Write a primitive* explain each part, and why it is there.
"""

import functools
import importlib.util
import io
import keyword
import re
import sysconfig
import tokenize
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent / "project"

#: The name of the package in there and of its function, and a part of the names of its kernels.
NAME = "decay_row"


def write(folder: Path, name: str) -> list[Path]:
    """Write a package called `name` into `folder`, which is new or empty. Return its files, relative to `folder`.

    Raises:
        ValueError: `name` cannot be the name of such a package.
        FileExistsError: `folder` is not empty.
    """
    check_name(name)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} is there already, and nothing is overwritten: give a folder that is new or empty"
        )
    written = []
    for source in files():
        path = Path(renamed(str(source), name))
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(renamed((PROJECT / source).read_text(), name))
        written.append(path)
    return sorted(written)


def files() -> list[Path]:
    """Return the files of the template, relative to it, without what Python or a tool has left there."""
    found = (path.relative_to(PROJECT) for path in PROJECT.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.endswith(("cache", "cache__")) for part in path.parts))


def renamed(text: str, name: str) -> str:
    """Replace the name in a text: in code, in capitals for build options, and in the spelling of packages on PyPI."""
    spelled = {NAME: name, NAME.upper(): name.upper(), _on_pypi(NAME): _on_pypi(name)}
    for old, new in spelled.items():
        text = text.replace(old, new)
    return text


def check_name(name: str) -> None:
    """Raise ValueError, with the reason, if a package cannot have that name."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(
            "NAME must be in lower snake case, such as my_op, and no keyword of Python: words of letters a-z and "
            f"digits, a letter first, joined by single underscores; got {name!r}"
        )
    if place := _installed(name):
        raise ValueError(f"NAME must not be {name!r}, which would hide the module of that name ({place})")
    used = _used_names()
    taken = {word for word in used if NAME not in word}
    if any(renamed(word, name) in taken for word in used - taken):
        raise ValueError(f"NAME must not be {name!r}, which the package uses for something else: choose another name")


def _installed(name: str) -> str | None:
    """Return the place of the module of that name, or None if there is no such module.

    A folder without an `__init__.py` counts as one only if it is installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is not None:
        return None if spec is None else spec.origin
    site_packages = {sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")}
    places = spec.submodule_search_locations or []
    return next((place for place in places if str(Path(place).parent) in site_packages), None)


@functools.cache
def _used_names() -> frozenset[str]:
    """Return the names that a package uses: in its Python files, for its folders, and of its dependencies."""
    used = {name for path in files() if path.suffix == ".py" for name in _names((PROJECT / path).read_text())}
    used |= {path.parts[0] for path in files() if path.parent.parts}
    used |= set(re.findall(r"^/(\w+)/$", (PROJECT / ".gitignore").read_text(), re.MULTILINE))
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    needed = [*project["build-system"]["requires"], *project["project"]["dependencies"], "pytest"]
    used |= {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in needed}
    return frozenset(used)


def _names(code: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def _on_pypi(name: str) -> str:
    return name.replace("_", "-")
