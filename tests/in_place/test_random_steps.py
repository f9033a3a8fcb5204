"""Steps that read and update one buffer at random: under `in_place` none copies it, and all give what they gave.

Plain JAX copies the buffer in more than half of them.
"""

import math
import random

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.loop import ORDERS
from hypothesis import given, settings
from in_place import assert_moves_no_more, compiled
from jax import lax

from jax_tensorarray import in_place
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._hlo import text as hlo_text

ROWS, SIZE, STEPS, EXAMPLES = 400, 16, 100, 3
PLACES = ("j[0]", "j[1]", "j[2]", "i", "i - 1", "i // 2", "(i + 1) % ROWS")
ROW, TILE = "{}[{}]", "lax.dynamic_slice({}, (jnp.int32({}), j[0] % 9), (2, SIZE // 2)).ravel()"
STEPS_OF_A_ROW, SOME_ROWS = "jnp.tile({}[{}, ::4], 4)", "jnp.sum({}[jnp.stack([{}, j[2]])], 0)"
PREDICATES = ("x[0] > 0.5", "j[2] > 200")


#: How all rows of a register move.
MOVES = (
    "jnp.roll({b}, -1, 0)",
    "jnp.roll({b}, 2, axis=0)",
    "jnp.roll({b}, j[0], 0)",
    "jnp.concatenate([{b}[1:], {new}])",
    "jnp.concatenate([{new}, {new}, {b}[:-2]])",
    "jnp.concatenate([{b}, {new}])[1:]",
    "{b}.at[:-1].set({b}[1:])",
)


#: How parts of a buffer are taken, and how the buffer is put together again.
PARTS = (
    ("{b}[:150], {b}[150:]", "jnp.concatenate([{0}, {1}])"),
    ("jnp.split({b}, [3, 4], axis=1)", "jnp.concatenate([{0}, {1}, {2}], 1)"),
    ("jnp.unstack({b}.reshape(2, -1, SIZE))", "jnp.stack([{0}, {1}]).reshape({b}.shape)"),
    ("{b}.reshape(-1, 2, SIZE)[:, 0], {b}.reshape(-1, 2, SIZE)[:, 1]", "jnp.stack([{0}, {1}], 1).reshape(ROWS, SIZE)"),
    ("[{b}.T]", "{0}.T"),
    ("[{b}.reshape(4, -1, 2, SIZE // 2).transpose(2, 1, 3, 0)]", "{0}.transpose(3, 1, 0, 2).reshape({b}.shape)"),
    ("[{b}.ravel()]", "{0}.reshape(ROWS, -1)"),
    ("[{b}[:, None]]", "{0}[:, 0]"),
    ("[{b}[10:30]]", "{b}.at[10:30].set({0})"),
    ("{b}[:, 1], {b}[:, 7]", "{b}.at[:, 1].set({0}).at[:, 7].set({1})"),
    ("[{b}[j[0]]]", "{b}.at[j[0]].set({0})"),
    ("[{b}[:, j[1] % SIZE]]", "{b}.at[:, j[1] % SIZE].set({0})"),
)


def lens(choose, shape):
    """A random view of an array `{b}`: how it is taken, how it is put back as `{x}`, and its shape."""
    d, n = choose.randrange(len(shape)), len(shape)
    size, rows = shape[d], ":, " * d
    order = choose.sample(range(n), n)
    back = tuple(order.index(k) for k in range(n))
    low, shift, half = choose.randrange(size // 2 + 1), choose.randrange(1, size + 1), size // 2
    high = choose.randint(low + (size + 1) // 2, size)
    without, with_ = (*shape[:d], *shape[d + 1 :]), (*shape[:d], 1, *shape[d:])
    forms = [
        (f"{{b}}.transpose{tuple(order)}", f"{{x}}.transpose{back}", tuple(shape[k] for k in order)),
        (f"jnp.expand_dims({{b}}, {d})", f"jnp.squeeze({{x}}, {d})", with_),
        (
            f"{{b}}[{rows}{low}:{high}]",
            f"{{b}}.at[{rows}{low}:{high}].set({{x}})",
            (*shape[:d], high - low, *shape[d + 1 :]),
        ),
        (f"jnp.roll({{b}}, {shift}, {d})", f"jnp.roll({{x}}, -{shift}, {d})", shape),
        (f"jnp.flip({{b}}, {d})", f"jnp.flip({{x}}, {d})", shape),
    ]
    if size % 2 == 0:
        k, parts = choose.randrange(2), ["jnp.split({b}, 2, AXIS)[0]", "jnp.split({b}, 2, AXIS)[1]"]
        put = ", ".join("{x}" if j == k else parts[j] for j in range(2))
        half_of = (*shape[:d], half, *shape[d + 1 :])
        forms.append(
            (parts[k].replace("AXIS", str(d)), f"jnp.concatenate([{put}], {d})".replace("AXIS", str(d)), half_of)
        )
        split = (*shape[:d], 2, half, *shape[d + 1 :])
        forms.append((f"{{b}}.reshape{split}", f"{{x}}.reshape({shape})", split))
    if n > 1 and size > 1:
        place = choose.choice([str(choose.randrange(size)), f"j[1] % {size}", "j[0]", f"i % {size}"])
        forms.append((f"{{b}}[{rows}{place}]", f"{{b}}.at[{rows}{place}].set({{x}})", without))
        row = f"lax.dynamic_index_in_dim({{b}}, {place}, {d}, keepdims=False)"
        forms.append((row, f"lax.dynamic_update_index_in_dim({{b}}, {{x}}, {place}, {d})", without))
    return choose.choice(forms)


def chain(choose, shape):
    """A random chain of views of an array, so that a view has more than a row."""
    while True:
        found, last = [], shape
        for _ in range(choose.randint(2, 4)):
            take, put, last = lens(choose, last)
            found.append((take, put))
        if math.prod(last) >= 64 and max(last) >= 16:
            break
    if choose.random() < 0.2:  # a slice of that is no product of slices
        return [*found, ("{b}.reshape(-1)", f"{{x}}.reshape({last})")], 0
    return found, last.index(max(last))


class Step:
    """The text of a step, which is written line by line."""

    def __init__(self, seed, *, moves=False, parts=False, several=False):
        self.choose, self.lines, self.rows, self.moves = random.Random(seed), [], [], moves
        self.parts, self.several = parts, several
        if several:  # places that depend on what is in the buffer
            self.lines.append("p = j[1] + jnp.int32(b0[j[2], 0] > 0)")
        # A row that is read of what starts again for some examples may cost a copy, and so may all of what moves.
        self.starts_again = seed % 3 > 0 and not moves
        self.has_tiles = seed % 3 > 0 or not moves  # tiles of registers that examples move by themselves
        self.updates = self.choose.randint(1, 3)
        for k in range(self.updates):
            for _ in range(self.choose.randint(0, 2)):
                self.read(self.choose.choice([k, k, k, max(k - 1, 0)]))
            self.update(k)
        if self.choose.random() < 0.4:
            self.read(self.updates)

    def read(self, version):
        name = f"r{len(self.rows)}"
        form = self.choose.choice([ROW, ROW, ROW, SOME_ROWS, TILE, STEPS_OF_A_ROW] if self.has_tiles else [ROW])
        self.lines.append(f"{name} = {form.format(f'b{version}', self.choose.choice(PLACES))}")
        self.rows.append(name)

    def term(self):
        row = self.choose.choice(self.rows or ["x"])
        forms = ("{}", "jnp.sin({})", "jnp.tanh({})", "{0} * x", "jnp.sum({})", "x + {}")
        return self.choose.choice(forms).format(row)

    def update(self, version):
        value = self.term() if self.choose.random() < 0.6 else f"{self.term()} + {self.term()}"
        by = self.choose.choice(["set", "set", "set", "add"])
        old, place, part = f"b{version}", self.choose.choice(PLACES), self.choose.random()
        if self.several and part >= 0.4:
            place = self.choose.choice(["p", f"jnp.stack([p, {place}])", "p - jnp.arange(3)"])
        new = f"{old}.at[{place}].{by}({value})"
        if part < 0.2 and self.has_tiles:
            tile = f"jnp.broadcast_to({value}, (SIZE,)).reshape(2, -1)"
            new = f"lax.dynamic_update_slice({old}, {tile}, (jnp.int32({place}), j[1] % 9))"
        elif part < 0.3 and self.has_tiles:
            new = f"{old}.at[{place}, 1::4].{by}(jnp.broadcast_to({value}, (SIZE,))[:4])"
        elif 0.3 <= part < 0.4 and not self.moves:  # by a mask that is true for one row
            added = f"{old} + {value}" if by == "add" else value
            new = f"jnp.where((jnp.arange(ROWS) == {place})[:, None], {added}, {old})"
        if self.parts and (version == 0 or self.choose.random() < 0.5):
            return self.update_parts(version)
        if self.moves and (version == 0 or self.choose.random() < 0.4):
            moved = self.choose.choice(MOVES).format(b=old, new=f"jnp.broadcast_to({value}, (1, SIZE))")
            new = self.choose.choice([moved, new.replace(old, moved, 1)])
        kind, predicate = self.choose.random(), self.choose.choice(PREDICATES)
        if kind < 0.2:
            new = f"jnp.where({predicate}, {new}, {old})"
        elif kind < 0.35:
            new = f"lax.cond({predicate}, lambda: {new}, lambda: {old})"
        elif kind < 0.5:
            other = f"{old}.at[{self.choose.choice(PLACES)}].set({self.term()})"
            new = f"lax.switch(j[0] % 3, [lambda: {new}, lambda: {old}, lambda: {other}])"
        elif kind < 0.6 and self.starts_again:
            new = f"jnp.where({predicate}, FIRST, {new})"
        self.lines.append(f"b{version + 1} = {new}")
        return None

    def update_parts(self, version):
        """Update some parts of a buffer, each at a place that may be out of its range."""
        if self.parts and self.choose.random() < 0.5:
            self.update_view(version)
            return
        take, put = self.choose.choice(PARTS)
        names = [f"p{version}_{k}" for k in range(sum(f"{{{k}}}" in put for k in range(3)))]
        self.lines.append(f"{', '.join(names)}, = {take.format(b=f'b{version}')}")
        for name in names:
            for _ in range(self.choose.randint(0, 2)):
                by, place = self.choose.choice(["set", "add", "multiply"]), self.choose.choice(PLACES)
                rows = f"jnp.arange({name}[0].size).reshape({name}[0].shape)"
                new = f"{name}.at[{place}].{by}(jnp.sum({self.term()}) + 0.1 * {rows})"
                if self.choose.random() < 0.3:
                    new = f"jnp.where({self.choose.choice(PREDICATES)}, {new}, {name})"
                self.lines.append(f"{name} = {new}")
                if self.choose.random() < 0.3:
                    self.lines.append(f"r{len(self.rows)} = jnp.resize({name}[{self.choose.choice(PLACES)}], SIZE)")
                    self.rows.append(f"r{len(self.rows)}")
        self.lines.append(f"b{version + 1} = {put.format(*names, b=f'b{version}')}")

    def update_view(self, version):
        """Update a row of a buffer that is seen through a chain of views, and put the views back."""
        found, axis = chain(self.choose, (ROWS, SIZE))
        names = [f"b{version}", *(f"v{version}_{k}" for k in range(len(found)))]
        for (take, _), old, new in zip(found, names, names[1:], strict=False):
            self.lines.append(f"{new} = {take.format(b=old)}")
        view, by, place = names[-1], self.choose.choice(["set", "add", "max"]), self.choose.choice(PLACES)
        row = f"{view}.take({place} % {view}.shape[{axis}], {axis}, mode='clip')"
        if self.choose.random() < 0.5:
            self.lines.append(f"r{len(self.rows)} = jnp.resize({row}, SIZE)")
            self.rows.append(f"r{len(self.rows)}")
        at = ":, " * axis + self.choose.choice(PLACES)
        scale = f"jnp.cos(jnp.arange({view}.size // {view}.shape[{axis}]))"
        rows = f"{scale}.reshape({view}.take(0, {axis}).shape)"
        self.lines.append(f"{view} = {view}.at[{at}].{by}(jnp.sum({self.term()}) * {rows})")
        for (_, put), old, new in reversed(list(zip(found, names, names[1:], strict=False))):
            result = f"b{version + 1}" if old == names[0] else old
            self.lines.append(f"{result} = {put.format(b=old, x=new)}")

    def function(self):
        used = [row for row in self.rows if self.choose.random() < 0.3]
        total = " + ".join(["h", *(f"jnp.sum({row})" for row in used)])
        end = f"return (b{self.updates}, 0.5 * jnp.tanh({total})), {self.choose.choice([*used, '0.0'])}"
        text = "\n    ".join(["def step(c, xs):", "(b0, h), (i, j, x) = c, xs", *self.lines, end])
        first = np.linspace(-1, 1, ROWS * SIZE).reshape(ROWS, SIZE)
        names = {"jnp": jnp, "lax": lax, "ROWS": ROWS, "SIZE": SIZE, "FIRST": first}
        exec(text, names)
        return text, names["step"]


def of_each(step):
    """The step of two environments, one after the other. Those that are done start again."""

    def one(inputs):
        state, xs = inputs
        new, y = step(state, xs)
        return lax.cond(xs[2][1] > 0.9, lambda: (jnp.full((ROWS, SIZE), new[1]), 0.5), lambda: new), y

    return lambda states, xs: lax.map(one, (states, jax.tree.map(lambda x: jnp.stack([x, x]), xs)))


def scan_of(seed, kind, examples=None):
    """Return the text of a random step, a function that scans it, and its arguments, perhaps of several examples."""
    text, step = Step(seed, **{kind: True} if kind in ("moves", "parts", "several") else {}).function()
    random = np.random.default_rng(seed)
    shape = () if examples is None else (examples,)
    b, x = random.standard_normal((*shape, ROWS, SIZE)), random.random((*shape, STEPS, SIZE))
    j = random.integers(1, ROWS, (*shape, STEPS, 3)).astype(np.int32)

    def f(b, j, x):
        start, steps = (
            ((b[None] * jnp.ones((2, 1, 1)), jnp.zeros(2)), of_each(step)) if kind == "mapped" else ((b, 0.0), step)
        )
        return lax.scan(steps, start, (jnp.arange(1, STEPS + 1), j, x))

    return text, f, (b, j, x)


def copies(program, buffer):
    return len(hlo_text.copies_in_loops(program.as_text(), buffer.size * buffer.dtype.itemsize))


@pytest.mark.slow(but=8)
@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        *((k, "") for k in range(24)),
        *((k, "moves") for k in range(12)),
        *((k, "parts") for k in range(30)),
        *((k, "mapped") for k in range(8)),
        *((k, "several") for k in range(8)),
    ],
)
def test_a_random_step(seed, kind):
    text, f, (b, j, x) = scan_of(seed, kind, examples=EXAMPLES if seed % 3 == 0 else None)
    f = jax.vmap(f) if seed % 3 == 0 else f
    ours, plain = (compiled(g, b, j, x) for g in (in_place(f), f))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), ours(b, j, x), plain(b, j, x))
    # Where no barrier holds, XLA makes some versions twice.
    if kind == "mapped":
        assert not barriers_hold("cpu") or not copies(ours, b) + copies(ours, np.stack([b, b])), text
    else:
        assert copies(ours, b) <= (0 if barriers_hold("cpu") else copies(plain, b)), text


@pytest.mark.slow
@pytest.mark.skipif(not barriers_hold("cpu"), reason="where no barrier holds, XLA makes some versions twice")
@settings(max_examples=settings.default.max_examples // 5)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["", "moves", "parts", "mapped", "several"]),
    order=st.sampled_from([*ORDERS]),
)
def test_a_random_step_moves_no_more_than_in_plain_jax(seed, kind, order):
    _, f, args = scan_of(seed, kind, examples=EXAMPLES if "vmap" in order else None)
    ours, plain = (ORDERS[order](f, by, (0, 2)) for by in (in_place, lambda f: f))
    assert_moves_no_more(ours, plain, args, args[0].nbytes)
