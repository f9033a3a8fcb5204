"""TensorFlow Addons' `dynamic_decode`, with a greedy decoder whose state holds a TensorArray."""

from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from benchmarks.ports.source import Change, Program, Wheel

BATCH, TOKENS, STATE, LONGEST, END = 3, 6, 4, 9, 0
STATIC = "JAX knows every shape while it traces; a shape is a tuple"


class Output(NamedTuple):
    """What a step of the decoder gives."""

    logits: Any
    token: Any


class Decoder:
    """A recurrent network that is fed what it chose, in the interface of `dynamic_decode`."""

    batch_size, tracks_own_finished = BATCH, False

    def __init__(self, ops: Any, params: dict[str, Any]) -> None:
        self.ops, self.params = ops, params
        self.output_size = Output(ops.TensorShape([TOKENS]), ops.TensorShape([]))
        self.output_dtype = Output(ops.float32, ops.int32)

    def initialize(self) -> Any:
        ops = self.ops
        rows = ops.TensorArray(ops.float32, size=0, dynamic_size=True, clear_after_read=False)
        state = {"h": self.params["start"], "rows": rows}
        return ops.asarray(np.zeros(BATCH, bool)), ops.take(self.params["embed"], np.ones(BATCH, np.int32)), state

    def step(self, time: Any, inputs: Any, state: Any, training: Any) -> Any:
        ops, p = self.ops, self.params
        h = ops.tanh(ops.matmul(state["h"], p["w"]) + inputs)
        logits = ops.matmul(h, p["out"])
        token = ops.argmax(logits)
        state = {"h": h, "rows": state["rows"].write(time, h)}
        return Output(logits, token), state, ops.take(p["embed"], token), token == END

    def finalize(self, outputs: Any, state: Any, lengths: Any) -> Any:
        raise NotImplementedError


def own_names(ops: Any) -> dict[str, Any]:
    return {
        **{"Any": Any, "BaseDecoder": Decoder, "Decoder": Decoder, "TensorLike": Any},
        **{"Optional": Optional, "Tuple": tuple, "Union": Union},
        "control_flow_util": SimpleNamespace(GraphOrParentsInXlaContext=lambda graph: ops.in_xla),
    }


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {"w": (STATE, STATE), "embed": (TOKENS, STATE), "out": (STATE, TOKENS), "start": (BATCH, STATE)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found = {}
    for case, options in {
        "plain": {},
        "imputed": {"impute_finished": True},
        "time major": {"impute_finished": True, "output_time_major": True},
    }.items():

        def decode(p: Any, options: Any = options) -> Any:
            return names["dynamic_decode"](Decoder(ops, p), maximum_iterations=LONGEST, **options)

        def loss(p: Any, decode: Any = decode) -> Any:
            outputs, state, _ = decode(p)
            return ops.total(ops.tanh(outputs.logits)) + ops.total(state["h"])

        outputs, state, lengths = decode({name: ops.asarray(value) for name, value in params.items()})
        rows = state["rows"].stack(pad=True) if ops.in_xla else state["rows"].stack()
        found |= {f"{case}: logits": outputs.logits, f"{case}: token": outputs.token, f"{case}: lengths": lengths}
        found |= {f"{case}: h": state["h"], f"{case}: rows": rows}
        found |= {f"{case}: d/d{name}": value for name, value in ops.gradient(loss)(params).items()}
    return found


PROGRAM = Program(
    title="TensorFlow Addons' `dynamic_decode`",
    wheel=Wheel("tensorflow_addons", "0.23.0"),
    parts={
        "tensorflow_addons/seq2seq/decoder.py": ("dynamic_decode", "_prepend_batch", "_transpose_batch_time"),
    },
    changes=[
        Change("maximum_iterations.shape.ndims != 0", "maximum_iterations.ndim != 0", STATIC),
        Change("if finished.shape.rank < zero.shape.rank:", "if finished.ndim < zero.ndim:", STATIC),
        Change(
            "                    new.set_shape(cur.shape)\n                    pass_through = new.shape.ndims == 0\n",
            "                    pass_through = new.ndim == 0\n",
            STATIC,
        ),
        Change("    if shape.rank is not None and shape.rank < 2:\n", "    if len(shape) < 2:\n", STATIC),
        Change(
            "perm = tf.concat(([1, 0], tf.range(2, tf.rank(tensor))), axis=0)",
            "perm = [1, 0, *range(2, tensor.ndim)]",
            "a permutation is known while tracing",
        ),
    ],
    own_names=own_names,
    run=run,
)
