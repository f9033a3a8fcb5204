"""On a GPU too no loop touches a whole buffer, and where it launches more kernels than plain JAX, these tests say why.

They read the HLO that XLA compiles for an H100, which takes no GPU but JAX's CUDA plugin; `gpu_hlo.py` says how to get
it. `python tests/gpu/test_gpu_hlo.py` prints the table that is in `benchmarks/results`.
"""

import functools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gpu_hlo
import jax
import jax.numpy as jnp
import loop_steps as loops
import plain_loops
import pytest
import reported
from in_place import assert_no_whole_buffer_operation
from jax import lax

from jax_tensorarray import in_place, ta_add, ta_max, ta_read
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._lowering.calls import PREFIX
from jax_tensorarray._selfcheck.programs import ours, plain, programs

pytestmark = pytest.mark.skipif(bool(gpu_hlo.why_not()), reason=gpu_hlo.why_not())

TRANSFORMS = {"forward": lambda f: f, "grad": jax.grad}

#: Kernels an iteration more than plain JAX has, where there are more: (forward, gradient). Reads before an update are
#: kept apart by barriers, of which each row passes one.
#: What XLA fuses differs from version to version, so they are not compared in all.
COUNTED_WITH = ("0.11.", "0.12.")
MORE = {
    "three_reads": (1, 0),
    "add": (0, 1),
    "branches": (0, 4),
    "closed_over_jit": (0, 1),
    "inner_writes": (0, 1),
    "many_rows": (2, 0),
}


COPIED_BEFORE_0_12 = {("swap", "grad", "ffi"), ("overwrite", "grad", "ffi")}


def buffer(length=1000, row=64):
    return jnp.zeros((length, row), jnp.float32)


@functools.cache
def hlo(name, transform, library, lowering="auto"):
    with jax.enable_x64(False), pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_TENSORARRAY_LOWERING", lowering)
        f = programs[name].with_ops({"ours": ours, "plain": plain}[library])
        return gpu_hlo.compiled_for_h100(TRANSFORMS[transform](f), buffer())


@pytest.mark.parametrize("lowering", ["auto", "ffi"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", programs)
def test_no_loop_touches_a_whole_buffer(name, transform, lowering):
    if (name, transform, lowering) in COPIED_BEFORE_0_12 and jax.__version_info__ < (0, 12):
        pytest.skip("XLA puts the call into a fusion besides, for the row that it writes elsewhere")
    assert_no_whole_buffer_operation(hlo(name, transform, "ours", lowering), buffer().nbytes)


@pytest.mark.parametrize("lowering", ["auto", "ffi"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_loop_of_maxima_touches_no_whole_buffer(transform, lowering):
    def loss(x):
        def body(b, i):
            return ta_max(b, i // 2, jnp.sin(ta_read(b, i)), lowering=lowering), None

        return jnp.sum(lax.scan(body, x, jnp.arange(len(x)))[0] ** 2)

    with jax.enable_x64(False):
        text = gpu_hlo.compiled_for_h100(TRANSFORMS[transform](loss), buffer())
    assert_no_whole_buffer_operation(text, buffer().nbytes)


def test_the_proof_fails_for_plain_jax():
    with pytest.raises(AssertionError, match="operations on the whole buffer"):
        assert_no_whole_buffer_operation(hlo("read_then_write", "grad", "plain"), buffer().nbytes)


@pytest.mark.skipif(not jax.__version__.startswith(COUNTED_WITH), reason="not counted with this version of jax")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", programs)
def test_a_step_launches_no_more_kernels_than_in_plain_jax_but_for_those_that_are_listed(name, transform):
    launched, of_plain_jax = (gpu_hlo.launches(hlo(name, transform, library)) for library in ("ours", "plain"))
    more = MORE.get(name, (0, 0))[list(TRANSFORMS).index(transform)]
    assert len(launched) <= len(of_plain_jax) + more, [op.text for op in launched]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", loops.STEPS)
def test_no_step_of_our_loops_touches_a_whole_buffer(name, transform):
    with jax.enable_x64(False):
        f = TRANSFORMS[transform](functools.partial(loops.run, name))
        text = gpu_hlo.compiled_for_h100(f, buffer(200, loops.ROW))
    assert_no_whole_buffer_operation(text, buffer(200, loops.ROW).nbytes)


@pytest.mark.parametrize("transform", loops.BATCHED)
@pytest.mark.parametrize("name", loops.STEPS)
def test_no_step_of_a_batch_of_our_loops_touches_a_whole_buffer(name, transform):
    with jax.enable_x64(False):
        xs, f = loops.batch(200), functools.partial(loops.run, name)
        text = gpu_hlo.compiled_for_h100(functools.partial(loops.BATCHED[transform], f), xs, jnp.zeros(3, jnp.int32))
    assert_no_whole_buffer_operation(text, buffer(200, loops.ROW).nbytes)  # of one example would be too large already


@pytest.mark.parametrize("name", [name for name in plain_loops.LOOPS if name != "divided"])  # that is among CPUs
def test_no_plain_loop_under_in_place_touches_a_whole_buffer(name):
    f = in_place(plain_loops.LOOPS[name])
    with jax.enable_x64(False):
        (x,) = plain_loops.rows(1000)
        text = gpu_hlo.compiled_for_h100(f if name in plain_loops.FORWARD_ONLY else jax.grad(f), x)
    assert_no_whole_buffer_operation(text, x.nbytes)


@pytest.mark.parametrize("issue", reported.PROGRAMS)
def test_no_reported_program_under_in_place_touches_a_whole_buffer(issue):
    transform, f, args_of = reported.PROGRAMS[issue]
    with jax.enable_x64(False):
        args = args_of(1100)
        text = gpu_hlo.compiled_for_h100(transform(in_place(f)), *args)
    assert_no_whole_buffer_operation(text, args[0].nbytes)


@pytest.mark.parametrize(("count", "is_sorted"), [(1000, True), (4, False)])
def test_many_positions_are_sorted_before_the_call_and_few_are_not(count, is_sorted):
    text = gpu_hlo.compiled_for_h100(ta_add, buffer(), jnp.zeros(count, jnp.int32), buffer(count))
    assert f"sorted = {str(is_sorted).lower()}" in text
    assert (" sort(" in text or "Sort" in text) == is_sorted


COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
IN_GRAPHS = """
import gpu_hlo, jax, jax.numpy as jnp
from jax_tensorarray._selfcheck.programs import ours, programs
gpu_hlo.compiled_for_h100(jax.grad(programs["read_then_write"].with_ops(ours)), jnp.zeros((1000, 64)))
"""


def test_our_calls_are_put_into_cuda_graphs(tmp_path):
    flags = f"--xla_gpu_enable_command_buffer={COMMANDS} --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    paths = os.pathsep.join([str(Path(gpu_hlo.__file__).parent), *sys.path])
    environment = os.environ | {
        "JAX_TENSORARRAY_LOWERING": "ffi",
        "PYTHONPATH": paths,
        "XLA_FLAGS": f"{flags} --xla_dump_hlo_as_text",
    }
    subprocess.run([sys.executable, "-c", IN_GRAPHS], env=environment, capture_output=True, check=True)
    dumped = sorted(tmp_path.glob("*thunk_sequence_after_thunk_passes.txt"))
    if not dumped:
        pytest.skip("this version of XLA does not say what it puts into a graph")
    graphs, ours_in_graphs = [], []
    for line in dumped[0].read_text().splitlines():
        depth = len(line) - len(line.lstrip())
        graphs = [d for d in graphs if d < depth] + ([depth] if "kCommandBuffer" in line else [])
        if ": kCustomCall" in line:
            ours_in_graphs.append(bool(graphs))
    assert ours_in_graphs == [True] * 4  # a read and a write, forward; an add and a swap, backward


def table() -> str:
    """Kernels an iteration and whole-buffer operations of every program, as a table in Markdown."""
    lines = [
        f"jax {jax.__version__}, compiled for an H100 with no GPU; rows of 64 float32, T = 1000. Launches in one",
        "iteration of every loop of the program, and whole-buffer operations (copies or fusions) among them.",
        "",
        "| program | | plain JAX: launches | whole-buffer | ours: launches | whole-buffer | calls of ours |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for name in programs:
        for transform in TRANSFORMS:
            cells = []
            for library in ("plain", "ours"):
                text = hlo(name, transform, library)
                cells += [
                    len(gpu_hlo.launches(text)),
                    len(hlo_text.whole_buffer_operations_in_loops(text, buffer().nbytes)),
                ]
            calls = Counter(
                target
                for op in gpu_hlo.launches(text)
                for target in ("read", "write", "add", "swap")
                if f'"{PREFIX}{target}"' in op.text
            )
            said = ", ".join(f"{n} {target}" for target, n in sorted(calls.items()))
            lines.append(f"| {name} | {transform} | {' | '.join(map(str, cells))} | {said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
