"""The examples: searches and losses as the same thing unrolled in plain Python, and training that learns."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import jit
from scripts import close, example, run

pytestmark = pytest.mark.slow

beam = example("beam_search")
rnnt = example("rnnt")

search = jit(jax.vmap(beam.beam_search, (None, 0, None)), static_argnums=2)
expected_error = jit(jax.value_and_grad(beam.loss), static_argnums=3)
loss = jit(jax.value_and_grad(rnnt.loss))

# --- beam search -----------------------------------------------------------------------------------------------


def unrolled_beam_search(params, seen, width):
    """Lists of letters and their log-probabilities, by Python's lists and NumPy, and the number of steps."""
    params = jax.tree.map(np.asarray, params)
    hypotheses = [([], 0.0, np.zeros(params["recur"].shape[0]))]
    steps = 0
    for symbol in seen:
        best = max(score for _, score, _ in hypotheses)
        if not any(score - best > beam.HOPELESS and word[-1:] != [beam.END] for word, score, _ in hypotheses):
            break
        longer = []
        for word, score, state in hypotheses:
            if word[-1:] == [beam.END]:
                longer.append((word, score, state))
                continue
            scores = params["see"][symbol] + state @ params["say"]
            log_p = scores - np.log(np.sum(np.exp(scores)))
            for letter in range(len(beam.LETTERS)):
                after = np.tanh(state @ params["recur"] + params["embed"][letter])
                longer.append(([*word, letter], score + log_p[letter], after))
        hypotheses = sorted(longer, key=lambda hypothesis: -hypothesis[1])[:width]
        steps += 1
    return [word for word, _, _ in hypotheses], [score for _, score, _ in hypotheses], steps


def log_probability(params, seen, word):
    total, state = 0.0, jnp.zeros(params["recur"].shape[0])
    for symbol, letter in zip(seen, word, strict=False):
        total = total + jax.nn.log_softmax(params["see"][symbol] + state @ params["say"])[letter]
        state = jnp.tanh(state @ params["recur"] + params["embed"][letter])
    return total


def plain_edit_distance(a, b):
    if not a or not b:
        return len(a) + len(b)
    replaced = plain_edit_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(replaced, plain_edit_distance(a[1:], b) + 1, plain_edit_distance(a, b[1:]) + 1)


def without_end(word):
    return tuple(int(letter) for letter in word if letter != beam.END)


@pytest.fixture(scope="module")
def reader():
    """Parameters that have learned something: words end, and so do searches, after different numbers of steps."""
    return run(beam, updates=200, batch=16, beam=6)


def test_beam_search_finds_what_python_lists_find(reader):
    params = reader[0][0]
    seen, _ = beam.make_words(np.random.default_rng(4), 4)
    words, scores, steps = search(params, seen, 6)
    for k in range(len(seen)):
        found, log_p, taken = unrolled_beam_search(params, seen[k].tolist(), 6)
        assert int(steps[k]) == taken
        assert [without_end(w) for w in words[k]] == list(map(without_end, found))
        close(scores[k], np.asarray(log_p))
    assert len(set(steps.tolist())) > 1


def test_expected_error_has_the_gradient_of_the_unrolled_search(reader):
    params = reader[0][0]
    seen, meant = beam.make_words(np.random.default_rng(5), 2)
    searched = []  # (what was seen, the words that are found, how many letters of each are wrong)
    for s, m in zip(seen.tolist(), meant, strict=True):
        words = unrolled_beam_search(params, s, 4)[0]
        wrong = [plain_edit_distance(without_end(word), without_end(m)) for word in words]
        searched.append((s, words, np.asarray(wrong, float)))

    def unrolled(params):
        log_p = [jnp.stack([log_probability(params, s, word) for word in words]) for s, words, _ in searched]
        return sum(jax.nn.softmax(p) @ wrong for p, (_, _, wrong) in zip(log_p, searched, strict=True)) / len(seen)

    found = expected_error(params, seen, meant, 4)
    close(found, in_numpy(jax.value_and_grad(unrolled))(params))
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(found[1])) > 1e-4


def test_training_on_the_errors_of_the_search_reduces_them(reader):
    (_, losses), result, printed = reader
    assert result == losses and np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    assert f"update  200: {losses[-1]:.3f}" in printed and "best hypotheses" in printed


# --- transducer ------------------------------------------------------------------------------------------------


encode, joint, remember = map(jax.jit, (rnnt.encode, rnnt.joint, rnnt.remember))


def unrolled_greedy(params, frames, length):
    """Labels, the frames they come in, and the log-probability of the path."""
    heard, state = encode(params, frames), jnp.zeros(params["recur"].shape[0])
    labels, emitted, total, t = [], [], 0.0, 0
    while t < length:
        log_p = joint(params, heard[t], state)
        label = int(jnp.argmax(log_p)) if len(labels) < rnnt.LONGEST_WORD else rnnt.BLANK
        total = total + log_p[label]
        if label == rnnt.BLANK:
            t += 1
        else:
            labels, emitted, state = [*labels, label], [*emitted, t], remember(params, state, label)
    return labels, emitted, total


def unrolled_log_likelihood(params, frames, length, labels, count):
    """The recursion over all cells of the lattice, by a table of numbers."""
    heard, states = rnnt.encode(params, frames), [jnp.zeros(params["recur"].shape[0])]
    for label in labels[:count]:
        states.append(rnnt.remember(params, states[-1], label))
    log_p = {(t, u): rnnt.joint(params, heard[t], states[u]) for t in range(length) for u in range(count + 1)}
    alpha = {}
    for t in range(length):
        for u in range(count + 1):
            ways = [jnp.float64(0.0)] if t == u == 0 else []
            if t > 0:
                ways.append(alpha[t - 1, u] + log_p[t - 1, u][rnnt.BLANK])
            if u > 0:
                ways.append(alpha[t, u - 1] + log_p[t, u - 1][labels[u - 1]])
            alpha[t, u] = jax.nn.logsumexp(jnp.stack(ways))
    return alpha[length - 1, count] + log_p[length - 1, count][rnnt.BLANK]


@pytest.fixture(scope="module")
def speller():
    return run(rnnt, updates=60, batch=8)


def recordings_as_lists(recordings):
    for frames, length, labels, count in zip(*recordings, strict=True):
        yield frames, int(length), [int(label) for label in labels], int(count)


def test_greedy_decoding_reads_what_a_python_loop_reads(speller):
    params = speller[0][0]
    recordings = rnnt.make_recordings(np.random.default_rng(4), 3)
    counts, labels, emitted, log_p = rnnt.read_all(params, recordings)
    for k, (frames, length, _, _) in enumerate(recordings_as_lists(recordings)):
        found = unrolled_greedy(params, frames, length)
        n = int(counts[k])
        assert (labels[k, :n].tolist(), emitted[k, :n].tolist()) == found[:2]
        assert not labels[k, n:].any()
        close(log_p[k], found[2])


def test_the_decoded_path_has_the_gradient_of_a_python_loop(speller):
    params = speller[0][0]
    recordings = rnnt.make_recordings(np.random.default_rng(5), 2)

    def ours(params):
        return jnp.sum(jax.vmap(rnnt.path_log_p, (None, 0, 0))(params, recordings.frames, recordings.length))

    def unrolled(params):
        return sum(unrolled_greedy(params, frames, n)[2] for frames, n, _, _ in recordings_as_lists(recordings))

    close(jit(jax.value_and_grad(ours))(params), jax.value_and_grad(unrolled)(params))


def test_the_transducer_loss_is_the_sum_over_the_lattice(speller):
    params = speller[0][0]
    recordings = rnnt.make_recordings(np.random.default_rng(6), 2)
    lists = list(recordings_as_lists(recordings))

    def unrolled(params):
        return -sum(unrolled_log_likelihood(params, *one) for one in lists) / 2

    close(loss(params, recordings), in_numpy(jax.value_and_grad(unrolled))(params))


def test_training_a_transducer_reduces_its_loss_and_its_mistakes(speller):
    (_, losses), result, printed = speller
    assert result[0] == losses and np.mean(losses[-10:]) < 0.4 * np.mean(losses[:10])
    assert "update   60: " in printed and "log-probability" in printed
    before, after = map(float, re.findall(r"mistakes cost (\S+)\.\n", printed))
    assert after < 0.9 * before
