"""What a package jits is compiled under `in_place` if its import is hooked, and nothing else is."""

import importlib
import inspect
import sys
import textwrap
import traceback
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tensorarray import in_place_package
from jax_tensorarray._in_place.repair import Repair

X = np.linspace(0, 1, 30 * 4).reshape(30, 4)

#: The beginning of each module below. Its loop selects whole buffers.
LOOP = """
import jax.numpy as jnp
from jax import lax

def loop(x, n=30):
    def body(i, b):
        return jnp.where(x[i, 0] > 0.3, b.at[i].set(jnp.sin(b[i - 1])), b)
    return lax.fori_loop(1, n, body, x)
"""


def expected(x, n=30):
    b = np.array(x)
    for i in range(1, n):
        if x[i, 0] > 0.3:
            b[i] = np.sin(b[i - 1])
    return b


def is_in_place(f, x):
    return "ta_write" in str(jax.make_jaxpr(lambda x: f(x))(x))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the modules of a package `waves`, which no other test sees."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])

    def write(**files):
        for name, text in files.items():
            file = tmp_path / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(exist_ok=True)
            (file.parent / "__init__.py").touch()
            text = textwrap.dedent(text)
            file.write_text(f"{text}\n{LOOP}" if "__future__" in text else f"{LOOP}\n{text}")
        (tmp_path / "waves" / "__init__.py").touch()
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("waves", "others")]:
        del sys.modules[name]


SPELLINGS = {
    "a decorator": "import jax\n@jax.jit\ndef f(x): return loop(x)",
    "a decorator with options": "import jax\n@jax.jit(static_argnames='n')\ndef f(x, n=30): return loop(x, n)",
    "a partial": """
        import functools, jax
        @functools.partial(jax.jit, static_argnums=1)
        def f(x, n=30): return loop(x, n)
    """,
    "a name": "from jax import jit\n@jit\ndef f(x): return loop(x)",
    "another name": "from jax import numpy, jit as compiled\nf = compiled(lambda x: loop(x))",
    "another module": "import jax as j\nf = j.jit(lambda x: loop(x))",
    "a private name": "from jax._src.api import jit\nf = jit(lambda x: loop(x))",
    "in a function": "def f(x):\n    from jax import jit\n    return jit(loop)(x)",
    "in a class": "import jax\nclass F:\n    @jax.jit\n    def f(x): return loop(x)\nf = F.f",
    "a method": """
        import jax
        from functools import partial
        class F:
            @partial(jax.jit, static_argnums=0)
            def f(self, x): return loop(x)
        f = F().f
    """,
    "a function with a keyword": "import jax\ng = jax.jit(lambda *, x: loop(x))\ndef f(x): return g(x=x)",
    "a callable object": "import jax\nclass F:\n    def __call__(self, x): return loop(x)\nf = jax.jit(F())",
    "a partial of a function": "import jax, functools\nf = jax.jit(functools.partial(lambda n, x: loop(x, n), 30))",
    "after a docstring": """
        'Waves.'
        from __future__ import annotations
        import jax
        @jax.jit
        def f(x: jax.Array): return loop(x)
    """,
    "beside a pattern": """
        import jax
        class Kind:
            jit = 1
        match 1:
            case Kind.jit:
                f = jax.jit(lambda x: loop(x))
    """,
}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("source", SPELLINGS.values(), ids=SPELLINGS)
def test_a_jit_of_the_package_is_in_place_however_it_is_spelled(write, source):
    write(waves__sines=source + "\n")
    in_place_package("waves")
    sines = importlib.import_module("waves.sines")
    assert is_in_place(sines.f, X)
    np.testing.assert_allclose(sines.f(X), expected(X))


def test_nothing_else_is(write):
    write(
        others__sines="""
            import jax
            from jax import jit
            f = jit(lambda x: loop(x))
            def filter_jit(f): return jax.jit(f)
        """,
        waves__sines="""
            import jax
            from others import sines
            from others.sines import filter_jit, f
            class Compiler:
                def jit(self, f): return f
            not_jitted = loop
            of_another = filter_jit(lambda x: loop(x))
            of_a_method = Compiler().jit(loop)
            mapped = jax.pmap
        """,
    )
    jit = jax.jit
    in_place_package("waves")
    sines = importlib.import_module("waves.sines")
    for f in (sines.f, sines.not_jitted, sines.of_another, sines.of_a_method, sines.sines.f, jax.jit(sines.loop)):
        assert not is_in_place(f, X)
    assert jax.jit is jit is sys.modules["others.sines"].jit
    assert sines.mapped is jax.pmap
    assert sines.jax is jax


def test_modules_that_are_imported_later_are_hooked_until_the_end(write):
    module = "import jax\nf = jax.jit(lambda x: loop(x))\ndef late(): return jax.jit(loop)\n"
    write(waves__one=module, waves__two=module, waves__three=module, waves__four=module)
    with in_place_package("waves") as hook:
        one = importlib.import_module("waves.one")
        assert is_in_place(importlib.import_module("waves.two").f, X)
        assert repr(hook) == "<in_place_package of 'waves'>"
    assert not is_in_place(importlib.import_module("waves.three").f, X)
    assert is_in_place(one.f, X) and is_in_place(one.late(), X)
    for _ in range(2):
        hook.uninstall()
    again = in_place_package("waves.four")
    # While something else is traced, too.
    assert is_in_place(lambda x: importlib.import_module("waves.four").f(x), X)
    assert is_in_place(importlib.import_module("waves.four").f, X)
    assert is_in_place(importlib.reload(sys.modules["waves.four"]).f, X)
    again.uninstall()


@pytest.mark.slow
def test_it_stays_a_jit(write, monkeypatch):
    write(
        waves__sines="""
            import functools, jax
            traced = []

            @functools.partial(jax.jit, static_argnames=("n", "scale"), donate_argnums=0)
            def f(x, n, scale=1.0):
                "Waves."
                assert (type(n), type(scale)) == (int, float)
                traced.append(n)
                return loop(x, n) * scale

            @jax.jit
            def inner(x): return loop(x)

            @jax.jit
            def outer(x): return inner(x) + 1

            def each_time(x):
                return jax.jit(counted)(x)

            def counted(x):
                traced.append("counted")
                return loop(x)

            wrapped = functools.wraps(counted)(lambda x: loop(x) + 1)

            @jax.jit
            def fails(x):
                raise KeyError("mine")

            of_partial = jax.jit(functools.partial(f.__wrapped__, n=9))
        """
    )
    in_place_package("waves")
    m = importlib.import_module("waves.sines")
    f = m.f
    assert (f.__name__, f.__doc__, f.__module__) == ("f", "Waves.", "waves.sines")
    assert list(inspect.signature(f).parameters) == ["x", "n", "scale"]
    assert "scale=1.0" in inspect.getsource(f)
    assert f.lower(X, n=20).as_text().startswith("module @jit_f ")
    assert m.of_partial.lower(X).as_text().startswith("module @jit_f ")
    np.testing.assert_allclose(f(X, 20, scale=2.0), 2 * expected(X, 20))
    assert is_in_place(lambda x: f(x, 20, scale=2.0), X)
    np.testing.assert_allclose(f.__wrapped__(jnp.asarray(X), 20), expected(X, 20))
    given = jnp.asarray(X)
    f(given, 30)
    assert given.is_deleted()
    # However they are called first.
    np.testing.assert_allclose(m.outer(X), expected(X) + 1)
    assert is_in_place(m.inner, X)
    # JAX knows a function that is jitted in each call.
    m.traced.clear()
    for _ in range(3):
        m.each_time(X)
    assert m.traced == ["counted"]
    np.testing.assert_allclose(m.jax.jit(m.wrapped)(X), expected(X) + 1)
    with jax.disable_jit():
        np.testing.assert_allclose(f(jnp.asarray(X), 20), expected(X, 20))
    with pytest.raises(KeyError, match="mine") as error:
        m.fails(X)
    line = traceback.extract_tb(error.value.__traceback__)[-1]
    assert line.line == 'raise KeyError("mine")'


def test_errors_of_the_package_and_of_this_library(write, monkeypatch):
    """An error of the package stays what it is. After a fault of this library the function runs as it is written."""
    write(
        waves__sines="""
            import jax
            traced = []

            @jax.jit
            def fails(x):
                traced.append("once")
                raise KeyError("mine")

            @jax.jit
            def f(x):
                traced.append("once")
                return loop(x)
        """
    )
    in_place_package("waves")
    m = importlib.import_module("waves.sines")
    with pytest.raises(KeyError, match="mine"):
        m.fails(X)
    assert m.traced.pop() == "once" and not m.traced

    def fault(*args, **kwargs):
        raise IndexError("ours")

    monkeypatch.setattr(Repair, "evaluate", fault)
    with pytest.warns(RuntimeWarning, match=r"a fault of jax_tensorarray, .* IndexError: ours .* report it") as warned:
        np.testing.assert_allclose(m.f(X), expected(X))
    assert len(warned) == 1


def test_no_compiled_file_is_left_for_other_programs(write, tmp_path):
    write(waves__sines="import jax\nf = jax.jit(lambda x: loop(x))\n")
    with in_place_package("waves"):
        importlib.import_module("waves.sines")
    assert not list((tmp_path / "waves").rglob("sines*.pyc"))


def test_a_module_that_is_no_file_of_source_code_is_left_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("waves_in_a_zip.py", "import jax\nf = jax.jit(lambda x: loop(x))\n" + LOOP)
    monkeypatch.syspath_prepend(tmp_path / "packed.zip")
    with (
        in_place_package("waves_in_a_zip"),
        pytest.warns(RuntimeWarning, match="what waves_in_a_zip jits stays as it is, .* its loader is zipimporter"),
    ):
        packed = importlib.import_module("waves_in_a_zip")
    assert not is_in_place(packed.f, X)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (jax, TypeError, r'must be a string, not module. Write in_place_package\("mctx"\) before `import mctx`'),
        (None, TypeError, "must be a string, not NoneType"),
        ("ott-jax", ValueError, "'ott-jax' is not the name of a package. Give the name that follows \"import\""),
        ("", ValueError, "'' is not the name"),
        ("jax", RuntimeError, r"'jax' is imported already, .* Call in_place_package\('jax'\) first: at the top of"),
    ],
)
def test_what_cannot_be_hooked_is_refused(name, error, text):
    before = sys.meta_path[:]
    with pytest.raises(error, match=f"in_place_package: .*{text}"):
        in_place_package(name)
    assert sys.meta_path == before


def test_a_package_that_is_not_there_is_an_error_when_it_is_imported():
    with in_place_package("no_such_waves"), pytest.raises(ModuleNotFoundError, match="no_such_waves"):
        importlib.import_module("no_such_waves")
