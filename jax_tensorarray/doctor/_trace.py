"""A folder to attach to a bug report: programs before and after `in_place`, the report, and versions."""

import contextlib
import json
import platform
import re
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxpr_as_fun

from jax_tensorarray import _compat, in_place
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.doctor._arguments import argument_copies
from jax_tensorarray.doctor._copies import MIN_BYTES, copies_in
from jax_tensorarray.doctor._header import header
from jax_tensorarray.doctor._report import Report, html

#: Programs in a folder: those that copy most.
_MOST = 20

_ARCHIVE = "trace.zip"


class TracedProgram(NamedTuple):
    """A program as JAX has compiled it; its jaxpr is None if JAX had lowered it before."""

    name: str
    jaxpr: Jaxpr
    hlo: str


def why_not(folder: Path) -> str:
    """Return why a trace cannot be written there, or an empty text. Make the folder if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if others := sorted(file.name for file in folder.iterdir()):
            return f"{folder} is not empty: it has {others[0]}"
        (folder / _ARCHIVE).touch()
        (folder / _ARCHIVE).unlink()
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror}"
    return ""


@contextlib.contextmanager
def recorded() -> Iterator[list[TracedProgram]]:
    """Keep the programs that JAX compiles in a block, in any thread, if they have loops or copy an argument."""
    programs: list[TracedProgram] = []

    def seen(name: str, jaxpr: Jaxpr, executable: Any) -> None:
        with contextlib.suppress(Exception):  # the program must go on, even if its HLO cannot be read
            hlo = hlo_text.of_executable(executable)
            if " while(" in hlo or argument_copies(hlo, MIN_BYTES):
                programs.append(TracedProgram(name.removeprefix("jit_"), jaxpr, hlo))

    with _compat.compilations(seen):
        yield programs


def write(folder: Path, programs: list[TracedProgram], report: Report, title: str) -> Path:
    """Write the report, the versions and a folder for each program, and pack all of it. Return the archive."""

    def moved(program: TracedProgram) -> int:
        return sum(copy.cost for copy in (*copies_in(program.hlo, 0), *argument_copies(program.hlo, MIN_BYTES)))

    listed = sorted(programs, key=moved, reverse=True)[:_MOST]
    left = len(programs) - len(listed)
    here = [f"numpy     {np.__version__}", f"platform  {platform.platform()}", f"command   {title}"]
    files = {
        "versions.txt": "\n".join([*header(), *here, *([f"{left} more programs"] if left else []), ""]),
        "report.txt": f"{report}\n",
        "report.json": json.dumps(report.as_json(), indent=1),
        "report.html": html(report, title),
    }
    for number, program in enumerate(listed, 1):
        name = re.sub(r"[^\w.-]+", "_", program.name)[:60]
        files |= {f"{number:02d}_{name}/{file}": text for file, text in _files_of(program).items()}
    with zipfile.ZipFile(folder / _ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
            archive.writestr(f"{folder.resolve().name}/{file}", text)
    return folder / _ARCHIVE


def _files_of(program: TracedProgram) -> dict[str, str]:
    """Return the texts of a program, before and after `in_place`, or why there is none."""
    files = {"loops_before.hlo": hlo_text.loops_only(program.hlo)}
    if program.jaxpr is None:
        return files | {"error.txt": "JAX had traced it before, so there is no jaxpr.\n"}
    files["before.jaxpr"] = _printed(program.jaxpr)
    try:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.jaxpr.in_avals]
        traced = jax.jit(in_place(jaxpr_as_fun(program.jaxpr))).trace(*types)
        files["after.jaxpr"] = _printed(traced.jaxpr)
        files["loops_after.hlo"] = hlo_text.loops_only(traced.lower().compile().as_text() or "")
    except Exception:  # whatever it is, the bug report needs it
        files["error.txt"] = traceback.format_exc()
    return files


def _printed(jaxpr: Jaxpr) -> str:
    """Return a jaxpr as text, with the line of each equation."""
    return re.sub(r" {3,}(?=#)", "  ", jaxpr.pretty_print(source_info=True, use_color=False)) + "\n"
