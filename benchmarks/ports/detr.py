"""The Hungarian algorithm of TensorFlow's DETR: loops in loops, and a fold that writes a TensorArray."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.ports.source import Program, Wheel

BATCH, ELEMENTS = 4, 6


def own_names(ops: Any) -> dict[str, Any]:
    return {"tf_utils": SimpleNamespace(get_shape_list=lambda x, expected_rank: list(x.shape))}


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    cases = {
        "random": rng.standard_normal((BATCH, ELEMENTS, ELEMENTS)).astype(np.float32),
        "ties": rng.integers(0, 3, (BATCH, ELEMENTS, ELEMENTS)).astype(np.float32),
    }
    found = {}
    for case, weights in cases.items():
        changed, assignment = names["hungarian_matching"](ops.asarray(weights))
        found |= {f"{case}: weights": changed, f"{case}: assignment": assignment}
    return found


PROGRAM = Program(
    title="DETR's `hungarian_matching`",
    wheel=Wheel("tf_models_official", "2.20.0"),
    parts={
        "official/projects/detr/ops/matchers.py": (
            *("_prepare", "_greedy_assignment", "_find_augmenting_path", "_improve_assignment"),
            *("_maximum_bipartite_matching", "_compute_cover", "_update_weights_using_cover", "hungarian_matching"),
        )
    },
    changes=[],
    own_names=own_names,
    run=run,
)
