"""tools/peers_tests.py finds the calls that differ under `in_place`, and no others."""

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("needs the tools of the sources", allow_module_level=True)

LIBRARY = """
import inspect
import jax
from jax import lax


@jax.jit
def filled(b):
    return lax.fori_loop(1, len(b), lambda i, b: b.at[i].set(b[i - 1] * 2), b)


@jax.jit
def doubled_under_in_place(x):
    return x * (1 + any("jax_tensorarray" in frame.filename for frame in inspect.stack()))


def retyped_under_in_place(c, x):
    return c, x.astype("int32") if any("jax_tensorarray" in frame.filename for frame in inspect.stack()) else x
"""

TESTS = """
import functools
import jax, jax.numpy as jnp
import peer
from jax import lax


def test_equal():
    assert peer.filled(jnp.ones(4))[3] == 8
    assert jax.grad(lambda b: peer.filled(b)[3])(jnp.ones(4))[0] == 8
    assert jax.vmap(peer.filled)(jnp.ones((3, 4))).shape == (3, 4)


def test_values():
    peer.doubled_under_in_place(1.5)  # wrong, and no assertion sees it


def test_dtype():
    lax.scan(peer.retyped_under_in_place, 0, jnp.ones(3))


def test_traced_with_values():
    assert jax.grad(lambda x: x * x if x > 0 else -x)(2.0) == 4


def test_donated():
    x = jnp.arange(4.0)
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(x)[0] == 1 and x.is_deleted()


def test_effects():
    seen = []
    jax.jit(lambda x: jax.debug.callback(seen.append, x))(1.0)
    jax.effects_barrier()
    assert len(seen) == 1


def test_traces():
    traces = []
    jax.jit(lambda x: traces.append("a trace"))(1.0)  # to store `x` there is an error under in_place
    assert len(traces) == 1  # more where calls are compared, and not under `in_place` alone


def test_that_fails():
    assert False
"""


@pytest.fixture
def peers_tests(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    import peers_tests

    peer = peers_tests.Peer("peer", ("tests/test_*.py",))
    monkeypatch.setitem(peers_tests.PEERS, "peer", peer)
    monkeypatch.setattr(peers_tests, "WORK", tmp_path / "work")
    (tmp_path / "clone" / "tests").mkdir(parents=True)
    (tmp_path / "clone" / "peer.py").write_text(LIBRARY)
    (tmp_path / "clone" / "tests" / "test_peer.py").write_text(TESTS)
    yield peers_tests
    for name in ("peers_tests", "outcomes"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_what_differs_is_found(peers_tests, monkeypatch, tmp_path, capsys):
    expected = peers_tests.Expected("test_dtype .*: dtype", "for this test")
    monkeypatch.setattr(peers_tests, "EXPECTED", (expected,))
    clone = f"peer={tmp_path / 'clone'}"
    assert peers_tests.main([clone, "--python", sys.executable, "--no-install", "--ways", "all"]) == 1
    said = capsys.readouterr().out
    listed = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    assert [line.split(":: ")[0].partition(": ")[0].rpartition("::")[2] for line in listed] == [
        "test_values",
        "test_dtype",
    ]
    assert "values" in listed[0] and "1.5 and 3.0" in listed[0]
    assert "float32 and int32" in listed[1] and "(expected: for this test)" in listed[1]
    assert "plain: 1 failed, 7 passed" in said and "1 effects" in said and "1 untraceable" in said
    assert "1 unexpected differences" in said
