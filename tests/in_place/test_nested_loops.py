"""Loops inside of loops that examples leave at different times: what has finished one of them is not copied.

`jax.vmap` selects between all of the old and all of the new buffer for each loop around a write.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from in_place import compiled
from jax import jit, lax

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text

ROWS, SIZE, EXAMPLES = 40, 16, 3
PLACES = ("k", "k // 2", "(7 * k + {n}) % ROWS", "-1 - k % 5", "{n}")
#: What the mask of the loop around has to pass. All examples take one branch.
AROUND = ("jax.checkpoint({})", "(lambda c, k=k: lax.cond(w > 0, {}, lambda c: c, c))")


class Nest:
    """The text of a function with loops in each other, which update one buffer before, inside and after the inner."""

    def __init__(self, seed: int) -> None:
        self.choose, self.lines, self.count = random.Random(seed), ["def f(b, n, x, w):", "    k, h = n % 3, x"], 0
        self.loop("    ", self.choose.choice([2, 2, 2, 3]))
        self.lines.append("    return b, h")

    def add(self, indent: str, text: str) -> None:
        self.lines.append(indent + text)

    def place(self) -> str:
        return self.choose.choice(PLACES).format(n="n")

    def update(self, indent: str) -> None:
        """Read a row, or not, and write one, perhaps in a branch."""
        row = f"b[{self.place()}]" if self.choose.random() < 0.7 else "x"
        by = self.choose.choice(["set", "set", "add", "max"])
        new = f"b.at[{self.place()}].{by}(jnp.sin({row}) + 0.1 * h)"
        if self.choose.random() < 0.3:
            new = f"lax.cond(k % 2 == 0, lambda b: {new}, lambda b: b, b)"
        self.add(indent, f"b = {new}")

    def loop(self, indent: str, depth: int) -> None:
        body, self.count = f"body{self.count}", self.count + 1
        self.add(indent, f"def {body}(c):")
        inner = indent + "    "
        self.add(inner, "k, steps, b, h = c")
        for part in range(self.choose.choice([1, 2, 2]) if depth > 1 else 1):
            if self.choose.random() < 0.6 or (depth == 1 and not part):
                self.update(inner)
            if depth > 1:
                self.loop(inner, depth - 1)
        for _ in range(self.choose.choice([0, 1, 1, 2])):
            self.update(inner)
        if self.choose.random() < 0.3:
            self.add(inner, f"h = h + 0.1 * b[{self.place()}]")
        self.add(inner, "return k + 1, steps + 1, b, 0.5 * jnp.tanh(h)")
        limits = ["(k + n) % 4", "n % 3", "jnp.where(h[0] > 0, 3, 1)", "2"]
        run = f"lax.while_loop(lambda c, k=k: c[1] < {self.choose.choice(limits)}, {body}, c)"
        if depth == 1 and self.choose.random() < 0.3:
            run = f"lax.fori_loop(0, 2, lambda _, c: {body}(c), c)"
        around = self.choose.choice([*["{}"] * 3, *AROUND]).format(f"(lambda c, k=k: {run})")
        self.add(indent, f"c = {around}((k, 0, b, h))")
        self.add(indent, "h, b = c[3], c[2]")
        if self.choose.random() < 0.5:
            self.add(indent, "k = c[0]")

    def function(self) -> tuple[str, Callable[..., Any]]:
        names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "ROWS": ROWS}
        text = "\n".join(self.lines)
        exec(text, names)
        return text, names["f"]


def along(f: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative in forward mode, which a `while_loop` has."""
    return lambda b, n, x, w: jax.jvp(lambda b, x: f(b, n, x, w), (b, x), (jnp.cos(b), jnp.sin(x)))


def back_along(f: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of the same derivative, in reverse mode."""

    def derivative(b: Any, n: Any, x: Any, w: Any) -> Any:
        of_b, of_x = jax.grad(lambda b, x: sum(map(jnp.sum, f(b, n, x, w))), (0, 1))(b, x)
        return jnp.sum(of_b * jnp.cos(b)) + jnp.sum(of_x * jnp.sin(x))

    return derivative


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_loops_that_examples_leave_one_by_one(seed: int) -> None:
    text, f = Nest(seed).function()
    r = np.random.default_rng(seed)
    args = (
        r.standard_normal((EXAMPLES, ROWS, SIZE)),
        np.array([1, 4, 8], np.int32),
        r.standard_normal((EXAMPLES, SIZE)),
        1.0,
    )
    batch = functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
    batched = batch(f)
    plain, program = in_numpy(batched)(*args), compiled(in_place(batched), *args)
    for g in (program, *[jit(batch(in_place(f)))] * (seed % 4 == 0)):
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-11), g(*args), plain)
    if seed % 4 in (1, 2):
        want = in_numpy(along(batched))(*args)
        if seed % 4 == 1:
            got = jit(along(in_place(batched)))(*args)
        else:
            got, want = jit(back_along(in_place(batched, max_steps=3)))(*args), sum(map(np.sum, want[1]))
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12), got, want)
    copies = hlo_text.copies_in_loops(program.as_text(), args[0].nbytes)
    assert not copies or not barriers_hold("cpu"), text
