"""Lingvo's farthest point sampling: the next point is the farthest from those that an array already has."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.ports import jax_ops
from benchmarks.ports.source import Change, Program, Wheel

BATCH, POINTS, SAMPLED = 3, 12, 7


class LingvosTensorFlow:
    """TensorFlow as Lingvo has it, with the `where` of TensorFlow 1; the random numbers are those of the port."""

    def __init__(self, tf: Any) -> None:
        self.tf, self.where = tf, tf.compat.v1.where
        self.random = SimpleNamespace(uniform=self.uniform)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tf, name)

    def uniform(self, shape: Any, minval: float, maxval: float, dtype: Any, seed: int) -> Any:
        numbers = jax_ops.random_uniform(shape, minval, maxval, dtype.as_numpy_dtype, seed)
        return self.tf.convert_to_tensor(np.asarray(numbers))


def own_names(ops: Any) -> dict[str, Any]:
    utils = SimpleNamespace(
        GetShape=lambda x, rank: list(x.shape),
        HasRank=lambda x, rank: x,
        HasShape=lambda x, shape: x,
        assert_greater_equal=lambda x, y: None,
        with_dependencies=lambda dependencies, x: x,
    )
    return {"py_utils": utils, **({} if ops is jax_ops else {"tf": LingvosTensorFlow(ops.tf)})}


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    points = rng.standard_normal((BATCH, POINTS, 3)).astype(np.float32)
    padding = (np.arange(POINTS) >= np.array([[12], [9], [5]])).astype(np.float32)
    distance = names["SquaredDistanceMatrix"](ops.asarray(points), ops.asarray(points), mem_optimized=True)
    cases = {
        "points": {},
        "seeded": {"num_seeded_points": 3},
        "distances": {"precomputed_squared_distance": distance},
    }
    found = {"squared distances": distance}
    for case, options in cases.items():
        sampled, closest = names["FarthestPointSampler"](
            ops.asarray(points), ops.asarray(padding), SAMPLED, random_seed=1, **options
        )
        found |= {f"{case}: sampled": sampled, f"{case}: closest": closest}
    return found


PROGRAM = Program(
    title="Lingvo's `FarthestPointSampler`",
    wheel=Wheel("lingvo", "0.14.2"),
    parts={"lingvo/tasks/car/car_lib.py": ("SquaredDistanceMatrix", "FarthestPointSampler")},
    changes=[
        Change(
            "tf.less(curr_idx, num_valid_points),",
            "tf.less(curr_idx, num_valid_points)[:, None],",
            "where TensorFlow 1 chooses between examples, JAX chooses between numbers",
        ),
        Change(
            """\
  if isinstance(batch_size, int) and isinstance(num_sampled_points, int):
    sampled_idx.set_shape((batch_size, num_sampled_points))
""",
            "",
            "JAX knows every shape while it traces",
        ),
    ],
    own_names=own_names,
    run=run,
)
