"""Loops over a buffer, each written once for plain JAX and for this library: those of the main job, and more.

Tests and benchmarks run the same programs. Each maps `x` of shape `[T, *elem]` to a scalar; `ops` has the functions
that read and write rows, and is `plain` or `ours`.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from jax_tensorarray import _selfcheck as shown
from jax_tensorarray import checkpoint_policies, ta_add, ta_swap
from jax_tensorarray._selfcheck import Program


def _plain_write(buffer, index, value, where=None):
    new = buffer.at[index].set(value)
    return new if where is None else jnp.where(where, new, buffer)


#: The ops of the main job, and those of the programs below.
plain = SimpleNamespace(
    **vars(shown.plain)
    | {
        "write": _plain_write,
        "add": lambda buffer, index, value: buffer.at[index].add(value),
        "swap": lambda buffer, index, value: (buffer.at[index].set(value), buffer[index]),
        "policy": None,
    }
)
ours = SimpleNamespace(**vars(shown.ours) | {"add": ta_add, "swap": ta_swap, "policy": checkpoint_policies.save_reads})

programs = {}


OF_MAIN_JOB = {program.name: program for program in shown.programs}


def of_main_job(name):
    programs[name] = OF_MAIN_JOB[name]


def program(about):
    def register(loss):
        programs[loss.__name__] = Program(loss.__name__, about, loss)
        return loss

    return register


def some_row(i, x):
    return (i * 7 + 3) % len(x)


@program("write into the carry")
def write(ops, x):
    buffer = shown.over_steps(lambda b, step: ops.write(b, step[0], jnp.sin(step[1])), jnp.zeros_like(x), x)
    return jnp.sum(buffer**2)


of_main_job("read_then_write")


@program("a read before a write that does not depend on it")
def read_beside_write(ops, x):
    def body(c, ix):
        (b, total), (i, row) = c, ix
        seen = ops.read(b, some_row(i, x))
        return ops.write(b, i, jnp.sin(row)), total + jnp.sum(seen**2)

    return shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@program("a read of the old buffer, after a write that does not depend on it")
def read_old_after_write(ops, x):
    def body(c, ix):
        (b, total), (i, row) = c, ix
        new = ops.write(b, i, jnp.sin(row))
        return new, total + jnp.sum(ops.read(b, some_row(i, x)) ** 2)

    return shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@program("a read of the new buffer, after the write")
def read_new_after_write(ops, x):
    def body(c, ix):
        (b, total), (i, row) = c, ix
        new = ops.write(b, i, jnp.sin(row))
        return new, total + jnp.sum(ops.read(new, some_row(i, x)) ** 2)

    return shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@program("three reads beside one write")
def three_reads(ops, x):
    def body(c, ix):
        (b, total), (i, row) = c, ix
        seen = [ops.read(b, (i * k + k) % len(x)) for k in (3, 5, 7)]
        return ops.write(b, i, jnp.sin(row)), total + jnp.sum(seen[0] * seen[1] + seen[2] ** 2)

    return shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@program("two buffers, each written from the other")
def cross(ops, x):
    def body(c, ix):
        (a, b), (i, row) = c, ix
        from_a, from_b = ops.read(a, i // 2), ops.read(b, i // 2)
        return ops.write(a, i, jnp.sin(from_b) + row), ops.write(b, i, jnp.cos(from_a) * row)

    a, b = shown.over_steps(body, (jnp.zeros_like(x), jnp.ones_like(x)), x)
    return jnp.sum(a * b)


@program("overwrite one row many times")
def overwrite(ops, x):
    def body(b, ix):
        i, row = ix
        return ops.write(b, i % 3, jnp.tanh(ops.read(b, (i + 1) % 3)) + row)

    return jnp.sum(shown.over_steps(body, jnp.zeros_like(x), x) ** 2)


@program("exchange two rows")
def exchange(ops, x):
    def body(b, ix):
        i, row = ix
        j = some_row(i, x)
        one, other = ops.read(b, i), ops.read(b, j)
        return ops.write(ops.write(b, i, jnp.sin(other)), j, one * row)

    return jnp.sum(shown.over_steps(body, x, x) ** 2)


@program("swap: put a row, take the old one")
def swap(ops, x):
    def body(c, step):
        (b, hand), (i, row) = c, step
        b, old = ops.swap(b, some_row(i, x), jnp.sin(hand) + row)
        return b, old

    b, hand = shown.over_steps(body, (x, x[0]), x)
    return jnp.sum(b**2) + jnp.sum(hand)


@program("add to a row, read another")
def add(ops, x):
    def body(b, ix):
        i, row = ix
        return ops.add(b, some_row(i, x), jnp.sin(ops.read(b, i // 2)) * row)

    return jnp.sum(shown.over_steps(body, x, x) ** 2)


@program("predicated write (where=)")
def predicated(ops, x):
    def body(b, ix):
        i, row = ix
        return ops.write(b, i, jnp.sin(row) + ops.read(b, i // 2), where=row.reshape(-1)[0] > 0)

    return jnp.sum(shown.over_steps(body, jnp.ones_like(x), x) ** 2)


of_main_job("branches")


@program("cond that writes, with a read before it outside")
def read_beside_cond(ops, x):
    def body(c, ix):
        (b, total), (i, row) = c, ix
        seen = ops.read(b, some_row(i, x))
        b = lax.cond(row.reshape(-1)[0] > 0, lambda b: ops.write(b, i, jnp.sin(row)), lambda b: b, b)
        return b, total + jnp.sum(seen**2)

    return shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@program("nested jit that writes, with a read before it outside")
def read_beside_jit(ops, x):
    store = jax.jit(lambda b, i, row: ops.write(b, i, jnp.sin(row)))

    def body(c, ix):
        (b, total), (i, row) = c, ix
        seen = ops.read(b, some_row(i, x))
        return store(b, i, row), total + jnp.sum(seen**2)

    return shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)[1]


@program("read a closed-over buffer")
def closed_over(ops, x):
    def body(hand, ix):
        return jnp.sin(hand + ops.read(x, some_row(ix[0], x)))

    return jnp.sum(shown.over_steps(body, jnp.zeros_like(x[0]), x))


@program("read a closed-over buffer inside a nested jit")
def closed_over_jit(ops, x):
    look = jax.jit(lambda b, i: jnp.sin(ops.read(b, i)))

    def body(hand, ix):
        return jnp.tanh(hand + look(x, some_row(ix[0], x)))

    return jnp.sum(shown.over_steps(body, jnp.zeros_like(x[0]), x))


@program("read a closed-over buffer inside cond")
def closed_over_cond(ops, x):
    def body(hand, ix):
        i, _ = ix
        return lax.cond(i % 3 == 0, lambda: jnp.cos(hand), lambda: jnp.sin(hand + ops.read(x, some_row(i, x))))

    return jnp.sum(shown.over_steps(body, jnp.zeros_like(x[0]), x))


@program("read a closed-over buffer inside an inner scan")
def closed_over_scan(ops, x):
    def body(hand, step):
        def inner(hand, k):
            return jnp.sin(hand + ops.read(x, (step[0] + k) % len(x))), None

        return lax.scan(inner, hand, jnp.arange(3))[0]

    return jnp.sum(shown.over_steps(body, jnp.zeros_like(x[0]), x))


@program("inner loop writes, outer loop reads")
def inner_writes(ops, x):
    def body(c, ix):
        (b, total), (i, row) = c, ix
        seen = ops.read(b, some_row(i, x))
        b = lax.fori_loop(0, 3, lambda k, b: ops.write(b, (i + k) % len(x), jnp.sin(row) * k), b)
        return b, total + jnp.sum(seen**2)

    b, total = shown.over_steps(body, (jnp.ones_like(x), jnp.zeros(())), x)
    return total + jnp.sum(b)


@program("gather and scatter four rows a step")
def many_rows(ops, x):
    def body(b, ix):
        i, row = ix
        rows = ops.read(b, (i + jnp.arange(4)) % len(x))
        return ops.write(b, (i * 5 + jnp.arange(4)) % len(x), jnp.tanh(rows) + row)

    return jnp.sum(shown.over_steps(body, x, x) ** 2)


@program("jax.checkpoint around the body, policy save_reads")
def checkpointed(ops, x):
    @functools.partial(jax.checkpoint, policy=ops.policy)
    def body(b, ix):
        i, row = ix
        return ops.write(b, i, jnp.tanh(ops.read(b, i // 2) + row))

    return jnp.sum(shown.over_steps(body, jnp.zeros_like(x), x) ** 2)


of_main_job("issue_15906")
