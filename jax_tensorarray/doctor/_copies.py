"""Compile a function, find the operations in its loops that touch a whole buffer, and name the cause of each."""

import contextlib
import functools
import itertools
import linecache
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from jax_tensorarray import _compat, in_place
from jax_tensorarray._hlo import ahead
from jax_tensorarray._hlo import buffers as hlo_buffers
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._in_place import arguments
from jax_tensorarray._loops import tapes
from jax_tensorarray.doctor._advice import ADVICE
from jax_tensorarray.doctor._arguments import ArgumentCopy, argument_copies
from jax_tensorarray.doctor._blocks import Group, Text, as_text, more_about
from jax_tensorarray.doctor._finding import Finding, array_at, blocks_of
from jax_tensorarray.doctor._kept import Kept, kept_for_gradient, listed
from jax_tensorarray.doctor._text import check_is_function, counted, readable, shape_of

#: Smaller buffers are ignored by default.
MIN_BYTES = 4096

#: Folders of libraries.
_PACKAGES = {"site-packages", "dist-packages"}

_WHAT = {
    "copy": "a copy of the buffer",
    "select": "a select between two whole buffers",
    "sum": "a sum of two whole buffers, one with few rows that are not zero",
    "anew": "an operation that computes every row of the buffer",
    "save": "a write of the whole buffer into another array",
    "broadcast": "a copy of the buffer for each of several examples",
}

_COMPUTATION = {"dot": "A product (einsum, dot or @)", "reduce": "A sum or another reduction"}


_JITTED = type(jax.jit(lambda: None))


@dataclass(frozen=True, kw_only=True)
class LoopCopy(Finding):
    """An operation that touches all of a buffer in every step of a loop.

    Attributes:
      kind: `"copy"`, `"broadcast"` (a copy for each of several examples), `"select"` (between two buffers), `"sum"` (of
        two), `"anew"` (anything else that computes every row), or `"save"` (the step stores the whole buffer in a
        larger array).
      operation: its name in the optimised HLO, to look it up in `jax.jit(f).lower(*args).compile().as_text()`.
      dtype: the element type of the result, by JAX's name.
      shape: the shape of the result, as XLA sees it: `vmap` adds an axis, and a device has only its part of a divided
        array.
      num_bytes: the size of the result.
      file: the Python file, or None if XLA does not name it.
      line: the number of the line.
      code: the text of that line, if the file can be read; else empty.
      in_gradient: whether it is part of a backward pass.
      advice: what to do.
      steps: how often it happens in one run of the program, if XLA knows the trip counts of the loops; else None.
      for_gradient: whether the array that a `"save"` puts it into is kept for a backward pass.
      reason: the name of the advice, which is a heading of `docs/reference/messages.md`.
    """

    kind: str
    operation: str
    num_bytes: int
    in_gradient: bool
    advice: str
    steps: int | None = None
    for_gradient: bool = False
    reason: str = ""

    @property
    def cost(self) -> int:
        """The bytes that are copied in all steps, or in one step if XLA does not know how many there are."""
        return self.num_bytes * (self.steps or 1)

    @property
    def key(self) -> Any:
        return self.file, self.line, self.kind, self.in_gradient

    @property
    def alike(self) -> Any:
        return *self.key, self.array, self.advice

    @property
    def shape_in_step(self) -> tuple[int, ...]:
        """The shape of what a step keeps. XLA sees a slice of all that is kept."""
        return self.shape[1:] if self.shape[:1] == (1,) else self.shape

    @property
    def what(self) -> str:
        """The operation and its array."""
        if self.for_gradient:
            steps = f"each of {self.steps} steps" if self.steps else "each step"
            kept = replace(self, shape=self.shape_in_step).array
            return f"the gradient keeps {kept} for {steps}, {readable(self.cost)}"
        passing = "backward pass, " if self.in_gradient else ""
        return f"{passing}{_WHAT[self.kind]}, {self.array}"

    def describe(self, alike: Sequence["LoopCopy"]) -> list[str]:
        steps = counted(self.steps, "step") if self.steps else "steps that XLA cannot count"
        said = self.what + (f" ({len(alike)} times)" if len(alike) > 1 else "")
        return [f"{said}." if self.for_gradient else f"{said}: {readable(self.num_bytes)} per step, {steps}."]

    def __str__(self) -> str:
        return super().__str__() + ("" if self.for_gradient else f", {readable(self.num_bytes)} per step")


class LoopCopies(list[LoopCopy]):
    """A list of `LoopCopy`, which prints as a report.

    Attributes:
      smaller: the number of operations that are not listed, because their buffers are smaller than `min_bytes`.
      memory: if a gradient stores buffers, the bytes that XLA needs for all temporary arrays, unchanged and under
        `in_place`; else None.
      kept: the arrays of at least `min_bytes` that a gradient stores for each step of a scan, the largest first. A
        report lists them if they take a mebibyte, or if there is a buffer among them.
      arguments: the arguments that a jitted function copies in every call in order to change a few rows.
    """

    smaller: int = 0
    memory: tuple[int, int] | None = None
    kept: Sequence[Kept] = ()
    arguments: Sequence[ArgumentCopy] = ()

    def __str__(self) -> str:
        number = f"{len(self)} operations on whole buffers" if len(self) > 1 else "1 operation on a whole buffer"
        smaller = f", but for {self.smaller} smaller than min_bytes" if self.smaller else ""
        first = f"{number} in loops, {readable(sum(copy.num_bytes for copy in self))} per step:"
        none = f"No loop copies a buffer that it carries, or computes all of it again{smaller}."
        told = set[str]()
        blocks = [Text(first if self else none), *blocks_of(self, Counter(), told)]
        if self and self.smaller:
            blocks.append(Group([Text(f"{self.smaller} more, on buffers smaller than min_bytes.")]))
        blocks += blocks_of(self.arguments, Counter(), told)
        if kept := listed(self.kept, any(copy.for_gradient for copy in self)):
            blocks.append(Group(kept))
        if self.memory is not None:
            before, after = map(readable, self.memory)
            blocks.append(Group([Text(f"All temporary arrays of the gradient: {before}; under in_place {after}.")]))
        return as_text([*blocks, *more_about(copy.reason for copy in self)])


def loop_copies(
    fun: Callable[..., object], *, min_bytes: int = MIN_BYTES, platform: Literal["cpu", "cuda", "tpu"] | None = None
) -> Callable[..., LoopCopies]:
    """Return a function that lists the operations in the loops of `fun` that touch a whole buffer in every step.

    A loop of T steps takes quadratic time if it copies a buffer of T rows in every step. The returned function takes
    the arguments of `fun`, or `jax.ShapeDtypeStruct`s instead of arrays. It compiles `fun` without running it, and
    examines the compiled loops: `lax.scan`, `fori_loop`, `while_loop` and the loops of this library, loops nested in
    them, and the loops of backward passes if `fun` is a gradient.

    A *buffer* is an array that the loop carries, and that the loop reads or updates by rows, at an index that is known
    only at run time. An array that the loop computes as a whole, such as the state of a recurrent network, is not a
    buffer. Stacked outputs and inputs of `lax.scan` are not buffers either.

    Args:
      fun: a function of arrays, or pytrees of them, jitted or not. For a gradient give `jax.grad(f)`.
      min_bytes: smaller buffers are counted, but not listed. With 0, small arguments show the same as large ones.
      platform: None for the platform that `fun` runs on here, or `"cpu"`, `"cuda"` (an H100) or `"tpu"` (a v5e). No
        such device is needed, only XLA's compiler for it. Arrays divided among devices are taken for whole ones.

    Returns:
      A function that returns a `LoopCopies`, a list of `LoopCopy`. The list is empty if every loop is in place, and
      prints as a report.

    Raises:
      TypeError: `fun` is not a function, or `min_bytes` is not an integer.
      ValueError: `min_bytes` is negative, or there is no such `platform`.
      ImportError: (in a call) XLA's compiler for `platform` is not installed, or JAX was used before and did not find
        the libraries of CUDA. The message says how to install it, or which variable to set and when.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import ta_write
    >>> from jax_tensorarray.doctor import loop_copies
    >>> def cumulated(write, xs):
    ...     return jax.lax.fori_loop(1, 20, lambda i, ys: write(ys, i, jnp.sin(xs[i])), xs).sum()
    >>> xs = jax.ShapeDtypeStruct((20, 64), jnp.float32)
    >>> plain = loop_copies(jax.grad(lambda xs: cumulated(lambda ys, i, x: ys.at[i].set(x), xs)))(xs)
    >>> plain[0].kind, plain[0].dtype, plain[0].shape, plain[0].in_gradient
    ('copy', 'float32', (20, 64), True)
    >>> print(loop_copies(jax.grad(lambda xs: cumulated(ta_write, xs)))(xs))
    No loop copies a buffer that it carries, or computes all of it again.
    """
    check_is_function("loop_copies", fun)
    try:
        min_bytes = operator.index(min_bytes)
    except TypeError:
        raise TypeError(f"loop_copies: min_bytes must be an integer, not {type(min_bytes).__name__}.") from None
    if min_bytes < 0:
        raise ValueError(f"loop_copies: min_bytes must not be negative, but it is {min_bytes}.")
    if platform not in (None, *ahead.PLATFORMS):
        names = ", ".join(map(repr, ahead.PLATFORMS))
        raise ValueError(f"loop_copies: platform must be None or one of {names}, but it is {platform!r}.")

    @arguments.named_as(fun)
    def of(*args: Any, **kwargs: Any) -> LoopCopies:
        with _compat.lines_of_today():
            compiled = _compiled(fun, args, kwargs, platform)
            hlo = compiled.as_text() or ""
            copies = copies_in(hlo, min_bytes)
            with contextlib.suppress(Exception):  # what is not known is left out
                traced = (fun if hasattr(fun, "trace") else jax.jit(fun)).trace(*args, **kwargs)
                with_kept(copies, kept_for_gradient(traced.jaxpr, min_bytes))
            if isinstance(fun, _JITTED):  # any other function is jitted elsewhere, perhaps with donated arguments
                copies.arguments = argument_copies(hlo, max(min_bytes, 1))
            if any(copy.for_gradient for copy in copies):
                with contextlib.suppress(Exception):  # whatever it is, it is not an error of the program
                    after = _compiled(in_place(fun), args, kwargs, platform)
                    copies.memory = _temporary(compiled), _temporary(after)
        return copies

    return of


def copies_in(hlo: str, min_bytes: int, findings: Sequence[hlo_buffers.BufferOp] | None = None) -> LoopCopies:
    """Return the operations on buffers of at least `min_bytes` in loops of optimised HLO, or among its `findings`."""
    frames = hlo_text.frames(hlo)
    findings = list(hlo_buffers.findings(hlo)) if findings is None else findings
    kinds = {(finding.buffer, _special(finding) or finding.kind) for finding in findings}
    copies = LoopCopies(_described(finding, kinds, frames) for finding in findings if counts(finding, min_bytes))
    copies.smaller = sum(counts(finding, 0) for finding in findings) - len(copies)
    return copies


def with_kept(copies: LoopCopies, kept: Sequence[Kept]) -> None:
    """Add the arrays that a gradient stores, and name their lines for the copies into them.

    XLA names the line of the gradient for such a copy. JAX names the line that makes the array, or the loop's.
    """
    places: dict[Any, Any] = {(k.dtype, k.shape, k.steps): k.at._asdict() for k in kept if k.file}
    for n, copy in enumerate(copies):
        if copy.for_gradient:
            copies[n] = replace(copy, **places.get((copy.dtype, copy.shape_in_step, copy.steps), {}))
    copies.kept = kept


def counts(finding: hlo_buffers.BufferOp, min_bytes: int) -> bool:
    """Return whether a finding is about a buffer of at least `min_bytes`. An array of one element is not a buffer."""
    return hlo_text.array_bytes(finding.array) >= min_bytes and math.prod(shape_of(finding.array)) > 1


#: Names of lowered row ops: `.../ta_write` for a call, `.../ta_write/dynamic_update_slice` for a slice.
_OF_ROW_OP, _OF_TAPE = re.compile(r"/ta_\w+(/\w+)?$"), re.compile(rf"/{tapes.SCOPE}/ta_write(/\w+)?$")


def _special(finding: hlo_buffers.BufferOp) -> str:
    """Return a kind that only counts as a cause."""
    return "tape" if _is_tape(finding) else "kept" if _is_for_gradient(finding) else ""


def _is_for_gradient(finding: hlo_buffers.BufferOp) -> bool:
    """Return whether the buffer is put into an array that a backward pass reads."""
    return finding.kind == "save" and all("jvp(" in name for i in finding.at if (name := i.op_name))


def _is_tape(finding: hlo_buffers.BufferOp) -> bool:
    """Return whether a loop of this library puts the buffer on its tape."""
    return finding.kind == "save" and _OF_TAPE.search(finding.at[0].op_name) is not None


def _temporary(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _compiled(fun: Any, args: Sequence[Any], kwargs: dict[str, Any], platform: str | None) -> Any:
    if platform is None:
        return (fun if hasattr(fun, "lower") else jax.jit(fun)).lower(*args, **kwargs).compile()
    try:
        return ahead.compiled_for(platform, functools.partial(fun, **kwargs) if kwargs else fun, *args)
    except ImportError as error:
        raise ImportError(f"loop_copies: {error}") from None


def _described(
    finding: hlo_buffers.BufferOp,
    kinds: Set[tuple[hlo_buffers.Array, str]],
    frames: Callable[[str], list[hlo_text.Frame]],
) -> LoopCopy:
    cause = _cause(finding, kinds)
    return LoopCopy(
        kind=finding.kind,
        operation=finding.instruction.name,
        in_gradient=any("transpose(" in i.op_name for i in finding.at),
        advice=ADVICE[cause].format(_whole_use(finding, frames)),
        steps=finding.steps,
        for_gradient=_is_for_gradient(finding),
        reason=cause,
        **array_at(finding.array, next(_lines_of_the_user(finding, frames), None)),
    )


#: The causes of kinds that need no other one.
_OF_KINDS = {
    "kept": "kept-for-the-gradient",
    "save": "kept-for-each-step",
    "anew": "made-anew",
    "sum": "sum-of-gradients",
}


def _cause(finding: hlo_buffers.BufferOp, kinds: Set[tuple[hlo_buffers.Array, str]]) -> str:
    """Return which advice fits. `kinds` holds the kinds of all findings: another one may be why a buffer is copied."""
    names = [i.op_name for i in finding.at]
    also = {kind for buffer, kind in kinds if buffer == finding.buffer}
    if "tape" in also and finding.kind != "select":
        return "kept-on-the-tape"
    if finding.kind == "broadcast":
        return "batched-choice" if "vmap(" in names[0] else "made-anew"
    if _is_for_gradient(finding) and not any("/checkpoint" in name for name in names):
        return "kept-for-the-gradient"
    if finding.kind in _OF_KINDS:
        return _OF_KINDS[finding.kind]
    if finding.carried:
        return finding.carried
    if "select" in also or names[0].endswith("jit(_where)/select_n"):
        return "batched-choice" if any("vmap(" in name for name in names) else "whole-select"
    if any("/checkpoint" in name or "/rematted_computation" in name for name in names):
        return "checkpoint-keeps-buffers"
    if kind := next((kind for kind in ("kept", "save", "anew") if kind in also), ""):
        return _OF_KINDS[kind]
    in_gradient = any("transpose(" in name for name in names)
    if finding.whole and not in_gradient:
        return "layout-of-a-product" if finding.transposed else "read-as-a-whole"
    if any(map(_OF_ROW_OP.search, names)):
        return "read-after-write"
    return "gradient-of-plain-rows" if in_gradient else "old-version-used"


def _whole_use(finding: hlo_buffers.BufferOp, frames: Callable[[str], list[hlo_text.Frame]]) -> str:
    """Describe the operation that computes with the whole buffer. XLA may know only the line of the loop."""
    if not finding.whole:
        return ""
    loop_lines = frames(finding.at[-1].attributes)
    known = ((i, at[0]) for i in finding.whole if (at := frames(i.attributes)) and at != loop_lines)
    i, frame = next(known, (finding.whole[0], None))
    what = _COMPUTATION.get(i.opcode, "Something")
    return f"{what} at {frame.file}:{frame.line}" if frame else what


def _lines_of_the_user(
    finding: hlo_buffers.BufferOp, frames: Callable[[str], list[hlo_text.Frame]]
) -> Iterator[hlo_text.Frame]:
    """Yield lines outside of JAX and of this library, the likeliest first."""
    around = frames(finding.at[-1].attributes)
    for i in finding.at:
        # JAX traces this part of its scan once, so its innermost line is the first scan of the process.
        of_any_scan = re.search(r"/jit\(dynamic_(update_)?index_in_dim\)/", i.op_name)
        lines = frames(i.attributes)[1 if of_any_scan else 0 :]
        yield from _calls_of_bind(lines, around) if lines and _binds(lines[0]) else lines


def _binds(line: hlo_text.Frame) -> bool:
    """Return whether a line binds a primitive that is not JAX's: its lines say nothing about the loop."""
    return re.search(r"bind\(", linecache.getline(line.file, line.line)) is not None


def _calls_of_bind(lines: list[hlo_text.Frame], around: list[hlo_text.Frame]) -> list[hlo_text.Frame]:
    """Drop the first lines, of the library that binds the primitive.

    If the loop is in that library too, it is the line that calls the file of the primitive, or the function.
    """
    same = sum(1 for _ in itertools.takewhile(operator.truth, map(operator.eq, reversed(lines), reversed(around))))
    in_loop = [(k, line, _library(line.file)) for k, line in enumerate(lines[: len(lines) - same])]
    (_, first, library), *callers = in_loop or [(0, lines[0], None)]
    from_outside = (k for k, _, of in callers if library and of != library)
    from_another_file = (k for k, line, _ in callers if line.file != first.file)
    from_another_line = (k for k, line, _ in callers if not _binds(line))
    return lines[next(itertools.chain(from_outside, from_another_file, from_another_line), 0) :]


def _library(file: str) -> str | None:
    """Return the folder or the file, among Python's packages, that a file belongs to."""
    parts = Path(file).parts
    return next((name for folder, name in itertools.pairwise(parts) if folder in _PACKAGES), None)
