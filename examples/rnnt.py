"""A transducer (RNN-T) that spells sounds: its loss, and its greedy decoding, as loops that are differentiated.

Sounds come as frames of noisy numbers: each lasts for one to three frames, and pauses lie between some. They are
spelled in letters, "x" as "ks", so the model must say nothing in some frames and two letters in others. At each frame a
transducer either emits a letter, which it remembers, or goes on to the next frame.

- The loss is the probability of the right spelling under all alignments, a recursion over the diagonals of a lattice of
  frames and letters. Every example has a lattice of its own size, and as many steps as it has diagonals.
- Greedy decoding takes as many steps as it goes on and emits, known only when it has ended. The log-probability of the
  path that it took is differentiated too: where a reading is wrong, a second phase of training makes that path less
  probable than the right spelling.

    python examples/rnnt.py

prints the losses as they fall, and what the model reads in new recordings: which letters, in which frames, in how many
steps.
It needs optax: `pip install optax`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tensorarray import TensorArray, fori_loop, while_loop

SOUNDS = "aotx"
SPELLING = {"a": "a", "o": "o", "t": "t", "x": "ks"}
LABELS = "-aotks"  # what the model emits; "-" is the blank: go on to the next frame
BLANK = 0
CHANNELS = 6  # numbers in a frame
LONGEST_SOUND = 24  # frames of the longest recording
LONGEST_WORD = 12  # letters of the longest spelling
IMPOSSIBLE = -1e9


class Recordings(NamedTuple):
    frames: jax.Array  # [number, LONGEST_SOUND, CHANNELS]
    length: jax.Array  # [number], in frames
    labels: jax.Array  # [number, LONGEST_WORD]
    count: jax.Array  # [number], of labels


def make_recordings(rng, number):
    """Make recordings of spoken words of one to six sounds."""
    voice = np.random.default_rng(9)
    looks = np.concatenate([np.zeros((1, CHANNELS)), voice.standard_normal((len(SOUNDS), CHANNELS))])
    frames = np.zeros((number, LONGEST_SOUND, CHANNELS))
    labels = np.full((number, LONGEST_WORD), BLANK)
    length, count = np.zeros(number, np.int32), np.zeros(number, np.int32)
    for k in range(number):
        heard, letters, last = [], "", None
        for sound in rng.integers(len(SOUNDS), size=rng.integers(1, 7)):
            if sound != last:
                heard += [0] * rng.integers(2) + [1 + sound] * rng.integers(1, 4)
                letters, last = letters + SPELLING[SOUNDS[sound]], sound
        length[k], count[k] = len(heard), len(letters)
        frames[k, : length[k]] = looks[heard] + 0.5 * rng.standard_normal((length[k], CHANNELS))
        labels[k, : count[k]] = [LABELS.index(letter) for letter in letters]
    return Recordings(*map(jnp.asarray, (frames, length, labels, count)))


# --- the model -------------------------------------------------------------------------------------------------


def init_params(rng, hidden=14):
    """Return parameters, about 700 numbers."""

    def normal(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape))

    return {
        "listen": normal(2 * CHANNELS, hidden),
        "bias": jnp.zeros(hidden),
        "heard": normal(hidden, hidden),
        "embed": normal(len(LABELS), hidden),
        "recur": normal(hidden, hidden),
        "out": normal(hidden, len(LABELS)),
    }


def encode(params, frames):
    """Return what is heard at each frame, [T, hidden], from the frame and the one before."""
    before = jnp.concatenate([jnp.zeros_like(frames[:1]), frames[:-1]])
    return jnp.tanh(jnp.concatenate([frames, before], axis=-1) @ params["listen"] + params["bias"]) @ params["heard"]


def remember(params, state, label):
    """Return the state after one more label."""
    return jnp.tanh(state @ params["recur"] + params["embed"][label])


def joint(params, heard, state):
    """Return log-probabilities of the labels, given the encoded frame and the state after the labels so far."""
    return jax.nn.log_softmax(jnp.tanh(heard + state) @ params["out"])


# --- greedy decoding: emit, or go on ---------------------------------------------------------------------------


class Decoding(NamedTuple):
    frame: jax.Array
    count: jax.Array  # labels so far
    states: TensorArray  # row u: what is remembered after u labels
    labels: TensorArray  # row u: label u
    emitted: TensorArray  # row u: the frame in which it was emitted
    log_p: TensorArray  # row u: log-probability of all steps that were taken after u labels


def greedy(params, frames, length):
    """Decode with the most probable label in each step, and return how it ended.

    `sum(log_p.stack())` is the log-probability of the path, and differentiable.
    """
    heard = TensorArray.from_array(encode(params, frames))
    hidden, dtype = params["recur"].shape[0], params["recur"].dtype

    def step(now):
        t, u = now.frame, now.count
        state = now.states.read(u)
        log_p = joint(params, heard.read(t), state)
        label = jnp.where(u < LONGEST_WORD, jnp.argmax(log_p), BLANK)
        emit = label != BLANK
        return Decoding(
            t + ~emit,
            u + emit,
            now.states.write(u + 1, remember(params, state, label), where=emit),
            now.labels.write(u, label.astype(jnp.int32), where=emit),
            now.emitted.write(u, t, where=emit),
            # The slot of a label is rewritten in each step, until the label is out.
            now.log_p.write(u, now.log_p.read(u) + log_p[label]),
        )

    return while_loop(
        lambda now: now.frame < length,
        step,
        Decoding(
            jnp.int32(0),
            jnp.int32(0),
            TensorArray(dtype, LONGEST_WORD + 1, element_shape=(hidden,)).write(0, jnp.zeros(hidden, dtype)),
            TensorArray(jnp.int32, LONGEST_WORD, element_shape=()),
            TensorArray(jnp.int32, LONGEST_WORD, element_shape=()),
            TensorArray(dtype, LONGEST_WORD + 1, element_shape=()),
        ),
        max_steps=LONGEST_SOUND + LONGEST_WORD,
    )


def path_log_p(params, frames, length):
    """Return the log-probability of the path that greedy decoding takes."""
    return jnp.sum(greedy(params, frames, length).log_p.stack())


# --- the loss: all alignments of a known spelling --------------------------------------------------------------


def log_likelihood(params, frames, length, labels, count):
    """Return the log-probability of the labels, summed over alignments (A. Graves, arXiv:1211.3711, equation 16)."""
    hidden, dtype = params["recur"].shape[0], params["recur"].dtype
    states = TensorArray(dtype, LONGEST_WORD + 1, element_shape=(hidden,)).write(0, jnp.zeros(hidden, dtype))
    states = fori_loop(
        0,
        count,
        lambda u, states: states.write(u + 1, remember(params, states.read(u), labels[u])),
        states,
        max_steps=LONGEST_WORD,
    )
    log_p = joint(params, encode(params, frames)[:, None], states.stack())  # [T, U + 1, labels]
    width = LONGEST_WORD + 1
    go_on = TensorArray.from_array(jnp.ravel(log_p[:, :, BLANK]))
    emit = TensorArray.from_array(jnp.ravel(jnp.take_along_axis(log_p[:, :-1], labels[None, :, None], axis=2)))

    # Row n is diagonal n: log-probabilities to be at frame n - u after u labels, for all u.
    u = jnp.arange(width)
    start = jnp.where(u == 0, 0.0, IMPOSSIBLE).astype(dtype)
    diagonals = TensorArray(dtype, LONGEST_SOUND + LONGEST_WORD, element_shape=(width,)).write(0, start)

    def next_diagonal(n, diagonals):
        before = diagonals.read(n - 1)
        t = n - u
        inside = (t >= 0) & (t < length) & (u <= count)
        waited, spoke = inside & (t > 0), inside & (u > 0)
        # From one frame earlier, and from one label earlier.
        blanks = go_on.gather(jnp.where(waited, (t - 1) * width + u, 0))
        spoken = emit.gather(jnp.where(spoke, t * (width - 1) + u - 1, 0))
        ways = jnp.logaddexp(
            jnp.where(waited, before + blanks, IMPOSSIBLE),
            jnp.where(spoke, jnp.roll(before, 1) + spoken, IMPOSSIBLE),
        )
        return diagonals.write(n, ways)

    diagonals = fori_loop(1, length + count, next_diagonal, diagonals, max_steps=LONGEST_SOUND + LONGEST_WORD)
    # At the last frame, all labels said; then the last blank.
    return diagonals.read(length - 1 + count)[count] + log_p[length - 1, count, BLANK]


def loss(params, recordings):
    """Return the negative log-likelihood of a recording, on average over a batch."""
    return -jnp.mean(jax.vmap(log_likelihood, (None, 0, 0, 0, 0))(params, *recordings))


def contrast(params, recordings):
    """Return how much more probable the model's own reading of a recording is than the right one, on average.

    It is zero where they are the same, since the decoded alignment is then one of the alignments in the sum.
    """

    def one(frames, length, labels, count):
        own = path_log_p(params, frames, length)
        return jax.nn.relu(own - log_likelihood(params, frames, length, labels, count))

    return jnp.mean(jax.vmap(one)(*recordings))


# --- training --------------------------------------------------------------------------------------------------


def descend(loss, params, batches, rate, report=lambda k, loss: None):
    """Return the parameters after an update with each of the batches, and the loss before each."""
    optimiser = optax.adam(rate, b2=0.99)
    state = optimiser.init(params)

    @jax.jit
    def update(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        moves, state = optimiser.update(gradient, state)
        return value, optax.apply_updates(params, moves), state

    losses = []
    for k, batch in enumerate(batches, 1):
        value, params, state = update(params, state, batch)
        losses.append(float(value))
        report(k, losses[-1])
    return params, losses


def train(updates, batch, seed=0, report=lambda k, loss: None):
    """Return parameters learned with the loss, and the loss before each update."""
    rng = np.random.default_rng(seed)
    params = init_params(rng)
    return descend(loss, params, (make_recordings(rng, batch) for _ in range(updates)), 0.03, report)


def refine(params, updates, batch, seed=1, report=lambda k, loss: None):
    """Train further on the model's own mistakes. Return parameters, and the sum of both losses before each update."""
    rng = np.random.default_rng(seed)

    def both(params, recordings):
        return loss(params, recordings) + contrast(params, recordings)

    return descend(both, params, (make_recordings(rng, batch) for _ in range(updates)), 0.01, report)


@jax.jit
def read_all(params, recordings):
    """Decode a batch greedily. Return the number of labels, the labels, their frames, and the log-probability."""

    def read(frames, length):
        found = greedy(params, frames, length)
        return found.count, found.labels.stack(), found.emitted.stack(), jnp.sum(found.log_p.stack())

    return jax.vmap(read)(recordings.frames, recordings.length)


def right(params, recordings):
    """Count the recordings that are spelled without a mistake."""
    _, labels, _, _ = read_all(params, recordings)
    return int(jnp.sum(jnp.all(labels == recordings.labels, axis=1)))


def spelled(labels):
    return "".join(LABELS[i] for i in labels if i != BLANK)


def main(updates=300, batch=16, seed=0):
    """Train in two phases, and show what was learned. Return the losses of both."""
    new = make_recordings(np.random.default_rng(seed + 2), 200)

    def report(what, of):
        def show(k, value):
            if k == 1 or k % max(1, of // 4) == 0:
                print(f"update {k:4}: {value:6.3f} {what}", flush=True)

        return show

    def judge(params):
        cost = float(jax.jit(contrast)(params, new))
        print(f"{right(params, new)} of 200 new recordings are read without a mistake; mistakes cost {cost:.3f}.\n")

    params, losses = train(updates, batch, seed, report("minus the log-likelihood of a spelling", updates))
    judge(params)
    more = updates // 2
    params, refined = refine(params, more, batch, seed + 1, report("the same, and what mistakes cost", more))
    judge(params)

    print("spelling      read          in frames                     of  steps  log-probability")
    counts, labels, emitted, log_p = map(np.asarray, read_all(params, new))
    for k in range(8):
        n, length = int(counts[k]), int(new.length[k])
        at = " ".join(map(str, emitted[k, :n]))
        print(f"{spelled(new.labels[k]):13} {spelled(labels[k]):13} {at:27} {length:4} {length + n:6} {log_p[k]:16.3f}")
    return losses, refined


if __name__ == "__main__":
    main()
