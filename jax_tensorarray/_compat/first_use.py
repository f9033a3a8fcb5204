"""Replace parts of JAX when this library is first used."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax_tensorarray._compat.versions import warn_if_untested


class Replacement(NamedTuple):
    """A value that replaces a rule in a table of JAX, or an attribute."""

    owner: Any  #: the table, or the object with that attribute
    name: Any
    new: Any

    def put(self) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = self.new
        else:
            setattr(self.owner, self.name, self.new)


#: Returns the replacements.
_make: Callable[[], Sequence[Replacement]] | None = None

_replacements: Sequence[Replacement] | None = None
_are_put = False
_putting = threading.RLock()


def on_first_use(make: Callable[[], Sequence[Replacement]]) -> None:
    """Set the function that returns the replacements."""
    global _make
    _make = make


def first_use() -> None:
    """Make the replacements, unless they are made. After an interrupt, the next use continues."""
    global _replacements, _are_put
    if _are_put or _make is None:
        return
    warn_if_untested()
    with _putting:
        if not _are_put:
            _replacements = _make() if _replacements is None else _replacements
            for replacement in _replacements:
                replacement.put()
            _are_put = True
