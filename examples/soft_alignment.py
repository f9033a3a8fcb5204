"""Sums over all alignments: an edit distance with a soft minimum, and the CTC loss, which learns to read.

The edit distance of two words is the least cost of an alignment of the one with the other. With a soft minimum it
becomes smooth, and all alignments count: D = -T log(sum of exp(-cost / T)) over them, at a temperature T. Its gradient
with respect to the costs is how probable it is that two letters are aligned; with respect to T, it is minus the entropy
of the alignments. As T goes to zero, D becomes the edit distance, and the gradient the best alignment.

The CTC loss is another such sum: the probability of a word, where every column of a picture gives one to each letter,
over all ways to divide the columns among the letters. Nobody has to say where in the picture the letters are.

Both are dynamic programming: a table is filled row by row, each from the one before. The table is a TensorArray in a
loop of as many steps as the word is long, or the picture, and the loop is differentiated. Walking back through the
table of the edit distance, in as many steps as the alignment has, draws alignments at random.

    python examples/soft_alignment.py

draws the alignment of two words as the temperature falls, then learns to read words in dirty print, and shows which
columns it takes for which letter.
It needs optax: `pip install optax`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_tensorarray import TensorArray, fori_loop, while_loop

GAP = 1.0  # cost of a letter that one word has and the other has not
IMPOSSIBLE = -1e9


# --- the edit distance -----------------------------------------------------------------------------------------


def soft_minimum(a, b, temperature):
    return -temperature * jnp.logaddexp(-a / temperature, -b / temperature)


def soft_edit_table(replace, temperature, length):
    """Return a table: row i, column j is the soft edit distance of the first i letters of a word and j of another.

    `replace[i, j]` is the cost of letter i of the one for letter j of the other. There are rows for `length` letters.
    """
    letters, others = replace.shape
    column = GAP * jnp.arange(others + 1, dtype=replace.dtype)
    replace = TensorArray.from_array(replace)

    def next_row(i, table):
        above = table.read(i)
        kept = soft_minimum(above[1:] + GAP, above[:-1] + replace.read(i), temperature)
        row = jnp.concatenate([above[:1] + GAP, kept])
        # Then any number of letters that only the other word has: a soft minimum over all columns to the left.
        return table.write(i + 1, column - temperature * lax.cumlogsumexp((column - row) / temperature))

    table = TensorArray(column.dtype, letters + 1, element_shape=column.shape).write(0, column)
    return fori_loop(0, length, next_row, table, max_steps=letters)


def soft_edit_distance(replace, temperature, length, other):
    """Return the soft edit distance of a word of `length` letters and one of `other`."""
    return soft_edit_table(replace, temperature, length).read(length)[other]


#: How probable it is that letter i is aligned with letter j, [letters, others].
expected_alignment = jax.grad(soft_edit_distance)


def entropy(replace, temperature, length, other):
    """Return the entropy of the alignments. exp(entropy) would be their number, if all were as good as each other."""
    return -jax.grad(soft_edit_distance, argnums=1)(replace, temperature, length, other)


def draw_alignment(key, replace, temperature, length, other):
    """Draw an alignment by its probability. Return its steps, from the end to the start, and how many.

    Step [i, j] is from there. A step to [i - 1, j - 1] aligns two letters, one to [i - 1, j] or [i, j - 1] has a gap.
    """
    table = soft_edit_table(replace, temperature, length)
    letters, others = replace.shape

    def step(carry):
        key, i, j, steps = carry
        above, here = table.read(jnp.maximum(i - 1, 0)), table.read(i)
        costs = jnp.stack([above[j - 1] + replace[i - 1, j - 1], above[j] + GAP, here[j - 1] + GAP])
        # Some of these letters are before the first one.
        costs = jnp.where(jnp.stack([(i > 0) & (j > 0), i > 0, j > 0]), costs, -IMPOSSIBLE)
        key, now = jax.random.split(key)
        way = jax.random.categorical(now, -costs / temperature)
        steps = steps.append(jnp.stack([i, j]))
        return key, i - (way != 2), j - (way != 1), steps

    steps = TensorArray(jnp.int32, 0, True, element_shape=(2,), max_size=letters + others)
    end = key, jnp.int32(length), jnp.int32(other), steps
    steps = while_loop(lambda carry: carry[1] + carry[2] > 0, step, end)[-1]
    return steps.stack(pad=True), steps.size()


# --- connectionist temporal classification ---------------------------------------------------------------------


def log_likelihood(log_p, length, labels, count, blank=0):
    """Return the log-probability of the labels over all alignments (A. Graves et al., ICML 2006, equations 5 to 8).

    `log_p[t]` are log-probabilities of all labels in frame t, of `length` frames. The first `count` of `labels` are
    the word. A word without an alignment in so few frames has a log-probability of about `IMPOSSIBLE`.
    """
    frames = TensorArray.from_array(log_p)
    # Blanks before, between and after the labels, any number of frames for each, none for a blank.
    states = jnp.full(2 * len(labels) + 1, blank).at[1::2].set(labels)
    state = jnp.arange(len(states))
    # A blank is left out between different labels.
    leap = (state % 2 == 1) & (state > 1) & (states != jnp.roll(states, 2))

    def next_row(t, table):
        before = table.read(t - 1)
        stepped = jnp.where(state > 0, jnp.roll(before, 1), IMPOSSIBLE)
        leapt = jnp.where(leap, jnp.roll(before, 2), IMPOSSIBLE)
        return table.write(t, jnp.logaddexp(jnp.logaddexp(before, stepped), leapt) + frames.read(t)[states])

    first = jnp.where(state < 2, frames.read(0)[states], IMPOSSIBLE)
    table = TensorArray(log_p.dtype, len(log_p), element_shape=first.shape).write(0, first)
    table = fori_loop(1, length, next_row, table, max_steps=len(log_p))
    last = table.read(length - 1)
    # On the last label, or on the blank after it.
    return jnp.logaddexp(last[2 * count], jnp.where(count > 0, last[2 * count - 1], IMPOSSIBLE))


# --- noisy print -----------------------------------------------------------------------------------------------

LABELS = "-ACEHILMNOT"  # "-" is the blank
BLANK = 0
FONT = """
    .##.  .###  ####  #..#  ###  #...  #...#  #...#  .##.  #####
    #..#  #...  #...  #..#  .#.  #...  ##.##  ##..#  #..#  ..#..
    ####  #...  ###.  ####  .#.  #...  #.#.#  #.#.#  #..#  ..#..
    #..#  #...  #...  #..#  .#.  #...  #...#  #..##  #..#  ..#..
    #..#  .###  ####  #..#  ###  ####  #...#  #...#  .##.  ..#..
"""
LOOKS = {
    letter: np.array([[pixel == "#" for pixel in row] for row in rows]).T
    for letter, rows in zip(LABELS[1:], zip(*map(str.split, FONT.strip().splitlines()), strict=True), strict=True)
}
HEIGHT = 5
WIDEST = 2 * 5 + 2  # columns of a letter and the space behind it
REACH = 5  # so many columns on both sides of one are seen with it


class Prints(NamedTuple):
    columns: jax.Array  # [number, longest, HEIGHT], 0 for white and 1 for black
    length: jax.Array  # [number], of columns
    labels: jax.Array  # [number, longest word]
    count: jax.Array  # [number], of labels


def print_words(rng, words, longest, dirt=0.03):
    """Make prints of words of up to `longest` letters. Columns are doubled and pixels are flipped, at random."""
    columns = np.zeros((len(words), 1 + WIDEST * longest, HEIGHT))
    labels = np.full((len(words), longest), BLANK, np.int32)
    length, count = np.zeros(len(words), np.int32), np.zeros(len(words), np.int32)
    for k, word in enumerate(words):
        at = 1
        for u, letter in enumerate(word):
            labels[k, u] = LABELS.index(letter)
            look = np.repeat(LOOKS[letter], rng.integers(1, 3, len(LOOKS[letter])), axis=0)
            columns[k, at : at + len(look)] = look
            at += len(look) + rng.integers(1, 3)
        length[k], count[k] = at, len(word)
        columns[k, :at] = columns[k, :at] != (rng.random((at, HEIGHT)) < dirt)
    return Prints(*map(jnp.asarray, (columns, length, labels, count)))


def random_words(rng, number, longest):
    return ["".join(rng.choice([*LABELS[1:]], rng.integers(1, longest + 1))) for _ in range(number)]


# --- the reader ------------------------------------------------------------------------------------------------


def init_params(rng, hidden=64):
    """Return parameters, about 4,300 numbers."""

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]))

    return {
        "see": normal((2 * REACH + 1) * HEIGHT, hidden),
        "bias": jnp.zeros(hidden),
        "say": normal(hidden, len(LABELS)),
    }


def read_columns(params, columns):
    """Return log-probabilities of the labels, [columns, labels], from each column and its neighbours."""
    wide = jnp.pad(columns, ((REACH, REACH), (0, 0)))
    window = jnp.concatenate([wide[k : k + len(columns)] for k in range(2 * REACH + 1)], axis=1)
    return jax.nn.log_softmax(jnp.tanh(window @ params["see"] + params["bias"]) @ params["say"])


def loss(params, prints):
    """Return the negative log-likelihood of a letter, on average."""

    def one(columns, length, labels, count):
        return log_likelihood(read_columns(params, columns), length, labels, count)

    return -jnp.sum(jax.vmap(one)(*prints)) / jnp.sum(prints.count)


def most_probable(params, prints):
    """Return the most probable label of each column, a list for every word."""
    labels = jax.vmap(lambda columns: jnp.argmax(read_columns(params, columns), axis=-1))(prints.columns)
    return [row[:n] for row, n in zip(labels.tolist(), prints.length.tolist(), strict=True)]


def collapsed(labels):
    """Return the word that labels of columns stand for. Repeated labels count once, and blanks are left out."""
    return "".join(LABELS[b] for a, b in zip([BLANK, *labels[:-1]], labels, strict=True) if b not in (a, BLANK))


# --- training --------------------------------------------------------------------------------------------------


def train(updates, batch, rate=0.02, longest=6, seed=0, report=lambda k, loss, params: None):
    """Return the trained parameters, and the loss before each update."""
    rng = np.random.default_rng(seed)
    params = init_params(rng)
    optimiser = optax.adam(optax.linear_schedule(rate, 0, updates), b2=0.99)
    state = optimiser.init(params)

    @jax.jit
    def update(params, state, prints):
        value, gradient = jax.value_and_grad(loss)(params, prints)
        moves, state = optimiser.update(gradient, state)
        return value, optax.apply_updates(params, moves), state

    losses = []
    for k in range(1, updates + 1):
        prints = print_words(rng, random_words(rng, batch, longest), longest)
        value, params, state = update(params, state, prints)
        losses.append(float(value))
        report(k, losses[-1], params)
    return params, losses


# --- what is shown ---------------------------------------------------------------------------------------------


def shaded(word, other, alignment):
    """Yield a line with the letters of the other word, then a line for each letter of the word."""
    yield "  " + " ".join(other)
    for letter, row in zip(word, alignment, strict=True):
        yield f"{letter} " + " ".join(" .:+#"[min(int(5 * p), 4)] for p in row)


def written_out(word, other, steps):
    """Return an alignment in two lines, with a dash for each gap."""
    lines = "", ""
    for (i, j), (next_i, next_j) in zip(steps, [*steps[1:], (0, 0)], strict=True):
        lines = (word[i - 1] if next_i < i else "-") + lines[0], (other[j - 1] if next_j < j else "-") + lines[1]
    return lines


def show_alignments(word, other, temperatures, drawn=4, seed=0):
    """Print the soft alignment of two words at each of the temperatures, and some of its alignments."""
    replace = jnp.asarray([[float(a != b) for b in other] for a in word])
    sizes = len(word), len(other)

    @jax.jit
    def look(temperature, keys):
        distance = soft_edit_distance(replace, temperature, *sizes)
        many = jnp.exp(entropy(replace, temperature, *sizes))
        draws = jax.vmap(draw_alignment, (0, None, None, None, None))(keys, replace, temperature, *sizes)
        return distance, many, expected_alignment(replace, temperature, *sizes), draws

    pictures = []
    for temperature in temperatures:
        distance, many, alignment, draws = look(temperature, jax.random.split(jax.random.key(seed), drawn))
        lines = [f"T = {temperature}", f"distance {distance:.2f}", f"number {many:.0f}", ""]
        lines += [*shaded(word, other, np.asarray(alignment)), ""]
        for steps, count in zip(*map(np.asarray, draws), strict=True):
            lines += [*written_out(word, other, steps[:count].tolist()), ""]
        pictures.append(lines)
    width = max(len(line) for lines in pictures for line in lines) + 4
    for lines in zip(*pictures, strict=True):
        print("".join(f"{line:{width}}" for line in lines).rstrip())


def main(updates=1500, batch=16, words=("MAMMOTH", "CHINCHILLA"), seed=0):
    """Align, train, and show what was learned. Return the parameters and the losses."""
    print("Soft alignments at a temperature T: their distance, the number of them that count, how probable it is")
    print("that two letters are aligned (# is certain), and some that were drawn at random.\n")
    show_alignments("saturday", "sunday", (1.0, 0.4, 0.1))

    rng = np.random.default_rng(seed + 2)
    prints = print_words(rng, words, max(map(len, words)))

    def report(k, value, params):
        if k in (1, 50, 100, 200, 400) or k == updates:
            read = collapsed(most_probable(params, prints)[0])
            print(f"update {k:4}: {value:6.3f} minus the log-probability of a letter; {words[0]} reads {read}")

    params, losses = train(updates, batch, seed=seed, report=report)
    new = random_words(rng, 200, 6)
    read = [collapsed(labels) for labels in most_probable(params, print_words(rng, new, 6))]
    print(f"\n{sum(map(str.__eq__, new, read))} of 200 new words are read without a mistake.\n")
    for columns, labels in zip(prints.columns, most_probable(params, prints), strict=True):
        for row in np.asarray(columns[: len(labels)]).T:
            print("".join(" #"[int(pixel)] for pixel in row).rstrip())
        print(f"{''.join(LABELS[label] for label in labels)}  {collapsed(labels)}\n")
    return params, losses


if __name__ == "__main__":
    main()
