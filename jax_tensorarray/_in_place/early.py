"""Loops that a program differentiates are repaired before.

What a derivative of plain JAX has made of a loop says more than what is written in the loop: that all versions of a
buffer are kept, or masks of whole buffers. So the loop is repaired first, and then differentiated. JAX has no way to
ask for that but the call by which every loop comes into a program, the `bind` of its primitive. Where no function is
being repaired it does what it did.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives

from jax_tensorarray import _compat
from jax_tensorarray._in_place.repair import Repair
from jax_tensorarray._in_place.values import Value


class _Request(NamedTuple):
    max_steps: int | None


#: What JAX remembers of a traced function it remembers for the value that this has.
_request = jax.make_user_context(None)


@contextlib.contextmanager
def repairs(max_steps: int | None) -> Iterator[None]:
    """In this context every loop that is differentiated is repaired."""
    with _request(_Request(max_steps)):
        yield


def _repairing(primitive: Primitive) -> Callable[..., Any]:
    usual = primitive.bind

    @functools.wraps(usual)
    def bind(*args: Any, **params: Any) -> Any:
        request = _request.value
        if request is None or not any(map(_compat.is_differentiated, args)):
            return usual(*args, **params)
        loop = SimpleNamespace(primitive=primitive, params=params)
        repair = Repair(request.max_steps)
        if not repair.finds_in(loop):
            return usual(*args, **params)
        with _request(None):
            return [x.array for x in repair.loop(loop, list(map(Value, args)))]

    return bind


def install() -> None:
    """Let JAX's loops come here first."""
    for primitive in (jax_primitives.scan_p, jax_primitives.while_p):
        primitive.bind = _repairing(primitive)  # type: ignore[method-assign]
