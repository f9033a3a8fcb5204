"""Print the tables; with TensorFlow, run each program in it and here first."""

import argparse
import sys

import jax

from benchmarks.ports import jax_ops
from benchmarks.ports.report import PROGRAMS, differences, reasons, table
from benchmarks.ports.source import Program


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ports", description=__doc__)
    parser.add_argument("--no-run", action="store_true", help="only count: needs no TensorFlow")
    parser.add_argument("programs", nargs="*", default=[*PROGRAMS], help=f"of {', '.join(PROGRAMS)}; all if none")
    options = parser.parse_args()
    programs = [PROGRAMS[name] for name in options.programs]
    wrong = [] if options.no_run else [line for program in programs for line in compared(program)]
    print("\n".join(wrong) or f"{table(programs)}\n\n{reasons(programs)}")
    return bool(wrong)


def compared(program: Program) -> list[str]:
    """What the port of a program, compiled, gives other than the program in TensorFlow."""
    from benchmarks.ports import tf_ops  # counting needs no TensorFlow

    found = jax.jit(lambda: program.run(program.port(jax_ops), jax_ops))()
    return differences(found, program.run(program.original(tf_ops), tf_ops), program.filler)


if __name__ == "__main__":
    sys.exit(main())
