"""Importing the library replaces nothing in JAX. The first use replaces what it needs, whatever has come before."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jax_tensorarray._compat import Replacement, first_use

TABLES = """
import sys, jax, jax.numpy as jnp, jax.export, jax.extend.source_info_util
import jax.experimental.checkify, jax.experimental.jet  # which the library imports
from jax import lax
from jax.extend.core import Primitive

def tables():
    '''All that modules of JAX hold, the entries of their tables, and the attributes of primitives.'''
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("jax", "jaxlib") and module is not None:
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, dict) and key != "__builtins__":
                    found |= {(name, key, k): v for k, v in list(value.items())}
                elif isinstance(value, (Primitive, type)) and type(value).__module__ != "builtins":
                    found |= {(name, key, k): v for k, v in list(vars(value).items())}
    return found

def different(before, after):
    '''What is another object than before, or is new without being of this library.'''
    names = "ta_", "in_place_"
    is_ours = lambda key: str(key).startswith(names) or getattr(key, "__module__", "").startswith("jax_tensorarray")
    # Kernels for GPUs wait in a list for the first GPU, which is the first of its kind here.
    are_kernels = lambda x: isinstance(x, list) and all(str(target[0]).startswith("jax_tensorarray_") for target in x)
    known = {key[0] for key in before}
    new = {key for key in after if key not in before and key[0] in known and len(key) > 2}
    new = {key for key in new if not is_ours(key[2]) and not are_kernels(after[key])}
    return new | {key for key in before if after.get(key) is not before[key]}
"""


#: Imports JAX once, and runs each script that it is sent in a fork of that: to import takes longer than most scripts.
FORKS = (
    TABLES
    + """
import contextlib, io, os, traceback

def answer(script):
    printed, failed = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(script, globals())
    except BaseException:
        failed = traceback.format_exc()
    print(repr((printed.getvalue(), failed)), flush=True)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        answer(eval(line))
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(repr(("", "the process has crashed")), flush=True)
"""
)


@pytest.fixture(scope="module")
def outcome():
    """What a script prints in a process of its own, in which JAX is imported, and nothing is traced."""
    settings = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), "JAX_PLATFORMS": "cpu"}
    command, pipe = [sys.executable, "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | settings, stdin=pipe, stdout=pipe, text=True) as process:

        def outcome(script):
            print(repr(script), file=process.stdin, flush=True)
            printed, failed = ast.literal_eval(process.stdout.readline())
            assert not failed, failed
            return printed.split()

        yield outcome


def test_importing_replaces_nothing(outcome):
    script = """
before = tables()
import jax_tensorarray as jta
print(*sorted(map(str, different(before, tables()))))
jta.scan, jta.TensorArray(jnp.float32, 2, element_shape=()), jta.in_place(jnp.sin)
"""
    assert outcome(script) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "use",
    [
        "jax.eval_shape(lambda b: jta.ta_read(b, 0), jnp.ones(2))",
        "jax.eval_shape(jta.in_place(lambda b: b[0]), jnp.ones(2))",
        "jax.eval_shape(lambda x: jta.while_loop(lambda x: x < 3, lambda x: x * x, x, max_steps=4), 2.0)",
        "jax.grad(lambda x: jta.while_loop(lambda x: x < 3, lambda x: x * x, x, max_steps=4))(2.0)",
        "jta.doctor.watch().__enter__()",
    ],
)
def test_the_first_use_replaces_what_it_says(outcome, use):
    script = f"""
import jax_tensorarray as jta, jax_tensorarray.doctor
from jax_tensorarray import _replaced
used = [(r.owner, r.name) for r in _replaced.replacements()]
was = [owner[name] if isinstance(owner, dict) else getattr(owner, name) for owner, name in used]
{use}
now = [owner[name] if isinstance(owner, dict) else getattr(owner, name) for owner, name in used]
print(len(used) > 4, *{{old is new for old, new in zip(was, now)}})
"""
    assert outcome(script) == ["True", "False"]


@pytest.mark.slow
def test_plain_programs_may_have_been_traced_and_differentiated_before(outcome):
    script = """
inner = jax.jit(lambda c: jnp.sin(c))
plain = jax.jit(lambda x: lax.scan(lambda c, i: (lax.cond(i > 1, inner, lambda c: c * c, c), c), x, jnp.arange(4))[0])
jax.vmap(jax.grad(plain))(jnp.ones(3)), jax.vjp(plain, 1.0)[1](1.0)
kept = jax.jit(lambda b: lax.fori_loop(1, 60, lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), b))
x = jnp.ones((60, 50))
first = jax.grad(lambda b: kept(b).sum())(x)

import jax_tensorarray as jta
from jax_tensorarray.doctor import loop_copies
def ops(b):
    read = jax.jit(lambda b, i: jta.ta_read(b, i))
    def step(i, b):
        row = lax.cond(i > 2, lambda: read(b, i - 1), lambda: jta.ta_read(b, i - 1))
        return jta.ta_write(b, i, jnp.sin(row))
    return jta.fori_loop(1, 60, step, b).sum()
loss = lambda b: kept(b).sum()
print(jnp.allclose(jax.grad(ops)(x), first), jnp.allclose(jax.grad(jta.in_place(loss))(x), first))
print(len(loop_copies(jax.grad(jta.in_place(loss)))(x)), len(loop_copies(jta.in_place(jax.grad(loss)))(x)))
"""
    assert outcome(script) == ["True", "True", "0", "0"]


@pytest.mark.slow
def test_a_lowering_rule_may_be_the_first_to_trace_a_row_op(outcome):
    """Then JAX lowers a program already, in which no pass has seen the op. It is a call, and the results are right."""
    script = """
from jax.interpreters import mlir
import jax_tensorarray as jta
rows_p = Primitive("rows")
rows_p.def_abstract_eval(lambda b: b.update(shape=(2, *b.shape[1:])))
mlir.register_lowering(rows_p, mlir.lower_fun(lambda b: jta.ta_read(b, jnp.int32(1), length=2), False))
f = lambda b: jta.ta_add(rows_p.bind(jnp.sin(b)), 0, 1.0)
b = jnp.arange(12.0).reshape(4, 3)
first = jax.jit(rows_p.bind)(b)
print(jnp.array_equal(first, b[1:3]), jnp.array_equal(jax.jit(f)(b), jnp.sin(b)[1:3].at[0].add(1.0)))
print("jax_tensorarray" in jax.jit(rows_p.bind).lower(b + 1).as_text())
"""
    assert outcome(script) == ["True", "True", "True"]


@pytest.mark.slow
def test_whoever_watches_before_the_first_use_leaves_what_that_replaces(outcome):
    script = """
import jax_tensorarray as jta
sums = lambda b: lax.fori_loop(0, 3, lambda i, s: s + jta.ta_read(b, i), 0.0)
is_call = lambda: "jax_tensorarray_read" in jax.jit(lambda b: sums(b)).lower(jnp.ones(3)).as_text()
with jta.doctor.watch():
    inside = is_call()
print(inside, is_call())
"""
    assert outcome(script) == ["False", "False"]


@pytest.mark.slow
def test_threads_that_race_for_the_first_use_are_right(outcome):
    script = """
import threading
import jax_tensorarray as jta
f = lambda b: jnp.sum(lax.fori_loop(1, 9, lambda i, b: jta.ta_write(b, i, jnp.sin(jta.ta_read(b, i - 1))), b))
g = lambda b: jnp.sum(lax.fori_loop(1, 9, lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), b))
found, ready = [], threading.Barrier(6)
def race(f):
    ready.wait()
    found.append(jax.jit(jax.grad(f))(jnp.ones(9)))
racing = [threading.Thread(target=race, args=[x]) for x in (f, g, jta.in_place(g)) * 2]
for thread in racing: thread.start()
for thread in racing: thread.join()
print(len(found), all(jnp.allclose(x, found[0]) for x in found))
"""
    assert outcome(script) == ["6", "True"]


def test_a_first_use_that_is_interrupted_goes_on_later(monkeypatch):
    state = sys.modules[first_use.__module__]
    table = {"first": 1, "second": 2}

    class Interrupted:
        def __setattr__(self, name, value):
            if name not in vars(self):
                vars(self)[name] = None
                raise KeyboardInterrupt
            vars(self)[name] = value

    owner, made = Interrupted(), []

    def make():
        made.append(True)
        new = [lambda old=table[name]: old for name in table]
        return [
            Replacement(table, "first", new[0]),
            Replacement(owner, "attribute", 3),
            Replacement(table, "second", new[1]),
        ]

    for name, value in (("_make", make), ("_replacements", None), ("_are_put", False), ("_putting", threading.RLock())):
        monkeypatch.setattr(state, name, value)
    with pytest.raises(KeyboardInterrupt):
        first_use()
    assert table["second"] == 2
    first_use()
    assert (table["first"](), table["second"](), owner.attribute, made) == (1, 2, 3, [True])
    table["first"] = "of somebody else"
    first_use()
    assert table["first"] == "of somebody else"
