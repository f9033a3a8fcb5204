"""The page of messages holds: its code before gives the message, and its code after is as right and does not.

The page has a section for each reason of `explain` and for each piece of advice of the doctor. Other programs that get
the same advice are below.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util
from row_programs import ours, plain
from snippets import snippets

import jax_tensorarray as jta
from jax_tensorarray import in_place, ta_add, ta_read, ta_write
from jax_tensorarray._jaxprs import jaxprs
from jax_tensorarray.doctor import explain, loop_copies
from jax_tensorarray.doctor._advice import ADVICE
from jax_tensorarray.doctor._reasons import REASONS

pytestmark = pytest.mark.slow(but=6)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
STAYS, COPIES = "Operations that `in_place` does not rewrite", "Copies in compiled loops"
WIDTH = 16


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False):
        yield


def sections():
    """The names of the sections of the page, each with its part and its snippet."""
    lines, found, named = PAGE.read_text().split("\n"), {}, re.compile(r"### `(.*)`|## (.*)")
    for snippet in snippets(PAGE, "python"):
        headings = [match for line in lines[: snippet.line] if (match := named.fullmatch(line))]
        if headings and headings[-1].group(1):
            part = next(match.group(2) for match in reversed(headings) if match.group(2))
            found[headings[-1].group(1)] = part, snippet
    return found


SECTIONS = sections()


def of_part(part):
    return [name for name, (its_part, _) in SECTIONS.items() if its_part == part]


@pytest.fixture
def first_lines(as_users_run_it):
    return snippets(PAGE, "python")[0].run()


# --- what `explain` says -----------------------------------------------------------------------------------------


def left_in_loops(jaxpr, in_loop=False):
    """The lines of the operations on rows that loops have in plain JAX."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if in_loop and name.startswith(("gather", "scatter", "dynamic_")) and eqn.invars[0].aval.size > 8:
            yield int(source_info_util.summarize(eqn.source_info).split(":")[1])
        for inner in jaxprs.jaxprs_in(eqn.params):
            yield from left_in_loops(inner, in_loop or name in ("scan", "while", "ta_while"))


@pytest.mark.parametrize("name", of_part(STAYS))
def test_code_before_gives_the_reason_of_its_section_and_code_after_does_not(name, first_lines):
    names = SECTIONS[name][1].run(first_lines)
    args = names.get("args", (names["b"],))
    before, after = explain(names["before"])(*args), explain(names["after"])(*names.get("args_after", args))
    assert name in {x.reason for x in before}, before
    assert name not in {x.reason for x in after}, after
    for x in (*before, *after):
        assert (x.text, bool(x.reason)) == (x.text, x.reason in REASONS) and (x.became or x.reason)
        assert x.file == str(PAGE) and x.code in PAGE.read_text()
    assert max(map(len, str(before).split("\n"))) <= 100


@pytest.mark.parametrize("name", ["another-buffer", "large-box", "rows-twice", "other-combination", "whole-view"])
def test_what_is_said_to_stay_is_what_is_left_in_the_jaxpr(name, first_lines):
    names = SECTIONS[name][1].run(first_lines)
    args = names.get("args", (names["b"],))
    for f in (names["before"], names["after"]):
        left = set(left_in_loops(jax.make_jaxpr(in_place(f))(*args)))
        assert {x.line for x in explain(f)(*args) if x.kind in ("read", "write") and not x.became} == left


def rows_of(x):
    return jnp.arange(len(x))


def examples_that_read(ops, x):
    """Each example only reads, if it reads at all, from a buffer that they share."""

    def one(until):
        def body(h, i):
            row = lax.cond(i < until, lambda: ops.read(x, i // 2), lambda: jnp.zeros(WIDTH))
            return jnp.sin(h + row), None

        return lax.scan(body, jnp.zeros(WIDTH), rows_of(x))[0]

    return jnp.sum(jax.vmap(one)(jnp.arange(3) * len(x) // 3))


def examples_that_read_in_a_step(ops, x):
    """The examples are those of one step, and share the buffer that it carries."""

    def body(b, i):
        def one(k):
            return lax.cond(k < i % 5, lambda: ops.read(b, (i + k) // 2), lambda: jnp.zeros(WIDTH))

        return ops.write(b, i, jnp.sin(jnp.sum(jax.vmap(one)(jnp.arange(4)), 0) + x[i])), None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def attention(write_first, x):
    """A step attends to the rows before its own, and never to the row that it writes."""

    def body(c, i):
        b, query = c
        if write_first:
            b = ta_write(b, i, query)
        weights = jax.nn.softmax(jnp.where(rows_of(x) < i, b @ query, -1e9))
        if not write_first:
            b = b.at[i].set(query)
        return (b, jnp.tanh(weights @ b + x[i])), None

    return jnp.sum(lax.scan(body, (x, x[0]), rows_of(x))[0][1])


def best_column(write_first, x):
    """The largest number so far in a column of the rows before this one."""

    def body(c, i):
        b, best = c
        if write_first:
            b = ta_write(b, i, jnp.sin(x[i] + i))
        best = jnp.maximum(best, jnp.max(jnp.where(rows_of(x) < i, b[:, 0], -1.0)))
        if not write_first:
            b = b.at[i].set(jnp.sin(x[i] + i))
        return (b, best), best

    return jnp.sum(lax.scan(body, (x, -1.0), rows_of(x))[1])


def row_by_sum(as_advised, x):
    def body(b, i):
        row = jnp.sin(ta_read(b, i // 2) + x[i])
        return ta_add(b, i, row) if as_advised else b + jax.nn.one_hot(i, len(x))[:, None] * row, None

    return jnp.sum(lax.scan(body, x, rows_of(x))[0] ** 2)


def product(x):
    def body(b, i):
        return ta_write(b, i, jnp.tanh(b @ ta_read(b, i)) @ b / len(b)), None

    return jnp.sum(jta.scan(body, x, rows_of(x), residuals="tape")[0])


# --- what the doctor advises -------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A program that gets this advice on the line with this text, and as advised."""

    reason: str
    before: Callable
    after: Callable
    line: str


def both(f):
    return functools.partial(f, False), functools.partial(f, True)


def with_ops(f):
    return functools.partial(f, plain), functools.partial(f, ours)


def gradients(before, after):
    return jax.grad(before), jax.grad(after)


OTHERS = {
    "a cond that reads": Program("batched-choice", *with_ops(examples_that_read_in_a_step), "lax.cond"),
    "attention": Program("read-as-a-whole", *both(attention), ".at[i].set"),
    "a maximum": Program("read-as-a-whole", *both(best_column), ".at[i].set"),
    "a cond under vmap": Program("sum-of-gradients", *gradients(*with_ops(examples_that_read)), "ops.read("),
    "a one-hot sum": Program("made-anew", *both(row_by_sum), "jax.nn.one_hot"),
}


@pytest.mark.usefixtures("fusions_of_users")
@pytest.mark.parametrize("name", [*of_part(COPIES), *OTHERS])
def test_a_program_that_does_what_is_advised_is_as_right_and_copies_less(name, first_lines):
    """The advice begins with `in_place` if it removes the cause, and else does not name it."""
    x, options = jnp.asarray(np.random.default_rng(0).normal(size=(1000, WIDTH)), jnp.float32), {}
    if name in OTHERS:
        reason, before, after, line = OTHERS[name]
        args = (x,)
    else:
        names = SECTIONS[name][1].run(first_lines)
        reason, before, after, line, options = name, names["before"], names["after"], "", {"min_bytes": 0}
        args = names.get("args", (x[:64],))
    copies, left, repaired = (loop_copies(f, **options)(*args) for f in (before, after, in_place(before)))
    given = [copy for copy in copies if copy.reason == reason and line in copy.code]
    assert given and {copy.file for copy in given} == {str(PAGE) if options else __file__}, copies
    assert max(ADVICE[reason].split("{}"), key=len) in given[0].advice and f"[{reason}]" in str(copies)
    reads = {"attention": "A product (einsum, dot or @) reads", "a maximum": f"Something at {__file__}:"}
    assert reads.get(name, "") in given[0].advice
    assert reason not in {copy.reason for copy in left} and {copy.kind for copy in left} <= {"anew"}, left
    assert sum(copy.num_bytes for copy in copies) >= 1.5 * sum(copy.num_bytes for copy in left)  # in each step
    is_removed = ADVICE[reason].startswith("Put in_place around the function: it ")
    assert ("in_place" in ADVICE[reason]) == is_removed
    assert (reason in {copy.reason for copy in repaired}) != is_removed, repaired
    # A mean over the results: `before` may return a buffer twice, at another position, or in another layout.
    results = [[jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.jit(f)(*args))] for f in (before, after)]
    np.testing.assert_allclose(*(sum(sums) / len(sums) for sums in results), rtol=1e-4)


def test_what_a_product_makes_anew_is_left_and_the_copies_beside_it_are_not():
    copies = loop_copies(jax.grad(product))(jnp.ones((200, WIDTH)))
    assert {copy.kind for copy in copies} == {"save", "anew", "copy"}
    for copy in copies:
        said = "If you want that, leave it" if copy.kind == "anew" else "Put in_place around the function"
        assert said in copy.advice, copy


def test_every_name_that_code_gives_has_a_section_and_no_other_has_one():
    assert set(of_part(STAYS)) == set(REASONS)
    assert set(of_part(COPIES)) == set(ADVICE) - set(REASONS)
    code = [file.read_text() for file in (Path(jta.__file__).parent / "_in_place").glob("*.py")]
    given = {name for text in code for name in re.findall(r'"([a-z]+(?:-[a-z]+)*)"', text)}
    assert set(REASONS) <= given
    calls = [call for text in code for call in re.findall(r"\bLeft\((.*?)\)", text)]
    assert {name for call in calls for name in re.findall(r'"(.*?)"', call)} <= set(REASONS)
