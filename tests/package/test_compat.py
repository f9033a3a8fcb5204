"""Private JAX API only changes speed; a jaxlib that cannot run the kernels is refused in plain words."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives
from row_programs import ours, plain, programs

import jax_tensorarray
from jax_tensorarray import _compat, _kernels, primitives, ta_read
from jax_tensorarray._jaxprs import kinds
from jax_tensorarray.export import disabled_checks


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["read_then_write", "closed_over", "closed_over_scan", "branches"])
def test_gradients_are_right_without_in_place_accumulation(name, monkeypatch):
    (table,) = _compat.private_names("interpreters.ad", "fancy_transposes")
    monkeypatch.delitem(table, primitives.ta_read_p)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 3)))
    got = jax.grad(lambda x: programs[name].loss(ours, x * 1.0))(x)
    np.testing.assert_allclose(got, jax.grad(programs[name].with_ops(plain))(x), rtol=1e-9, atol=1e-12)


def test_the_table_of_primitives_knows_each_public_primitive_of_jax_once():
    names = [name for _, row in kinds._TABLE for name in row.split()]
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert not {x.name for x in vars(jax_primitives).values() if isinstance(x, Primitive)}.difference(names)


@pytest.mark.slow
def test_importing_works_where_jax_has_none_of_the_private_names():
    script = """
import sys
import jax, jax.numpy as jnp, numpy as np
NAMES = ("fancy_transposes", "lower_jaxpr_to_module")
class Without:
    def __init__(self, module): self.module = module
    def __getattr__(self, name):
        if name in NAMES: raise AttributeError(name)
        return getattr(self.module, name)
owners = {key: module for key, module in sys.modules.items() if any(name in vars(module) for name in NAMES)}
assert len(owners) >= 2, owners
state = lambda: [dict(v) if isinstance(v := vars(m).get(name), dict) else v for m in owners.values() for name in NAMES]
before = state()
sys.modules.update({key: Without(module) for key, module in owners.items()})
from jax_tensorarray import ta_read, ta_write
assert state() == before
def loss(x):
    f = lambda b, i: (ta_write(b, i, jnp.sin(ta_read(b, i // 2) + ta_read(x, i))), None)
    return jnp.sum(jax.lax.scan(f, x, jnp.arange(5))[0] ** 2)
x0 = jnp.arange(5.0)
def unrolled(x):
    b = x
    for i in range(5): b = b.at[i].set(jnp.sin(b[i // 2] + x[i]))
    return jnp.sum(b ** 2)
np.testing.assert_allclose(jax.grad(loss)(x0), jax.grad(unrolled)(x0), rtol=1e-5)
print("right")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "right", run.stderr


def test_every_program_passes_through_the_passes():
    """Those name the line of each op that may raise."""
    f, b = jax.jit(lambda b, i: ta_read(b, i, lowering="ffi")), (jnp.ones(3), 1)
    texts = [
        f.lower(*b).as_text(),
        f.trace(*b).lower(lowering_platforms=("cpu", "cuda")).as_text(),
        jax.export.export(f, disabled_checks=disabled_checks())(*b).mlir_module(),
    ]
    for text in texts:
        assert "jax_tensorarray_read" in text and 'op = "ta_read@test_compat.py:' in text


def test_only_the_compat_file_touches_private_jax():
    package = Path(jax_tensorarray.__file__).parent
    private = r"jax\._src|jaxlib\.(mlir|xla_client|_jax)|from jaxlib import"
    users = {
        path.relative_to(package).parts[0] for path in package.rglob("*.py") if re.search(private, path.read_text())
    }
    assert users == {"_compat"}


#: Rooms and files of the package, from the bottom to the top.
LAYERS = (
    *("_types", "_union_find", "_gates", "_compat", "_kernels", "_ops", "_jaxprs", "_lowering", "_array"),
    *("checkpoint_policies", "_loops", "_in_place", "_replaced", "_hlo", "doctor", "_selfcheck"),
)


def test_a_room_imports_only_from_rooms_below_it():
    package = Path(jax_tensorarray.__file__).parent
    above = set[str]()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for line in re.findall(r"^from jax_tensorarray(?:\.(\w+)| import ((?:\w+, )*\w+))", path.read_text(), re.M):
            for name in re.findall(r"\w+", " ".join(line)):
                if room in LAYERS and name in LAYERS and LAYERS.index(name) > LAYERS.index(room):
                    above.add(f"{path.relative_to(package)} imports {name}")
    assert above == set()


def test_the_running_ffi_version_is_read_from_the_header_of_jaxlib():
    major, minor = _compat.ffi_api_version()
    assert (major, minor) >= (0, 3)


@pytest.mark.parametrize("running", [(0, 3), (0, 4), (0, 99), None], ids=str)
def test_kernels_run_under_their_ffi_newer_ones_and_unknown_ones(running):
    _kernels.check_abi((0, 3), running, "jax_tensorarray._cpu")


@pytest.mark.parametrize("running", [(0, 2), (1, 0), (1, 3)])
def test_an_abi_mismatch_is_an_import_error_that_says_what_to_run(running):
    with pytest.raises(ImportError) as error:
        _kernels.check_abi((0, 3), running, "jax_tensorarray._cpu")
    message = str(error.value)
    assert "XLA FFI 0.3" in message and f"{running[0]}.{running[1]}" in message
    assert "jaxlib 0.10.2" in message and "pip install" in message


def test_the_kernels_were_built_with_the_oldest_headers():
    from jax_tensorarray import _cpu

    assert _cpu.ffi_api_version in ((0, 3), _compat.ffi_api_version())


def test_a_missing_compiled_module_is_an_import_error_that_says_what_to_run(monkeypatch):
    monkeypatch.setattr(_kernels, "missing", {})
    monkeypatch.setitem(sys.modules, "jax_tensorarray._cpu", None)
    with pytest.raises(ImportError, match="pip install"):
        _kernels.load()
