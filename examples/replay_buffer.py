"""Learn from a replay buffer that stays where it is: a ring of transitions, donated to every update.

Walkers cross a map with a cliff. Now and then the wind blows them aside, which costs dear beside the cliff. They
remember what they did, where it led and what they got, and learn from transitions drawn at random from their memory
(Q-learning). The memory has room for so many transitions; then the newest takes the place of the oldest. As a
TensorArray in a state that is donated, `jax.jit(..., donate_argnums=0)`, it is written where it lies: to remember takes
the same time however much there is to remember. Without donation every call copies all of it.

    python examples/replay_buffer.py

prints what a walk is worth as they learn, beside the most that it can be; the ways that they found, with wind and
without; and the time that it takes to remember a transition as the memory grows, donated and not.
"""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tensorarray import TensorArray

# --- the memory ------------------------------------------------------------------------------------------------


class Replay(NamedTuple):
    """The last transitions, each a pytree."""

    rows: TensorArray
    next: jax.Array  # the row that the next transition takes
    filled: jax.Array  # how many rows have one


def new_replay(transition, capacity):
    """Make an empty replay with room for `capacity` transitions like this one."""
    return Replay(TensorArray.like(transition, capacity), jnp.int32(0), jnp.int32(0))


def remember(replay, transitions):
    """Remember transitions `[n, ...]`, the newest last. The oldest ones go, if there is no room.

    There may be more transitions than rows: they are written in order, and the last one in a row stays.
    """
    number, capacity = len(jax.tree.leaves(transitions)[0]), len(replay.rows)
    return Replay(
        replay.rows.scatter((replay.next + jnp.arange(number)) % capacity, transitions),
        (replay.next + number) % capacity,
        jnp.minimum(replay.filled + number, capacity),
    )


def draw(replay, key, number):
    """Draw transitions at random from the filled rows, `[number, ...]`. There has to be one."""
    return replay.rows.gather(jax.random.randint(key, (number,), 0, replay.filled))


# --- the world -------------------------------------------------------------------------------------------------

MAP = (
    "............",
    "............",
    "....##......",
    "............",
    "S##########G",
)
WIDTH = len(MAP[0])
START, GOAL = "".join(MAP).index("S"), "".join(MAP).index("G")
CLIFF = np.array([place == "#" for place in "".join(MAP)])
ARROWS = "^v<>"
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
STEP, FALL = -1.0, -30.0  # what they cost
DISCOUNT = 0.98


class Transition(NamedTuple):
    place: jax.Array  # row times WIDTH plus column
    action: jax.Array  # of MOVES
    reward: jax.Array
    after: jax.Array  # the place where it led
    arrived: jax.Array


def move(place, action, gust, wind):
    """Move one walker. `gust` is a pair: a number in [0, 1), below `wind` if it blows, and the way it blows."""
    blows, way = gust
    way = jnp.where(blows < wind, way, action)
    row, column = jnp.array([place // WIDTH, place % WIDTH]) + jnp.asarray(MOVES)[way]
    after = jnp.clip(row, 0, len(MAP) - 1) * WIDTH + jnp.clip(column, 0, WIDTH - 1)
    fallen = jnp.asarray(CLIFF)[after]
    after = jnp.where(fallen, START, after)
    return Transition(place, action, jnp.where(fallen, FALL, STEP), after, after == GOAL)


# --- learning --------------------------------------------------------------------------------------------------


class State(NamedTuple):
    values: jax.Array  # [places, moves]: what is expected from there on, after that move
    replay: Replay
    places: jax.Array  # [walkers]
    key: jax.Array
    steps: jax.Array


def new_state(capacity, walkers, seed=0):
    number, integer = jnp.float32(0), jnp.int32(0)
    replay = new_replay(Transition(integer, integer, number, integer, jnp.bool_(False)), capacity)
    values = jnp.zeros((len(CLIFF), len(MOVES)), jnp.float32)
    return State(values, replay, jnp.full(walkers, START, jnp.int32), jax.random.key(seed), jnp.int32(0))


def live(state, wind, batch, adventure=0.3):
    """Let all walkers take a step, remember it, and learn from `batch` transitions."""
    key, *keys = jax.random.split(state.key, 6)
    shape = state.places.shape
    action = jnp.argmax(state.values[state.places], axis=1)
    action = jnp.where(
        jax.random.uniform(keys[0], shape) < adventure, jax.random.randint(keys[1], shape, 0, len(MOVES)), action
    )
    gust = jax.random.uniform(keys[2], shape), jax.random.randint(keys[3], shape, 0, len(MOVES))
    new = jax.vmap(move, (0, 0, 0, None))(state.places, action.astype(jnp.int32), gust, wind)
    new = jax.tree.map(lambda x, row: x.astype(row), new, state.replay.rows.dtype)
    replay = remember(state.replay, new)

    seen = draw(replay, keys[4], batch)
    target = seen.reward + DISCOUNT * jnp.where(seen.arrived, 0.0, jnp.max(state.values[seen.after], axis=1))
    at = seen.place, seen.action
    surprise = jnp.zeros_like(state.values).at[at].add(target - state.values[at])
    times = jnp.zeros_like(state.values).at[at].add(1.0)
    rate = 0.5 / (1 + state.steps / 200)  # less and less, for what is left is chance
    values = state.values + rate * surprise / jnp.maximum(times, 1)
    return State(values, replay, jnp.where(new.arrived, START, new.after), key, state.steps + 1)


@functools.partial(jax.jit, static_argnames="batch", donate_argnames="state")
def train(state, wind, steps, batch=512):
    """Take `steps` steps. The state is updated where it is."""
    return lax.fori_loop(0, steps, lambda _, state: live(state, wind, batch), state)


@jax.jit
def worth(policy, wind):
    """Return the worth of a walk from START under a policy, [places]. Without one, return the most that it can be."""
    places = jnp.arange(len(CLIFF))

    def expected(values):
        """Return what is expected after each move from each place, [places, moves]."""

        def one(place, action):
            quiet = move(place, action, (1.0, action), wind)
            blown = jax.vmap(lambda way: move(place, action, (-1.0, way), wind))(jnp.arange(len(MOVES)))
            quiet, blown = (t.reward + DISCOUNT * jnp.where(t.arrived, 0.0, values[t.after]) for t in (quiet, blown))
            return (1 - wind) * quiet + wind * jnp.mean(blown)

        return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(places, jnp.arange(len(MOVES)))

    def improve(_, values):
        values = expected(values)
        return jnp.max(values, axis=1) if policy is None else values[places, policy]

    return lax.fori_loop(0, 1000, improve, jnp.zeros(len(CLIFF)))[START]


# --- time ------------------------------------------------------------------------------------------------------


def seconds_to_remember(capacity, donated, floats=64, runs=20):
    """Return the fastest of `runs` calls that remember one transition: two observations of `floats` numbers."""
    f = jax.jit(remember, donate_argnums=0 if donated else ())
    new = {"seen": jnp.ones((1, floats)), "then": jnp.ones((1, floats)), "action": jnp.zeros(1), "reward": jnp.ones(1)}
    replay = new_replay(jax.tree.map(lambda x: x[0], new), capacity)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        replay = jax.block_until_ready(f(replay, new))
        times.append(time.perf_counter() - start)
    return min(times)


def drawing(values):
    """Return the lines of the map with the move that is best at each place."""
    arrows = [ARROWS[k] for k in jnp.argmax(values, axis=1)]
    arrows = [at if at in "#G" else arrow for at, arrow in zip("".join(MAP), arrows, strict=True)]
    return [" ".join(arrows[k : k + WIDTH]) for k in range(0, len(arrows), WIDTH)]


def main(rounds=7, walkers=16, capacity=20_000, sizes=(4096, 65_536), seed=0):
    """Let them learn, with wind and without, and take the time. Return the worth of a walk after each round."""
    found, ways = {}, {}
    for name, wind in {"wind": 0.2, "calm": 0.0}.items():
        state = new_state(capacity, walkers, seed)
        where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.replay.rows)]
        best, found[name] = float(worth(None, wind)), []
        print(f"With wind, the best way is worth {best:.1f}:" if wind else f"In a calm, {best:.1f}:")
        for k in range(rounds):
            state = train(state, wind, 50 * 2**k - int(state.steps))
            found[name].append(float(worth(jnp.argmax(state.values, axis=1), wind)))
            print(
                f"  {int(state.steps):5} steps, {int(state.replay.filled):6} transitions in memory: "
                f"the way found is worth {found[name][-1]:7.1f}",
                flush=True,
            )
        stayed = where == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.replay.rows)]
        print(f"  The memory is {'where it was' if stayed else 'somewhere else'}.\n")
        ways[name] = drawing(state.values)
    print(f"{'with wind':{2 * WIDTH + 4}}in a calm")
    print("\n".join(f"{a:{2 * WIDTH + 4}}{b}" for a, b in zip(*ways.values(), strict=True)))

    print("\nMicroseconds to remember one more transition of 130 numbers:\n")
    print("room for  donated  not donated")
    for size in sizes:
        times = [1e6 * seconds_to_remember(size, donated) for donated in (True, False)]
        print(f"{size:8} {times[0]:8.0f} {times[1]:12.0f}")
    return found


if __name__ == "__main__":
    main()
