"""`in_place` can be turned off, by three switches, and then a function is what `jax.jit` makes of it."""

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tensorarray
from jax_tensorarray import disable_in_place, in_place

X = jnp.linspace(0.1, 1, 6)

ROOT = Path(__file__).parents[2]


def filled(x):
    return lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x)


def is_rewritten(f, *args):
    return "ta_write" in str(jax.make_jaxpr(lambda *args: f(*args))(*args))


# --- off -------------------------------------------------------------------------------------------------------


def test_the_option_of_one_function():
    off = in_place(filled, enabled=False)
    assert not is_rewritten(off, X) and is_rewritten(in_place(filled), X)
    np.testing.assert_array_equal(off(X), jax.jit(filled)(X))
    assert off.lower(X).as_text() == jax.jit(filled).lower(X).as_text()
    assert off.eval_shape(X).shape == X.shape
    assert "ta_write" not in str(off.trace(X).jaxpr)


def test_the_block_and_what_is_compiled_inside_and_outside_of_it():
    f = in_place(filled)
    of_jit = jax.jit(f)
    for call in (f, of_jit, lambda x: jax.grad(lambda x: of_jit(x).sum())(x)):
        assert is_rewritten(call, X)
        for _ in range(2):
            with disable_in_place():
                assert not is_rewritten(call, X)
            assert is_rewritten(call, X)
    texts = [of_jit.lower(X).as_text()]
    with disable_in_place():
        texts.append(of_jit.lower(X).as_text())
        assert texts[1] == f.lower(X).as_text().replace("inline", "")
    texts.append(of_jit.lower(X).as_text())
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))])
def test_a_function_is_compiled_once_for_each_position_of_the_switch(outer):
    traced = []

    def f(x):
        traced.append("on" if is_on else "off")
        return filled(x)

    call, xs = outer(in_place(f)), jnp.stack([X, 2 * X])
    for is_on in (True, False, True, False):
        if is_on:
            call(xs)
        else:
            with disable_in_place():
                call(xs)
    assert traced == ["on", "off"]


def test_the_environment(monkeypatch):
    f = in_place(filled)
    for value, is_on in (("0", False), ("1", True), ("", True), ("0", False)):
        monkeypatch.setenv("JAX_TENSORARRAY_IN_PLACE", value)
        assert is_rewritten(f, X) is is_on
    monkeypatch.setenv("JAX_TENSORARRAY_IN_PLACE", "no")
    with pytest.raises(ValueError, match="JAX_TENSORARRAY_IN_PLACE must be one of 0, 1, got 'no'"):
        f(X)


def test_arguments_are_treated_as_before():
    class Layer:  # compares by identity
        size = 2

    def step(x, found, last, layer, name, scale):
        assert (name, type(scale), layer.size) == ("wave", int, 2)
        last["x"] = filled(x)
        found.append(x * scale)
        return {"name": name, "layer": layer, "sum": x.sum()}

    results = []
    for enabled in (True, False):
        found, last, layer = [], {}, Layer()
        f = in_place(step, enabled=enabled)
        for _ in range(2):
            out = f(X, found, last, layer, "wave", 2)
        assert out["name"] == "wave" and out["layer"] is layer and len(found) == 2
        results.append((out["sum"], *found, last["x"]))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_modules_of_nnx_are_updated():
    nnx = pytest.importorskip("flax.nnx")

    class Counts(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.int32(0))

    def step(model, x):
        model.count[...] = model.count[...] + 1
        return filled(x)

    model = Counts()
    in_place(step, enabled=False)(model, X)
    with disable_in_place():
        in_place(step)(model, X)
    assert model.count[...] == 2


OFF = {
    "JAX_TENSORARRAY_IN_PLACE=0": lambda f, monkeypatch: (
        monkeypatch.setenv("JAX_TENSORARRAY_IN_PLACE", "0"),
        in_place(f, max_steps=9),
    )[1],
    "enabled=False": lambda f, monkeypatch: in_place(f, max_steps=9, enabled=False),
    "disable_in_place()": lambda f, monkeypatch: disable_in_place()(in_place(f, max_steps=9)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("why", OFF)
def test_the_gradient_of_a_while_loop_says_what_is_off(why, monkeypatch):
    def until(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * jnp.sin(x)), (0, x))[1]

    def nested(x):
        return lax.scan(lambda c, _: (jax.jit(until)(c), None), x, None, length=2)[0]

    monkeypatch.delenv("JAX_TENSORARRAY_IN_PLACE", raising=False)
    for f in (until, nested):
        call = OFF[why](f, monkeypatch)
        np.testing.assert_allclose(call(0.5), f(0.5))
        np.testing.assert_allclose(jax.jvp(call, (0.5,), (1.0,))[1], jax.jvp(f, (0.5,), (1.0,))[1])
        np.testing.assert_allclose(jax.vmap(call)(X), jax.vmap(f)(X))
        for grad in (jax.grad(call), jax.jit(jax.grad(call))):
            with pytest.raises(ValueError, match=r"^in_place: reverse mode needs max_steps=9") as error:
                grad(0.5)
            assert f"in_place is off ({why})" in str(error.value)
    inside = OFF[why](lambda x: jax.grad(until)(x), monkeypatch)
    with pytest.raises(ValueError, match="in_place is off"):
        inside(0.5)
    # A gradient that does not go through the loop has no error.
    beside = OFF[why](lambda x: lax.stop_gradient(until(x)) * x, monkeypatch)
    np.testing.assert_allclose(jax.grad(beside)(0.5), until(0.5))


def outcome(script, **settings):
    """What a script prints in a process of its own."""
    settings = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "JAX_PLATFORMS": "cpu"} | settings
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split(), run.stderr


@pytest.mark.slow
def test_a_program_in_which_it_is_off_replaces_nothing_in_jax():
    script = """
import jax, jax.numpy as jnp
from jax_tensorarray import _replaced, in_place
used = [(r.owner, r.name) for r in _replaced.replacements()]
values = lambda: [owner[name] if isinstance(owner, dict) else getattr(owner, name) for owner, name in used]
before = values()
f = in_place(lambda x: jax.lax.fori_loop(1, 4, lambda i, b: b.at[i].set(b[i - 1]), x), max_steps=3)
f(jnp.ones(4)), jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.ones(4)), f.lower(jnp.ones(4))
print(len(before) > 4, before == values(), "ta_write" in str(f.trace(jnp.ones(4)).jaxpr))
"""
    assert outcome(script, JAX_TENSORARRAY_IN_PLACE="0")[0] == ["True", "True", "False"]


def test_what_a_package_jits_is_plain(tmp_path, monkeypatch):
    (tmp_path / "ripples.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "@jax.jit\n"
        "def f(x):\n"
        "    return jax.lax.fori_loop(1, len(x), lambda i, b: b.at[i].set(jnp.sin(b[i - 1])), x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    with jax_tensorarray.in_place_package("ripples"):
        import ripples  # type: ignore[import-not-found]
    try:
        assert is_rewritten(ripples.f, X)
        with disable_in_place():
            assert not is_rewritten(ripples.f, X)
            np.testing.assert_array_equal(ripples.f(X), filled(X))
        assert is_rewritten(ripples.f, X)
        monkeypatch.setenv("JAX_TENSORARRAY_IN_PLACE", "0")
        assert not is_rewritten(ripples.f, X[:5])
    finally:
        del sys.modules["ripples"]


# --- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["enabled", "check", "strict"])
@pytest.mark.parametrize("value", [1, None, "yes", jnp.bool_(True)])
def test_options_that_are_no_bools_are_refused(name, value):
    for options in ({"fun": filled}, {}):
        with pytest.raises(TypeError, match=rf"^in_place: {name} must be True or False, got "):
            in_place(**options, **{name: value})


@pytest.mark.slow
def test_residuals_are_listed():
    for value in ("inverse", "all", 3):
        with pytest.raises(ValueError, match="'auto', 'tape', 'recompute', 'undo', 'checkpoint', or an object of"):
            in_place(filled, residuals=value)
    for name in ("auto", "tape", "recompute", "undo", "checkpoint"):
        np.testing.assert_allclose(
            jax.grad(lambda x, name=name: in_place(filled, residuals=name)(x).sum())(X),
            jax.grad(lambda x: filled(x).sum())(X),
            rtol=1e-6,
        )


def test_options_are_pickled():
    f = pickle.loads(pickle.dumps(in_place(filled, enabled=False, check=True, strict=True, max_steps=3)))
    assert {name: f._options[name] for name in ("enabled", "check", "strict", "max_steps")} == {
        "enabled": False,
        "check": True,
        "strict": True,
        "max_steps": 3,
    }


# --- the log ---------------------------------------------------------------------------------------------------


def chosen(x, other):
    def body(i, b):
        new = b.at[i].set(jnp.sin(b[i - 1]) + b[i, 0])
        return lax.cond(i > 3, lambda: new, lambda: other)

    return lax.fori_loop(1, len(x), body, x)


def test_one_line_per_trace(caplog):
    x = jnp.ones((8, 4))
    line = chosen.__code__.co_firstlineno + 3
    with caplog.at_level(logging.INFO, "jax_tensorarray"):
        f = in_place(chosen)
        for _ in range(2):
            f(x, 2 * x)
        in_place(filled, enabled=False)(X)
        in_place(jnp.sin)(X)
    texts = [record.getMessage() for record in caplog.records if record.name == "jax_tensorarray"]
    assert len(texts) == 3
    assert texts[0].startswith("chosen: 2 reads, 1 write in 1 loop; 1 left [another-buffer], ")
    assert texts[0].endswith(f"test_switch.py:{line}")
    assert texts[1:] == [
        "filled: not rewritten, in_place is off (enabled=False)",
        "sin: nothing rewritten in 0 loops",
    ]


def test_the_line_counts_loops_once_and_nothing_that_needs_no_action(caplog):
    def step(x):
        value, grad = jax.value_and_grad(lambda x: chosen(x, x).sum() + jnp.ones((8, 4))[3, jnp.int32(x[0, 0])])(x)
        return value, grad.at[0].set(0.0)

    with caplog.at_level(logging.DEBUG, "jax_tensorarray"):
        in_place(step)(jnp.ones((8, 4)))
    texts = [record.getMessage() for record in caplog.records]
    [line] = [text for text in texts if text.startswith("step: ") and "in 1 loop" in text]
    assert "not-in-a-loop" not in line
    assert any("[not-in-a-loop]" in text for text in texts)  # the details have it


def test_check_and_strict_say_that_they_have_looked(caplog):
    x = jnp.ones((2000, 4))
    with caplog.at_level(logging.INFO, "jax_tensorarray"):
        in_place(filled, check=True, strict=True)(x)
    texts = [record.getMessage() for record in caplog.records]
    assert texts.count("filled: check=True compares each call with the function as it is written") == 1
    assert texts.count("filled: strict=True found no copy in the compiled program") == 1


def test_the_details_are_those_of_the_doctor(caplog):
    from jax_tensorarray.doctor import explain

    x = jnp.ones((8, 4))
    with caplog.at_level(logging.DEBUG, "jax_tensorarray"):
        in_place(chosen)(x, 2 * x)
    details = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    details = [text for text in details if text.startswith("chosen")]
    assert details == [f"chosen: {explain(chosen)(x, 2 * x)}"]


def test_without_a_log_nothing_is_collected(monkeypatch):
    from jax_tensorarray._in_place import explained

    monkeypatch.setattr(explained.Listener, "__init__", lambda self: pytest.fail("a listener"))
    in_place(lambda x: filled(x))(X)


# --- a JAX that is not known -----------------------------------------------------------------------------------

NEWER = """
import jax, sys
jax.__version_info__, jax.__version__ = (0, 99, 1), "0.99.1"
import jax_tensorarray, jax.numpy as jnp
print("imported")
for _ in range(2):
    jax_tensorarray.in_place(jnp.sin)(1.0)
"""


@pytest.mark.slow
def test_a_newer_jax_is_warned_of_once_and_at_the_first_use():
    script = NEWER.replace("print(", "import warnings; warnings.simplefilter('always'); print(")
    told = outcome(script)[1]
    assert told.count("RuntimeWarning: jax_tensorarray has been tested with jax up to 0.12, and this is jax 0.99") == 1
    assert "<string>:7" in told
    for value in ("ignore", "warn", ""):
        told = outcome(script, JAX_TENSORARRAY_UNTESTED_JAX=value)[1]
        assert ("RuntimeWarning" in told) is (value != "ignore")
    wrong = NEWER.replace("(0, 99, 1)", "(0, 12, 0)") + "\n"
    wrong = wrong.replace("for _ in range(2):", "try:").rstrip() + "\nexcept ValueError as error: print(error)\n"
    said = " ".join(outcome(wrong, JAX_TENSORARRAY_UNTESTED_JAX="no")[0])
    assert said == "imported JAX_TENSORARRAY_UNTESTED_JAX must be one of warn, ignore, got 'no'"
    assert outcome("import jax_tensorarray", JAX_TENSORARRAY_UNTESTED_JAX="no") == ([], "")


# --- types -----------------------------------------------------------------------------------------------------

TYPED = """
import jax
from jax_tensorarray import in_place

@in_place
def step(x: jax.Array, n: int, *, scale: float = 1.0) -> tuple[jax.Array, str]: ...

@in_place(max_steps=3, residuals="undo")
def other(x: jax.Array) -> float: ...

class Model:
    @in_place
    def loss(self, x: jax.Array) -> jax.Array: ...

x = jax.numpy.ones(3)
reveal_type(step(x, 3, scale=2.0))
reveal_type(other(x))
reveal_type(Model().loss(x))
reveal_type(step.lower(x, 3))
step(x, "3")
other()
Model().loss(1)
in_place(step, residuals="inverse")
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_signature(tmp_path):
    mypy = pytest.importorskip("mypy.api")
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        told, errors, _ = mypy.run(
            ["--no-error-summary", "--hide-error-context", "--follow-imports=silent", "--config-file=", str(file)]
        )
    finally:
        os.chdir(before)
    assert not errors
    found = [line.split(":", 1)[1] for line in told.splitlines() if "empty-body" not in line]
    assert [line.split('"')[1] for line in found if "Revealed" in line] == [
        "tuple[jax._src.basearray.Array, str]",
        "float",
        "jax._src.basearray.Array",
        "jax._src.stages.Lowered",
    ], told
    wrong = [int(line.split(":")[0]) for line in found if "error" in line]
    assert wrong == [20, 21, 22, 23], told
