"""Find the arguments that a program copies as a whole, outside of loops, and count how often it is called."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._hlo import arguments as hlo_arguments
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.doctor._advice import OF_ARGUMENTS
from jax_tensorarray.doctor._finding import Finding, array_at
from jax_tensorarray.doctor._kept import LISTED
from jax_tensorarray.doctor._text import readable

#: The program that JAX compiles for an update outside of jit. Its arguments have no names.
_EAGER = re.compile(r"HloModule jit_(scatter\w*|dynamic_update_slice),")


@dataclass(frozen=True, kw_only=True)
class ArgumentCopy(Finding):
    """An argument that every call of a program copies as a whole, although the call changes at most a few of its rows.

    Attributes:
      name: the argument, as the program was called: `state['h']`.
      dtype: the element type of the array, by JAX's name.
      shape: the shape of the array.
      num_bytes: the size of the array.
      donated: whether the argument is donated.
      cause: `"not donated"`, `"donated"` (and copied all the same), `"exchanged"` (the call returns it in the memory of
        another donated argument) or `"eager"` (an update outside of jit, where no argument has a name).
      times: the number of copies per call.
      calls: how often the program was called, or None if the doctor could not count.
      file: the Python file that changes the rows, or None if XLA does not name it.
      line: the number of the line.
      code: the text of the line; empty if the file cannot be read.
      advice: how to avoid the copy.
      number: the position of the argument among those that the program uses.
    """

    name: str
    num_bytes: int
    donated: bool
    cause: str
    times: int
    calls: int | None
    advice: str
    number: int = 0

    @property
    def cost(self) -> int:
        """The bytes that are copied in all calls, or in one if they were not counted."""
        return self.num_bytes * self.times * (self.calls or 1)

    @property
    def key(self) -> Any:
        return self.file, self.line, self.cause, self.name

    @property
    def alike(self) -> Any:
        return self.file, self.line, self.cause

    @property
    def what(self) -> str:
        """A description in one sentence without its end."""
        what = "an array" if self.cause == "eager" else f"the argument {self.name}"
        return f"a copy of {what}, {self.array}: {readable(self.num_bytes * self.times)} per call{_calls(', ', self)}"

    def describe(self, alike: Sequence["ArgumentCopy"]) -> list[str]:
        more = [f"{len(alike) - LISTED} more are copied there."] if len(alike) > LISTED else []
        return [*(f"{copy.what}." for copy in alike[:LISTED]), *more]


def headline_of_arguments(copies: Sequence[ArgumentCopy]) -> str:
    """Say what is wrong with the arguments of a program, in one line."""
    first = max(copies, key=lambda copy: copy.cost)
    number = sum(copy.cause == first.cause for copy in copies)
    names, verb, come = first.name, "is", "comes"
    if number > 1:
        names, verb, come = f"{names} and {number - 1} more", "are", "come"
    what = {
        "not donated": f"{names} {verb} not donated, and copied in every call",
        "donated": f"{names} {verb} donated, but copied in every call all the same",
        "exchanged": f"{names} {come} back at another position, and {verb} copied in every call",
        "eager": "an update outside of jit copies the whole array in every call",
    }[first.cause]
    return f"{what}: {readable(sum(copy.cost for copy in copies))}{_calls(' in ', first) or ' per call'}"


def _calls(before: str, copy: ArgumentCopy) -> str:
    return f"{before}{copy.calls} calls" if (copy.calls or 0) > 1 else ""


def argument_copies(hlo: str, min_bytes: int) -> list[ArgumentCopy]:
    """Return the arguments that a program copies, from its optimised HLO. They are not counted as called."""
    copied = hlo_arguments.copied_arguments(hlo, min_bytes)
    if not copied:
        return []
    frames, is_eager = hlo_text.frames(hlo), _EAGER.match(hlo) is not None
    return [_described(argument, frames, is_eager and argument.name == "args[0]") for argument in copied]


def _described(
    argument: hlo_arguments.CopiedArgument, frames: Callable[[str], list[hlo_text.Frame]], is_eager: bool
) -> ArgumentCopy:
    frame = next((frame for i in argument.at for frame in frames(i.attributes)), None)
    cause = "exchanged" if argument.exchanged else "donated" if argument.is_donated else "not donated"
    cause = "eager" if is_eager else cause
    return ArgumentCopy(
        name=argument.name,
        donated=argument.is_donated,
        cause=cause,
        times=len(argument.moves),
        calls=None,
        advice=OF_ARGUMENTS[cause].format(argument.name),
        number=argument.number,
        **array_at(argument.array, frame),
    )


@dataclass
class CountedProgram:
    """A program whose calls are counted."""

    name: str
    types: frozenset[tuple[tuple[int, ...], Any]]
    calls: int = 1  #: the first one compiles it
    function: Any = None

    def counted(self, copies: Sequence[ArgumentCopy]) -> list[ArgumentCopy]:
        """Return the copies, and in how many calls each happens.

        What is not donated is left out if there was no other call: then it is not a state.
        """
        return [replace(copy, calls=self.calls) for copy in copies if copy.donated or self.calls > 1]


class Calls:
    """Counts the calls of a few programs. Nothing is counted, and nothing costs time, until there is one.

    Of a call, JAX tells the function and the arguments. So a program is known by the name of its function and the types
    of the arguments that it copies, and the first function that fits from then on is taken for its own.
    """

    def __init__(self) -> None:
        self._programs: list[CountedProgram] = []
        self._names: set[str] = set()
        self._shapes: set[tuple[int, ...]] = set()
        self._end: Callable[[], None] | None = None

    def expect(self, jaxpr: Jaxpr, copies: Sequence[ArgumentCopy], name: str) -> CountedProgram:
        """Count the calls of a program from now on. `name` is its own name, in case that of its function is not known.

        The types are those that the caller knows: of an array divided among devices, each has a part.
        """
        types = [(copy.shape, np.dtype(copy.dtype)) for copy in copies]
        if jaxpr is not None:
            types = [(jaxpr.in_avals[copy.number].shape, jaxpr.in_avals[copy.number].dtype) for copy in copies]
        program = CountedProgram(_compat.name_of_function(jaxpr) or name, frozenset(types))
        self._programs.append(program)
        self._names.add(program.name)
        self._shapes.update(shape for shape, _ in types)
        self._end = _compat.each_call(self._called)
        return program

    def end(self) -> None:
        if self._end is not None:
            self._end()

    def _called(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        name = getattr(function, "__name__", "")  # a program that is compiled ahead of time has none
        if name and name not in self._names:
            return
        leaves = jax.tree.leaves((args, kwargs))
        types = {(x.shape, x.dtype) for x in leaves if getattr(x, "shape", None) in self._shapes}
        fitting = [p for p in reversed(self._programs) if name in ("", p.name) and p.types <= types]
        if fitting:
            of_function = [p for owner in (function, None) for p in fitting if p.function is owner]
            program = (of_function or fitting)[0]
            program.function = program.function or function
            program.calls += 1
