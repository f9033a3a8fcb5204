"""What the README shows is true."""

import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import snippets

FILE = Path(__file__).parent.parent / "README.md"
README = FILE.read_text()


def the_one_with(name):
    (found,) = [names for names in (s.run() for s in snippets.snippets(FILE, "python")) if name in names]
    return found


def decoded(w, xs):
    """What the decoder means, in NumPy."""
    ys = [xs[0]]
    for i in range(1, len(xs)):
        ys.append(np.tanh(xs[i] + w @ ys[i // 2]))
    return np.stack(ys)


def decoder_inputs():
    rng = np.random.default_rng(0)
    return rng.standard_normal((64, 64)).astype(np.float32) / 8, rng.standard_normal((7, 64)).astype(np.float32)


def test_the_ported_decoder_is_right():
    names = the_one_with("decode")
    w, xs = decoder_inputs()
    np.testing.assert_allclose(names["decode"](w, xs), decoded(w, xs), rtol=1e-4, atol=1e-5)
    grad_w, grad_xs = names["grads"](jnp.asarray(w), jnp.asarray(xs))
    towards = np.random.default_rng(1).standard_normal(xs.shape)
    w, xs, h = w.astype(np.float64), xs.astype(np.float64), 1e-6
    ends = [np.sum(decoded(w + s * h * w, xs + s * h * towards) ** 2) for s in (1, -1)]
    np.testing.assert_allclose(np.sum(grad_w * w) + np.sum(grad_xs * towards), (ends[0] - ends[1]) / (2 * h), rtol=1e-4)


def test_tensorflows_decoder_gives_the_same_numbers():
    pytest.importorskip("tensorflow", reason="TensorFlow is an optional extra: pip install '.[tensorflow]'")
    (snippet,) = snippets.snippets(FILE, "py")
    w, xs = decoder_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ys = snippet.run()["decode"](w, xs).numpy()
    np.testing.assert_allclose(the_one_with("decode")["decode"](w, xs), ys, rtol=1e-5, atol=1e-6)


def test_the_ten_lines_are_right():
    names = the_one_with("loss")
    xs = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2)))
    ys = np.zeros((6, 2))
    for i in range(6):
        ys[i] = np.tanh(ys[i // 2] + np.asarray(xs)[i])
    np.testing.assert_allclose(names["loss"](xs), np.sum(ys**2), rtol=1e-6)
    assert names["grads"].shape == (2000, 64)


def test_every_public_name_is_explained():
    import jax_tensorarray

    for name in jax_tensorarray.__all__:
        assert name in README or name == "primitives", name


def test_every_public_method_of_tensorarray_says_what_it_does():
    from jax_tensorarray import TensorArray

    for name in dir(TensorArray):
        if not name.startswith("_"):
            assert getattr(TensorArray, name).__doc__, name
