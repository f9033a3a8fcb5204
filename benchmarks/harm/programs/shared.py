"""Programs that are there already: of the tests, the other benchmarks, the main job, the examples, public libraries."""

import functools

import numpy as np

from benchmarks.harm.program import PROGRAMS, Program, floats, normal, program
from benchmarks.rivals import programs as texts
from benchmarks.rivals.in_jax import DIALECTS
from benchmarks.wild.programs import PROGRAMS as WILD
from examples import attention_decoder, beam_search, ode, rnnt, soft_alignment
from tests.support.catalogue import plain_loops, reported
from tests.support.row_programs import plain, programs

for name, loop in plain_loops.LOOPS.items():
    how = {"by": None} if loop.orders == ("forward",) else {}
    axes = None if name == "divided" else 0  # which has a mesh of its own
    program(lambda r: (floats(r, 1000, 4, scale=0.5),), family="tests", name=name, axes=axes, **how)(loop.f)


def _examples(r):
    return np.zeros(1000, np.float32), np.int32(r.integers(100))


REPORTED = (
    (reported.previous_matrix, normal(500, 4, 4), {}),
    (reported.always_true, normal(500, 4, 4), {}),
    (reported.filled_by_cond, _examples, {"by": None}),
    (reported.filled_by_while, _examples, {"by": None}),
    (reported.popped, lambda r: (floats(r, 1000), np.arange(1000) * 7 % 983), {}),
    (reported.random_sources, normal(2000), {"by": None}),
    (reported.slices_of_rows, normal(500, 8), {}),
    (reported.accumulated, normal(2000, 8), {}),
)
for f, make, how in REPORTED:
    program(make, family="reported", **how)(f)

for of in programs.values():
    program(normal(500, 64), family="main job", name=of.name)(of.with_ops(plain))

PLAIN = DIALECTS["plain"]
RIVALS = (
    (texts.decoder, lambda r: (floats(r, 500, 64), floats(r, 64, 64, scale=0.1)), (0, None)),
    (texts.append, normal(500, 64), 0),
    (texts.lstm, lambda r: (floats(r, 200, 32), floats(r, 96, 128, scale=0.1)), (0, None)),
    (
        texts.beam_search,
        lambda r: (floats(r, 100, 32), floats(r, 32, 32, scale=0.2), floats(r, 32, 32, scale=0.1)),
        (0, None, None),
    ),
)
for f, make, axes in RIVALS:
    program(make, family="rivals", name=f.__name__, axes=axes)(functools.partial(f, PLAIN))


def _loop_of(text, xp):
    return lambda x, n: text(xp, x, n=n, rows=300, max_steps=300)


for name, xp, by in (("while_read_earlier", "lax_while", None), ("masked_scan", "plain", 0)):
    make = lambda r: (floats(r, 64), np.int32(300 - r.integers(100)))  # noqa: E731
    program(make, family="rivals", name=name, by=by)(_loop_of(texts.while_read_earlier, DIALECTS[xp]))


def _one_text(r):
    params, texts = attention_decoder.init_params(r), attention_decoder.make_texts(r, 1, 100, 100, 101)
    return params, texts.packed[0], texts.letters[0]


def _prints(r):
    return soft_alignment.init_params(r), soft_alignment.print_words(r, soft_alignment.random_words(r, 16, 6), 6)


EXAMPLES = (  # all but the first with our loops and arrays
    (attention_decoder.plain_log_likelihood, "attention_decoder_in_plain_jax", _one_text),
    (attention_decoder.loss, "attention_decoder", lambda r: (_one_text(r)[0], attention_decoder.make_texts(r, 8))),
    (
        lambda *args: beam_search.loss(*args, 4),
        "beam_search",
        lambda r: (beam_search.init_params(r), *beam_search.make_words(r, 16)),
    ),
    (lambda *args: ode.loss(*args)[0], "ode", lambda r: (np.asarray(ode.make_guesses(1)[0]),)),
    (rnnt.loss, "rnnt", lambda r: (rnnt.init_params(r), rnnt.make_recordings(r, 16))),
    (soft_alignment.loss, "soft_alignment", _prints),
)
for f, name, make in EXAMPLES:
    program(make, name=name, family="examples", axes=None)(f)


def public(of, size):
    """Return a public program at a size. Its library is imported when its arguments are made."""
    made = functools.cache(lambda: of.make(size))
    by = 0 if of.gradient else None
    return Program("wild", of.name, lambda *args: made()[0](*args), lambda r: made()[1], by, axes=None)


PROGRAMS.extend(public(of, of.small) for of in WILD)
