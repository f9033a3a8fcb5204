"""`python -m jax_tensorarray.template DIR NAME` writes a package with a primitive and its kernels."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from jax_tensorarray.template import write


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the package that the arguments ask for, and say how to build and test it."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_tensorarray.template",
        description="Write a package with two JAX primitives: an update of a row in place and a reduction, with all "
        "rules, kernels for CPU and CUDA, tests and wheels. It builds and passes its tests unchanged: edit it from "
        "there. The pages in docs/primitive/ explain it. The files are yours, under any licence.",
        epilog="example: python -m jax_tensorarray.template my_op my_op",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to: a folder that is new or empty")
    parser.add_argument(
        "name", metavar="NAME", help="name of the package and of its function, in lower snake case, such as my_op"
    )
    given = parser.parse_args(arguments)
    try:
        files = write(given.folder, given.name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{given.folder}: the package {given.name}\n")
    print(*(f"  {file}" for file in files), sep="\n")
    # A path without a separator would be the name of a package on PyPI.
    place = str(given.folder) if given.folder.is_absolute() else os.path.join(os.curdir, given.folder)
    print("\nBuild and test it:\n")
    print(f"  python -m pip install -e {shlex.quote(place + '[test]')}")
    print(f"  python -m pytest {shlex.quote(place)}")


if __name__ == "__main__":
    main()
