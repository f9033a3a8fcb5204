"""`python -m jax_tensorarray.template DIR NAME` writes a package with a primitive and its kernels."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from . import write  # not by its full name: `PYTHONPATH=jax_tensorarray python -m template` needs no installation


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
    given = parser.parse_args(arguments)
    try:
        files = write(given.folder, given.name)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"Wrote the package {given.name} into {given.folder}:\n")
    print(*(f"  {file}" for file in files), sep="\n")
    # A path without a separator would be the name of a package on PyPI.
    place = str(given.folder) if given.folder.is_absolute() else os.path.join(os.curdir, given.folder)
    option = f"{given.name.upper()}_CUDA=OFF"
    print(f"\nBuild and test it. {option} leaves out the kernels for GPUs, which take minutes to compile:\n")
    print(f"  {option} python -m pip install -e {shlex.quote(place + '[test]')}")
    print(f"  python -m pytest {shlex.quote(place)}")
    print("\nBoth take about 70 seconds of CPU time. Without a GPU, one half of the tests is skipped.")


if __name__ == "__main__":
    main()
