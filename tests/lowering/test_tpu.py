"""What a TPU runs, where there is none: operations of XLA's own, which a CPU runs too, and what libtpu makes of them.

The first tests need nothing. The others read the HLO for a TPU v5e, which takes its compiler: `pip install 'jax[tpu]'`.
`python tests/lowering/test_tpu.py` prints the table that is in `benchmarks/results`.
"""

import functools
import itertools
import math
import re

import device_hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_hlo import TRANSFORMS, buffer
from gpu_hlo import FREE
from hypothesis import given, settings
from in_numpy import in_numpy
from in_place import assert_no_whole_buffer_operation
from jax import jit, lax
from jax.export import DisabledSafetyCheck
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from random_checks import Batch, close, on_state, same_batch, same_state, total
from random_machines import THETA, InJax, expected, outputs
from random_programs import programs as random_programs
from row_programs import ours, plain, programs

from jax_tensorarray import check_errors, ta_add, ta_max, ta_read, ta_swap, ta_write
from jax_tensorarray._hlo import ahead
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._ops.calls import PREFIX
from jax_tensorarray.export import disabled_checks

# --- what is lowered, run by a CPU -----------------------------------------------------------------------------


def as_on_a_tpu(f):
    """`f` as it is lowered for a TPU, run on the CPU, which runs operations of XLA's own as well."""

    def run(*args):
        checks = [DisabledSafetyCheck.platform()]
        exported = jax.export.export(jax.jit(f), platforms=["tpu"], disabled_checks=checks)(*args)
        assert PREFIX + "fence" not in exported.mlir_module()
        return jit(exported.call)(*args)

    return run


def state(program, start):
    run = as_on_a_tpu(lambda *args: outputs(program, InJax(dropping=True, reverse_mode=False), *args))
    same_state(run(THETA, start), expected(program, dropping=True).state)


def gradient(program, start):
    try:
        f = as_on_a_tpu(jax.grad(total(program, InJax(dropping=True))))
        close(f(THETA, start), expected(program, dropping=True).loss.d, "gradient")
    except ValueError as error:
        if 'residuals="undo" cannot rewind' not in str(error):
            raise


def batch(program, _):
    batch = Batch(program, True, True, 0)
    f = on_state(program, InJax(dropping=True, reverse_mode=False))
    same_batch(as_on_a_tpu(jax.vmap(f, batch.axes, batch.out))(*batch.states), batch)


@pytest.mark.usefixtures("every_array_is_sent")
@pytest.mark.parametrize("check", [state, gradient, batch])
@settings(max_examples=settings().max_examples // 4)
@given(program=random_programs())
def test_a_random_program(check, program):
    check(program, jnp.int32(program.start))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("op", [ta_write, ta_add, ta_max, ta_swap])
def test_an_index_out_of_range_does_nothing_and_raises_nothing(op):
    buffer, indices = np.arange(10.0).reshape(5, 2), np.array([-1, 5, 2**31 - 1], np.int32)
    run = as_on_a_tpu(lambda b, at: [(op(b, at[k], jnp.full(2, 7.0)), ta_read(b, at[k])) for k in range(3)])
    for out, read in run(buffer, indices):
        after, *taken = out if op is ta_swap else (out,)
        np.testing.assert_array_equal(after, buffer)
        for row in (read, *taken):
            np.testing.assert_array_equal(row, np.zeros(2))


def test_nobody_can_know_of_errors_on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(RuntimeWarning, match="check_errors: a TPU drops indices that are out of range"):
        check_errors()


def test_a_program_for_a_cpu_and_a_tpu_runs_on_both():
    f = jax.grad(programs["cross"].with_ops(ours))
    x = jnp.linspace(-1, 1, 40).reshape(10, 4)
    both = jax.export.export(jax.jit(f), platforms=["cpu", "tpu"], disabled_checks=disabled_checks())(x)
    np.testing.assert_allclose(both.call(x), in_numpy(jax.grad(programs["cross"].with_ops(plain)))(x), rtol=1e-5)
    assert PREFIX + "fence" not in both.mlir_module()


# --- what XLA compiles for one ---------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(bool(ahead.why_not("tpu")), reason=ahead.why_not("tpu"))
hlo = functools.partial(device_hlo.hlo, "tpu")

#: Operations an iteration more than plain JAX has, where there are more. Each of many rows is a slice of its own.
COUNTED_WITH = "0.12."
MORE = {
    ("branches", "second order"): 5,
    ("many_rows", "forward"): 8,
    ("many_rows", "gradient"): 24,
    ("many_rows", "second order"): 47,
}


def operations(text):
    return [op for op in hlo_text.operations_in_loops(text) if op.opcode not in FREE]


#: Each program has a gradient, and is transformed in one other way.
OF_PROGRAMS = {*zip(programs, itertools.cycle(t for t in TRANSFORMS if t != "gradient"), strict=False), *MORE}


@needs_compiler
@pytest.mark.parametrize(("name", "transform"), sorted({(name, "gradient") for name in programs} | OF_PROGRAMS))
def test_a_step_touches_no_whole_buffer(name, transform):
    """It has no more operations than in plain JAX, but for those in `MORE`."""
    text = hlo(name, transform, "ours")
    assert_no_whole_buffer_operation(text, buffer().nbytes)
    if jax.__version__.startswith(COUNTED_WITH) and not transform.startswith("vmap"):
        own, of_plain_jax = operations(text), operations(hlo(name, transform, "plain"))
        assert len(own) <= len(of_plain_jax) + MORE.get((name, transform), 0), own


@needs_compiler
@pytest.mark.parametrize("case", device_hlo.CASES, ids="-".join)
def test_no_loop_touches_a_whole_buffer(case):
    device_hlo.assert_no_loop_touches_a_whole_buffer("tpu", case)


@needs_compiler
def test_the_proof_fails_for_plain_jax():
    device_hlo.assert_the_proof_fails_for_plain_jax("tpu")


def mesh(topology="v5e:2x2"):
    return Mesh(np.asarray(ahead.devices_of("tpu", topology)).reshape(4), ("x",))


@needs_compiler
@pytest.mark.parametrize("what", ["batch", "elements"])
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *((name, "gradient") for name in ("cross", "many_rows", "branches", "closed_over_scan")),
        *((name, "forward") for name in ("exchange", "branches")),
    ],
)
def test_no_loop_on_four_devices_touches_all_that_one_has_or_moves_it(name, what, transform):
    f = TRANSFORMS[transform](programs[name].with_ops(ours))
    shape, spec = {"batch": ((8, 1000, 64), P("x")), "elements": ((1000, 512), P(None, "x"))}[what]
    with jax.enable_x64(False):
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
        run = jax.jit(jax.vmap(f) if what == "batch" else f)
        text = run.trace(x).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert_no_whole_buffer_operation(text, math.prod(shape))  # a quarter, of four bytes each
    moving = [
        op
        for op in hlo_text.operations_in_loops(text)
        if op.opcode.startswith(("all-", "collective", "reduce-scatter"))
    ]
    assert all(op.num_bytes <= 8 for op in moving)  # a sum over the elements of a row


@needs_compiler
@pytest.mark.parametrize("name", ["cross", "exchange", "many_rows"])
def test_a_v5p_is_served_as_well(name):
    with jax.enable_x64(False):
        f = jax.grad(programs[name].with_ops(ours))
        text = ahead.compiled_for("tpu", f, buffer(), topology="v5p:2x2x1").as_text()
    assert_no_whole_buffer_operation(text, buffer().nbytes)


ROWS, DTYPES = (1, 8, 100, 128), (jnp.float32, jnp.bfloat16, jnp.int8)


def one_row(row, dtype, ops):
    """The HLO of a loop that reads a row and writes the next one."""

    def f(b):
        return lax.fori_loop(1, len(b), lambda i, b: ops.write(b, i, ops.read(b, i - 1) + 1), b)

    with jax.enable_x64(False):
        return ahead.compiled_for("tpu", f, jax.ShapeDtypeStruct((10_000, row), dtype)).as_text()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_any_size_costs_as_much_as_in_plain_jax(row, dtype):
    """By what XLA estimates: rows lie in tiles, which are moved as a whole."""
    own, of_plain_jax = (one_row(row, dtype, ops) for ops in (ours, plain))
    assert_no_whole_buffer_operation(own, 10_000 * row * jnp.dtype(dtype).itemsize)
    assert cycles(own) <= 1.1 * cycles(of_plain_jax)


def cycles(text):
    """What XLA takes a step of all loops to cost."""
    found = (re.search(r'"estimated_cycles":"(\d+)"', op.attributes) for op in hlo_text.operations_in_loops(text))
    return sum(int(match.group(1)) for match in found if match)


def table() -> str:
    """Operations an iteration and those on whole buffers of every program, as a table in Markdown."""
    lines = [
        f"jax {jax.__version__}, compiled for a TPU v5e with no TPU; rows of 64 float32, T = 1000. Operations in one",
        "iteration of every loop of the program, those on whole buffers, and XLA's estimate of what they take,",
        "in cycles. It gives no estimate for some copies and updates, and none for scalars.",
        "",
        "| program | | plain JAX: operations | whole-buffer | cycles | ours: operations | whole-buffer | cycles |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in programs:
        for transform in ("forward", "gradient"):
            cells = []
            for library in ("plain", "ours"):
                text, size = hlo(name, transform, library), buffer().nbytes
                whole = hlo_text.whole_buffer_operations_in_loops(text, size)  # copies are among them
                cells += [len(operations(text)), len(whole), cycles(text)]
            lines.append(f"| {name} | {transform} | {' | '.join(map(str, cells))} |")
    lines += ["", "A row read and the next one written, T = 10 000, in cycles of XLA's estimate:", ""]
    lines += ["| row | float32: plain JAX | ours | bfloat16: plain JAX | ours | int8: plain JAX | ours |"]
    lines += ["|--:|--:|--:|--:|--:|--:|--:|"]
    for row in ROWS:
        costs = [cycles(one_row(row, dtype, library)) for dtype in DTYPES for library in (plain, ours)]
        lines.append(f"| {row} | {' | '.join(map(str, costs))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
