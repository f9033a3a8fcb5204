"""The examples of sequences: a decoder as a Python loop over lists, and sums over alignments as all of them."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_numpy import in_numpy
from jax import jit
from scripts import close, example, run

from jax_tensorarray.doctor import loop_copies

pytestmark = pytest.mark.slow

decoder = example("attention_decoder")
soft = example("soft_alignment")

# --- decoder ---------------------------------------------------------------------------------------------------


def unrolled_step(params, source, state, pointer, rows):
    """Log-probabilities and attention, with a list of rows and a score for each."""
    query = jnp.concatenate([state, pointer @ source]) @ params["query"]
    back = [min(len(rows) - 1 - t, decoder.FAR) for t in range(len(rows))]
    scores = jnp.stack([row @ query + params["places"][d] @ query for row, d in zip(rows, back, strict=True)])
    attention = jnp.exp(scores) / jnp.sum(jnp.exp(scores))
    seen = sum(a * row for a, row in zip(attention, rows, strict=True))
    thought = jnp.tanh(jnp.concatenate([state, pointer @ source, seen]) @ params["think"])
    scores = thought @ params["say"]
    return scores - jnp.log(jnp.sum(jnp.exp(scores))), attention


def unrolled_take_in(params, source, state, pointer, rows, letter):
    rows = [*rows, params["letters"][letter]]
    return *decoder.take_in(params, source, state, pointer, rows[-1]), rows


def unrolled_start(params, packed):
    """Source, state, pointer and rows, before the first step."""
    return params["symbols"][packed], jnp.zeros(params["say"].shape[0]), jnp.eye(len(packed))[-1], []


def unrolled_log_likelihood(params, packed, letters):
    source, *now = unrolled_start(params, packed)
    total, last = 0.0, decoder.END
    for letter in letters:
        now = unrolled_take_in(params, source, *now, last)
        total, last = total + unrolled_step(params, source, *now)[0][letter], letter
    return total


def unrolled_decode(params, packed, longest):
    """Letters, the symbols that were read, and attention, as lists."""
    source, *now = unrolled_start(params, packed)
    letters, read, looked = [], [], []
    while len(letters) < longest and decoder.END not in letters:
        last = letters[-1] if letters else decoder.END
        now = in_numpy(lambda *now, last=last: unrolled_take_in(params, source, *now, last))(*now)
        log_p, attention = in_numpy(unrolled_step)(params, source, *now)
        letters.append(int(np.argmax(log_p)))
        read.append(int(np.argmax(now[1])))
        looked.append(attention)
    return letters, read, looked


@pytest.fixture(scope="module")
def unpacker():
    return run(decoder, updates=120, batch=8, lengths=(160,))


@pytest.fixture(scope="module")
def decode():
    return jit(jax.vmap(decoder.decode, (None, 0, None)), static_argnums=2)


def test_the_loss_has_the_gradient_of_a_loop_over_lists(unpacker):
    texts = decoder.make_texts(np.random.default_rng(4), 2, 4, 9, room=10)
    counts = texts.count.tolist()
    assert len(set(counts)) > 1

    def unrolled(params):
        one_by_one = zip(*map(np.asarray, texts[:2]), counts, strict=True)
        log_p = [unrolled_log_likelihood(params, packed, letters[:count]) for packed, letters, count in one_by_one]
        return -sum(log_p) / sum(counts)

    found = jit(jax.value_and_grad(decoder.loss))(unpacker[0][0], texts)
    close(found, in_numpy(jax.value_and_grad(unrolled))(unpacker[0][0]))


def test_decoding_writes_what_a_python_loop_writes(unpacker, decode):
    params = unpacker[0][0]
    texts, longest = decoder.make_texts(np.random.default_rng(5), 3, 4, 8, room=10), 10
    written = decode(params, texts.packed, longest)
    for k, packed in enumerate(texts.packed):
        letters, read, looked = unrolled_decode(params, packed, longest)
        count = int(written.count[k])
        assert (written.letters[k, :count].tolist(), written.read[k, :count].tolist()) == (letters, read)
        assert not written.letters[k, count:].any()
        for t, attention in enumerate(looked):
            close(written.attention[k, t], np.pad(attention, (0, longest - t - 1)))
    # Some end, and some write on as long as there is room.
    assert len(set(written.count.tolist())) > 1


def test_the_forward_loop_copies_no_rows():
    params, texts = decoder.init_params(np.random.default_rng(0)), decoder.make_texts(np.random.default_rng(0), 1)
    assert not loop_copies(decoder.log_likelihood, min_bytes=0)(params, *(x[0] for x in texts))


def test_the_decoder_learns_and_shows_what_it_writes(unpacker):
    (_, losses), _, printed = unpacker
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert f"update  120: {losses[-1]:.3f}" in printed
    assert "han-3 mur+3ed in no-2  ->  " in printed


def test_a_long_text_takes_less_memory_than_in_plain_jax(unpacker):
    ours, plain = map(float, re.search(r"160 letters: +(\S+) MB, plain JAX +(\S+) MB", unpacker[-1]).groups())
    assert 6 * ours < plain


# --- soft edit distance ----------------------------------------------------------------------------------------


def alignments(n, m):
    """All alignments of n letters with m, each as its pairs."""
    if not n or not m:
        return [[]]
    paired = [[*pairs, (n - 1, m - 1)] for pairs in alignments(n - 1, m - 1)]
    return paired + alignments(n - 1, m) + alignments(n, m - 1)


@pytest.fixture(scope="module")
def sums():
    """The distance, the expected alignment and the entropy."""
    functions = soft.soft_edit_distance, soft.expected_alignment, soft.entropy
    return jit(lambda *args: tuple(f(*args) for f in functions))


@pytest.mark.parametrize(("n", "m"), [(3, 4), (4, 2), (0, 3), (3, 0)])
def test_the_soft_edit_distance_is_a_sum_over_all_alignments(sums, n, m):
    replace, temperature = np.random.default_rng(0).uniform(0, 2, (4, 4)), 0.7
    every = alignments(n, m)
    costs = [sum(replace[p] for p in pairs) + soft.GAP * (n + m - 2 * len(pairs)) for pairs in every]
    weights = np.exp(-np.asarray(costs) / temperature)
    probability = weights / weights.sum()
    aligned = np.zeros((4, 4))
    for p, pairs in zip(probability, every, strict=True):
        for pair in pairs:
            aligned[pair] += p
    entropy = -np.sum(probability * np.log(probability))
    close(sums(jnp.asarray(replace), temperature, n, m), (-temperature * np.log(weights.sum()), aligned, entropy))


def test_drawn_alignments_are_as_frequent_as_they_are_probable(sums):
    replace, temperature, draws = jnp.asarray(np.random.default_rng(4).uniform(0, 2, (4, 4))), 0.6, 4000
    draw = jit(jax.vmap(soft.draw_alignment, (0, None, None, None, None)))
    steps, count = map(np.asarray, draw(jax.random.split(jax.random.key(0), draws), replace, temperature, 3, 3))
    aligned = np.zeros(replace.shape)
    for path, taken in zip(steps.tolist(), count.tolist(), strict=True):
        assert path[0] == [3, 3] and not any(map(any, path[taken:]))
        for (i, j), (next_i, next_j) in itertools.pairwise([*path[:taken], [0, 0]]):
            assert (i - next_i, j - next_j) in ((1, 1), (1, 0), (0, 1))
            if i > next_i and j > next_j:
                aligned[next_i, next_j] += 1
    expected = sums(replace, temperature, 3, 3)[1]
    np.testing.assert_allclose(aligned / draws, expected, atol=4 * 0.5 / math.sqrt(draws))
    assert set(count.tolist()) == {3, 4, 5, 6}


# --- CTC -------------------------------------------------------------------------------------------------------


def enumerated_log_likelihood(log_p, length, labels):
    """The sum over all labellings of the frames that collapse to the labels."""
    ways = []
    for path in itertools.product(range(log_p.shape[1]), repeat=length):
        if [b for a, b in zip((0, *path), path, strict=False) if b not in (a, 0)] == labels:
            ways.append(sum(log_p[t, k] for t, k in enumerate(path)))
    return jnp.log(jnp.sum(jnp.exp(jnp.stack(ways))))


@pytest.fixture(scope="module")
def ctc():
    return jit(jax.value_and_grad(soft.log_likelihood))


@pytest.mark.parametrize("labels", [[], [1], [2, 1], [1, 1], [2, 2, 1]], ids=str)
def test_ctc_is_the_sum_over_all_labellings_of_the_frames(ctc, labels):
    log_p = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(5).standard_normal((6, 3))))
    padded = jnp.asarray(labels + [0] * (3 - len(labels)))
    found = ctc(log_p, 5, padded, len(labels))
    close(found, in_numpy(jax.value_and_grad(lambda p: enumerated_log_likelihood(p, 5, labels)))(log_p))
    assert not found[1][5:].any()


def test_ctc_is_hopeless_where_there_are_too_few_frames(ctc):
    log_p, labels = jnp.log(jnp.full((6, 3), 1 / 3)), jnp.asarray([1, 1, 0])
    assert ctc(log_p, 2, labels, 2)[0] < soft.IMPOSSIBLE / 2
    close(ctc(log_p, 3, labels, 2)[0], 3 * math.log(1 / 3))


@pytest.fixture(scope="module")
def reader():
    return run(soft, updates=250, batch=8, words=("TEA",))


def test_a_reader_learns_and_shows_what_it_reads(reader):
    (_, losses), _, printed = reader
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[20:30])
    assert f"update  250: {losses[-1]:6.3f}" in printed
    read = int(re.search(r"(\d+) of 200 new words are read", printed).group(1))
    assert read > 20
