"""Examine everything that a program compiles: which of its loops copy whole buffers, and what `in_place` changes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._hlo.arguments import donated
from jax_tensorarray._in_place import switch
from jax_tensorarray.doctor import _kept, _report
from jax_tensorarray.doctor._arguments import (
    Calls,
    argument_copies,
)
from jax_tensorarray.doctor._copies import (
    MIN_BYTES,
    LoopCopies,
    copies_in,
    counts,
    with_kept,
)
from jax_tensorarray.doctor._page import fragment
from jax_tensorarray.doctor._programs import CompiledProgram, Programs
from jax_tensorarray.doctor._trial import grows, tried

#: So many seconds are spent on programs in which nothing was found.
_FOR_GROWTH = 30


class LoopCopyError(RuntimeError):
    """The error of `forbid_copies`, and of `in_place` with `strict=True`.

    `copies` are the operations on whole buffers that were found.
    """

    def __init__(self, program: str, copies: LoopCopies, by: str = "forbid_copies") -> None:
        super().__init__(f"{by}: in {program}, {copies}")
        self.copies = copies


class Report(Programs):
    """The programs that JAX has compiled in a block of `watch`, and the findings about them.

    It prints as a text, and a notebook shows it as a page.

    Attributes:
      programs: the number of compiled programs.
      loops: the number of loops in these programs.
      in_place: the number of these loops that copy no whole buffer.
      unread: the number of programs that could not be examined.
      cases: the programs with findings. The program that copies most comes first. `try_in_place` adds programs whose
        time or memory grows faster than the number of steps.
    """

    def try_in_place(self, *, timed: bool = True, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Try `in_place` on each program: count the remaining copies and, if `timed`, measure the gain.

        If `jax.jit` has traced a function in the block, `in_place` is tried on that function, which is traced once
        more. Otherwise it is tried on the finished program. The programs run on zeros, and only if they have no side
        effects and XLA knows how many steps their loops take. If all loops take the same number of steps, and a run
        takes less than 3 seconds, a program also runs with a quarter of the steps. Programs without findings run with
        fewer steps too, for half a minute in all.

        Args:
          timed: whether to run the programs. Otherwise they are only compiled.
          progress: is called with a text before each trial.

        Returns:
          The report itself.
        """
        with switch.enable_in_place() if switch.why_off() else contextlib.nullcontext():
            self._try_in_place(timed, progress)
        return self

    def to_try(self, *, timed: bool = True) -> int:
        """Return on how many programs `try_in_place` works."""
        return len(self.cases) + (sum(case.can_grow for case in self._others) if timed else 0)

    def _try_in_place(self, timed: bool, progress: Callable[[str], None]) -> None:
        for n, case in enumerate(self.cases, 1):
            progress(f"trying in_place on {case.program} ({n} of {len(self.cases)})")
            if case.jaxpr is None:
                case.failed = "JAX had traced it before"
                continue
            try:
                case.trial = tried(case, timed)
            except Exception as error:  # whatever it is, the report goes on
                case.failed = f"{type(error).__name__}: {error}".splitlines()[0]
        started = time.perf_counter()
        while timed and self._others and time.perf_counter() - started < _FOR_GROWTH:
            case = self._others.pop(0)
            if not case.can_grow:
                continue
            progress(f"running {case.program} with fewer steps")
            with contextlib.suppress(Exception):  # nothing is wrong with it that is known
                if grows(case):
                    self.cases.append(case)
        progress("")

    def __str__(self) -> str:
        return self.text(False)

    def _repr_html_(self) -> str:
        """Return the report as HTML, which notebooks show."""
        return fragment(self)

    def text(self, colours: bool) -> str:
        """Return the report in 79 columns."""
        return _report.text(self, colours)


# --- watching --------------------------------------------------------------------------------------------------


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
            with_kept(copies, _kept.kept_for_gradient(jaxpr, min_bytes))
    case = CompiledProgram(program, copies, jaxpr=jaxpr, ends=None not in loops, donated=donated(hlo))
    if loops or copies.arguments:
        case.function = None if jaxpr is None else _compat.function_of(jaxpr)
    if calls is not None and copies.arguments:
        case.calls = calls.expect(jaxpr, copies.arguments, program)
    if copies or copies.arguments:
        report.cases.append(case)
    elif loops and not findings:
        report._others.append(case)
