"""Fit a differential equation to data through a solver that chooses its own steps.

Between 1900 and 1920 the Hudson's Bay Company counted the pelts of hares and of the lynxes that eat them. Their numbers
rise and fall as Lotka and Volterra say: hares multiply and are eaten, lynxes starve unless they eat. What are the four
rates, and how many animals were there at first? The solver steps from one year to the next in as many steps as the
error allows, by the method of Dormand and Prince: where the error of a step is too large the step is rejected and a
shorter one tried. How many steps there are is known when they are done. So it is a `while_loop`; each accepted step
appends a polynomial to a TensorArray, which grows; and the gradient goes back through the steps that were taken, for
many guesses of the rates at once, each with its own steps.

    python examples/ode.py

prints how the guesses improve, the parameters beside the ones from a Bayesian analysis of the same data, and the two
curves with the steps of the solver under them.

For differential equations in earnest take diffrax, which has many solvers, implicit ones among them, events, controlled
and stochastic equations, and adjoints of its own. This is how such a loop is written, if you need one of your own.
It needs optax: `pip install optax`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tensorarray import TensorArray, while_loop

YEARS = np.arange(1900.0, 1921.0)
HARES = [30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1]  # pelts, in thousands
HARES += [40.3, 57.0, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6, 16.2, 24.7]
LYNXES = [4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4]
LYNXES += [8.0, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6]
PELTS = np.stack([HARES, LYNXES], axis=1)

#: Names of the parameters; the equation has their exponentials, which are positive.
NAMES = ("births", "eaten", "deaths", "gained", "hares", "lynxes")
#: Posterior means of B. Carpenter, "Predator-Prey Population Dynamics: the Lotka-Volterra model in Stan" (2018).
PUBLISHED = (0.55, 0.028, 0.80, 0.024, 34.0, 5.9)


# --- the solver ------------------------------------------------------------------------------------------------

#: The stages of Dormand and Prince: where each is in time, and the weights of the slopes before it. The last stage is
#: the end of the step, of order 5, and the first of the next one.
STAGES = (
    (1 / 5, (1 / 5,)),
    (3 / 10, (3 / 40, 9 / 40)),
    (4 / 5, (44 / 45, -56 / 15, 32 / 9)),
    (8 / 9, (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729)),
    (1, (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656)),
    (1, (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)),
)
#: That end, less the one of order 4 from the same slopes.
ERROR = (-71 / 57600, 0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40)
#: The state in the middle of a step (Shampine 1986), twice the weights.
MIDDLE = (
    *(6025192743 / 30085553152, 0, 51252292925 / 65400821598, -2691868925 / 45128329728),
    *(187940372067 / 1594534317056, -1776094331 / 19743644256, 11237099 / 235043384),
)
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0


class Piece(NamedTuple):
    """The solution in one step, a polynomial of degree 4 in time: 0 at the start of the step, 1 at its end."""

    start: jax.Array
    length: jax.Array
    coefficients: jax.Array  # [5, n], the constant first


class Run(NamedTuple):
    """What the solver carries from one attempt to the next."""

    t: jax.Array
    y: jax.Array  # [n]
    slope: jax.Array  # [n]
    h: jax.Array  # the step to try
    again: jax.Array  # whether the last attempt was rejected
    rejected: jax.Array  # how many were
    pieces: TensorArray


def combined(weights, slopes):
    return sum(w * k for w, k in zip(weights, slopes, strict=True) if w)


def attempt(field, t, y, slope, h):
    """Try a step: return the state and the slope at its end, the error in the state, and the polynomial in between."""
    slopes = [slope]
    for node, weights in STAGES:
        end = y + h * combined(weights, slopes)
        slopes.append(field(t + node * h, end))
    middle = y + h / 2 * combined(MIDDLE, slopes)
    # The cubic with both ends and slopes, and as much of x²(1 - x)² as leads through the middle.
    rise, first, last = end - y, h * slope, h * slopes[-1]
    bend = 16 * (middle - (y + end) / 2 - (first - last) / 8)
    polynomial = [y, first, 3 * rise - 2 * first - last + bend, first + last - 2 * rise - 2 * bend, bend]
    return end, slopes[-1], h * combined(ERROR, slopes), Piece(t, h, jnp.stack(polynomial))


def solve(field, y0, t0, t1, *, tolerance=1e-6, first_step=0.1, max_steps=1000):
    """Solve y' = field(t, y) from t0 to t1.

    Return the pieces of the solution, the number of rejected steps, and whether the solver has come to t1. The pieces
    are a TensorArray whose size is the number of accepted steps. `max_steps` attempts may be too few to come to t1. The
    solution is differentiable in y0 and in all that the field closes over. Steps are chosen, not differentiated: but
    for the tolerance the solution does not depend on them. A rejected attempt must not overflow, or the gradient is
    NaN, as from any `where` between a number and infinity: give a shorter `first_step` then. No later attempt is more
    than ten times as long as an accepted step.
    """

    def step(run):
        end = run.t + run.h
        h = jnp.where(end > t1, t1 - run.t, run.h)
        y, slope, error, piece = attempt(field, run.t, run.y, run.slope, h)
        scale = tolerance * (1 + jnp.maximum(jnp.abs(run.y), jnp.abs(y)))
        error = jax.lax.stop_gradient(jnp.sqrt(jnp.mean((error / scale) ** 2)))
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
        accepted = error < 1
        factor = jnp.clip(SAFETY * error ** (-1 / 5), SHRINK, GROW)
        factor = jnp.where(accepted & run.again, jnp.minimum(factor, 1.0), factor)  # not long again at once
        return Run(
            jnp.where(accepted, jnp.where(end > t1, t1, end), run.t),
            jnp.where(accepted, y, run.y),
            jnp.where(accepted, slope, run.slope),
            h * factor,
            ~accepted,
            run.rejected + ~accepted,
            run.pieces.append(piece, where=accepted),
        )

    t, h = jnp.asarray(t0, y0.dtype), jnp.asarray(first_step, y0.dtype)
    row = Piece(t, h, jnp.zeros((5, *y0.shape), y0.dtype))
    pieces = TensorArray.like(row, size=0, dynamic_size=True, max_size=max_steps)
    run = Run(t, y0, field(t, y0), h, jnp.bool_(False), jnp.int32(0), pieces)
    run = while_loop(lambda run: run.t < t1, step, run, max_steps=max_steps, on_limit="stop")
    return run.pieces, run.rejected, run.t >= t1


def evaluate(pieces, times):
    """Return the solution at some times, [len(times), n], each from the piece in which it lies."""
    starts = jnp.where(pieces.mask(), pieces.stack(pad=True).start, jnp.inf)
    piece = pieces.gather(jnp.searchsorted(starts, times, side="right") - 1)
    x = ((times - piece.start) / piece.length)[:, None]
    value = jnp.zeros_like(piece.coefficients[:, 0])
    for k in reversed(range(5)):
        value = value * x + piece.coefficients[:, k]
    return value


# --- hares and lynxes ------------------------------------------------------------------------------------------


def populations(params, times=YEARS, **options):
    """Return the numbers of both animals at some times, then the pieces of the solution and the rest from `solve`."""
    births, eaten, deaths, gained, *start = jnp.exp(params)

    def field(t, y):
        hares, lynxes = y
        return jnp.stack([(births - eaten * lynxes) * hares, (gained * hares - deaths) * lynxes])

    pieces, rejected, done = solve(field, jnp.stack(start), times[0], times[-1], **options)
    return evaluate(pieces, times), pieces, rejected, done


def loss(params, pelts=PELTS, times=YEARS, **options):
    """Return the mean square of the difference of logarithms, and the numbers of accepted and of rejected steps."""
    found, pieces, rejected, done = populations(params, times, **options)
    # What is not positive has no logarithm: a coarse solution of a bad guess.
    wrong = jnp.mean((jnp.log(jnp.maximum(found, 1e-3)) - jnp.log(pelts)) ** 2)
    return jnp.where(done, wrong, jnp.inf), (pieces.size(), rejected)


# --- fitting ---------------------------------------------------------------------------------------------------

OPTIMISER = optax.adam(0.03, b2=0.99)


def make_guesses(number, seed=0):
    """Make guesses, logarithms of parameters: rough rates and the first year's animals, each off by a random factor."""
    rng = np.random.default_rng(seed)
    guess = np.log([1.0, 0.02, 1.0, 0.02, *PELTS[0]])
    return jnp.asarray(guess + 0.5 * rng.standard_normal((number, len(NAMES))))


@jax.jit
def update(params, state, pelts):
    """Update all guesses. Return their losses and numbers of solver steps, the new parameters and optimiser state."""
    (value, steps), gradient = jax.vmap(jax.value_and_grad(loss, has_aux=True), (0, None))(params, pelts)
    moves, state = OPTIMISER.update(gradient, state)
    return value, steps, optax.apply_updates(params, moves), state


def fit(guesses, updates, pelts=PELTS, report=lambda *args: None):
    """Return the parameters that each guess has led to before the last update, and their losses, [guesses]."""
    params, state = guesses, OPTIMISER.init(guesses)
    for k in range(1, updates + 1):
        guesses = params
        value, steps, params, state = update(guesses, state, pelts)
        report(k, value, steps)
    return guesses, value


# --- what it looks like ----------------------------------------------------------------------------------------


def drawing(params, height=15, columns=4):
    """Draw both curves and the pelts that were counted, `columns` columns a year, over the steps of the solver."""
    times = np.linspace(YEARS[0], YEARS[-1], columns * (len(YEARS) - 1) + 1)
    curves, pieces, _, _ = jax.jit(populations)(params, times)
    top = 1.05 * max(PELTS.max(), float(curves.max()))
    canvas = [[" "] * len(times) for _ in range(height)]
    for values, marks, every in ((np.asarray(curves), "·-", 1), (PELTS, "HL", columns)):
        for k, row in enumerate(values):
            for value, mark in zip(row, marks, strict=True):
                canvas[height - 1 - int(value / top * height)][k * every] = mark
    steps = [" "] * len(times)
    for start in np.asarray(pieces.stack().start):
        steps[round((start - YEARS[0]) * columns)] = "|"
    scale = [f"{top * (1 - k / height):5.0f}" if k % 5 == 0 else "" for k in range(height)]
    labels = "".join(f"{year:<{5 * columns}.0f}" for year in YEARS[::5])
    rows = [*zip(scale, canvas, strict=True), ("", labels), ("steps", steps)]
    return "\n".join(f"{name:5} {''.join(row)}".rstrip() for name, row in rows)


def main(updates=300, guesses=8, seed=0):
    """Fit all guesses, and show the best. Return its parameters and its loss."""

    def report(k, value, steps):
        if str(k).strip("0") in ("1", "3") or k == updates:
            best, middle = np.sqrt(np.min(value)), np.sqrt(np.median(value))
            accepted, rejected = (f"{np.min(x)} to {np.max(x)}" for x in steps)
            print(
                f"update {k:4}: error {best:.3f} of the best guess, {middle:.3f} of the middle one; "
                f"{accepted} steps, and {rejected} rejected",
                flush=True,
            )

    print(f"Root mean square error of the logarithms, from {guesses} guesses of the parameters:")
    params, values = fit(make_guesses(guesses, seed), updates, report=report)
    best = params[jnp.argmin(values)]

    print("\n" + " " * 9 + "".join(f"{name:>9}" for name in NAMES))
    for name, row in {"fitted": np.exp(best), "published": PUBLISHED}.items():
        print(f"{name:9}" + "".join(f"{x:9.3f}" if x < 1 else f"{x:9.1f}" for x in row))
    print("\nThousands of pelts, counted (H, L) and computed, of hares (·) and of lynxes (-):\n")
    print(drawing(best))
    return best, float(jnp.min(values))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
