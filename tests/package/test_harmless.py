"""The library changes nothing about programs that do not use it, and its own frames are hidden as JAX's are.

This file is also a script, which writes down what JAX does: without the library, with it imported, and after its first
use.
"""

import functools
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir


def failing(where):
    """A function of a primitive with a rule that raises an error."""

    def fail(*_):
        raise ValueError(f"in {where}")

    p = Primitive(f"fails_in_{where}")
    p.def_impl(lambda x: x)
    p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(p, fail if where == "lowering" else lambda ctx, x: [x])
    ad.deflinear2(p, fail)
    return lambda x: p.bind(jnp.sin(x))


def in_each_call(f):
    """What each kind of equation that holds a jaxpr makes of a function."""
    return {
        "plain": f,
        "jit": jax.jit(f),
        "scan": lambda x: lax.scan(lambda c, _: (f(c * x), c), x, None, length=2)[0],
        "cond": lambda x: lax.cond(x > 0, f, lambda x: x * f(x), x),
        "checkpoint": jax.checkpoint(lambda x: f(f(x))),
        "nested": jax.jit(lambda x: lax.scan(lambda c, _: (jax.checkpoint(f)(c), None), x, None, length=2)[0]),
    }


def programs():
    indexed = in_each_call(lambda x: jnp.sum(jnp.zeros(3).at[1].set(x)[jnp.int32(x)]))
    yield from ((f"{name}, value", jnp.vectorize(f)) for name, f in in_each_call(jnp.sin).items())
    yield from ((f"{name}, gradient", jax.grad(f)) for name, f in indexed.items())
    yield from ((f"{name}, vmap", lambda x, f=f: jax.vmap(f)(x + jnp.ones(2))) for name, f in indexed.items())
    yield "while", lambda x: lax.while_loop(lambda x: x < 3, jax.named_scope("step")(lambda x: x + 1), x)
    yield "Hessian", jax.hessian(indexed["nested"])


def described(error):
    """The frames of a traceback that JAX has filtered, and those of its causes."""
    frames = [list(frame)[:3] for frame in traceback.extract_tb(error.__traceback__)]
    return [str(error), getattr(error, "__notes__", []), frames, error.__cause__ and described(error.__cause__)]


def seen(f, *args):
    try:
        return repr(f(*args))
    except Exception as error:
        return described(error)


def observe():
    jax.config.update("jax_num_cpu_devices", 2)  # an error once there is a backend
    yield "settings", {name: repr(value) for name, value in jax.config.values.items() if "cache" not in name}
    for name, f in programs():
        lowered = jax.jit(f).lower(1.0)
        yield f"{name}: jaxpr", str(jax.make_jaxpr(f)(1.0))
        yield f"{name}: StableHLO", lowered.as_text(debug_info=True)
        yield f"{name}: HLO", lowered.compile().as_text()
        yield f"{name}: export", hashlib.sha256(jax.export.export(jax.jit(f))(1.0).serialize()).hexdigest()
        yield f"{name}: result", seen(f, 1.0)
    for where in ["lowering", "transpose"]:
        for name, f in in_each_call(failing(where)).items():
            yield f"{name}: error in {where}", seen(jax.jit(jax.grad(f) if where == "transpose" else f), 1.0)
            yield f"{name}: error in {where}, outside of jit", seen(jax.grad(f) if where == "transpose" else f, 1.0)
    yield "error while tracing", seen(jax.jit(lambda x: jnp.zeros(2) + jnp.zeros(3)), 1.0)
    yield "compilation cache", sorted(os.listdir(jax.config.jax_compilation_cache_dir))


IMPORTED = "import jax_tensorarray"
USED = "import jax_tensorarray; jax_tensorarray._compat.first_use()"


@functools.cache
def observations(setup, cache):
    settings = {
        # The package that lies beside these tests.
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # of machine code, which is not looked at
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run = subprocess.run(
        [sys.executable, __file__, setup], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    shutil.rmtree(cache)  # whose name is part of a key
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("uses", [IMPORTED, USED], ids=["imported", "used"])
def test_no_program_cache_key_location_or_traceback_changes(uses, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "cache"
    without, with_library = (observations(setup, cache) for setup in ["", uses])
    assert len(without["compilation cache"]) > 2 * len(list(programs()))
    different = [name for name in without if without[name] != with_library[name]]
    assert {name: (without[name], with_library[name]) for name in different} == {}
    assert without.keys() == with_library.keys()


@pytest.mark.slow
def test_a_script_that_holds_an_array_to_its_end_ends_in_silence():
    script = "import jax.numpy as jnp, jax_tensorarray as jta; ta = jta.TensorArray(jnp.float32, 1).write(0, 1.0)"
    settings = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""


def lines_of(f):
    """The lines of a function."""
    lines, first = inspect.getsourcelines(f)
    return range(first, first + len(lines))


def test_the_lines_of_compiled_ops_are_those_of_the_user():
    import jax_tensorarray as jta

    def f(x):
        ta = jta.TensorArray(x.dtype, 4, element_shape=()).unstack(x)
        ta = jta.fori_loop(0, 4, lambda i, ta: ta.write(i, jnp.sin(ta.read(3 - i))), ta)
        b = jta.ta_max(jta.ta_swap(jta.ta_add(ta.stack(), 1, 2.0), 0, 1.0)[0], 2, 0.5)
        return jta.while_loop(lambda b: b[0] < 3, lambda b: jta.ta_add(b, 0, jta.ta_read(b, 1)), b, max_steps=9)

    for function in (f, jax.grad(lambda x: jnp.sum(f(x)))):
        lowered = jax.jit(function).lower(jnp.ones(4))
        text = lowered.as_text(debug_info=True) + lowered.compile().as_text()
        assert os.path.basename(__file__) in text
        assert os.path.dirname(jta.__file__) not in text


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])])
def test_a_traceback_ends_in_the_line_of_the_user(transform):
    import jax_tensorarray as jta

    def wrong(x):
        raise ValueError("wrong")

    def stray(x):
        return jta.ta_read(x[None], 5)

    loops = {
        "while_loop": lambda body, x: jta.while_loop(lambda x: x < 3, body, x, max_steps=3),
        "fori_loop": lambda body, x: jta.fori_loop(0, 3, lambda i, x: body(x), x),
        "scan": lambda body, x: jta.scan(lambda x, _: (body(x), x), x, None, 3, residuals=jta.residuals.Checkpoint(2)),
    }
    for loop in loops.values():
        for body in (wrong, stray):
            with pytest.raises((ValueError, IndexError)) as error:
                transform(lambda x, loop=loop, body=body: loop(body, x))(jnp.float32(0))
            last = traceback.extract_tb(error.value.__traceback__)[-1]
            assert (last.filename, last.lineno in lines_of(body)) == (__file__, True)


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(sys.argv[1])
        found = dict(observe())
    print(json.dumps(found | {"warnings": [str(warning.message) for warning in caught]}))
