"""OpenNMT's `dynamic_decode` with its beam search: arrays that grow, made where nobody knows how far."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.ports.source import Change, Program, Wheel

BATCH, TOKENS, STATE, LONGEST, END, BEAM = 2, 7, 4, 8, 2, 3
STATIC = "JAX knows every shape while it traces; a shape is a tuple"
PADDED = "how many rows there are is known only at run time: a result has as many as there may be"


def own_names(ops: Any) -> dict[str, Any]:
    abc = SimpleNamespace(ABC=object, abstractmethod=lambda f: f)
    return {
        "abc": abc,
        "Sampler": object,
        "DecodingResult": lambda **parts: SimpleNamespace(**parts),
        "constants": SimpleNamespace(END_OF_SENTENCE_ID=END),
        "misc": SimpleNamespace(shape_list=lambda x: list(x.shape)),
        "tfa": SimpleNamespace(seq2seq=SimpleNamespace(tile_batch=lambda x, n: ops.repeat(x, n))),
    }


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shapes = {"w": (STATE, STATE), "embed": (TOKENS, STATE), "out": (STATE, TOKENS), "source": (STATE, 5)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    start = rng.standard_normal((BATCH, STATE)).astype(np.float32)
    found = {}
    for case, width, penalties, attends, least in (
        ("greedy", 1, {}, False, 0),
        ("greedy, attention", 1, {}, True, 4),
        ("beam", BEAM, {}, False, 0),
        ("beam, penalties", BEAM, {"length_penalty": 0.6, "coverage_penalty": 0.2}, True, 3),
    ):

        def decode(
            p: Any, width: int = width, penalties: Any = penalties, attends: Any = attends, n: int = least
        ) -> Any:
            def model(ids: Any, step: Any, state: Any) -> Any:
                h = ops.tanh(ops.matmul(state["h"], p["w"]) + ops.take(p["embed"], ids))
                logits = ops.matmul(h, p["out"]) + ops.asarray(np.eye(TOKENS, dtype=np.float32)[END] * 3)
                attention = ops.softmax(ops.matmul(h, p["source"]))
                return (logits, {"h": h}, attention) if attends else (logits, {"h": h})

            return names["dynamic_decode"](
                model,
                ops.asarray(np.ones(BATCH, np.int32)),
                end_id=END,
                initial_state={"h": ops.asarray(np.repeat(start, width, 0))},
                decoding_strategy=names["BeamSearch"](width, **penalties) if width > 1 else names["GreedySearch"](),
                maximum_iterations=LONGEST,
                minimum_iterations=n,
                attention_history=attends,
                attention_size=5,
            )

        def loss(p: Any, decode: Any = decode) -> Any:
            result = decode(p)
            return ops.total(result.log_probs) + ops.total(result.state["h"])

        result = decode({name: ops.asarray(value) for name, value in params.items()})
        found |= {f"{case}: ids": result.ids, f"{case}: lengths": result.lengths, f"{case}: h": result.state["h"]}
        found |= {f"{case}: log_probs": result.log_probs}
        if attends:
            found[f"{case}: attention"] = result.attention
        found |= {f"{case}: d/d{name}": value for name, value in ops.gradient(loss)(params).items()}
    return found


PROGRAM = Program(
    title="OpenNMT's `dynamic_decode`, beam search",
    wheel=Wheel("OpenNMT_tf", "2.32.0"),
    parts={
        "opennmt/utils/decoding.py": (
            *("BestSampler", "DecodingStrategy", "GreedySearch", "BeamSearch", "dynamic_decode", "_reorder_state"),
            *("_get_shape_invariants", "_penalize_token", "_gather_from_word_indices", "_lengths_from_ids"),
            *("_gather_tree", "_gather_tree_from_array"),
        )
    },
    changes=[
        Change("on_value=logits.dtype.max", "on_value=jnp.finfo(logits.dtype).max", "a dtype does not know its range"),
        Change(
            "off_value=logits.dtype.min", "off_value=jnp.finfo(logits.dtype).min", "a dtype does not know its range"
        ),
        Change("tensor.shape.ndims == 0", "tensor.ndim == 0", STATIC),
        Change("shape = tensor.shape.as_list()", "shape = list(tensor.shape)", STATIC),
        Change(
            "        ids = tf.transpose(outputs.stack())\n",
            "        ids = outputs.stack(pad=True)\n"
            "        there_are = jnp.arange(len(ids)) < outputs.size()\n"
            "        ids = jnp.where(there_are, ids.T, end_id)\n",
            PADDED,
        ),
        Change("tf.transpose(attention.stack(), perm", "tf.transpose(attention.stack(pad=True), perm", PADDED),
        Change(
            "        attention = attention[:, :, :-1]  # Ignore attention for </s>.\n",
            "        attention = attention[:, :, :-1]  # Ignore attention for </s>.\n"
            "        attention *= (jnp.arange(attention.shape[2]) < outputs.size() - 1)[:, None]\n",
            PADDED,
        ),
        Change("max_time = outputs.size()", "max_time = len(outputs.stack(pad=True))", PADDED),
        Change("tf.reshape(outputs.stack(), array_shape)", "tf.reshape(outputs.stack(pad=True), array_shape)", PADDED),
        Change(
            "tf.reshape(parent_ids.stack(), array_shape)", "tf.reshape(parent_ids.stack(pad=True), array_shape)", PADDED
        ),
        Change(
            "_gather_tree_from_array(attention.stack(), parent_ids, lengths)",
            "_gather_tree_from_array(attention.stack(pad=True), parent_ids, lengths)",
            PADDED,
        ),
        Change(
            """\
    assert_op = tf.debugging.Assert(
        tf.math.reduce_all(
            tf.math.logical_and(parent_ids >= 0, parent_ids < beam_width)
        ),
        ["All parent ids must be positive and less than beam_width"],
    )
""",
            "",
            "what is compiled has no assertions",
        ),
        Change(
            "    with tf.control_dependencies([assert_op]):\n", "    if True:\n", "what is compiled has no assertions"
        ),
        Change(
            "    for t in tf.range(1, max_time):\n",
            "    def older(t, carry):\n        parent, output_ids = carry\n",
            "JAX does not rewrite Python's loops",
        ),
        Change(
            "        output_ids = output_ids.write(t, ids)\n",
            "        return parent, output_ids.write(t, ids)\n\n"
            "    parent, output_ids = fori_loop(1, max_time, older, (parent, output_ids))\n",
            "JAX does not rewrite Python's loops",
        ),
    ],
    own_names=own_names,
    run=run,
    filler={"ids": END},
)
