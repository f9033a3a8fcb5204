"""Begin a JAX primitive of your own: `python -m jax_tensorarray.template DIR NAME` writes a package that works.

The template is the package in the folder `template` of the repository, which our tests build and run. To write another
package, `write` replaces its name. The pages *Write a primitive* explain each part, and why it is there.
"""

import argparse
import keyword
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# Nothing here imports the library: `python jax_tensorarray/template.py` needs no installation.

#: The template in a checkout, and in a wheel: see CMakeLists.txt. A checkout has no `_template`. Beside an installed
#: library, `template` may be anything.
_IN_CHECKOUT = Path(__file__).parents[1] / "template"
_INSTALLED = Path(__file__).with_name("_template")
PROJECT = _INSTALLED if _INSTALLED.is_dir() else _IN_CHECKOUT

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
    """Return the files of the template, relative to it, without caches."""
    paths = (path.relative_to(PROJECT) for path in PROJECT.rglob("*") if path.is_file())
    return sorted(path for path in paths if not any(part.endswith(("cache", "cache__")) for part in path.parts))


def renamed(text: str, name: str) -> str:
    """Replace the name in a text: in code, in capitals for build options, and in the spelling of packages on PyPI."""
    spelled = {NAME: name, NAME.upper(): name.upper(), _on_pypi(NAME): _on_pypi(name)}
    for old, new in spelled.items():
        text = text.replace(old, new)
    return text


def check_name(name: str) -> None:
    """Raise ValueError, with the reason, if a package cannot have that name."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"NAME must be in lower snake case, such as my_op, a letter first; got {name!r}")
    words = {word for file in files() for word in re.findall(r"\w+", (PROJECT / file).read_text())} - {NAME}
    if name in words | sys.stdlib_module_names | {*keyword.kwlist}:
        raise ValueError(f"NAME must not be {name!r}, a word of Python or of the files of the package: choose another")


def _on_pypi(name: str) -> str:
    return name.replace("_", "-")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the package that the arguments ask for, and say how to build and test it."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray.template",
        description="Write a package with two JAX primitives: one updates a row of a buffer in place, one reduces all "
        "rows. The package has the rules for derivatives and vmap, kernels for CPU and CUDA, tests, and a build of "
        "wheels. It builds and passes its tests as written, so change it step by step. It needs jax, but not "
        "jax_tensorarray. The pages 'Write a primitive' of the documentation explain each part. The files are yours, "
        "under any licence.",
        epilog="example: python -m jax_tensorarray.template ./my_op my_op",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to write; it must be new or empty")
    parser.add_argument(
        "name", metavar="NAME", help="the name of the package and of its function, in lower snake case, such as my_op"
    )
    options = parser.parse_args(arguments)
    try:
        written = write(options.folder, options.name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"Wrote the package {options.name} into {options.folder}:\n")
    print(*(f"  {file}" for file in written), sep="\n")
    # A path without a separator would be the name of a package on PyPI.
    path = str(options.folder) if options.folder.is_absolute() else os.path.join(os.curdir, options.folder)
    option = f"{options.name.upper()}_CUDA=OFF"
    print(f"\nBuild and test it. {option} leaves out the kernels for GPUs, which take minutes to compile:\n")
    print(f"  {option} python -m pip install -e {shlex.quote(path + '[test]')}")
    print(f"  python -m pytest {shlex.quote(path)}")
    print("\nBoth take about 90 seconds of CPU time. Without a GPU, one half of the tests is skipped.")


if __name__ == "__main__":
    main()
