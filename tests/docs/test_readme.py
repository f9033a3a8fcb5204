"""What the README shows is true."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import snippets

from jax_tensorarray import in_place

FILE = Path(__file__).parents[2] / "README.md"
README = FILE.read_text()


@pytest.fixture(scope="module")
def names():
    """What the snippets define, one after the other."""
    names = {}
    for snippet in snippets.snippets(FILE, "python"):
        snippet.run(names)
    return names


def decoded(w, xs):
    """What the decoder means, in NumPy."""
    ys = [xs[0]]
    for i in range(1, len(xs)):
        ys.append(np.tanh(xs[i] + w @ ys[i // 2]))
    return np.stack(ys)


def decoder_inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((64, 64)).astype(np.float32) / 8, rng.standard_normal((7, 64)).astype(np.float32)


def test_the_ported_decoder_is_right(names):
    w, xs = decoder_inputs()
    np.testing.assert_allclose(names["decode"](w, xs), decoded(w, xs), rtol=1e-4, atol=1e-5)
    loss = jax.jit(jax.grad(lambda w, xs: jnp.sum(names["decode"](w, xs) ** 2), argnums=(0, 1)))
    grad_w, grad_xs = loss(jnp.asarray(w), jnp.asarray(xs))
    towards = np.random.default_rng(1).standard_normal(xs.shape)
    w, xs, h = w.astype(np.float64), xs.astype(np.float64), 1e-6
    ends = [np.sum(decoded(w + s * h * w, xs + s * h * towards) ** 2) for s in (1, -1)]
    np.testing.assert_allclose(np.sum(grad_w * w) + np.sum(grad_xs * towards), (ends[0] - ends[1]) / (2 * h), rtol=1e-4)


def test_the_loop_of_plain_jax_has_its_gradient(names):
    assert names["gradient"].shape == (8000, 64)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 2)))
    loss, h = names["loss"], 1e-3
    difference = (loss(x + h * x) - loss(x - h * x)) / (2 * h)
    np.testing.assert_allclose(jnp.sum(jax.grad(in_place(loss))(x) * x), difference, rtol=1e-2)


def test_the_while_loop_has_its_slope(names):
    np.testing.assert_allclose(names["slopes"], 0.5 / np.sqrt([2.0, 3.0, 5.0]), rtol=1e-4)


def test_it_is_short():
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_the_files_that_it_links_are_there(name):
    page = FILE.parent / name
    for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_ci_finds_the_two_commands():
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    assert len(lines) == 2 and re.match(r"^python3 -m venv .*pytest", lines[1])


def test_every_public_method_of_tensorarray_says_what_it_does():
    from jax_tensorarray import TensorArray

    for name in dir(TensorArray):
        if not name.startswith("_"):
            assert getattr(TensorArray, name).__doc__, name
