"""The logger `jax_tensorarray`: what `in_place` has made of a function, one line per trace, and all details.

A line such as "loss: 5 reads, 2 writes in 2 loops; 1 left [another-buffer], train.py:14" counts what was rewritten,
the loops as the user wrote them, and what is left, with the reasons and the first line. It leaves out operations
outside of loops, which need no action.

Nothing is collected unless the logger is enabled, and nothing is analysed twice: the line is made of the remarks that
`explained` keeps for `doctor.explain`.
"""

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place import explained
from jax_tensorarray._jaxprs import jaxprs, registry

logger = logging.getLogger("jax_tensorarray")
logger.addHandler(logging.NullHandler())

_PLURALS = {"carry": "carries", "branch": "branches"}

#: A reason that needs no action: the operation happens once per call.
_OUTSIDE = "not-in-a-loop"


@contextlib.contextmanager
def tracing(fun: Callable[..., Any]) -> Iterator[Callable[[Jaxpr], None]]:
    """Log what becomes of a function that is traced in a block. Call the result with the jaxpr as it is written."""
    if not logger.isEnabledFor(logging.INFO):
        yield lambda jaxpr: None
        return
    seen: list[Jaxpr] = []
    with explained.hearing() as notes:
        yield seen.append
    if seen:
        _tell(_name(fun), notes, len({place for jaxpr in seen for place in _loops(jaxpr)}))


def is_off(fun: Callable[..., Any], why: str) -> None:
    """Log that a function is traced as it is written, since something has turned `in_place` off."""
    logger.info("%s: not rewritten, in_place is off (%s)", _name(fun), why)


def is_checked(fun: Callable[..., Any]) -> None:
    """Log that each call of a function is compared with the function as it is written."""
    logger.info("%s: check=True compares each call with the function as it is written", _name(fun))


def has_no_copies(name: str) -> None:
    """Log that a compiled program copies nothing in the loops of a strict function."""
    logger.info("%s: strict=True found no copy in the compiled program", name)


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def _tell(name: str, notes: list[explained.Remark], loops: int) -> None:
    from jax_tensorarray.doctor._explain import _listed
    from jax_tensorarray.doctor._text import name_of_file

    found = _listed(notes)
    listed = [x for x in found if x.kind != "loop"]  # those say only that a loop has no derivative
    counts: Counter[str] = Counter()
    for x in listed:
        counts[x.kind] += x.times if x.became else 0
    parts = [_count(n, kind) for kind, n in counts.items() if n]
    text = f"{', '.join(parts) or 'nothing rewritten'} in {_count(loops, 'loop')}"
    stay = [x for x in listed if not x.became and x.reason != _OUTSIDE]
    if stay:
        first = stay[0]
        reasons = ", ".join(dict.fromkeys(x.reason for x in stay if x.reason))
        place = f", {name_of_file(first.file)}:{first.line}" if first.file else ""
        text += f"; {sum(x.times for x in stay)} left [{reasons}]{place}"
    logger.info("%s: %s", name, text)
    logger.debug("%s: %s", name, found)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun if n == 1 else _PLURALS.get(noun, noun + 's')}"


def _loops(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the place of each loop in a jaxpr, of nested ones too. A loop and its backward pass have the same place."""
    for eqn in _compat.opened(jaxpr).eqns:
        if registry.entry_of(eqn).kind == "loop":
            place = source_info_util.summarize(eqn.source_info)
            yield place if re.match(r".+:\d+", place) else id(eqn)
        for inner in jaxprs.jaxprs_in(eqn.params):
            yield from _loops(inner)
