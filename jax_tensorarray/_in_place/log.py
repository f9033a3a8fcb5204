"""The logger `jax_tensorarray`: what `in_place` has made of a function, one line per trace, and all details.

Nothing is collected unless the logger is enabled, and nothing is analysed twice: the line is made of the remarks that
`explained` keeps for `doctor.explain`.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place import explained
from jax_tensorarray._jaxprs import jaxprs, registry

logger = logging.getLogger("jax_tensorarray")
logger.addHandler(logging.NullHandler())

_PLURALS = {"carry": "carries", "branch": "branches"}


@contextlib.contextmanager
def tracing(fun: Callable[..., Any]) -> Iterator[Callable[[Jaxpr], None]]:
    """Log what becomes of a function that is traced in a block. The result is told of the jaxpr as it is written."""
    if not logger.isEnabledFor(logging.INFO):
        yield lambda jaxpr: None
        return
    seen: list[Jaxpr] = []
    with explained.hearing() as notes:
        yield seen.append
    if seen:
        _tell(getattr(fun, "__name__", repr(fun)), notes, sum(map(_loops, seen)))


def is_off(fun: Callable[..., Any], why: str) -> None:
    """Log that a function is traced as it is written, since something has turned `in_place` off."""
    logger.info("%s: not rewritten, in_place is off (%s)", getattr(fun, "__name__", fun), why)


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
    stay = [x for x in listed if not x.became]
    if stay:
        first = stay[0]
        reasons = ", ".join(dict.fromkeys(x.reason for x in stay if x.reason))
        place = f", {name_of_file(first.file)}:{first.line}" if first.file else ""
        text += f"; {sum(x.times for x in stay)} left [{reasons}]{place}"
    logger.info("%s: %s", name, text)
    logger.debug("%s: %s", name, found)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun if n == 1 else _PLURALS.get(noun, noun + 's')}"


def _loops(jaxpr: Jaxpr) -> int:
    """Return how many loops there are in a jaxpr, nested ones too."""
    return sum(
        (registry.entry_of(eqn).kind == "loop") + sum(map(_loops, jaxprs.jaxprs_in(eqn.params)))
        for eqn in _compat.opened(jaxpr).eqns
    )
