"""Keras' `rnn`: sequences of different lengths, given by a mask or by numbers."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.ports.source import Change, Program, Wheel

STEPS, BATCH, WIDTH, STATE = 5, 3, 2, 4
STATIC = "JAX knows every shape while it traces; a shape is a tuple"


def own_names(ops: Any) -> dict[str, Any]:
    graph = SimpleNamespace(GraphOrParentsInXlaContext=lambda graph: ops.in_xla)
    names = {name: getattr(ops, name) for name in ("expand_dims", "reverse", "zeros_like")}
    return {"control_flow_util": graph, **names}


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((WIDTH, STATE)).astype(np.float32),
        "u": rng.standard_normal((STATE, STATE)).astype(np.float32) / 2,
        "x": rng.standard_normal((BATCH, STEPS, WIDTH)).astype(np.float32),
    }
    mask, lengths = rng.random((BATCH, STEPS)) < 0.7, np.array([5, 2, 4], np.int32)
    by_time = ops.asarray(np.swapaxes(params["x"], 0, 1))
    cases = {
        "plain": {},
        "backwards": {"go_backwards": True},
        "last only": {"return_all_outputs": False},
        "mask": {"mask": ops.asarray(mask)},
        "mask, zeros": {"mask": ops.asarray(mask), "zero_output_for_mask": True},
        "mask, backwards": {"mask": ops.asarray(mask), "go_backwards": True, "zero_output_for_mask": True},
        "lengths": {"input_length": ops.asarray(lengths)},
        "lengths, zeros": {"input_length": ops.asarray(lengths), "zero_output_for_mask": True},
        "lengths, backwards": {"input_length": ops.asarray(lengths), "go_backwards": True},
        "time major": {"time_major": True, "mask": ops.asarray(mask.T[..., None])},
    }
    found = {}
    for case, options in cases.items():

        def rnn(p: Any, options: Any = options) -> Any:
            def step(x: Any, states: Any) -> Any:
                h = ops.tanh(ops.matmul(x, p["w"]) + ops.matmul(states[0], p["u"]))
                return h, [h]

            x = by_time if options.get("time_major") else p["x"]
            return names["rnn"](step, x, [ops.asarray(np.zeros((BATCH, STATE), np.float32))], **options)

        def loss(p: Any, rnn: Any = rnn) -> Any:
            last, outputs, states = rnn(p)
            return ops.total(last) + ops.total(outputs * outputs) + ops.total(states[0])

        last, outputs, (final,) = rnn({name: ops.asarray(value) for name, value in params.items()})
        found |= {f"{case}: last": last, f"{case}: outputs": outputs, f"{case}: state": final}
        found |= {f"{case}: d/d{name}": value for name, value in ops.gradient(loss)(params).items()}
    return found


PROGRAM = Program(
    title="Keras' `rnn`",
    wheel=Wheel("tf_keras", "2.21.0"),
    parts={"tf_keras/src/backend.py": ["rnn"]},
    changes=[
        Change(
            "    if not tf.__internal__.tf2.enabled():\n        return_all_outputs = True  # Not supported in TF1.\n",
            "",
            "about TensorFlow 1",
        ),
        Change("        input_.shape.with_rank_at_least(3)\n", "        assert input_.ndim >= 3\n", STATIC),
        Change("input_t.shape.as_list()[fixed_dim:]", "list(input_t.shape[fixed_dim:])", STATIC),
        Change(
            """\
                for state, new_state in zip(flat_state, flat_new_state):
                    if isinstance(new_state, tf.Tensor):
                        new_state.set_shape(state.shape)
""",
            "",
            STATIC,
            times=2,
        ),
        Change(
            """\
    def set_shape(output_):
        if isinstance(output_, tf.Tensor):
            shape = output_.shape.as_list()
            if return_all_outputs:
                shape[0] = time_steps
            else:
                shape[0] = 1
            shape[1] = batch
            output_.set_shape(shape)
        return output_

    outputs = tf.nest.map_structure(set_shape, outputs)
""",
            "",
            STATIC,
        ),
        Change(
            '            "maximum_iterations": max_iterations,\n',
            '            "maximum_iterations": max_iterations,\n            "max_steps": time_steps,\n',
            "the longest of `input_length` is known only at run time, and reverse mode needs a bound before",
        ),
    ],
    own_names=own_names,
    run=run,
)
