"""Calls that move so many bytes that the CPU divides them among threads: the results are those of one thread."""

import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ops import OPS, OURS, ROW_OPS, assert_same, every, on_device
from waiting import finish

import jax_tensorarray as ta

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

#: Rows, positions, and numbers in a row: rows to be divided among threads, rows divided themselves, and both.
SHAPES = {
    "rows of 256 bytes": (5000, 40_000, 128),
    "rows of an odd number of numbers": (700, 9001, 331),
    "one long row": (3, None, 2_500_011),
    "long rows, each many times": (3, 30, 100_001),
}
#: The ops that have a mask for each shape.
MASKED = {
    "rows of 256 bytes": ("ta_write", "ta_max"),
    "rows of an odd number of numbers": ("ta_read", "ta_add", "ta_swap"),
    "one long row": ("ta_write", "ta_max"),
    "long rows, each many times": ("ta_read", "ta_add", "ta_swap"),
}
#: int16, so that sums are exact and no number of bytes is special but for those above.
DTYPE = jnp.int16


def operands(shape, *, batch=()):
    size, count, row = SHAPES[shape]
    rng = np.random.default_rng(0)
    buffer = rng.integers(-1000, 1000, (*batch, size, row)).astype(DTYPE)
    positions = (*batch, *(() if count is None else (count,)))
    index = rng.integers(-1, size + 1, positions) if count else np.full(positions, 1)  # some are out of range
    value = rng.integers(-1000, 1000, (*positions, row)).astype(DTYPE)
    return buffer, index.astype(np.int32), value


def given(op, **named):
    return [named[name] for name in op.operands if name in named]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@every(ROW_OPS)
def test_many_bytes_are_moved_as_few_are(op, shape):
    buffer, index, value = operands(shape)
    xs = given(
        op, buffer=buffer, index=index, value=value, **{"where": index % 3 != 0} if str(op) in MASKED[shape] else {}
    )
    assert_same(op(OURS, *on_device(*xs)), op(oracle, *xs))


@pytest.mark.slow
@every([OPS["ta_read"], OPS["ta_swap"], OPS["ta_max"]])
def test_a_batch_of_buffers_is_divided_too(op):
    batch = given(op, **dict(zip(("buffer", "index", "value"), operands("rows of 256 bytes", batch=(3,)), strict=True)))
    results = jax.vmap(functools.partial(op, OURS))(*on_device(*batch))
    for k, one in enumerate(zip(*batch, strict=True)):
        assert_same([r[k] for r in results], op(oracle, *one))


def test_an_index_out_of_range_among_many_leaves_an_error_that_names_it():
    buffer, index, _ = operands("rows of 256 bytes")
    index = np.where((index < 0) | (index >= len(buffer)), 0, index)
    index[-1] = len(buffer)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"index {len(buffer)} is out of range"):
        finish(ta.ta_read(jnp.asarray(buffer), jnp.asarray(index)))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.skipif(not CSRC.exists(), reason="needs the C++ sources, which an installed package has not")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_thread_touches_what_is_not_its_own_or_no_longer_there(tmp_path, sanitizers):
    program = tmp_path / "parallel"
    flags = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    subprocess.run([COMPILER, *flags, str(HERE / "parallel.cc"), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
