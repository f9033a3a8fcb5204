"""`in_place(f, strict=True)`: an error if the compiled program still copies a buffer in a loop of `f`.

`in_place` runs while JAX traces, and only the compiled program shows what XLA copies. So a scope marks all operations
of `f`, also in its derivatives, and XLA keeps the names of scopes. When JAX has compiled a program with such marks,
`doctor` examines it, as `forbid_copies` does, and judges the loops that carry the mark.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr

from jax_tensorarray import _compat
from jax_tensorarray._in_place import log
from jax_tensorarray._jaxprs import jaxprs

_MARK = "in_place_strict."

_watching = contextlib.ExitStack()
_is_watching = False
_lock = threading.Lock()


@contextlib.contextmanager
def marked(fun: Callable[..., Any], strict: bool) -> Iterator[None]:
    """Mark what is traced in a block as a part of `fun`, if that is strict."""
    if not strict:
        yield
        return
    _watch()
    name = re.sub(r"\W+", "_", getattr(fun, "__name__", "f")).strip("_")
    with jax.named_scope(_MARK + name):
        yield


def is_marked(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr contains something of a strict function."""
    return _is_watching and jaxprs.any_equation(jaxpr, _has_mark)


def _has_mark(eqn: Any) -> bool:
    return _MARK in str(eqn.source_info.name_stack)


def _watch() -> None:
    """Look at all programs that JAX compiles from now on. Those without a mark cost one look at their jaxpr.

    A program may be compiled long after it has been traced, so this has no end.
    """
    global _is_watching
    with _lock:
        if not _is_watching:
            _watching.enter_context(_compat.compilations(_seen, needs_lines=_may_be_marked))
            _is_watching = True


def _may_be_marked(jaxpr: Jaxpr | None) -> bool:
    return jaxpr is None or is_marked(jaxpr)


def _seen(name: str, jaxpr: Jaxpr | None, executable: Any) -> None:
    if not _may_be_marked(jaxpr):
        return
    from jax_tensorarray._hlo import buffers, text
    from jax_tensorarray.doctor import LoopCopyError
    from jax_tensorarray.doctor._copies import MIN_BYTES, copies_in

    hlo = text.of_executable(executable)
    if _MARK not in hlo:
        return
    found = [finding for finding in buffers.findings(hlo) if any(_MARK in i.op_name for i in finding.at)]
    copies = copies_in(hlo, MIN_BYTES, found)
    if copies:
        raise LoopCopyError(name.removeprefix("jit_"), copies, "in_place: strict=True")
    for strict in dict.fromkeys(re.findall(rf"{re.escape(_MARK)}(\w+)", hlo)):
        log.has_no_copies(strict)
