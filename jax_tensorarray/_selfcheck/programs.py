"""The loops of the main job, each written once for plain JAX and for this library.

Each maps `x` of shape `[T, *elem]` to a scalar; `ops` has the functions that read and write rows.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.swap import ta_swap
from jax_tensorarray._ops.write import ta_write

Array = jax.Array
Step = tuple[Array, Array]  #: its number, and the row of `x`

#: Plain JAX, as people write it today.
plain = SimpleNamespace(
    read=lambda buffer, index: buffer[index],
    write=lambda buffer, index, value: buffer.at[index].set(value),
    swap=lambda buffer, index, value: (buffer.at[index].set(value), buffer[index]),
    array=lambda size, row: jnp.zeros((size, *row.shape), row.dtype),
    get=lambda ta, index: ta[index],
    put=lambda ta, index, row: ta.at[index].set(row),
    stack=lambda ta: ta,
)

#: The same with this library.
ours = SimpleNamespace(
    read=ta_read,
    write=ta_write,
    swap=ta_swap,
    array=lambda size, row: TensorArray.like(row, 0, dynamic_size=True, max_size=size),
    get=TensorArray.read,
    put=TensorArray.write,
    stack=lambda ta: ta.stack(pad=True),
)


class Program(NamedTuple):
    """A loop: its name, what it does in a few words, and the function `(ops, x) -> scalar`."""

    name: str
    about: str
    loss: Callable[[Any, Array], Array]

    def with_ops(self, ops: Any) -> Callable[[Array], Array]:
        """Return the program as a function of `x` alone."""
        return partial(self.loss, ops)


def over_steps(body: Callable[[Any, Step], Any], carry: Any, x: Array) -> Any:
    """Return the carry after `body(carry, (i, x[i]))` for every row of `x`."""
    return lax.scan(lambda c, step: (body(c, step), None), carry, (jnp.arange(len(x)), x))[0]


def some_row(i: Array, x: Array) -> Array:
    return (i * 7 + 3) % len(x)


def _issue_15906(ops: Any, x: Array) -> Array:
    def body(c: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], None]:
        i, ys = c
        return (i + 1, ops.write(ys, i, ops.read(x, i) * i**0.5)), None

    return jnp.sum(lax.scan(body, (0, jnp.zeros_like(x)), None, length=len(x))[0][1])


def _tensorarray(ops: Any, x: Array) -> Array:
    def body(c: tuple[Any, Any, Array], step: Step) -> tuple[Any, Any, Array]:
        (states, tokens, score), (i, row) = c, step
        state = jnp.tanh(row + ops.get(states, i) - ops.get(states, i // 2))
        chances = jax.nn.log_softmax(state.reshape(-1))
        token = jnp.argmax(chances).astype(jnp.int32)
        return ops.put(states, i + 1, state), ops.put(tokens, i, token), score + chances[token]

    states, tokens = ops.array(len(x) + 1, x[0]), ops.array(len(x), jnp.int32(0))
    states, tokens, score = over_steps(body, (ops.put(states, 0, x[0]), tokens, jnp.zeros(())), x)
    return score + jnp.sum(ops.stack(states) ** 2) + jnp.sum(ops.stack(tokens))


def _write(ops: Any, x: Array) -> Array:
    buffer = over_steps(lambda b, step: ops.write(b, step[0], jnp.sin(step[1])), jnp.zeros_like(x), x)
    return jnp.sum(buffer**2)


def _read_then_write(ops: Any, x: Array) -> Array:
    def body(b: Array, step: Step) -> Array:
        i, row = step
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + row))

    return jnp.sum(over_steps(body, jnp.zeros_like(x), x) ** 2)


def _swap(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], step: Step) -> tuple[Array, Array]:
        (b, hand), (i, row) = c, step
        b, old = ops.swap(b, some_row(i, x), jnp.sin(hand) + row)
        return b, old

    b, hand = over_steps(body, (x, x[0]), x)
    return jnp.sum(b**2) + jnp.sum(hand)


def _branches(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], step: Step) -> tuple[Array, Array]:
        (b, hand), (i, row) = c, step
        return lax.cond(
            row.reshape(-1)[0] > 0,
            lambda b, hand: (ops.write(b, i, jnp.sin(row) + hand), hand),
            lambda b, hand: (b, hand + jnp.cos(ops.read(b, i // 2))),
            b,
            hand,
        )

    b, hand = over_steps(body, (jnp.ones_like(x), jnp.zeros_like(x[0])), x)
    return jnp.sum(b**2) + jnp.sum(hand)


def _closed_over_scan(ops: Any, x: Array) -> Array:
    def body(hand: Array, step: Step) -> Array:
        def inner(hand: Array, k: Array) -> tuple[Array, None]:
            return jnp.sin(hand + ops.read(x, (step[0] + k) % len(x))), None

        return lax.scan(inner, hand, jnp.arange(3))[0]

    return jnp.sum(over_steps(body, jnp.zeros_like(x[0]), x))


programs = {
    name: Program(name, about, loss)
    for name, about, loss in (
        ("issue_15906", "jax issue 15906: test_scan", _issue_15906),
        ("tensorarray", "a decoder with two growing TensorArrays", _tensorarray),
        ("write", "write into the carry", _write),
        ("read_then_write", "read an earlier row, write the next", _read_then_write),
        ("swap", "swap: put a row, take the old one", _swap),
        ("branches", "cond: write in one branch, read in the other", _branches),
        ("closed_over_scan", "read a closed-over buffer inside an inner scan", _closed_over_scan),
    )
}
