"""Compiling ahead of time, types without values, values while tracing, and the cache of compiled programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_tensorarray import TensorArray, ta_add, ta_read, ta_stack, ta_swap, while_loop

STEPS, ROW = 12, 3
XS = np.random.default_rng(0).normal(size=(STEPS, ROW)).astype(np.float32)


INDEX = jnp.arange(STEPS)

# One loss, in several ways.


def ops(xs):
    def body(b, i):
        row = ta_read(b, i // 2)
        b, x = ta_swap(b, i, 0.0)
        return ta_add(b, i, jnp.tanh(row + x)), None

    return jnp.sum(ta_stack(lax.scan(body, xs, INDEX)[0], STEPS) ** 2)


def of_the_class(xs):
    ta = TensorArray(xs.dtype, size=0, dynamic_size=True, max_size=STEPS + 1, element_shape=(ROW,))
    ta = ta.append(jnp.tanh(2 * xs[0]))
    ta = lax.fori_loop(1, STEPS, lambda i, ta: ta.append(jnp.tanh(ta.read(i // 2) + xs[i])), ta)
    return jnp.sum(ta.stack(pad=True) ** 2)


def loop(xs, residuals="tape"):
    def body(carry):
        i, ta = carry
        return i + 1, ta.write(i, jnp.tanh(ta.read(i // 2) + ta_read(xs, i)))

    init = (jnp.int32(0), TensorArray.from_array(xs))
    _, ta = while_loop(lambda c: c[0] < STEPS, body, init, max_steps=STEPS + 2, residuals=residuals)
    return jnp.sum(ta.stack() ** 2)


def loop_undone(xs):
    return loop(xs, "undo")


PROGRAMS = {f.__name__: f for f in (ops, of_the_class, loop, loop_undone)}


def plain(xs):
    """The loss in a list of NumPy rows."""
    rows = list(xs.astype(np.float64))
    for i in range(STEPS):
        rows[i] = np.tanh(rows[i // 2] + xs[i])
    return np.sum(np.square(rows))


def slope(xs, direction, eps=1e-6):
    xs = xs.astype(np.float64)
    return (plain(xs + eps * direction) - plain(xs - eps * direction)) / (2 * eps)


DIRECTION = np.cos(np.arange(STEPS * ROW)).reshape(STEPS, ROW)


def assert_right(value, grad):
    np.testing.assert_allclose(value, plain(XS), rtol=1e-5)
    np.testing.assert_allclose(np.sum(grad * DIRECTION), slope(XS, DIRECTION), rtol=1e-4)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_compiled_ahead_of_time(name):
    f, x = jax.value_and_grad(PROGRAMS[name]), jax.ShapeDtypeStruct(XS.shape, XS.dtype)
    value, grad = jax.eval_shape(f, x)
    assert (value.shape, value.dtype, grad.shape, grad.dtype) == ((), np.float32, XS.shape, np.float32)
    compiled = jax.jit(f).lower(x).compile()
    assert_right(*compiled(XS))
    assert compiled.memory_analysis() is not None


def test_a_program_compiled_ahead_of_time_takes_and_gives_a_tensorarray():
    def push(ta, x):
        return ta.append(x), ta.size()

    ta = TensorArray(jnp.float32, size=0, dynamic_size=True, max_size=4, element_shape=())
    like = jax.eval_shape(lambda: ta)
    compiled = jax.jit(push).lower(like, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    for k in range(3):
        ta, size = compiled(ta, np.float32(k))
        assert size == k
    np.testing.assert_array_equal(ta.stack(), [0, 1, 2])
    with pytest.raises(TypeError):
        compiled(TensorArray(jnp.float32, size=4, element_shape=()), np.float32(0))


def test_the_type_of_a_tensorarray_needs_no_memory():
    def f():
        ta = TensorArray.like({"loss": jnp.float32(0), "hidden": jnp.zeros((2, 3), jnp.bfloat16)}, 10**12)
        return ta.write(10**9, {"loss": jnp.float32(0), "hidden": jnp.zeros((2, 3), jnp.bfloat16)})

    ta = jax.eval_shape(f)
    assert isinstance(ta, TensorArray)
    assert len(ta) == 10**12
    assert ta.element_shape == {"loss": (), "hidden": (2, 3)}
    assert ta.dtype == {"loss": np.float32, "hidden": jnp.bfloat16}
    assert {x.shape for x in jax.tree.leaves(ta)} == {(10**12,), (10**12, 2, 3)}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["of_the_class", "loop"])
def test_values_while_tracing(name):
    """What is known is computed while the function around it is traced, and is an array there."""

    def f(x):
        with jax.ensure_compile_time_eval():
            value, grad = jax.value_and_grad(PROGRAMS[name])(jnp.asarray(XS))
            table = TensorArray.from_array(grad).write(0, np.ones(ROW, np.float32))
            seen.append((float(value), np.asarray(grad), np.asarray(table.read(0))))
        return x * value + jnp.sum(table.read(0))

    seen = []
    found = jax.jit(f)(2.0)
    ((value, grad, row),) = seen
    assert_right(value, grad)
    np.testing.assert_array_equal(row, np.ones(ROW))
    np.testing.assert_allclose(found, 2 * value + ROW, rtol=1e-6)


# --- the cache of compiled programs ----------------------------------------------------------------------------

CACHED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np

sys.path.insert(0, sys.argv[2])
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))

import test_ahead_of_time as programs
from jax_tensorarray import ta_write

found = {}
for name, f in programs.PROGRAMS.items():
    compiled = jax.jit(jax.value_and_grad(f)).lower(programs.XS)
    before = len(events)
    compiled = compiled.compile()
    here = [event.split("/")[-1] for event in events[before:] if event.startswith("/jax/compilation_cache/cache_")]
    value, grad = compiled(programs.XS)
    found[name] = here, float(value), np.asarray(grad).tolist()
try:
    step = jax.jit(lambda b, i: ta_write(b, i, 1.0))
    jax.block_until_ready(step(programs.XS, 99))
    found["error"] = "none"
except (ValueError, jax.errors.JaxRuntimeError) as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_compiled_programs_of_the_first(tmp_path):
    def run():
        here = str(Path(__file__).parent)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", CACHED, str(tmp_path), here]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    for name in PROGRAMS:
        assert first[name][0] == ["cache_misses"], name
        assert second[name][0] == ["cache_hits"], name
        assert first[name][1:] == second[name][1:]
        assert_right(*second[name][1:])
    assert "index 99 is out of range" in second["error"]
