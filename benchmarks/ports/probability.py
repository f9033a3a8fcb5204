"""TensorFlow Probability's `trace_scan`: a chain of states. Some are kept."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.ports.source import Change, Program, Wheel

STEPS, STATE = 6, 3


def own_names(ops: Any) -> dict[str, Any]:
    return {
        "JAX_MODE": False,
        "control_flow_util": SimpleNamespace(GraphOrParentsInXlaContext=lambda graph: ops.in_xla),
        "ps": SimpleNamespace(size0=len, cond=ops.cond),
        "tensorshape_util": SimpleNamespace(set_shape=lambda x, shape: x.set_shape(shape)),
    }


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((STATE, STATE)).astype(np.float32),
        "x": rng.standard_normal((STEPS, STATE)).astype(np.float32),
    }
    cases = {
        "all": {},
        "some": {"trace_criterion_fn": lambda state: state["n"] % 2 == 1},
        "some, allocated": {"trace_criterion_fn": lambda state: state["n"] % 2 == 1, "static_trace_allocation_size": 4},
        "stops": {"condition_fn": lambda i, state, *_: state["n"] < 4},
    }
    found = {}
    for case, options in cases.items():

        def trace(p: Any, options: Any = options) -> Any:
            def step(state: Any, x: Any) -> Any:
                return {"h": ops.tanh(ops.matmul(state["h"][None], p["w"])[0] + x), "n": state["n"] + 1}

            start = {"h": ops.asarray(np.zeros(STATE, np.float32)), "n": ops.asarray(np.int32(0))}
            return names["trace_scan"](
                step, start, p["x"], lambda state: [state["h"], {"n": state["n"], "twice": state["h"] * 2}], **options
            )

        def loss(p: Any, trace: Any = trace) -> Any:
            state, (rows, kept) = trace(p)
            return ops.total(state["h"]) + ops.total(rows * rows) + ops.total(kept["twice"])

        last, (rows, kept) = trace({name: ops.asarray(value) for name, value in params.items()})
        found |= {f"{case}: h": last["h"], f"{case}: n": last["n"]}
        found |= {f"{case}: rows": rows, f"{case}: kept n": kept["n"], f"{case}: kept twice": kept["twice"]}
        found |= {f"{case}: d/d{name}": value for name, value in ops.gradient(loss)(params).items()}
    return found


PROGRAM = Program(
    title="TensorFlow Probability's `trace_scan`",
    wheel=Wheel("tensorflow_probability", "0.25.0"),
    parts={
        "tensorflow_probability/python/internal/loop_util.py": (
            "_convert_variables_to_tensors",
            "tensor_array_from_element",
            "trace_scan",
        )
    },
    changes=[
        Change(
            """\
  with tf.name_scope(name or 'trace_scan'), tf1.variable_scope(
      tf1.get_variable_scope()) as vs:
    if vs.caching_device is None and not tf.executing_eagerly():
      vs.set_caching_device(lambda op: op.device)
""",
            "  with tf.name_scope(name or 'trace_scan'):\n",
            "JAX has no variables",
        ),
        Change(
            """\
    static_length = tf.TensorShape(None if dynamic_size else initial_size)

    def _merge_static_length(x):
      tensorshape_util.set_shape(x, static_length.concatenate(x.shape[1:]))
      return x

    stacked_trace = tf.nest.map_structure(
        _merge_static_length, stacked_trace, expand_composites=True)
""",
            "",
            "JAX knows every shape while it traces",
        ),
    ],
    own_names=own_names,
    run=run,
)
