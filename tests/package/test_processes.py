"""Training in several processes, divided by examples and by features: the losses are those of plain JAX.

`tests/ops/test_sharding.py` has several devices of one process."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts

pytestmark = pytest.mark.slow

UPDATES = 4


@pytest.fixture(scope="module")
def example():
    return scripts.example("data_parallel")


def plain_loss(example, params, xs):
    """The same model with its states in a list."""
    states = [jnp.zeros((xs.shape[1], example.HIDDEN))]
    for i, x in enumerate(xs):
        earlier = states[max(i + 1 - example.EARLIER, 0)]
        mixed = x @ params["hear"] + states[i] @ params["keep"] + earlier @ params["recall"] + params["bias"]
        states.append(jnp.tanh(mixed))
    said = [state @ params["say"] for state in states[1 + example.DELAY :]]
    return jnp.mean((jnp.stack(said) - xs[: -example.DELAY]) ** 2)


@pytest.fixture(scope="module")
def losses(example):
    """Of plain JAX on one device."""
    params = {name: jnp.asarray(x) for name, x in example.init_params().items()}
    m = v = jax.tree.map(jnp.zeros_like, params)
    loss = jax.jit(jax.value_and_grad(lambda p, xs: plain_loss(example, p, xs)))
    found = []
    for k in range(1, UPDATES + 1):
        value, grad = loss(params, jnp.asarray(example.make_batch(k - 1)))
        found.append(float(value))
        m = {n: 0.9 * m[n] + 0.1 * grad[n] for n in params}
        v = {n: 0.99 * v[n] + 0.01 * grad[n] ** 2 for n in params}
        for n in params:
            params[n] -= 0.01 * (m[n] / (1 - 0.9**k)) / (jnp.sqrt(v[n] / (1 - 0.99**k)) + 1e-8)
    return found


def test_several_processes(losses):
    options = f"--processes 2 --devices 1 --updates {UPDATES}".split()
    command = [sys.executable, str(scripts.DIRECTORY / "data_parallel.py"), *options]
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for name in ("data", "feature"):
        assert f"{name}-parallel, 2 devices in 2 processes" in done.stdout
    found = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    np.testing.assert_allclose(found, [*losses, *losses], atol=1e-8)


def test_a_process_that_fails_ends_the_others(example, monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "sys.exit(3) if sys.argv[-1] == '1' else time.sleep(300)\n"
        "pathlib.Path(__file__).with_name('ended by itself').touch()\n"
    )
    monkeypatch.setattr(example, "__file__", str(script))
    assert example.start(3, []) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]
