"""Say what `in_place` makes of each read, write and select of rows, and why it does not rewrite some."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jax_tensorarray import _compat, _contexts
from jax_tensorarray._in_place import api, arguments, explained
from jax_tensorarray._in_place.repair import Request
from jax_tensorarray._loops.api import strategy_within
from jax_tensorarray._loops.from_jax import check_max_steps
from jax_tensorarray._loops.strategy import Strategy
from jax_tensorarray._types import Equation
from jax_tensorarray.doctor._blocks import Block, Group, Source, Text, as_text, more_about
from jax_tensorarray.doctor._finding import Finding
from jax_tensorarray.doctor._kept import line_of
from jax_tensorarray.doctor._reasons import REASONS
from jax_tensorarray.doctor._text import check_is_function, first_line, grouped, name_of_file


@dataclass(frozen=True, kw_only=True)
class Explained(Finding):
    """The fate of a read, a write or a select of rows under `in_place`.

    Attributes:
      file: the Python file, or None if JAX does not know it.
      line: the number of the line.
      code: the text of the line; empty if the file cannot be read.
      kind: `"read"`, `"write"` or `"select"`; `"shift"` of all rows by some places, `"exchange"` of two buffers,
        `"carry"` of a loop, `"slice"` of a stack, `"layout"` of a buffer, `"product"` with a mask, `"loop"`,
        or `"use"` of a whole buffer.
      op: the primitive of JAX.
      dtype: of the buffer.
      shape: likewise. The transformations that `f` contains are included: `vmap` adds an axis.
      became: what it becomes, such as `"ta_write"`; empty if it stays as it is.
      reason: the tag of the reason why it stays, or may be slow; else empty. Each tag is a heading of the page of
        messages.
      text: the reason in words.
      help: a change of the code that helps, if there is one.
      times: how often the line has this operation.
    """

    kind: str
    op: str
    became: str
    reason: str
    text: str
    help: str
    times: int

    def __str__(self) -> str:
        fate = self.became or "not rewritten"
        name = f" [{self.reason}]" if self.reason else ""
        return f"{self.kind} of {self.array}: {fate}{name}"


class Explanation(list[Explained]):
    """A list of `Explained`, sorted by file and line, which prints as a report of at most 100 columns."""

    def __str__(self) -> str:
        if not self:
            return "in_place meets no read, write or select of rows in plain JAX."
        stay = sum(x.times for x in self if not x.became)
        total = sum(x.times for x in self)
        blocks: list[Block] = [Text(f"Reads, writes and selects of rows: {total}. Not rewritten: {stay or 'none'}.")]
        for at, remarks in grouped(self, lambda x: x.at).items():
            texts: list[Block] = []
            for alike in grouped(remarks, lambda x: x.reason).values():
                for text, same in grouped(alike, str).items():
                    times = sum(x.times for x in same)
                    texts.append(Text(text + (f" ({times} times)" if times > 1 else ""), indent=2))
                texts.append(Text(f"{alike[0].text} {alike[0].help}".strip(), indent=4))
            blocks.append(Group([Source(at), *texts]))
        return as_text([*blocks, *more_about(x.reason for x in self)])


def explain(
    fun: Callable[..., object],
    *,
    max_steps: int | None = None,
    residuals: str | Strategy = "auto",
    memory: int | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Explanation]:
    """Return a function that says what `in_place` makes of each read, write and select of rows in `fun`.

    The returned function takes the arguments of `fun`, or `jax.ShapeDtypeStruct`s instead of arrays. It traces `fun` as
    `in_place(fun)` does, and compiles and runs nothing. Explain the function that you run: `explain(jax.grad(f))` and
    `explain(jax.vmap(f))` include the operations that these transformations add.

    Ops of this library are not listed. Selects in loops without reads and writes of rows are not listed either.

    Args:
      fun: a function that JAX can trace.
      max_steps: as for `in_place`.
      residuals: as for `in_place`.
      memory: as for `in_place`.
      static_argnums: as for `in_place`.
      static_argnames: as for `in_place`.

    Returns:
      A function that returns an `Explanation`, a list of `Explained`, which prints as a report.

    Raises:
      TypeError: `fun` is not callable, or `max_steps` is not an integer.
      ValueError: `max_steps` is negative, or `residuals` or `memory` is none of those of `in_place`.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray.doctor import explain
    >>> def f(a, b):
    ...     def body(i, b):
    ...         new = b.at[i].set(jnp.sin(b[i - 1]))
    ...         return jax.lax.cond(i > 5, lambda: new, lambda: a)
    ...     return jax.lax.fori_loop(1, 8, body, b)
    >>> b = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> [(x.kind, x.became, x.reason) for x in explain(f)(b, b)]
    [('read', 'ta_read', ''), ('write', 'ta_write', ''), ('select', '', 'another-buffer')]
    """
    check_is_function("explain", fun)
    check_max_steps("explain", max_steps)
    request = Request(max_steps, strategy_within("explain", residuals, memory))
    static = arguments.Static(fun, static_argnums, static_argnames)

    @arguments.named_as(fun)
    def of(*args: Any, **kwargs: Any) -> Explanation:
        call = static.split(_is_typed, args, kwargs)
        listener = explained.Listener()
        with jax.disable_jit(False), _contexts.listening(listener):
            api.compiled(fun, request, static).eval_shape(*call.args, **call.kwargs)
        notes, listener.notes = listener.notes, []  # JAX's caches keep the listener
        return _listed(notes)

    return of


def _is_typed(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) or arguments.is_array(x)


def _listed(notes: Sequence[explained.Remark]) -> Explanation:
    """Join the notes of a line that are alike. A jaxpr that is traced twice has its equations twice."""
    equations: dict[Explained, dict[int, set[int]]] = {}
    for note in notes:
        equations.setdefault(_described(note), {}).setdefault(id(note.jaxpr), set()).add(id(note.eqn))
    remarks = [replace(x, times=max(map(len, of.values()))) for x, of in equations.items()]
    return Explanation(sorted(remarks, key=lambda x: (x.file or "", x.line or 0)))


def _described(note: explained.Remark) -> Explained:
    at = first_line([note.place])
    text, advice = REASONS[note.reason] if note.reason else ("", "")
    facts = {name: _named(x, at.file) if name == "by" else x for name, x in note.facts.items()}
    return Explained(
        kind=note.kind,
        op=_compat.name_of_primitive(note.eqn),
        dtype=str(note.aval.dtype),
        shape=tuple(note.aval.shape),
        became=note.became,
        reason=note.reason,
        text=text.format(**facts),
        help=advice,
        times=0,
        **at._asdict(),
    )


_NAMES = {"dot_general": "the product", "concatenate": "the concatenation"}


def _named(eqn: Equation, file: str | None) -> str:
    """Name an equation, and its line."""
    if eqn is None:
        return "the result of the step"
    name = _NAMES.get(eqn.primitive.name, f"`{_compat.name_of_primitive(eqn)}`")
    at = line_of([eqn])
    of_file = f" of {name_of_file(at.file)}" if at.file and at.file != file else ""
    return f"{name} in line {at.line}{of_file}" if at.line else name
