"""Functions that call the kernels can be stored, and run by another process, another release and another jax."""

import functools
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import exported
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tensorarray
from jax_tensorarray import export, fori_loop, in_place, scan, ta_read, ta_write, while_loop
from jax_tensorarray._ops import calls

flatbuffers = pytest.importorskip("flatbuffers", reason="jax.export stores functions with it")


@pytest.fixture(autouse=True)
def without_64_bits():
    with jax.enable_x64(False):
        yield


def expected(name):
    return jax.jit(exported.PROGRAMS[name])(exported.ROWS)


def test_without_the_list_jax_refuses():
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        jax.export.export(jax.jit(exported.by_ops))(exported.ROWS)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", exported.PROGRAMS)
def test_what_this_or_an_older_release_has_stored_runs(name):
    """The fixtures were made by jax 0.10.2 with the contract of that number."""
    want = expected(name)
    np.testing.assert_array_equal(jax.export.deserialize(exported.stored(name)).call(exported.ROWS), want)
    older = jax.export.deserialize(exported.path(name).read_bytes())
    np.testing.assert_allclose(older.call(exported.ROWS), want, rtol=1e-6)


@pytest.mark.slow
def test_another_process_runs_it(tmp_path):
    name = "by_a_loop-grad"
    (tmp_path / "stored.bin").write_bytes(exported.stored(name))
    np.save(tmp_path / "rows.npy", exported.ROWS)
    program = """
        import sys
        from pathlib import Path
        import jax, numpy as np
        import jax_tensorarray

        folder = Path(sys.argv[1])
        loaded = jax.export.deserialize((folder / "stored.bin").read_bytes())
        np.save(folder / "result.npy", loaded.call(np.load(folder / "rows.npy")))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "result.npy"), expected(name))


def test_the_cotangent_of_a_stored_function():
    """`vjp_order=1` stores the function together with its gradient."""
    f = jax.jit(exported.by_ops)
    checks = export.disabled_checks()
    loaded = jax.export.deserialize(jax.export.export(f, disabled_checks=checks)(exported.ROWS).serialize(vjp_order=1))
    np.testing.assert_allclose(jax.grad(loaded.call)(exported.ROWS), jax.grad(f)(exported.ROWS), rtol=1e-6)


def test_a_stored_function_is_part_of_another_program():
    """Its calls count the rows of several axes together, and those of the program do not yet."""
    read = jax.jit(lambda b, i: ta_read(b, (i, 3 - i)) + ta_read(b, 1, axis=1)[0] + ta_read(b, i, length=2)[1, 0])
    kind = jax.ShapeDtypeStruct((5, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    loaded = jax.export.deserialize(
        jax.export.export(read, disabled_checks=export.disabled_checks())(*kind).serialize()
    )

    def f(b):
        return lax.fori_loop(0, 4, lambda i, b: ta_write(b, (i, i), loaded.call(b, i)), b)

    b = np.arange(20, dtype=np.float32).reshape(5, 4)
    found = jax.jit(f)(b)
    for i in range(4):
        b[i, i] = b[i, 3 - i] + b[0, 1] + b[i + 1, 0]
    np.testing.assert_array_equal(found, b)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_symbolic_batch(gradient):
    def f(b, xs):
        def body(c):
            i, b = c
            return i + 1, ta_write(b, i, jnp.tanh(ta_read(b, i // 2) + ta_read(xs, i)))

        return jnp.sum(while_loop(lambda c: c[0] < 5, body, (0, b), max_steps=6)[1] ** 2)

    g = jax.jit(jax.vmap(jax.grad(f, (0, 1)) if gradient else f))
    shape = jax.export.symbolic_shape("batch, 6, 2")
    types = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    loaded = jax.export.deserialize(jax.export.export(g, disabled_checks=export.disabled_checks())(*types).serialize())
    for batch in (1, 3):
        args = np.random.default_rng(0).normal(size=(2, batch, 6, 2)).astype(np.float32)
        for a, b in zip(jax.tree.leaves(loaded.call(*args)), jax.tree.leaves(g(*args)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "f",
    [
        lambda loops, x: loops.fori_loop(0, x.shape[0], lambda i, y: y + x[i], jnp.zeros(4)),
        lambda loops, x: loops.fori_loop(1, x.shape[0] - 1, lambda i, b: b.at[i].set(b[i - 1] * 2), x),
        lambda loops, x: loops.while_loop(lambda c: c[0] < x.shape[0], lambda c: (c[0] + 1, c[1] + x[c[0]]), (0, x[0])),
        lambda loops, x: loops.scan(lambda y, row: (y + row, y), jnp.zeros(4), x),
    ],
    ids=["fori_loop", "fori_loop of rows", "while_loop", "scan"],
)
def test_a_symbolic_number_of_steps(f):
    """As in JAX's own loops; and with a `max_steps` there is a derivative in reverse, which those do not have."""
    bounded = SimpleNamespace(
        fori_loop=functools.partial(fori_loop, max_steps=9), while_loop=functools.partial(while_loop, max_steps=9)
    )
    bounded.scan = scan
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), jnp.float32)
    x = jnp.linspace(-1, 1, 20, dtype=jnp.float32).reshape(5, 4)

    def loss(loops, x):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(loops, x)))

    unrolled = SimpleNamespace(fori_loop=lax.fori_loop, scan=lax.scan, while_loop=bounded.while_loop)
    for g, wanted in (
        (lambda x: f(jax_tensorarray, x), f(lax, x)),
        (in_place(lambda x: f(lax, x)), f(lax, x)),
        (jax.grad(lambda x: loss(bounded, x)), jax.grad(lambda x: loss(unrolled, x))(x)),
    ):
        stored = jax.export.export(jax.jit(g), disabled_checks=export.disabled_checks())(shape)
        for a, b in zip(jax.tree.leaves(stored.call(x)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_one_file_for_cpu_and_cuda():
    loaded = jax.export.deserialize(exported.stored("by_ops-grad", platforms=("cpu", "cuda")))
    assert loaded.platforms == ("cpu", "cuda")
    np.testing.assert_allclose(loaded.call(exported.ROWS), expected("by_ops-grad"), rtol=1e-6)


def test_the_list_has_every_call_that_there_is_before_the_first_use():
    program = """
        from jax_tensorarray import _cpu, export
        assert set(export.TARGETS) == set(_cpu.registrations()), export.TARGETS
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_the_list_has_every_call_of_the_contract():
    table = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", export.__doc__, re.MULTILINE)
    named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    signatures = calls.SIGNATURES
    like_add = {name for name, one in signatures.items() if one.combine and one[:2] == signatures["add"][:2]}
    assert {calls.PREFIX + name for name in named | like_add} == set(export.TARGETS)


def test_the_fixtures_are_of_the_contract_that_there_is():
    folder = Path(exported.FIXTURES)
    assert {p.name for p in folder.glob("*.bin")} >= {exported.path(name).name for name in exported.PROGRAMS}
    assert jax_tensorarray.export.CONTRACT_VERSION == 1
    for name in exported.PROGRAMS:
        assert str(Path(__file__).parents[2]).encode() not in exported.path(name).read_bytes()
