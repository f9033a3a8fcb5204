"""`import jax_tensorarray` imports little, and everything is there when it is used."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_tensorarray
from jax_tensorarray import TensorArray, export, ta_write

#: Modules, with all below them, that an import of the library may import. All others wait for their first use.
MAY_IMPORT = {
    *("_compat", "_contexts", "_cpu", "_cuda", "_environment", "_faults", "_gates", "_kernels", "_ops", "_rocm"),
    "_types",
}
MUST_NOT_IMPORT = {"equinox", "flax", "hypothesis", "matplotlib", "optax", "pytest", "tensorflow"}


def run(code, *args):
    """Run a program in a new process, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(jax_tensorarray.__file__).parents[1])}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout


def test_an_import_imports_no_module_that_waits_for_its_first_use():
    found = run("import sys, jax_tensorarray; print(*sys.modules)").split()
    own = {name.split(".")[1] for name in found if name.startswith("jax_tensorarray.")}
    assert own <= MAY_IMPORT, own - MAY_IMPORT
    assert not MUST_NOT_IMPORT & {*found}


@pytest.mark.slow
@pytest.mark.parametrize("name", jax_tensorarray.__all__)
def test_each_name_may_be_the_first_that_is_used(name):
    """Modules import each other in another order for each name."""
    code = """if True:
        import sys, jax_tensorarray
        found = getattr(jax_tensorarray, sys.argv[1])
        assert found is getattr(jax_tensorarray, sys.argv[1])
        print(getattr(found, "__qualname__", found.__name__))
    """
    assert run(code, name).strip() in (name, f"jax_tensorarray.{name}")


def test_all_names_are_seen_before_they_are_used():
    code = """if True:
        import jax_tensorarray
        print(*dir(jax_tensorarray))
        names = {}
        exec("from jax_tensorarray import *", names)
        print(*names)
    """
    seen, imported = run(code).splitlines()
    assert set(jax_tensorarray.__all__) <= set(seen.split())
    assert {"_kernels", "__version__", "__doc__"} <= set(seen.split())
    assert set(jax_tensorarray.__all__) <= set(imported.split())


@pytest.mark.parametrize("name", ["in_plac", "_no_such_module", "__wrapped__"])
def test_an_unknown_name_is_the_usual_error(name):
    with pytest.raises(AttributeError, match=f"^module 'jax_tensorarray' has no attribute '{name}'$"):
        getattr(jax_tensorarray, name)


@pytest.mark.slow
def test_a_stored_function_runs_and_a_stored_array_is_a_pytree_where_nothing_was_used(tmp_path):
    f = jax.jit(lambda b: ta_write(b, 1, 2.0))
    stored = jax.export.export(f, disabled_checks=export.disabled_checks())(jnp.zeros(3))
    (tmp_path / "function").write_bytes(stored.serialize())
    (tmp_path / "array").write_bytes(pickle.dumps(TensorArray(jnp.float32, size=2).write(1, 3.0)))
    code = """if True:
        import pathlib, pickle, sys
        import jax, jax.numpy as jnp
        import jax_tensorarray
        jax.config.update("jax_enable_x64", True)
        folder = pathlib.Path(sys.argv[1])
        print(jax.export.deserialize(bytearray((folder / "function").read_bytes())).call(jnp.zeros(3)))
        array = pickle.loads((folder / "array").read_bytes())
        print(jax.tree.map(lambda x: x + 1, array).stack())
    """
    assert run(code, tmp_path).splitlines() == ["[0. 2. 0.]", "[1. 4.]"]


@pytest.mark.slow
def test_the_first_use_compiles_nothing_again():
    """JAX compiles everything again after a new user context: these are made by the import."""
    code = """if True:
        import jax, jax.numpy as jnp, jax_tensorarray
        traced = []
        f = jax.jit(lambda x: traced.append(x) or x + 1)
        f(jnp.ones(3))
        for name in jax_tensorarray.__all__:
            getattr(jax_tensorarray, name)
        f(jnp.ones(3))
        print(len(traced))
    """
    assert run(code).strip() == "1"


def test_a_type_checker_knows_all_names_and_no_others(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "typed.py"
    names = "".join(f"jax_tensorarray.{name}\n" for name in jax_tensorarray.__all__)
    file.write_text(f"import jax_tensorarray\n{names}jax_tensorarray.in_plac\nreveal_type(jax_tensorarray.scan)\n")
    options = ["--no-error-summary", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}"]
    environment = {**os.environ, "MYPYPATH": str(Path(jax_tensorarray.__file__).parents[1])}
    command = [sys.executable, "-m", "mypy", *options, str(file)]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True).stdout
    wrong = [line for line in told.splitlines() if "error" in line]
    assert len(wrong) == 1 and '"in_plac"' in wrong[0], told
    assert "def (" in told, told
