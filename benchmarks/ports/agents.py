"""TF-Agents' recurrent network of a policy, which starts again with each episode, and its replay of trajectories."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.ports.source import Change, Program, Wheel

BATCH, STEPS, SEEN, STATE, ACTIONS = 3, 6, 2, 4, 3
STATIC = "JAX knows every shape while it traces; a shape is a tuple"


class Trajectory(NamedTuple):
    """What happened, or the specifications of that."""

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    reward: Any
    discount: Any


class TimeStep(NamedTuple):
    """What a policy sees of a step."""

    step_type: Any
    reward: Any
    discount: Any
    observation: Any


class Policy:
    """Chooses the best action by a recurrent network, which starts again with an episode."""

    policy_state_spec: Any = None

    def __init__(self, ops: Any, params: dict[str, Any]) -> None:
        self.ops, self.p = ops, params
        action = SimpleNamespace(dtype=ops.int32, shape=())
        info = {"logits": SimpleNamespace(dtype=ops.float32, shape=(ACTIONS,))}
        self.trajectory_spec = Trajectory((), (), action, info, (), ())

    def get_initial_state(self, batch_size: Any) -> Any:
        return self.ops.asarray(np.zeros((batch_size, STATE), np.float32))

    def action(self, step: TimeStep, state: Any) -> Any:
        ops, p = self.ops, self.p
        seen = ops.matmul(step.observation["x"], p["w"]) + step.reward[:, None]
        state = ops.where(step.step_type[:, None] == 0, ops.zeros_like(state), state * step.discount[:, None])
        state = ops.tanh(ops.matmul(state, p["u"]) + seen)
        logits = ops.matmul(state, p["out"])
        return SimpleNamespace(action=ops.argmax(logits), state=state, info={"logits": logits})


class Cell:
    """A recurrent cell with two outputs."""

    output_size = (STATE, ())

    def __init__(self, ops: Any, params: dict[str, Any]) -> None:
        self.ops, self.p = ops, params
        self.output_size = (ops.TensorShape([STATE]), ops.TensorShape([ACTIONS]))

    def __call__(self, x: Any, state: Any, training: bool) -> Any:
        h = self.ops.tanh(self.ops.matmul(x, self.p["w"]) + self.ops.matmul(state[0], self.p["u"]))
        return (h, self.ops.matmul(h, self.p["out"])), [h]


def own_names(ops: Any) -> dict[str, Any]:
    def outer_shape(trajectory: Any, spec: Any) -> Any:
        return np.array(trajectory.discount.shape[:2])

    def swapped(x: Any) -> Any:
        return ops.transpose(x, [1, 0, *range(2, len(x.shape))])

    return {
        "common": SimpleNamespace(transpose_batch_time=swapped),
        "nest_utils": SimpleNamespace(get_outer_shape=outer_shape, assert_same_structure=lambda x, y: None),
        "ts": SimpleNamespace(TimeStep=TimeStep),
    }


def run(names: dict[str, Any], ops: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((SEEN, STATE)).astype(np.float32),
        "u": rng.standard_normal((STATE, STATE)).astype(np.float32) / 2,
        "out": rng.standard_normal((STATE, ACTIONS)).astype(np.float32),
        "x": rng.standard_normal((STEPS, BATCH, SEEN)).astype(np.float32),
    }
    first = rng.random((STEPS, BATCH)) < 0.3
    return {**replayed(names, ops, params, first, rng), **unrolled(names, ops, params, first)}


def replayed(names: dict[str, Any], ops: Any, params: Any, first: Any, rng: Any) -> dict[str, Any]:
    by_time = Trajectory(
        step_type=np.where(first, 0, 1).astype(np.int32),
        observation={"x": params["x"]},
        action=rng.integers(0, ACTIONS, (STEPS, BATCH)).astype(np.int32),
        policy_info={"logits": np.zeros((STEPS, BATCH, ACTIONS), np.float32)},
        reward=rng.standard_normal((STEPS, BATCH)).astype(np.float32),
        discount=rng.random((STEPS, BATCH)).astype(np.float32),
    )
    params = {name: ops.asarray(value) for name, value in params.items()}
    found = {}
    for case, time_major in (("replay", False), ("replay, time major", True)):

        def given(x: Any, time_major: bool = time_major) -> Any:
            return ops.asarray(x if time_major else np.swapaxes(x, 0, 1))

        trajectory = Trajectory(
            *(given(x) if isinstance(x, np.ndarray) else {name: given(y) for name, y in x.items()} for x in by_time)
        )
        replay = names["TrajectoryReplay"](Policy(ops, params), time_major=time_major)
        actions, info, state = replay.run(trajectory)
        found |= {f"{case}: actions": actions, f"{case}: logits": info["logits"], f"{case}: state": state}
    return found


def unrolled(names: dict[str, Any], ops: Any, params: Any, first: Any) -> dict[str, Any]:
    found = {}
    for case, reset in (("unroll", None), ("unroll, episodes", first)):

        def unroll(p: Any, reset: Any = reset) -> Any:
            zeros = [ops.asarray(np.zeros((BATCH, STATE), np.float32))]
            return names["_dynamic_unroll_multi_step"](
                Cell(ops, p),
                p["x"],
                None if reset is None else ops.asarray(reset),
                initial_state=[zeros[0] + 1],
                zero_state=zeros,
                dtype=None,
                parallel_iterations=20,
                swap_memory=False,
                iterations=STEPS,
                const_batch_size=BATCH,
                training=True,
            )

        def loss(p: Any, unroll: Any = unroll) -> Any:
            (h, logits), state = unroll(p)
            return ops.total(h * h) + ops.total(ops.tanh(logits)) + ops.total(state[0])

        (h, logits), (state,) = unroll({name: ops.asarray(value) for name, value in params.items()})
        found |= {f"{case}: h": h, f"{case}: logits": logits, f"{case}: state": state}
        found |= {f"{case}: d/d{name}": value for name, value in ops.gradient(loss)(params).items()}
    return found


PROGRAM = Program(
    title="TF-Agents' `TrajectoryReplay`, and the loop of `DynamicUnroll`",
    wheel=Wheel("tf_agents", "0.19.0"),
    parts={
        "tf_agents/environments/trajectory_replay.py": ["TrajectoryReplay"],
        "tf_agents/keras_layers/dynamic_unroll_layer.py": (
            *("_maybe_tensor_shape_from_tensor", "_infer_state_dtype", "_maybe_reset_state"),
            "_dynamic_unroll_multi_step",
        ),
    },
    changes=[
        Change("s.shape.rank > 0", "s.ndim > 0", STATIC),
        Change(
            """\
  with tf.compat.v1.variable_scope(
      tf.compat.v1.get_variable_scope()
  ) as varscope:
    if not tf.executing_eagerly() and varscope.caching_device is None:
      varscope.set_caching_device(lambda op: op.device)

""",
            "  if True:\n",
            "JAX has no variables",
        ),
        Change(
            """\
  if isinstance(iterations, int):
    # TensorArray.stack() doesn't set a static value for dimension 0,
    # even if the size is known. Set the shapes here.
    iterations_shape = tf.TensorShape([iterations])
    tf.nest.map_structure(
        lambda t: t.set_shape(iterations_shape.concatenate(t.shape[1:])),
        outputs,
    )
""",
            "",
            STATIC,
        ),
    ],
    own_names=own_names,
    run=run,
)
