"""The gradient of a `while_loop` if `in_place` is off: an error that says so.

`max_steps` gives a `while_loop` a derivative in reverse mode, but only if `in_place` rewrites it. The error of JAX
would not mention `in_place`. So an identity follows each loop. It compiles to nothing, and its transpose raises the
error.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from jax.extend.core import Jaxpr, Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad, batching, mlir

from jax_tensorarray._jaxprs import jaxprs, registry
from jax_tensorarray._types import Array, Equation


def explaining_gradients(jaxpr: Jaxpr, text: str) -> Callable[..., list[Array]]:
    """Return a jaxpr as a function. The gradient of a `while_loop` in it is an error with that text."""
    change = _Change(text)
    return lambda *args: change.body(jaxpr, *args)


@contextlib.contextmanager
def of_while_loops(max_steps: int | None, reason: str) -> Iterator[str]:
    """Have the error for a gradient of a `while_loop` in a block say why `max_steps` does not help.

    The result is the text of that error, for `explaining_gradients`.
    """
    text = (
        f"in_place: reverse mode needs max_steps={max_steps} to differentiate a lax.while_loop, but {reason}, and JAX "
        "has no such derivative. Turn it off for the gradient only: call it without jax.grad, jax.vjp or jax.jacrev."
    )
    try:
        yield text
    except ValueError as error:
        if max_steps is None or _OF_JAX not in str(error):
            raise
        raise ValueError(text) from error


_OF_JAX = "Reverse-mode differentiation does not work for lax.while_loop"


def has_while(jaxpr: Jaxpr) -> bool:
    """Return whether there is a `while_loop` of JAX in a jaxpr."""
    return jaxprs.any_equation(jaxpr, lambda eqn: eqn.primitive is jax_primitives.while_p)


class _Change(registry.Change):
    def __init__(self, text: str) -> None:
        self.text = text

    def body(self, jaxpr: Jaxpr, *args: Array) -> list[Array]:
        return jaxprs.interpret(jaxpr, args, self._equation)

    def _equation(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        if eqn.primitive is jax_primitives.while_p:
            outs = jaxprs.bind(eqn, operands)
            return [in_place_off_p.bind(x, text=self.text) if jaxprs.is_inexact(x) else x for x in outs]
        # The rules of a `custom_jvp` or `custom_vjp` may have a derivative that the loop has not.
        entry = registry.entry_of(eqn)
        if entry.kind == "rules" or not any(map(has_while, jaxprs.jaxprs_in(eqn.params))):
            return jaxprs.bind(eqn, operands)
        inner = registry.inlined(eqn)
        if inner is not None:
            return self.body(inner, *operands)
        rebuilt = entry.rebuild(eqn, operands, self)
        return jaxprs.bind(eqn, operands) if rebuilt is None else rebuilt


def _refuse(ct: Any, x: Any, *, text: str) -> NoReturn:
    raise ValueError(text)


in_place_off_p = Primitive("in_place_off")
in_place_off_p.def_impl(lambda x, *, text: x)
in_place_off_p.def_abstract_eval(lambda x, *, text: x)
ad.deflinear2(in_place_off_p, _refuse)
batching.defvectorized(in_place_off_p)
mlir.register_lowering(in_place_off_p, lambda ctx, x, *, text: [x])
