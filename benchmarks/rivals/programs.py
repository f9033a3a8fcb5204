"""Programs written once for every framework: `xp` has its arithmetic, its loops, and rows that are read and written.

Programs named as in `tests/support/row_programs.py` mean the same, for the frameworks other than JAX. Each
takes what `inputs.inputs` gives (`x` may be an object with `shape` and rows `x[i]`), and returns a scalar.
"""

from benchmarks.inputs import LETTERS

BEAM = 4


def some_row(i, x):
    return (i * 7 + 3) % x.shape[0]


# --- the programs of tests/support/row_programs.py ------------------------------------------------------------


def write(xp, x):
    (b,) = xp.loop(x.shape[0], lambda i, b: (b.write(i, xp.sin(x[i])),), (xp.zeros(x),))
    return xp.sum(xp.dense(b) ** 2)


def read_then_write(xp, x):
    def body(i, b):
        return (b.write(i, xp.tanh(b.read(i // 2) + x[i])),)

    (b,) = xp.loop(x.shape[0], body, (xp.zeros(x),))
    return xp.sum(xp.dense(b) ** 2)


def read_beside_write(xp, x):
    def body(i, b, total):
        seen = b.read(some_row(i, x))
        return b.write(i, xp.sin(x[i])), total + xp.sum(seen**2)

    return xp.loop(x.shape[0], body, (xp.ones(x), xp.sum(x[0]) * 0))[1]


def read_new_after_write(xp, x):
    def body(i, b, total):
        new = b.write(i, xp.sin(x[i]))
        return new, total + xp.sum(new.read(some_row(i, x)) ** 2)

    return xp.loop(x.shape[0], body, (xp.ones(x), xp.sum(x[0]) * 0))[1]


def three_reads(xp, x):
    def body(i, b, total):
        seen = [b.read((i * k + k) % x.shape[0]) for k in (3, 5, 7)]
        return b.write(i, xp.sin(x[i])), total + xp.sum(seen[0] * seen[1] + seen[2] ** 2)

    return xp.loop(x.shape[0], body, (xp.ones(x), xp.sum(x[0]) * 0))[1]


def cross(xp, x):
    def body(i, a, b):
        from_a, from_b = a.read(i // 2), b.read(i // 2)
        return a.write(i, xp.sin(from_b) + x[i]), b.write(i, xp.cos(from_a) * x[i])

    a, b = xp.loop(x.shape[0], body, (xp.zeros(x), xp.ones(x)))
    return xp.sum(xp.dense(a) * xp.dense(b))


def overwrite(xp, x):
    def body(i, b):
        return (b.write(i % 3, xp.tanh(b.read((i + 1) % 3)) + x[i]),)

    (b,) = xp.loop(x.shape[0], body, (xp.zeros(x),))
    return xp.sum(xp.dense(b) ** 2)


def exchange(xp, x):
    def body(i, b):
        j = some_row(i, x)
        one, other = b.read(i), b.read(j)
        return (b.write(i, xp.sin(other)).write(j, one * x[i]),)

    (b,) = xp.loop(x.shape[0], body, (xp.unstack(x),))
    return xp.sum(xp.dense(b) ** 2)


def swap(xp, x):
    def body(i, b, hand):
        j = some_row(i, x)
        old = b.read(j)
        return b.write(j, xp.sin(hand) + x[i]), old

    b, hand = xp.loop(x.shape[0], body, (xp.unstack(x), x[0]))
    return xp.sum(xp.dense(b) ** 2) + xp.sum(hand)


def add(xp, x):
    def body(i, b):
        j = some_row(i, x)
        return (b.write(j, b.read(j) + xp.sin(b.read(i // 2)) * x[i]),)

    (b,) = xp.loop(x.shape[0], body, (xp.unstack(x),))
    return xp.sum(xp.dense(b) ** 2)


def closed_over(xp, x):
    rows = xp.unstack(x)
    (hand,) = xp.loop(x.shape[0], lambda i, hand: (xp.sin(hand + rows.read(some_row(i, x))),), (x[0] * 0,))
    return xp.sum(hand)


def issue_15906(xp, x):
    def body(i, ys):
        return (ys.write(i, x[i] * xp.cast(i) ** 0.5),)

    (ys,) = xp.loop(x.shape[0], body, (xp.zeros(x),))
    return xp.sum(xp.dense(ys))


# --- what TensorArrays are used for ------------------------------------------------------------------------------


def decoder(xp, x, w):
    """The loop of the README: an earlier output and an input are read in every step."""
    rows = xp.unstack(x)

    def body(i, ys):
        return (ys.write(i, xp.tanh(rows.read(i) + xp.matvec(w, ys.read(i // 2)))),)

    (ys,) = xp.loop(x.shape[0], body, (xp.zeros(x).write(0, x[0]),), start=1)
    return xp.sum(xp.dense(ys) ** 2)


def append(xp, x):
    """An array that grows by a row in every step."""
    (ys,) = xp.loop(x.shape[0], lambda i, ys: (ys.append(x[i] * 0.5),), (xp.growing(x),))
    return xp.sum(xp.dense(ys) ** 2)


def map_rows(xp, x):
    """Unstack, read, write, stack."""
    rows = xp.unstack(x)
    (ys,) = xp.loop(x.shape[0], lambda i, ys: (ys.write(i, xp.tanh(rows.read(i))),), (xp.zeros(x),))
    return xp.sum(xp.dense(ys) ** 2)


def lstm(xp, x, w):
    """An LSTM decoder, whose every step also reads one earlier state."""
    width = x.shape[1]
    rows = xp.unstack(x)

    def body(i, states, hidden, cell):
        gates = xp.matvec(w, xp.concat([rows.read(i), hidden, states.read(i // 2)]), transpose=True)
        forget, take, new, out = (gates[k * width : (k + 1) * width] for k in range(4))
        cell = xp.sigmoid(forget) * cell + xp.sigmoid(take) * xp.tanh(new)
        hidden = xp.sigmoid(out) * xp.tanh(cell)
        return states.write(i, hidden), hidden, cell

    states, _, _ = xp.loop(x.shape[0], body, (xp.zeros(x).write(0, x[0]), x[0] * 0, x[0] * 0), start=1)
    return xp.sum(xp.dense(states) ** 2)


def beam_search(xp, x, w, recur):
    """Scores and states of the best hypotheses in every step, then the states along the best one, last to first.

    Differentiable in what is seen (`x`) and in the parameters, through the choices of the search.
    """
    T = x.shape[0]

    def extend(i, states, parents, scores):
        state = xp.tanh(states.read(i))  # [BEAM, hidden]
        log_p = xp.log_softmax(x[i] + xp.matmul(state, w))
        scores, best = xp.top_k(xp.ravel(scores[:, None] + log_p), BEAM)
        parent = best // LETTERS
        grown = xp.matmul(xp.take(state, parent), recur) + xp.cast(best % LETTERS)[:, None] / LETTERS
        # Relative to the best one: sums of thousands of logarithms would leave no digits to compare.
        return states.write(i + 1, grown), parents.write(i, parent), scores - scores[:1]

    start = xp.matmul(xp.zeros_of((BEAM, w.shape[0])), recur)
    first = xp.array([0.0, *[-1e9] * (BEAM - 1)])
    empty = xp.empty(T + 1, (BEAM, w.shape[0])).write(0, start)
    states, parents, scores = xp.loop(T, extend, (empty, xp.empty(T, (BEAM,), integer=True), first))

    def back(i, total, hypothesis):
        at = T - 1 - i
        seen = xp.take(states.read(at + 1), hypothesis)
        return total + xp.sum(seen**2), xp.take(parents.read(at), hypothesis)

    total, _ = xp.loop(T, back, (xp.sum(scores), xp.zeros_of((), integer=True)))
    return total


# --- loops whose number of steps `n` is known at run time (JAX alone) ----------------------------------------------


def while_write(xp, x, w, n, rows, max_steps):
    """x = tanh(w x), kept in every step."""

    def body(carry):
        k, x, ys = carry
        x = xp.tanh(xp.matvec(w, x))
        return k + 1, x, ys.write(k, x)

    carry = (n * 0, x, xp.empty(rows, x.shape))
    _, x, ys = xp.while_loop(lambda carry: carry[0] < n, body, carry, max_steps)
    return xp.sum(xp.dense(ys) ** 2) + xp.sum(x)


def while_read_earlier(xp, x, n, rows, max_steps):
    """A row is written and an earlier one is read in every step."""

    def body(carry):
        k, x, ys = carry
        ys = ys.write(k, x)
        return k + 1, xp.tanh(0.9 * x + ys.read(k // 2)), ys

    carry = (n * 0, x, xp.empty(rows, x.shape))
    _, x, ys = xp.while_loop(lambda carry: carry[0] < n, body, carry, max_steps)
    return xp.sum(xp.dense(ys) ** 2) + xp.sum(x)


def while_layers(xp, x, w, n, rows, max_steps):
    """Six layers of different kinds in a step: for the time of compilation."""

    def body(carry):
        k, x, ys = carry
        ys = ys.write(k, x)
        before = ys.read(k // 2)
        for activation in (xp.tanh, xp.sin, xp.cos, xp.sigmoid, xp.log_softmax, xp.exp):
            x = xp.tanh(activation(xp.matvec(w, x) + before))
        return k + 1, x, ys

    carry = (n * 0, x, xp.empty(rows, x.shape))
    _, x, ys = xp.while_loop(lambda carry: carry[0] < n, body, carry, max_steps)
    return xp.sum(xp.dense(ys) ** 2) + xp.sum(x)


def triangular(xp, x, v, n, rows, max_steps):
    """y[k] = tanh(sum over j < k of v[k - j] y[j] + x[0]): in every step all results so far are used."""

    def body(carry):
        k, ys = carry
        y = xp.tanh(xp.sum(xp.part(v, rows - k, rows) * xp.dense(ys)) + x[0])
        return k + 1, ys.write(k, y)

    _, ys = xp.while_loop(lambda carry: carry[0] < n, body, (n * 0, xp.empty(rows, ())), max_steps)
    return xp.sum(xp.dense(ys) ** 2)
