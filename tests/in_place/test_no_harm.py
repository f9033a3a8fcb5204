"""`in_place` never costs: a step of a loop has at most the operations of plain JAX's, and calls nothing.

The programs are those of `benchmarks.harm` that once were slower. Their time is measured there.
"""

import itertools

import pytest
from figures import thunks
from in_place import compiled

from benchmarks.harm.program import PLAIN, VARIANTS
from benchmarks.harm.programs import PROGRAMS
from jax_tensorarray._compat import barriers_hold
from jax_tensorarray._ops.calls import PREFIX

SLOWER = {
    "weakly typed buffers": ("full_cond", "full_inf_while", "arange_while_in_loop"),
    "views of what does not change": ("transposed_rows", "cast_rows", "scaled_rows", "reshaped_rows", "embedding"),
    "many rows": (
        "many_rows",
        "sum_of_20",
        "add_at_17",
        "add_at_128",
        "replay_16",
        "gibbs_topics",
        "beam_states",
        "particle_filter",
    ),
    "parts of a row": ("slices_by_inner_scan", "common_subsequence"),
    "ring buffers": ("delay_line",),
    "what XLA fuses": ("masked_rows", "kv_cache", "cholesky_elements", "reservoir"),
    "branches": ("opcodes_2",),
    "jax 0.10": ("floyd_warshall_min", "quicksort", "union_find", "gauss_seidel"),
}
#: Of these XLA makes a few small operations more, which take no longer: "quicksort" has masks for the loops inside.
FEW_MORE = {"union_find": 1.4, "quicksort": 1.1, "many_rows": 1.2}
#: Where no barrier holds, a branch puts a read before an update. "union_find" has 53 operations instead of 17 then, and
#: takes 1.75 times as long (`benchmarks/results/harm.md`, jax 0.10.2).
WITH_BRANCHES = 3.2

pytestmark = pytest.mark.usefixtures("in_single_precision")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [*zip((name for names in SLOWER.values() for name in names), itertools.cycle(["forward", "vmap"]), strict=False)],
)
def test_a_step_has_no_more_operations_than_in_plain_jax(name, variant):
    (program,) = [p for p in PROGRAMS if p.name == name][:1]
    args, (base, repaired) = program.arguments(variant == "vmap"), VARIANTS[variant]
    plain, ours = (thunks(compiled(f, *args).as_text()) for f in (PLAIN[base](program), repaired(program)))
    most = FEW_MORE.get(name, 1) if barriers_hold("cpu") else WITH_BRANCHES
    assert len(ours) <= most * len(plain), ours
    assert sum(op.num_bytes for op in ours) <= 1.1 * sum(op.num_bytes for op in plain)
    assert not [op.attributes for op in ours if PREFIX in op.attributes and barriers_hold("cpu")]
