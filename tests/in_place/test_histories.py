"""Histories that are read as a whole, at random, or in gradients."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.histories import ROWS, SIZE, STEPS, X, in_a_branch
from in_numpy import in_numpy
from in_place import compiled
from jax import lax
from orders import ORDERS, total

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray.doctor import loop_copies


@pytest.mark.slow
@pytest.mark.skipif(not barriers_hold("cpu"), reason="XLA drops barriers")
@pytest.mark.parametrize("order", ["grad(in_place)", "in_place(grad)"])
def test_the_gradient_of_a_step_in_a_branch_copies_none(order):
    assert len(copies_of_gradient()) == 8
    assert not loop_copies(ORDERS[order](in_a_branch, in_place, 0), min_bytes=ROWS * SIZE * 8)(X)


@functools.cache
def copies_of_gradient():
    """In plain JAX."""
    return loop_copies(jax.grad(total(in_a_branch)), min_bytes=ROWS * SIZE * 8)(X)


def copies(program):
    return len(hlo_text.copies_in_loops(program.as_text(), ROWS * SIZE * 8))


# --- at random -------------------------------------------------------------------------------------------------

READS = (
    "lax.scan(lambda r, i: (jnp.sin(r + {b}[i]), None), x, jnp.arange(ROWS))[0]",
    "lax.fori_loop(0, ROWS, lambda i, r: jnp.tanh(r + {b}[ROWS - 1 - i]), x)",
    "jnp.tanh(x + jnp.sum({b}, 0))",
    "jnp.tanh(({b} @ x)[:SIZE] + x)",
    "jnp.sin(x + {b}[{k}])",
)
PLACES = ("i % ROWS", "(i + 1) % ROWS", "(i * i) % ROWS", "3")


def random_step(choose):
    """The text of a step of a branch, which reads and writes a buffer in any order."""
    lines = ["def step(i, b, x):"]
    for _ in range(choose.randint(2, 5)):
        if choose.random() < 0.6:
            lines.append(f"x = {choose.choice(READS).format(b='b', k=choose.choice(PLACES))}")
        else:
            write = f"b.at[{choose.choice(PLACES)}].{choose.choice(['set', 'add'])}(x)"
            lines.append(f"b = {choose.choice([write, write, f'lax.cond(x[0] > 0, lambda: {write}, lambda: b)'])}")
    return "\n    ".join([*lines, "return b, x"])


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("seed", range(16))
def test_a_random_branch(seed):
    choose, names = random.Random(seed), {"jnp": jnp, "lax": lax, "ROWS": ROWS, "SIZE": SIZE}
    text = random_step(choose)
    exec(text, names)
    others = [lambda i, b, x: (b, 0.5 * x), *([] if choose.random() < 0.6 else [names["step"]])]

    def f(b, x):
        def body(c, i):
            return lax.switch(i % (1 + len(others)), [names["step"], *others], i, *c), None

        return lax.scan(body, (b, x), jnp.arange(STEPS))[0]

    args = np.random.default_rng(seed).standard_normal((ROWS, SIZE)), X
    ours = compiled(in_place(f), *args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13), ours(*args), in_numpy(f)(*args))
    assert not copies(ours) or (not barriers_hold("cpu") and copies(ours) <= copies(compiled(f, *args))), text


#: How the rows of two registers move, and what is computed of them.
MOVES = ("jnp.concatenate([{b}[1:], {x}[None]])", "jnp.roll({b}, 1, 0).at[0].set({x})", "jnp.roll({b}, 2, 0)")
VALUES = (
    "jnp.sum({b}, -1)",
    "jnp.max({b} * x, -1)",
    "jnp.sum({b} * {c}, axis=1)",
    "jnp.where(x[0] > 0, {b}, 2 * {c}).prod(1)",
    "jnp.sum(lax.rev({b}, (0,)) - {c}, -1)",
    "jnp.cumsum({b}[:, 0])",
    "lax.rev(jnp.exp(-jnp.sum({b} * {b}, 1)), (0,))",
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_what_is_computed_of_registers(seed):
    choose = random.Random(seed)
    values = [choose.choice(VALUES).format(b=choose.choice("ab"), c=choose.choice("ab")) for _ in range(2)]
    moves = [choose.choice(MOVES)] * 2 if choose.random() < 0.7 else choose.choices(MOVES, k=2)
    when = choose.choice(["True", "x[1] < 0.3"])
    lines = [
        f"u, v = {values[0]}, {values[1]}",
        "r = lax.scan(lambda r, xs: (jnp.tanh(r + xs[0] + xs[1]), None), x, (lax.rev(a, (0,)), u))[0]",
        f"r = lax.cond(x[0] > 0.1, lambda: r, lambda: 0.5 * r + v[-2] + ({values[0]})[i])",
        f"a = jnp.where({when}, {moves[0].format(b='a', x='r')}, a)",
        f"b = jnp.where({when}, {moves[1].format(b='b', x='jnp.sin(r)')}, b)",
        "return (a, b, jnp.cos(r)), v[1]",
    ]
    text = "\n    ".join(["def step(c, i):", "a, b, x = c", *lines])
    names = {"jnp": jnp, "lax": lax}
    exec(text, names)

    def f(a, x):
        return lax.scan(names["step"], (a, 2 * a, x), jnp.arange(STEPS))

    a = 0.1 * np.random.default_rng(seed).standard_normal((ROWS, SIZE))
    ours = compiled(in_place(f), a, X)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-13)
    jax.tree.map(close, ours(a, X), in_numpy(f)(a, X))
    assert not copies(ours) or copies(ours) <= copies(compiled(f, a, X)), text
    if seed % 4 == 0:
        ours, plain = (jax.grad(lambda a, x, g=g: total(lambda x: g(a, x))(x)) for g in (in_place(f), f))
        np.testing.assert_allclose(jax.jit(ours)(a, X), in_numpy(plain)(a, X), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(not barriers_hold("cpu"), reason="where no barrier holds, XLA makes the update again")
@pytest.mark.parametrize("read", [lambda b, x: x @ (b * jnp.cos(b)), lambda b, x: jnp.sum(jnp.tanh(b), 0) + b[3]])
def test_what_reads_a_history_as_a_whole_reads_it_after_its_update(read):
    """XLA would make the update in the fusion that reads, too, of the buffer before it. Then that one is copied."""
    rows = 512

    def f(b):
        def step(s, i):
            b, x = s
            b = b.at[i].set(jnp.sin(x))
            return (b, 0.3 + read(b, jnp.cos(i + jnp.arange(rows))) / rows), None

        return lax.scan(step, (b, b[0]), jnp.arange(rows))[0]

    b = np.linspace(-1, 1, rows * SIZE).reshape(rows, SIZE)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9)
    jax.tree.map(close, jax.jit(in_place(f))(b), in_numpy(f)(b))
    gradient = jax.grad(lambda b: jnp.sum(f(b)[0] ** 2) + jnp.sum(f(b)[1]))
    np.testing.assert_allclose(jax.jit(in_place(gradient))(b), jax.jit(gradient)(b), rtol=1e-9, atol=1e-12)
    for g, x in ((in_place(f), b), (in_place(gradient), b), (jax.vmap(in_place(gradient)), np.stack([b, b]))):
        moved = loop_copies(g, min_bytes=b.nbytes)(x)
        assert not [c for c in moved if c.kind == "copy"], list(map(str, moved))
