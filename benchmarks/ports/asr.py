"""TensorFlowASR's greedy search of a transducer, which takes tokens at a frame until the network gives a blank."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.ports.source import Change, Program, Wheel

FRAMES, WIDTH, TOKENS, STATE, BLANK = 7, 4, 5, 4, 0
SIZE = "a size is known while tracing: a result has as many rows as there may be"


def own_names(ops: Any) -> dict[str, Any]:
    return {"schemas": SimpleNamespace(PredictInput=Any, PredictOutput=lambda **parts: SimpleNamespace(**parts))}


class Model:
    """What the two methods find in `self`: an encoder, and the two networks of a transducer."""

    name, blank = "transducer", BLANK

    def __init__(self, names: dict[str, Any], ops: Any, params: dict[str, Any]) -> None:
        self.names, self.ops, self.p = names, ops, params
        self.encoder = SimpleNamespace(call_next=lambda x, length, states: (x, length, states))
        self.predict_net = SimpleNamespace(call_next=self.predicted)

    def call_next(self, *inputs: Any) -> Any:
        return self.names["call_next"](self, *inputs)

    def feature_extraction(self, inputs: Any, training: bool) -> Any:
        return inputs

    def predicted(self, tokens: Any, states: Any) -> Any:
        h = self.ops.tanh(self.ops.matmul(states[:, 0, 0], self.p["w"]) + self.ops.take(self.p["embed"], tokens[:, 0]))
        return h[:, None], h[:, None, None]

    def joint_net(self, frame_and_prediction: Any, training: bool) -> Any:
        frame, prediction = frame_and_prediction
        joint = self.ops.tanh(frame[:, :, None] + prediction[:, None])
        return self.ops.matmul(joint, self.p["out"])


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"w": (STATE, STATE), "embed": (TOKENS, STATE), "out": (STATE, TOKENS), "frames": (1, FRAMES, WIDTH)}
    params = {name: 2 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    params = {name: ops.asarray(value) for name, value in params.items()}
    there = np.arange(FRAMES) < FRAMES - 1
    found = {}
    for case, most, length in (("three a frame", 3, there), ("one a frame", 1, there), ("all frames", 2, there | True)):
        inputs = SimpleNamespace(
            inputs=params["frames"],
            inputs_length=ops.total(ops.asarray(length[None].astype(np.int32)))[None],
            previous_tokens=ops.asarray(np.full((1, 1), BLANK, np.int32)),
            previous_encoder_states=ops.asarray(np.zeros((), np.float32)),
            previous_decoder_states=ops.asarray(np.zeros((1, 1, 1, STATE), np.float32)),
        )
        result = names["recognize_single"](Model(names, ops, params), inputs, max_tokens_per_frame=most)
        found |= {f"{case}: tokens": result.tokens, f"{case}: last token": result.next_tokens}
        found |= {f"{case}: h": result.next_decoder_states}
    return found


PROGRAM = Program(
    title="TensorFlowASR's `recognize_single`, a transducer",
    wheel=Wheel("TensorFlowASR", "2.1.0"),
    parts={
        "tensorflow_asr/models/transducer/base_transducer.py": ("Transducer.call_next", "Transducer.recognize_single")
    },
    changes=[
        Change("size=tf.reshape(nframes, shape=[]) * max", "size=encoded.shape[1] * max", SIZE),
        Change("size=tf.reshape(nframes, shape=[]),", "size=encoded.shape[1],", SIZE),
        Change(
            "tf.while_loop(\n            condition,\n",
            "tf.while_loop(\n            lambda *state: condition(*state)[0, 0],\n",
            "the condition of a loop of JAX has no axes",
        ),
    ],
    own_names=own_names,
    run=run,
)
