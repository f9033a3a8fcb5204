"""State on disk: a TensorArray in a train state is saved and restored, into what it was and onto other devices."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tensorarray import TensorArray
from jax_tensorarray.flax import register as register_with_flax

ROWS = np.arange(24.0, dtype=np.float32).reshape(3, 8)


def static():
    return TensorArray.from_array(jnp.asarray(ROWS))


def limited():
    ta = TensorArray(jnp.float32, size=0, dynamic_size=True, max_size=16, element_shape=(8,))
    return ta.append(ROWS[0]).append(ROWS[1])


def limited_in_jit():
    return jax.jit(limited)()


def growing():
    ta = TensorArray(jnp.float32, size=0, dynamic_size=True)
    return ta.append(ROWS[0]).append(ROWS[1])


def pytree_rows():
    ta = TensorArray.like({"loss": jnp.float32(0), "hidden": jnp.zeros(8, jnp.bfloat16)}, 3)
    return ta.write(1, {"loss": jnp.float32(4), "hidden": jnp.asarray(ROWS[2], jnp.bfloat16)})


def pytree_rows_limited():
    ta = TensorArray.like((jnp.int32(0), jnp.zeros(2, jnp.complex64)), 0, dynamic_size=True, max_size=4)
    return ta.append((jnp.int32(7), jnp.array([1j, 2], jnp.complex64)))


def ragged():
    ta = TensorArray(jnp.float32, size=0, dynamic_size=True, infer_shape=False)
    return ta.append(ROWS[0]).append(ROWS[1, :2])


def unwritten():
    return TensorArray(jnp.float32, size=3)


KINDS = [static, limited, limited_in_jit, growing, pytree_rows, pytree_rows_limited, ragged, unwritten]


def train_state(kind):
    return {"step": jnp.int32(3), "params": {"w": jnp.ones((2, 2))}, "seen": kind()}


def emptied(state):
    """A state of the same structure with other values, as a program has it that has just started."""
    return jax.tree.map(lambda x: jnp.full_like(x, 1), state)


def rows_of(ta):
    try:
        return [jax.tree.map(np.asarray, row) for row in ta]
    except ValueError as error:  # of an array whose rows have no shape yet
        return str(error)


def assert_restored(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    ta, expected = found["seen"], wanted["seen"]
    assert repr(ta) == repr(expected)
    assert len(ta) == len(expected)
    jax.tree.map(np.testing.assert_array_equal, rows_of(ta), rows_of(expected))
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), jax.tree.leaves(ta), jax.tree.leaves(expected))
    np.testing.assert_array_equal(found["params"]["w"], wanted["params"]["w"])
    assert found["step"] == wanted["step"]


def assert_goes_on(ta):
    """What was restored is written to and grows, in and outside of `jit`, as before."""
    value = jax.tree.map(lambda x: np.ones_like(x), ta.read(0))
    for write in (lambda ta: ta.write(1, value), jax.jit(lambda ta: ta.write(1, value))):
        jax.tree.map(np.testing.assert_array_equal, write(ta).read(1), value)
    if ta.dynamic_size:
        assert len(ta.append(value)) == len(ta) + 1


def check(found, kind):
    assert_restored(found, train_state(kind))
    if kind is not unwritten and kind is not pytree_rows_limited:
        assert_goes_on(found["seen"])


#: name -> (a state, one of the same structure) -> the first, saved and restored
WAYS = {
    "pickle": lambda state, target: pickle.loads(pickle.dumps(state)),
    "deepcopy": lambda state, target: copy.deepcopy(state),
    # Gives NumPy arrays, and a TensorArray of them is one like any other.
    "device_get": lambda state, target: jax.device_get(state),
    "flax bytes": lambda state, target: flax().from_bytes(target, flax().to_bytes(state)),
    "flax state dict": lambda state, target: flax().from_state_dict(target, flax().to_state_dict(state)),
}


def flax():
    module = pytest.importorskip("flax.serialization", reason="flax is not installed")
    register_with_flax()  # which does no harm once more
    return module


@pytest.mark.slow(but=11)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_restored_into_what_it_was(kind, way):
    state = train_state(kind)
    check(WAYS[way](state, emptied(state)), kind)


def test_a_deep_copy_is_a_copy():
    ta = static()
    other = copy.deepcopy(ta)
    jax.jit(lambda ta: ta.write(0, ROWS[1]), donate_argnums=0)(ta)
    np.testing.assert_array_equal(other.stack(), ROWS)


@pytest.mark.parametrize("kind", [limited, limited_in_jit, pytree_rows_limited])
def test_a_file_has_the_rows_and_nothing_else_that_was_in_memory(kind):
    for _ in range(3):
        ta = kind()
        children = pickle.loads(pickle.dumps(ta))._flatten()[0][0]
        for leaf, row in zip(jax.tree.leaves(children), jax.tree.leaves(ta.stack(pad=True)), strict=True):
            np.testing.assert_array_equal(leaf, row)
            assert not np.asarray(leaf)[len(ta) :].any()


ORBAX = """
import sys, jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as orbax
from jax_tensorarray import TensorArray
ta = TensorArray(jnp.float32, size=0, dynamic_size=True, max_size=16, element_shape=(8,)).append(jnp.ones(8))
leaves, tree = jax.tree.flatten({"seen": ta})
state = tree.unflatten([x.at[1:].set(7) if x.shape else x for x in leaves])  # as if this had been in memory
print(*{float(x) for x in np.unique(jax.tree.leaves(state)[0])})
for checkpointer, target in ((orbax.StandardCheckpointer(), "target"), (orbax.PyTreeCheckpointer(), "item")):
    file = sys.argv[1] + "/" + target
    checkpointer.save(file, state)
    getattr(checkpointer, "wait_until_finished", lambda: None)()
    print(*{float(x) for x in np.unique(checkpointer.restore(file)["seen"]["rows"])})
    found = checkpointer.restore(file, **{target: state})["seen"]
    print(repr(found) == repr(ta), np.array_equal(found.stack(), ta.stack()), len(found.append(jnp.ones(8))))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="orbax is not installed")
def test_a_checkpoint_by_orbax_has_zeros_past_the_rows(tmp_path):
    settings = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ORBAX, str(tmp_path)]
    run = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["1.0 7.0", *["0.0 1.0", "True True 2"] * 2]


def test_a_flax_state_dict_names_rows_and_size():
    found = flax().to_state_dict(limited())
    assert set(found) == {"rows", "size"}
    assert found["size"] == 2
    np.testing.assert_array_equal(found["rows"], np.concatenate([ROWS[:2], np.zeros((14, 8))]))
    assert set(flax().to_state_dict(pytree_rows())["rows"]) == {"loss", "hidden"}


@pytest.mark.slow
def test_flax_knows_an_array_that_is_made_after_it_is_imported():
    pytest.importorskip("flax.serialization", reason="flax is not installed")
    script = """
import jax.numpy as jnp
from jax_tensorarray import TensorArray
import flax.serialization
ta = TensorArray.from_array(jnp.arange(3))
saved = flax.serialization.to_bytes({"seen": ta})
print(flax.serialization.from_bytes({"seen": ta.write(0, 7)}, saved)["seen"].stack())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[0 1 2]", run.stderr


def test_flax_does_not_restore_what_has_another_structure():
    serialization = flax()
    with pytest.raises(ValueError, match=r"restored from \['rows', 'size'\], but the saved state has \['rows'\]"):
        serialization.from_bytes(limited(), serialization.to_bytes(static()))
    with pytest.raises(ValueError, match=r"restored from \[\], but the saved state has \['rows'\]"):
        serialization.from_bytes(unwritten(), serialization.to_bytes(static()))


# --- orbax -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpointer():
    orbax = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    with orbax.StandardCheckpointer() as checkpointer:
        yield checkpointer


def save(checkpointer, path, state):
    checkpointer.save(path, state)
    checkpointer.wait_until_finished()


@pytest.mark.slow(but=3)
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("kind", KINDS)
def test_orbax(kind, checkpointer, tmp_path):
    state = train_state(kind)
    save(checkpointer, tmp_path / "state", state)
    check(checkpointer.restore(tmp_path / "state", emptied(state)), kind)
    check(checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state)), kind)


@pytest.mark.parametrize("kind", [static, limited, pytree_rows])
def test_orbax_restores_to_another_sharding(kind, checkpointer, tmp_path):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    four = NamedSharding(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]), P(None, "x"))
    eight = NamedSharding(jax.make_mesh((2, 4), ("x", "y")), P(None, "y"))

    def placed(x, sharding):
        spec = sharding.spec if jnp.ndim(x) == 2 else P()
        return jax.device_put(x, NamedSharding(sharding.mesh, spec))

    state = jax.tree.map(lambda x: placed(x, four) if jnp.ndim(x) else x, {"seen": kind()})
    save(checkpointer, tmp_path / "state", state)
    target = jax.tree.map(lambda x: placed(jnp.ones_like(x), eight), state)
    found = checkpointer.restore(tmp_path / "state", target)["seen"]
    for x in jax.tree.leaves(found):
        assert x.sharding.is_equivalent_to(NamedSharding(eight.mesh, P(None, "y") if x.ndim == 2 else P()), x.ndim)
    jax.tree.map(np.testing.assert_array_equal, rows_of(found), rows_of(kind()))
    # It is divided as it was asked for after a step too.
    after = jax.jit(lambda ta: ta.write(1, jax.tree.map(jnp.zeros_like, ta.read(0))))(found)
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(found), strict=True):
        assert x.ndim < 2 or x.sharding.is_equivalent_to(y.sharding, x.ndim)
