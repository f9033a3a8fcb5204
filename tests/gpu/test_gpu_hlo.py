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

import device_hlo
import figures
import gpu_hlo
import jax
import jax.numpy as jnp
import pytest
from device_hlo import buffer
from in_place import assert_no_whole_buffer_operation
from row_programs import programs

from jax_tensorarray import ta_add
from jax_tensorarray._hlo import text as hlo_text
from jax_tensorarray._ops.calls import PREFIX

pytestmark = pytest.mark.skipif(bool(gpu_hlo.why_not()), reason=gpu_hlo.why_not())

TRANSFORMS = figures.TRANSFORMS
#: Batches and second derivatives of the first are left to the test of the TPU.
CASES = [case for case in device_hlo.CASES if case[0] != "loop" or case[2] in TRANSFORMS]

#: Kernels an iteration more than plain JAX has, where there are more: (forward, gradient). Reads before an update are
#: kept apart by barriers. Each row passes one.
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


COPIED_BEFORE_0_12 = {"swap", "overwrite"}


hlo = functools.partial(device_hlo.hlo, "cuda")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", figures.FUNCTIONS)
def test_a_step_touches_no_whole_buffer_and_launches_what_is_committed(name, transform):
    """No more kernels than plain JAX does, but for those in `MORE`."""
    text, nbytes = figures.compiled(name, transform, gpu_hlo.compiled_for_h100)
    launched = gpu_hlo.launches(text)
    assert_no_whole_buffer_operation(text, nbytes)
    figures.assert_committed("gpu", f"{name}, {transform}", figures.operations(launched, text, nbytes))
    if name in programs and jax.__version__.startswith(COUNTED_WITH):
        of_plain_jax = gpu_hlo.launches(hlo(name, transform, "plain"))
        more = MORE.get(name, (0, 0))[list(TRANSFORMS).index(transform)]
        assert len(launched) <= len(of_plain_jax) + more, launched


@pytest.mark.parametrize("name", programs)
def test_no_gradient_by_calls_touches_a_whole_buffer(name):
    if name in COPIED_BEFORE_0_12 and jax.__version_info__ < (0, 12):
        pytest.skip("XLA puts the call into a fusion besides, for the row that it writes elsewhere")
    assert_no_whole_buffer_operation(hlo(name, "gradient", "ours", "ffi"), buffer().nbytes)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_no_loop_touches_a_whole_buffer(case):
    device_hlo.assert_no_loop_touches_a_whole_buffer("cuda", case)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_no_loop_of_maxima_by_calls_touches_a_whole_buffer(transform, monkeypatch):
    monkeypatch.setenv("JAX_TENSORARRAY_LOWERING", "ffi")
    device_hlo.assert_no_loop_touches_a_whole_buffer("cuda", ("loop", "maxima", transform))


def test_the_proof_fails_for_plain_jax():
    device_hlo.assert_the_proof_fails_for_plain_jax("cuda")


@pytest.mark.parametrize(("count", "is_sorted"), [(1000, True), (4, False)])
def test_many_positions_are_sorted_before_the_call_and_few_are_not(count, is_sorted):
    text = gpu_hlo.compiled_for_h100(ta_add, buffer(), jnp.zeros(count, jnp.int32), buffer(count))
    assert f"sorted = {str(is_sorted).lower()}" in text
    assert (" sort(" in text or "Sort" in text) == is_sorted


COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
IN_GRAPHS = """
import gpu_hlo, jax, jax.numpy as jnp
from row_programs import ours, programs
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
                if f'"{PREFIX}{target}"' in op.attributes
            )
            said = ", ".join(f"{n} {target}" for target, n in sorted(calls.items()))
            lines.append(f"| {name} | {transform} | {' | '.join(map(str, cells))} | {said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
