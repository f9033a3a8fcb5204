"""Train a word reader on the errors of its own beam search.

A word of a small lexicon is seen letter by letter, through a cipher and with a quarter of the letters smudged. A beam
search spells it: it keeps the best hypotheses, extends each by every letter, and stops when those that have not ended
are hopeless, after a number of steps that nobody knows in advance. The loss is the expected number of wrong letters
(edit distance) over the hypotheses that the search has found, the "minimum word error" criterion of speech recognition.
So the search itself is differentiated: scores, states, letters and back-pointers are rows of TensorArrays, carried by a
`while_loop` that has a gradient.

    python examples/beam_search.py

prints the loss as it falls, then what the model makes of new words: it has found out the cipher, where words end, and,
from the lexicon, which letters the smudges hide.
It needs optax: `pip install optax`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_tensorarray import TensorArray, fori_loop, while_loop

LEXICON = ["ace", "add", "bad", "bead", "bed", "cab", "cafe", "decade", "deaf", "facade", "face", "fade", "feed"]
LETTERS = ".abcdef"  # what the model writes; "." ends a word
CIPHER = ".cfaebd"  # how a letter looks to the model, if it is not smudged
SYMBOLS = ".abcdef?"  # what the model sees; "." is the empty paper after the word
END = 0
LONGEST = 8  # the search gives up after that many letters
HOPELESS = -6.0  # a hypothesis that much worse than the best one is not worth another step
IMPOSSIBLE = -1e9


def make_words(rng, number):
    """Make words: the symbols that are seen, [number, LONGEST], and the letters meant, padded with END."""
    seen = np.full((number, LONGEST), SYMBOLS.index("."))
    meant = np.full((number, LONGEST), END)
    for k, word in enumerate(rng.choice(LEXICON, number)):
        for t, letter in enumerate(word):
            meant[k, t] = LETTERS.index(letter)
            seen[k, t] = SYMBOLS.index("?" if rng.random() < 1 / 4 else CIPHER[meant[k, t]])
    return jnp.asarray(seen), jnp.asarray(meant)


def init_params(rng, hidden=16):
    """Return parameters, about 550 numbers."""

    def normal(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape))

    return {
        "see": normal(len(SYMBOLS), len(LETTERS)),  # what a symbol says about the letter
        "say": normal(hidden, len(LETTERS)),  # what the letters so far say about it
        "embed": normal(len(LETTERS), hidden),
        "recur": normal(hidden, hidden),
    }


# --- the search ------------------------------------------------------------------------------------------------


class Search(NamedTuple):
    step: jax.Array
    ended: jax.Array  # [beam]
    scores: TensorArray  # row t: log-probabilities of the hypotheses after t letters, [beam]
    states: TensorArray  # row t: what the model remembers of each, [beam, hidden]
    letters: TensorArray  # row t: the letter that each hypothesis got in step t, [beam]
    parents: TensorArray  # row t: which hypothesis it extended, [beam]


def beam_search(params, seen, beam):
    """Return the best hypotheses for one word: letters [beam, LONGEST], log-probabilities [beam], and the steps."""
    hidden, dtype = params["recur"].shape[0], params["recur"].dtype

    def extend(search):
        t = search.step
        state = search.states.read(t)
        log_p = jax.nn.log_softmax(params["see"][seen[t]] + state @ params["say"])  # [beam, letters]
        # A hypothesis that has ended goes on unchanged.
        only_end = jnp.where(jnp.arange(len(LETTERS)) == END, 0.0, IMPOSSIBLE).astype(dtype)
        log_p = jnp.where(search.ended[:, None], only_end, log_p)
        scores, best = lax.top_k(jnp.ravel(search.scores.read(t)[:, None] + log_p), beam)
        parent, letter = best // len(LETTERS), best % len(LETTERS)
        state = jnp.tanh(state[parent] @ params["recur"] + params["embed"][letter])
        return Search(
            t + 1,
            search.ended[parent] | (letter == END),
            search.scores.write(t + 1, scores),
            search.states.write(t + 1, state),
            search.letters.write(t, letter),
            search.parents.write(t, parent),
        )

    def worth_it(search):
        scores = search.scores.read(search.step)
        hopeful = ~search.ended & (scores - jnp.max(scores) > HOPELESS)
        return (search.step < LONGEST) & jnp.any(hopeful)

    # All hypotheses are the same at first: only one of them counts.
    first = jnp.where(jnp.arange(beam) == 0, 0.0, IMPOSSIBLE).astype(dtype)
    search = while_loop(
        worth_it,
        extend,
        Search(
            jnp.int32(0),
            jnp.zeros(beam, bool),
            TensorArray(dtype, LONGEST + 1, element_shape=(beam,)).write(0, first),
            TensorArray(dtype, LONGEST + 1, element_shape=(beam, hidden)).write(0, jnp.zeros((beam, hidden), dtype)),
            TensorArray(jnp.int32, LONGEST, element_shape=(beam,)),
            TensorArray(jnp.int32, LONGEST, element_shape=(beam,)),
        ),
        max_steps=LONGEST,
    )

    # Follow the back-pointers from the last step to the first. Rows that are not written are zeros: END.
    def back(carry):
        t, hypothesis, words = carry
        letter = search.letters.read(t - 1)[hypothesis]
        return t - 1, search.parents.read(t - 1)[hypothesis], words.write(t - 1, letter)

    words = TensorArray(jnp.int32, LONGEST, element_shape=(beam,))
    _, _, words = while_loop(lambda carry: carry[0] > 0, back, (search.step, jnp.arange(beam, dtype=jnp.int32), words))
    return words.stack().T, search.scores.read(search.step), search.step


def edit_distance(word, other):
    """Count the letters to insert, delete or replace. Both words are padded with END."""
    column = jnp.arange(len(other) + 1)

    def next_row(i, above):
        replaced = jnp.minimum(above[1:] + 1, above[:-1] + (word[i] != other))
        row = jnp.concatenate([above[:1] + 1, replaced])
        return lax.cummin(row - column) + column  # insertions

    # As many rows as the word is long.
    return fori_loop(0, jnp.sum(word != END), next_row, column)[jnp.sum(other != END)]


def expected_error(params, seen, meant, beam):
    """Return the edit distance to the word that was meant, averaged over the hypotheses by their probability."""
    words, scores, _ = beam_search(params, seen, beam)
    errors = jax.vmap(edit_distance, (0, None))(words, meant)
    return jax.nn.softmax(scores) @ errors.astype(scores.dtype)


def loss(params, seen, meant, beam):
    """Return the mean over many words. Each is searched as long as it takes."""
    return jnp.mean(jax.vmap(expected_error, (None, 0, 0, None))(params, seen, meant, beam))


# --- training --------------------------------------------------------------------------------------------------


def train(updates, batch, beam, rate=0.02, seed=0, report=lambda k, loss: None):
    """Return the trained parameters, and the loss before each update."""
    rng = np.random.default_rng(seed)
    params = init_params(rng)
    optimiser = optax.adam(rate, b2=0.99)
    state = optimiser.init(params)

    @jax.jit
    def update(params, state, seen, meant):
        value, gradient = jax.value_and_grad(loss)(params, seen, meant, beam)
        moves, state = optimiser.update(gradient, state)
        return value, optax.apply_updates(params, moves), state

    losses = []
    for k in range(1, updates + 1):
        value, params, state = update(params, state, *make_words(rng, batch))
        losses.append(float(value))
        report(k, losses[-1])
    return params, losses


def spelled(indices, letters):
    return "".join(letters[i] for i in indices).rstrip(".")


def main(updates=700, batch=32, beam=8, seed=0):
    """Train, and show what was learned. Return the losses."""

    def report(k, value):
        if k == 1 or k % max(1, updates // 8) == 0:
            print(f"update {k:4}: {value:.3f} letters wrong in a word, expected over the beam", flush=True)

    params, losses = train(updates, batch, beam, seed=seed, report=report)

    seen, meant = make_words(np.random.default_rng(seed + 1), 300)
    words, scores, steps = jax.jit(jax.vmap(beam_search, (None, 0, None)), static_argnums=2)(params, seen, beam)
    wrong = jax.vmap(edit_distance)(words[:, 0], meant)
    length = int(jnp.sum(meant != END))
    print(
        f"\nNew words: {int(jnp.sum(wrong))} of {length} letters wrong, {int(jnp.sum(wrong == 0))} of 300 words right."
    )
    print("\nseen       meant      steps  the best hypotheses, with their probabilities")
    for k in range(8):
        best = jax.nn.softmax(scores[k])
        found = "  ".join(f"{spelled(words[k, b], LETTERS):8} {best[b]:.2f}" for b in range(min(3, beam)))
        print(f"{spelled(seen[k], SYMBOLS):10} {spelled(meant[k], LETTERS):10} {int(steps[k]):5}  {found}")
    learned = "".join(LETTERS[int(j)] for j in jnp.argmax(params["see"], axis=1)[:-1])
    print(f"\nThe cipher, as learned:  {SYMBOLS[:-1]}  stands for  {learned}")
    truth = "".join(LETTERS[CIPHER.index(symbol)] for symbol in SYMBOLS[:-1])
    print(f"             in truth:  {SYMBOLS[:-1]}  stands for  {truth}")
    return losses


if __name__ == "__main__":
    main()
