"""`check_errors` waits for GPUs that have run an op, and for nothing else."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jax_tensorarray
from jax_tensorarray import _kernels, check_errors


def gpu(has_run, text):
    def wait_for_error():
        assert has_run, "there is nothing to wait for"
        return text

    return SimpleNamespace(has_run=lambda: has_run, wait_for_error=wait_for_error)


def test_it_raises_what_a_gpu_has_recorded(monkeypatch):
    text = "ta_read: index 7 is out of range for a buffer of size 5"
    monkeypatch.setattr(_kernels, "modules", {jax.default_backend(): gpu(has_run=True, text=text)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        check_errors()


def test_without_an_error_it_is_silent_and_touches_no_unused_gpu(monkeypatch):
    monkeypatch.setattr(_kernels, "modules", {jax.default_backend(): gpu(has_run=True, text=None)})
    check_errors()
    monkeypatch.setattr(_kernels, "modules", {"cuda": gpu(has_run=False, text=None)})
    check_errors()


def test_it_waits_for_no_cpu(monkeypatch):
    monkeypatch.setattr(_kernels, "modules", {"cpu": SimpleNamespace()})
    monkeypatch.setattr(jax, "live_arrays", lambda platform: pytest.fail("it waits for a CPU"))
    check_errors()


def test_it_is_public_and_a_cpu_raises_at_once():
    assert "check_errors" in jax_tensorarray.__all__
    if jax.default_backend() == "cpu" and not hasattr(_kernels.modules["cpu"], "wait_for_error"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="index 7"):
            jax.block_until_ready(jax_tensorarray.ta_read(jnp.zeros(3), jnp.array(7)))
