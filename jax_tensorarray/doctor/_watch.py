"""Examine everything that a program compiles: which of its loops copy whole buffers."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._hlo.arguments import donated
from jax_tensorarray.doctor._arguments import Calls, argument_copies
from jax_tensorarray.doctor._copies import MIN_BYTES, LoopCopies, copies_in, counts, with_kept
from jax_tensorarray.doctor._kept import kept_for_gradient
from jax_tensorarray.doctor._programs import CompiledProgram
from jax_tensorarray.doctor._report import Report


class LoopCopyError(RuntimeError):
    """The error of `forbid_copies`, and of `in_place` with `strict=True`.

    `copies` are the operations on whole buffers that were found.
    """

    def __init__(self, program: str, copies: LoopCopies, by: str = "forbid_copies") -> None:
        super().__init__(f"{by}: in {program}, {copies}")
        self.copies = copies


@contextlib.contextmanager
def watch(*, min_bytes: int = MIN_BYTES) -> Iterator[Report]:
    """Examine all programs that JAX compiles in a block, in any thread, for copies in their loops.

    The programs run unchanged. Programs that JAX has compiled before are not examined.

    Args:
      min_bytes: smaller buffers are ignored.

    Yields:
      A `Report`, which is complete when the block ends. `report.try_in_place()` adds the effect of `in_place` on each
      program.

    Raises:
      NotImplementedError: this version of JAX has no hook for its compiler.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.doctor import watch
    >>> with watch() as report:
    ...     xs = jnp.ones((200, 64))
    ...     step = lambda i, ys: ys.at[i].set(jnp.sin(ys[i - 1]))
    ...     dx = jax.jit(jax.grad(lambda x: jax.lax.fori_loop(1, 200, step, x).sum()))(xs)
    >>> report.copies[0].kind, report.copies[0].shape, report.copies[0].steps
    ('copy', (200, 64), 199)
    """
    report, calls = Report(), Calls()

    def seen(name: str, jaxpr: Jaxpr, executable: Any) -> None:
        try:
            _look(report, name, jaxpr, executable, min_bytes, calls)
        except Exception:  # the program must go on, even if its HLO cannot be read
            report.unread += 1

    with _compat.lines_of_today(), _compat.compilations(seen, needs_functions=True):
        try:
            yield report
        finally:
            calls.end()
            for case in report.cases:
                if case.calls is not None:
                    case.copies.arguments = case.calls.counted(case.copies.arguments)
            with_copies: list[CompiledProgram] = []
            for case in report.cases:
                (with_copies if case.copies or case.copies.arguments else report._others).append(case)
            report.cases = sorted(with_copies, key=lambda case: case.cost, reverse=True)


@contextlib.contextmanager
def forbid_copies(*, min_bytes: int = MIN_BYTES) -> Iterator[None]:
    """Raise an error if JAX compiles a program in a block whose loops copy whole buffers. The program does not run.

    Args:
      min_bytes: smaller buffers may be copied.

    Raises:
      LoopCopyError: JAX has compiled such a program. The message names the lines, and says what to do.
      NotImplementedError: this version of JAX has no hook for its compiler.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import in_place
    >>> from jax_tensorarray.doctor import forbid_copies
    >>> def loss(x):
    ...     return jax.lax.fori_loop(1, 200, lambda i, ys: ys.at[i].set(jnp.cos(ys[i - 1])), x).sum()
    >>> with forbid_copies():
    ...     dx = jax.jit(in_place(jax.grad(loss)))(jnp.ones((200, 64)))
    """

    def seen(name: str, jaxpr: Jaxpr, executable: Any) -> None:
        report = Report()
        _look(report, name, jaxpr, executable, min_bytes)
        for case in (case for case in report.cases if case.copies):
            raise LoopCopyError(case.program, case.copies)

    with _compat.lines_of_today(), _compat.compilations(seen):
        yield


def _look(report: Report, name: str, jaxpr: Jaxpr, executable: Any, min_bytes: int, calls: Calls | None = None) -> None:
    report.programs += 1
    hlo = hlo_text.of_executable(executable)
    loops = hlo_buffers.trip_counts(hlo)
    findings = list(hlo_buffers.findings(hlo)) if loops else []
    copies = copies_in(hlo, min_bytes, findings) if loops else LoopCopies()
    report.loops += len(loops)
    report.in_place += len(loops) - len({f.at[-1].name for f in findings if counts(f, min_bytes)})
    program = name.removeprefix("jit_")
    if calls is not None:
        copies.arguments = argument_copies(hlo, min_bytes)
    if copies and jaxpr is not None:
        with contextlib.suppress(Exception):  # what is not known is left out
            with_kept(copies, kept_for_gradient(jaxpr, min_bytes))
    case = CompiledProgram(program, copies, jaxpr=jaxpr, ends=None not in loops, donated=donated(hlo))
    if loops or copies.arguments:
        case.function = None if jaxpr is None else _compat.function_of(jaxpr)
    if calls is not None and copies.arguments:
        case.calls = calls.expect(jaxpr, copies.arguments, program)
    if copies or copies.arguments:
        report.cases.append(case)
    elif loops and not findings:
        report._others.append(case)
