"""A decoder that unpacks compressed text, by looking back at what it has written itself.

The source is packed much as in LZ77, the method inside of zip: a letter stands for itself, "+3" for "the last three
letters once more" and "-3" for "the last three once more, backwards". So "mur+3" is murmur, "red-3" is redder, and most
letters cannot be found in the source: they are in the decoder's own output, at a place that the source only points to.
The decoder keeps what it has written as rows of a TensorArray and attends to all rows that are there, to one more in
each step. It writes until it writes the end, after a number of steps that nobody knows in advance.

Attention computes with the whole buffer in each step, so reverse mode would have to keep a copy of it for every step,
and in plain JAX it does. `fori_loop` sees that: it keeps the one row that a step overwrites, and puts it back when it
comes to that step on its way back.

    python examples/attention_decoder.py

prints the loss as it falls, then unpacks words that the decoder has never seen, among them longer ones than it was
trained on, with a picture of where it looked for each letter. In the end it shows what the gradient for a long text
takes, here and in plain JAX.
It needs optax: `pip install optax`.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_tensorarray import TensorArray, fori_loop, while_loop

LETTERS = [*". abcdefghijklmnopqrstuvwxyz"]  # what the decoder writes; "." ends a text
COPIES = ["+2", "+3", "+4", "+5", "-2", "-3", "-4", "-5"]
SYMBOLS = LETTERS + COPIES  # what it reads
END = 0
LONGEST = 24  # letters of the longest text that it is trained on
FAR = 10  # so many places back, and more, are far

SHOWN = ["han-3 mur+3ed in no-2", "an-2 and ot-2 eat cous+4 with ban+2as", "ha+2+4+4"]


class Texts(NamedTuple):
    packed: jax.Array  # [number, room] symbols, END behind them
    letters: jax.Array  # [number, room], END behind them
    count: jax.Array  # [number], of letters with one END


def unpacked(symbols):
    """Return the letters that a list of symbols stands for. The decoder has to learn this."""
    letters = []
    for symbol in symbols:
        if symbol in COPIES:
            copied = letters[-int(symbol[1:]) :]
            letters += copied if symbol[0] == "+" else copied[::-1]
        else:
            letters.append(symbol)
    return letters


def as_texts(sources, room):
    """Convert packed texts, each a list of symbols, to arrays."""
    packed, letters = (np.full((len(sources), room), END, np.int32) for _ in range(2))
    count = np.zeros(len(sources), np.int32)
    for k, source in enumerate(sources):
        text = unpacked(source)
        packed[k, : len(source)] = [SYMBOLS.index(symbol) for symbol in source]
        letters[k, : len(text)] = [LETTERS.index(letter) for letter in text]
        count[k] = len(text) + 1
    return Texts(*map(jnp.asarray, (packed, letters, count)))


def make_texts(rng, number, shortest=4, longest=LONGEST, room=LONGEST + 1):
    """Make random texts of `shortest` to `longest` letters, in arrays with room for more."""
    sources = []
    for _ in range(number):
        source, written, length = [], 0, rng.integers(shortest, longest + 1)
        while written < length:
            copy = rng.choice(COPIES)
            copied = int(copy[1:])
            if rng.random() < 0.5 and copied <= min(written, length - written):
                source, written = [*source, copy], written + copied
            else:
                source, written = [*source, rng.choice(LETTERS[1:])], written + 1
        sources.append(source)
    return as_texts(sources, room)


# --- the model -------------------------------------------------------------------------------------------------


def init_params(rng, hidden=40, width=24):
    """Return parameters, about 19,000 numbers."""

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]))

    return {
        "symbols": normal(len(SYMBOLS), width),
        "letters": normal(len(LETTERS), width),
        "query": normal(hidden + width, width),
        "places": normal(FAR + 1, width),  # keys of the places, counted from the last row backwards
        "think": normal(hidden + 2 * width, hidden),
        "say": normal(hidden, len(LETTERS)),
        "gates": normal(hidden + 2 * width, 2 * hidden),
        "recur": normal(hidden + 2 * width, hidden),
        "move": normal(hidden + width, 1),
    }


class Decoding(NamedTuple):
    state: jax.Array  # [hidden]
    pointer: jax.Array  # which symbol of the source is read: a probability for each
    letter: jax.Array  # the last one that was written, END before the first
    rows: TensorArray  # row t: what was the last letter in step t, as [width] numbers


def start(params, symbols, longest):
    """Return the state before the first letter. The pointer is behind the source, and moves on to the first symbol."""
    hidden, (_, width), dtype = params["say"].shape[0], params["letters"].shape, params["letters"].dtype
    pointer = (jnp.arange(symbols) == symbols - 1).astype(dtype)
    rows = TensorArray(dtype, longest, element_shape=(width,))
    return Decoding(jnp.zeros(hidden, dtype), pointer, jnp.int32(END), rows)


def next_letter(params, source, state, pointer, rows, size):
    """Return log-probabilities of the next letter and the attention to each row. Rows from `size` on do not exist."""
    context = pointer @ source
    query = jnp.concatenate([state, context]) @ params["query"]
    place = jnp.arange(len(rows))
    scores = rows @ query + (params["places"] @ query)[jnp.clip(size - 1 - place, 0, FAR)]
    attention = jax.nn.softmax(jnp.where(place < size, scores, -jnp.inf))
    thought = jnp.tanh(jnp.concatenate([state, context, attention @ rows]) @ params["think"])
    return jax.nn.log_softmax(thought @ params["say"]), attention


def take_in(params, source, state, pointer, row):
    """Return state and pointer after a letter, from a gated recurrent unit and a gate for reading on."""
    x = jnp.concatenate([pointer @ source, row])
    keep, reset = jnp.split(jax.nn.sigmoid(jnp.concatenate([state, x]) @ params["gates"]), 2)
    state = keep * state + (1 - keep) * jnp.tanh(jnp.concatenate([reset * state, x]) @ params["recur"])
    move = jax.nn.sigmoid(jnp.concatenate([state, pointer @ source]) @ params["move"])
    return state, move * jnp.roll(pointer, 1) + (1 - move) * pointer


def step(params, source, t, now):
    """Take step t without choosing the next letter. Also return its log-probabilities and the attention to each row."""
    row = params["letters"][now.letter]
    state, pointer = take_in(params, source, now.state, now.pointer, row)
    # The row is written before all rows are used, so there is no use of the old buffer that XLA would keep a copy for.
    rows = now.rows.write(t, row)
    log_p, attention = next_letter(params, source, state, pointer, rows.stack(), t + 1)
    return Decoding(state, pointer, now.letter, rows), log_p, attention


def log_likelihood(params, packed, letters, count):
    """Return the log-probability of the first `count` letters, each given the letters before it."""
    source, letters = params["symbols"][packed], TensorArray.from_array(letters)

    def body(t, carry):
        now, total = carry
        now, log_p, _ = step(params, source, t, now)
        letter = letters.read(t)
        return now._replace(letter=letter), total + log_p[letter]

    longest = len(letters)
    begin = start(params, len(packed), longest), jnp.zeros((), source.dtype)
    return fori_loop(0, count, body, begin, max_steps=longest)[1]


def loss(params, texts):
    """Return the negative log-likelihood of a letter, on average."""
    return -jnp.sum(jax.vmap(log_likelihood, (None, 0, 0, 0))(params, *texts)) / jnp.sum(texts.count)


class Written(NamedTuple):
    count: jax.Array  # of letters with END, if it has come to that
    letters: jax.Array  # [longest], END behind them
    read: jax.Array  # [longest], which symbol of the source was read for each
    attention: jax.Array  # [longest, longest], to each row, for each letter


def decode(params, packed, longest):
    """Decode a source: write the most probable letter in each step, until that letter is END."""
    source = params["symbols"][packed]

    def goes_on(carry):
        t, ended, *_ = carry
        return ~ended & (t < longest)

    def body(carry):
        t, _, now, letters, read, looked = carry
        now, log_p, attention = step(params, source, t, now)
        letter = jnp.argmax(log_p).astype(jnp.int32)
        return (
            t + 1,
            letter == END,
            now._replace(letter=letter),
            letters.write(t, letter),
            read.write(t, jnp.argmax(now.pointer).astype(jnp.int32)),
            looked.write(t, attention),
        )

    letters, read = (TensorArray(jnp.int32, longest, element_shape=()) for _ in range(2))
    looked = TensorArray(source.dtype, longest, element_shape=(longest,))
    begin = jnp.int32(0), jnp.bool_(False), start(params, len(packed), longest), letters, read, looked
    count, _, _, letters, read, looked = while_loop(goes_on, body, begin)
    return Written(count, letters.stack(), read.stack(), looked.stack())


# --- training --------------------------------------------------------------------------------------------------


def train(updates, batch, rate=0.01, seed=0, report=lambda k, loss: None):
    """Return the trained parameters, and the loss before each update."""
    rng = np.random.default_rng(seed)
    params = init_params(rng)
    falling = optax.linear_schedule(rate, 0, updates)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(falling, b2=0.99))
    state = optimiser.init(params)

    @jax.jit
    def update(params, state, texts):
        value, gradient = jax.value_and_grad(loss)(params, texts)
        moves, state = optimiser.update(gradient, state)
        return value, optax.apply_updates(params, moves), state

    losses = []
    for k in range(1, updates + 1):
        value, params, state = update(params, state, make_texts(rng, batch))
        losses.append(float(value))
        report(k, losses[-1])
    return params, losses


# --- what is shown ---------------------------------------------------------------------------------------------


def symbols_of(text):
    """Split a packed text, as it is written in "mur+3", into its symbols."""
    return re.findall(r"[+-]\d|.", text)


def picture(packed, written):
    """Yield a line for each letter: the symbol that was read, the letter, and the attention to the letters before."""
    names = [*"._", *SYMBOLS[2:]]
    letters = [names[i] for i in written.letters[: written.count]]
    yield " " * 8 + "".join(letters[:-1])
    for t, letter in enumerate(letters):
        symbol = names[packed[written.read[t]]]
        marks = "".join(" .:+#"[min(int(5 * a), 4)] for a in written.attention[t, 1 : t + 1])
        yield f"{symbol:>4} {letter:>2} {marks}".rstrip()


def plain_log_likelihood(params, packed, letters):
    """Compute `log_likelihood` in plain JAX, for texts as long as the array, with a buffer in the carry of a scan."""
    source = params["symbols"][packed]
    state, pointer, letter, rows = start(params, len(packed), len(letters))

    def body(carry, letter):
        t, state, pointer, last, rows, total = carry
        row = params["letters"][last]
        state, pointer = take_in(params, source, state, pointer, row)
        rows = rows.at[t].set(row)
        log_p, _ = next_letter(params, source, state, pointer, rows, t + 1)
        return (t + 1, state, pointer, letter, rows, total + log_p[letter]), None

    begin = jnp.int32(0), state, pointer, letter, rows.stack(), jnp.zeros((), source.dtype)
    return lax.scan(body, begin, letters)[0][-1]


def temporary_memory(f, *args):
    """Return the bytes that XLA allocates for a function beside its arguments and results."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def compare(params, lengths, seed=0):
    """Yield the memory of the gradient for one text, here and in plain JAX, for several lengths.

    Both keep the pointer into the source, a number for every symbol, in each step. Only plain JAX keeps all rows in
    each step.
    """
    for length in lengths:
        texts = make_texts(np.random.default_rng(seed), 1, length, length, room=length + 1)
        packed, letters, count = (x[0] for x in texts)
        ours = temporary_memory(jax.grad(log_likelihood), params, packed, letters, count)
        plain = temporary_memory(jax.grad(plain_log_likelihood), params, packed, letters)
        yield length, ours, plain


def main(updates=500, batch=16, lengths=(200, 800), seed=0):
    """Train, and show what was learned. Return the parameters and the losses."""

    def report(k, value):
        if k == 1 or k % max(1, updates // 10) == 0:
            print(f"update {k:4}: {value:.3f} minus the log-probability of a letter", flush=True)

    params, losses = train(updates, batch, seed=seed, report=report)
    room = 4 * LONGEST + 1
    write_all = jax.jit(jax.vmap(lambda params, packed: decode(params, packed, room), (None, 0)))

    print(f"\nNew texts, after training on texts of up to {LONGEST} letters:")
    for length in (LONGEST, 2 * LONGEST, 4 * LONGEST):
        texts = make_texts(np.random.default_rng(seed + 1), 100, length, length, room)
        same = write_all(params, texts.packed).letters[:, :length] == texts.letters[:, :length]
        perfect, right = int(jnp.sum(jnp.all(same, axis=1))), float(jnp.mean(same))
        print(f"{length:4} letters: {perfect:3} of 100 without a mistake, {right:.1%} of the letters right")

    texts = as_texts([symbols_of(source) for source in SHOWN], room)
    written = write_all(params, texts.packed)
    print()
    for k, source in enumerate(SHOWN):
        text = "".join(LETTERS[i] for i in written.letters[k, : written.count[k]])
        print(f"{source}  ->  {text}")
    print("\nThe first of them: the symbol read in each step, the letter written, and where it looked (# at one place;")
    print("nothing where it looked nowhere in particular):\n")
    print(*picture(*jax.tree.map(lambda x: np.asarray(x[0]), (texts.packed, written))), sep="\n")

    print("\nTemporary memory of the gradient for one text:")
    for length, ours, plain in compare(params, lengths, seed):
        print(f"{length:4} letters: {ours / 1e6:5.2f} MB, plain JAX {plain / 1e6:6.2f} MB")
    return params, losses


if __name__ == "__main__":
    main()
