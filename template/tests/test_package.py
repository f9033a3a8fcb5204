"""Kernels are loaded if they fit the running jaxlib, and functions that call them can be stored."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import decay_row
from decay_row import _ffi
from helpers import assert_close


def test_kernels_that_are_newer_than_jaxlib_are_refused():
    _ffi.check_abi((0, 3), (0, 3))
    _ffi.check_abi((0, 3), (0, 5))
    for built, running in [((0, 3), (0, 2)), ((0, 3), (1, 3))]:
        with pytest.raises(ImportError, match=r"built for XLA FFI 0\.3"):
            _ffi.check_abi(built, running)


def both(buffer, index):
    out, old = decay_row.decay_row(buffer, index, 1.0, 0.5)
    return decay_row.logsumexp_rows(out), old


def test_a_stored_function_runs_in_another_process(tmp_path):
    stored = export.export(jax.jit(both), disabled_checks=decay_row.disabled_checks())(jnp.ones((5, 2)), jnp.int32(1))
    (tmp_path / "stored").write_bytes(stored.serialize())
    code = f"""if True:
        import jax, jax.numpy as jnp, numpy as np
        jax.config.update("jax_enable_x64", True)
        from jax import export
        import decay_row  # registers the kernels
        with open({str(tmp_path / "stored")!r}, "rb") as file:
            stored = export.deserialize(bytearray(file.read()))
        np.testing.assert_allclose(stored.call(jnp.ones((5, 2)), jnp.int32(1))[0], np.log(4 * np.e + np.exp(1.5)))
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_readme_stores_a_function_and_calls_it():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    store, load = re.findall(r"```python\n(import .*?)```", readme, re.DOTALL)
    names = {}
    exec(store, names)
    exec(load, names)
    assert_close(names["buffer"], np.ones((5, 3)) + 0.5 * (np.arange(5) == 2)[:, None])
    assert_close(names["old"], np.ones(3))


@pytest.mark.parametrize("index", [1, np.int64(1), None])
def test_the_number_of_rows_may_be_left_open(index):
    rows = jax.ShapeDtypeStruct((*export.symbolic_shape("t"), 2), "float64")

    def f(buffer, traced):
        return both(buffer, traced if index is None else index)

    types = rows, jax.ShapeDtypeStruct((), "int32")
    stored = export.export(jax.jit(f), disabled_checks=decay_row.disabled_checks())(*types)
    for size in (2, 5, 300):
        buffer = jnp.asarray(np.random.default_rng(0).standard_normal((size, 2)))
        assert_close(stored.call(buffer, jnp.int32(1)), both(buffer, 1))
