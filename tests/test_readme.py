"""What the README shows is true."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_snippets_run_and_the_example_is_right():
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippets
    for snippet in snippets:
        names = {}
        exec(snippet, names)
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
