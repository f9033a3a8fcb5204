"""Loops over a buffer, each written once for plain JAX and for this library.

The main job, the tests and the benchmarks run the same programs. Each maps `x` of shape `[T, *elem]` to a scalar;
`ops` has the functions that read and write rows.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tensorarray import checkpoint_policies
from jax_tensorarray._array.tensorarray import TensorArray
from jax_tensorarray._ops.add import ta_add
from jax_tensorarray._ops.read import ta_read
from jax_tensorarray._ops.swap import ta_swap
from jax_tensorarray._ops.write import ta_write

Array = jax.Array


def _plain_write(buffer: Array, index: Array, value: Array, where: Array | None = None) -> Array:
    new = buffer.at[index].set(value)
    return new if where is None else jnp.where(where, new, buffer)


def _plain_swap(buffer: Array, index: Array, value: Array) -> tuple[Array, Array]:
    return buffer.at[index].set(value), buffer[index]


#: Plain JAX, as people write it today.
plain = SimpleNamespace(
    read=lambda buffer, index: buffer[index],
    write=_plain_write,
    add=lambda buffer, index, value: buffer.at[index].add(value),
    swap=_plain_swap,
    policy=None,
    array=lambda size, row: jnp.zeros((size, *row.shape), row.dtype),
    get=lambda ta, index: ta[index],
    put=lambda ta, index, row: ta.at[index].set(row),
    stack=lambda ta: ta,
)

#: The same with this library.
ours = SimpleNamespace(
    read=ta_read,
    write=ta_write,
    add=ta_add,
    swap=ta_swap,
    policy=checkpoint_policies.save_reads,
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
        return functools.partial(self.loss, ops)


programs: dict[str, Program] = {}


def _program(about: str) -> Callable[[Callable[[Any, Array], Array]], Callable[[Any, Array], Array]]:
    def register(loss: Callable[[Any, Array], Array]) -> Callable[[Any, Array], Array]:
        programs[loss.__name__] = Program(loss.__name__, about, loss)
        return loss

    return register


def _over_steps(body: Callable[[Any, tuple[Array, Array]], Any], carry: Any, x: Array) -> Any:
    """Return the carry after `body(carry, (i, x[i]))` for every row of `x`."""
    return lax.scan(lambda c, ix: (body(c, ix), None), carry, (jnp.arange(len(x)), x))[0]


def _some_row(i: Array, x: Array) -> Array:
    return (i * 7 + 3) % len(x)


@_program("write into the carry")
def write(ops: Any, x: Array) -> Array:
    buffer = _over_steps(lambda b, ix: ops.write(b, ix[0], jnp.sin(ix[1])), jnp.zeros_like(x), x)
    return jnp.sum(buffer**2)


@_program("read an earlier row, write the next")
def read_then_write(ops: Any, x: Array) -> Array:
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + row))

    return jnp.sum(_over_steps(body, jnp.zeros_like(x), x) ** 2)


@_program("a read before a write that does not depend on it")
def read_beside_write(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        seen = ops.read(b, _some_row(i, x))
        return ops.write(b, i, jnp.sin(row)), total + jnp.sum(seen**2)

    return _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@_program("a read of the old buffer, after a write that does not depend on it")
def read_old_after_write(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        new = ops.write(b, i, jnp.sin(row))
        return new, total + jnp.sum(ops.read(b, _some_row(i, x)) ** 2)

    return _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@_program("a read of the new buffer, after the write")
def read_new_after_write(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        new = ops.write(b, i, jnp.sin(row))
        return new, total + jnp.sum(ops.read(new, _some_row(i, x)) ** 2)

    return _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@_program("three reads beside one write")
def three_reads(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        seen = [ops.read(b, (i * k + k) % len(x)) for k in (3, 5, 7)]
        return ops.write(b, i, jnp.sin(row)), total + jnp.sum(seen[0] * seen[1] + seen[2] ** 2)

    return _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@_program("two buffers, each written from the other")
def cross(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (a, b), (i, row) = c, ix
        from_a, from_b = ops.read(a, i // 2), ops.read(b, i // 2)
        return ops.write(a, i, jnp.sin(from_b) + row), ops.write(b, i, jnp.cos(from_a) * row)

    a, b = _over_steps(body, (jnp.zeros_like(x), jnp.ones_like(x)), x)
    return jnp.sum(a * b)


@_program("overwrite one row many times")
def overwrite(ops: Any, x: Array) -> Array:
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        return ops.write(b, i % 3, jnp.tanh(ops.read(b, (i + 1) % 3)) + row)

    return jnp.sum(_over_steps(body, jnp.zeros_like(x), x) ** 2)


@_program("exchange two rows")
def exchange(ops: Any, x: Array) -> Array:
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        j = _some_row(i, x)
        one, other = ops.read(b, i), ops.read(b, j)
        return ops.write(ops.write(b, i, jnp.sin(other)), j, one * row)

    return jnp.sum(_over_steps(body, x, x) ** 2)


@_program("swap: put a row, take the old one")
def swap(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, hand), (i, row) = c, ix
        b, old = ops.swap(b, _some_row(i, x), jnp.sin(hand) + row)
        return b, old

    b, hand = _over_steps(body, (x, x[0]), x)
    return jnp.sum(b**2) + jnp.sum(hand)


@_program("add to a row, read another")
def add(ops: Any, x: Array) -> Array:
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        return ops.add(b, _some_row(i, x), jnp.sin(ops.read(b, i // 2)) * row)

    return jnp.sum(_over_steps(body, x, x) ** 2)


@_program("predicated write (where=)")
def predicated(ops: Any, x: Array) -> Array:
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        return ops.write(b, i, jnp.sin(row) + ops.read(b, i // 2), where=row.reshape(-1)[0] > 0)

    return jnp.sum(_over_steps(body, jnp.ones_like(x), x) ** 2)


@_program("cond: write in one branch, read in the other")
def branches(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, hand), (i, row) = c, ix
        return lax.cond(
            row.reshape(-1)[0] > 0,
            lambda b, hand: (ops.write(b, i, jnp.sin(row) + hand), hand),
            lambda b, hand: (b, hand + jnp.cos(ops.read(b, i // 2))),
            b,
            hand,
        )

    b, hand = _over_steps(body, (jnp.ones_like(x), jnp.zeros_like(x[0])), x)
    return jnp.sum(b**2) + jnp.sum(hand)


@_program("cond that writes, with a read before it outside")
def read_beside_cond(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        seen = ops.read(b, _some_row(i, x))
        b = lax.cond(row.reshape(-1)[0] > 0, lambda b: ops.write(b, i, jnp.sin(row)), lambda b: b, b)
        return b, total + jnp.sum(seen**2)

    return _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@_program("nested jit that writes, with a read before it outside")
def read_beside_jit(ops: Any, x: Array) -> Array:
    store = jax.jit(lambda b, i, row: ops.write(b, i, jnp.sin(row)))

    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        seen = ops.read(b, _some_row(i, x))
        return store(b, i, row), total + jnp.sum(seen**2)

    return _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@_program("read a closed-over buffer")
def closed_over(ops: Any, x: Array) -> Array:
    def body(hand: Array, ix: tuple[Array, Array]) -> Array:
        return jnp.sin(hand + ops.read(x, _some_row(ix[0], x)))

    return jnp.sum(_over_steps(body, jnp.zeros_like(x[0]), x))


@_program("read a closed-over buffer inside a nested jit")
def closed_over_jit(ops: Any, x: Array) -> Array:
    look = jax.jit(lambda b, i: jnp.sin(ops.read(b, i)))

    def body(hand: Array, ix: tuple[Array, Array]) -> Array:
        return jnp.tanh(hand + look(x, _some_row(ix[0], x)))

    return jnp.sum(_over_steps(body, jnp.zeros_like(x[0]), x))


@_program("read a closed-over buffer inside cond")
def closed_over_cond(ops: Any, x: Array) -> Array:
    def body(hand: Array, ix: tuple[Array, Array]) -> Array:
        i, _ = ix
        return lax.cond(i % 3 == 0, lambda: jnp.cos(hand), lambda: jnp.sin(hand + ops.read(x, _some_row(i, x))))

    return jnp.sum(_over_steps(body, jnp.zeros_like(x[0]), x))


@_program("read a closed-over buffer inside an inner scan")
def closed_over_scan(ops: Any, x: Array) -> Array:
    def body(hand: Array, ix: tuple[Array, Array]) -> Array:
        def inner(hand: Array, k: Array) -> tuple[Array, None]:
            return jnp.sin(hand + ops.read(x, (ix[0] + k) % len(x))), None

        return lax.scan(inner, hand, jnp.arange(3))[0]

    return jnp.sum(_over_steps(body, jnp.zeros_like(x[0]), x))


@_program("inner loop writes, outer loop reads")
def inner_writes(ops: Any, x: Array) -> Array:
    def body(c: tuple[Array, Array], ix: tuple[Array, Array]) -> tuple[Array, Array]:
        (b, total), (i, row) = c, ix
        seen = ops.read(b, _some_row(i, x))
        b = lax.fori_loop(0, 3, lambda k, b: ops.write(b, (i + k) % len(x), jnp.sin(row) * k), b)
        return b, total + jnp.sum(seen**2)

    b, total = _over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)
    return total + jnp.sum(b)


@_program("gather and scatter four rows a step")
def many_rows(ops: Any, x: Array) -> Array:
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        rows = ops.read(b, (i + jnp.arange(4)) % len(x))
        return ops.write(b, (i * 5 + jnp.arange(4)) % len(x), jnp.tanh(rows) + row)

    return jnp.sum(_over_steps(body, x, x) ** 2)


@_program("jax.checkpoint around the body, policy save_reads")
def checkpointed(ops: Any, x: Array) -> Array:
    @functools.partial(jax.checkpoint, policy=ops.policy)
    def body(b: Array, ix: tuple[Array, Array]) -> Array:
        i, row = ix
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + row))

    return jnp.sum(_over_steps(body, jnp.zeros_like(x), x) ** 2)


@_program("jax issue 15906: test_scan")
def issue_15906(ops: Any, x: Array) -> Array:
    def body(c: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], None]:
        i, ys = c
        return (i + 1, ops.write(ys, i, ops.read(x, i) * i**0.5)), None

    return jnp.sum(lax.scan(body, (0, jnp.zeros_like(x)), None, length=len(x))[0][1])


def _decoder(ops: Any, x: Array) -> Array:
    def step(c: tuple[Any, Any, Array], ix: tuple[Array, Array]) -> tuple[Any, Any, Array]:
        (states, tokens, score), (i, row) = c, ix
        state = jnp.tanh(row + ops.get(states, i) - ops.get(states, i // 2))
        chances = jax.nn.log_softmax(state.reshape(-1))
        token = jnp.argmax(chances).astype(jnp.int32)
        return ops.put(states, i + 1, state), ops.put(tokens, i, token), score + chances[token]

    states, tokens = ops.array(len(x) + 1, x[0]), ops.array(len(x), jnp.int32(0))
    states, tokens, score = _over_steps(step, (ops.put(states, 0, x[0]), tokens, jnp.zeros(())), x)
    return score + jnp.sum(ops.stack(states) ** 2) + jnp.sum(ops.stack(tokens))


#: What the main job shows: these, and one as people port it from TensorFlow.
shown = programs | {"tensorarray": Program("tensorarray", "a decoder with two growing TensorArrays", _decoder)}
