"""Programs of public libraries, as their documentation writes them. `n` is what grows."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

#: Makes a function and its arguments from a size.
Make = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]


class Program(NamedTuple):
    """A program: `kind` and `what` describe it, `small` and `large` are two of its sizes.

    `gradient` says whether the sum of its results is differentiated by its first argument too. `note` says what its
    maintainers could change, or why nothing is gained.
    """

    library: str
    kind: str
    what: str
    n: str
    small: int
    large: int
    make: Make
    gradient: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.make.__name__

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Three sizes, each so many times the one before: `in_place` decides by size whether to rewrite."""
        return self.small**2 // self.large, self.small, self.large


PROGRAMS: list[Program] = []


def program(library: str, kind: str, what: str, n: str, small: int, large: int, **more: Any) -> Callable[[Make], Make]:
    """Register what makes a program."""

    def register(make: Make) -> Make:
        PROGRAMS.append(Program(library, kind, what, n, small, large, make, **more))
        return make

    return register


KEY = jax.random.key(0)


@program(
    "mctx",
    "tree search",
    "gumbel_muzero_policy, 16 roots, 32 actions",
    "simulations",
    100,
    400,
    note="""`backward` is a `while_loop` under `vmap`, and JAX selects between whole trees at every level. Write one
loop for the batch, `while jnp.any(index != ROOT_INDEX)`, and let a finished search write out of range:
`x.at[batch_range, jnp.where(going, parent, n)].set(v, mode="drop")`. In one run with 400 simulations this gave the
same trees bit for bit, 5.0 times as fast as the original; `in_place` was 7.1 times as fast. Two arrays are still
copied.""",
)
def mctx_search(n: int) -> Any:
    import mctx

    roots, actions, width = 16, 32, 16

    def recurrent(params: Any, key: Any, action: Any, state: Any) -> Any:
        state = jnp.tanh(state @ params["w"] + jax.nn.one_hot(action, actions) @ params["a"])
        step = mctx.RecurrentFnOutput(
            reward=state[:, 0],
            discount=jnp.full(roots, 0.97),
            prior_logits=state @ params["p"],
            value=state @ params["v"],
        )
        return step, state

    keys = jax.random.split(KEY, 6)
    shapes = {"w": (width, width), "a": (actions, width), "p": (width, actions), "v": (width,)}
    params = {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items(), strict=False)}
    logits, state = jax.random.normal(keys[4], (roots, actions)), jax.random.normal(keys[5], (roots, width))
    root = mctx.RootFnOutput(prior_logits=logits, value=jnp.zeros(roots), embedding=state)

    def search(key: Any) -> Any:
        return mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=n)

    return search, (KEY,)


@program(
    "optax",
    "assignment",
    "assignment.hungarian_algorithm, vmap of 16",
    "rows",
    32,
    128,
    note="""Each example copies vectors of 130 numbers. Copying them takes no longer than writing one row.""",
)
def optax_assignment(n: int) -> Any:
    from optax import assignment

    costs = jax.random.uniform(KEY, (16, n, n))
    return jax.vmap(assignment.hungarian_algorithm), (costs,)


@program("optax", "optimiser", "lbfgs on Rosenbrock's function, 100 steps", "memory", 50, 200)
def optax_lbfgs(n: int) -> Any:
    import optax

    def rosenbrock(x: Any) -> Any:
        return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    def minimized(x: Any) -> Any:
        method = optax.lbfgs(memory_size=n)
        value_and_grad = optax.value_and_grad_from_state(rosenbrock)

        def step(carry: Any, _: Any) -> Any:
            x, state = carry
            value, grad = value_and_grad(x, state=state)
            update, state = method.update(grad, state, x, value=value, grad=grad, value_fn=rosenbrock)
            return (optax.apply_updates(x, update), state), value

        return lax.scan(step, (x, method.init(x)), None, length=100)[1]

    return minimized, (jnp.linspace(-1, 1, 100),)


@program(
    "ott-jax",
    "dynamic programming",
    "univariate.north_west_solver",
    "points",
    1000,
    4000,
    gradient=True,
    note="""The loop carries the marginals, the duals and the pairs, and a `cond` under `vmap` selects between whole
arrays of them. A step needs only single numbers of the step before. Let a `lax.scan` carry `i`, `j`, the rests of both
masses and the two last duals, stack its other outputs, and write the duals by one `.at[].set` after the loop. In one
run with 4000 points this was 23 times as fast, and its gradient 350 times.""",
)
def ott_north_west(n: int) -> Any:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import univariate

    keys = jax.random.split(KEY)
    x, y = (jax.random.normal(key, (n, 1)) for key in keys)

    def cost(x: Any) -> Any:
        problem = linear_problem.LinearProblem(pointcloud.PointCloud(x, y))
        return univariate.north_west_solver(problem).ot_costs

    return cost, (x,)


@program(
    "ott-jax", "solver", "sinkhorn without implicit differentiation, 100 iterations", "points", 64, 256, gradient=True
)
def ott_sinkhorn(n: int) -> Any:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    keys = jax.random.split(KEY)
    x, y = (jax.random.normal(key, (n, 4)) for key in keys)
    solve = sinkhorn.Sinkhorn(implicit_diff=None, min_iterations=100, max_iterations=100)

    def cost(x: Any) -> Any:
        return solve(linear_problem.LinearProblem(pointcloud.PointCloud(x, y))).reg_ot_cost

    return cost, (x,)


@program(
    "matfree",
    "solver",
    "low_rank.cholesky_partial_pivot of a Gram matrix",
    "rank",
    100,
    400,
    gradient=True,
    note="""`_swap_rows` writes one row and then the other, and reads the first version in between. Read both rows and
write both at once: `arr.at[jnp.stack([i, j])].set(arr[jnp.stack([j, i])])`. In one run at rank 400 this was 1.9 times
as fast, as `in_place` was. In the gradient, the cotangent of `L @ L[i]` is the whole factor in each step, which is
unavoidable. `in_place` copies nothing else, and stores rows where JAX stores the factor.""",
)
def matfree_cholesky(n: int) -> Any:
    from matfree import low_rank

    x = jax.random.normal(KEY, (800, 3))

    def factor(x: Any) -> Any:
        def element(i: Any, j: Any) -> Any:
            return jnp.exp(-jnp.sum((x[i] - x[j]) ** 2)) + 0.1 * (i == j)

        return low_rank.cholesky_partial_pivot(element, nrows=len(x), rank=n)()[0]

    return factor, (x,)


@program(
    "matfree",
    "solver",
    "decomp.tridiag_sym, Lanczos without custom_vjp",
    "vectors",
    25,
    100,
    gradient=True,
    note="""With 200 vectors the gradient is chaotic in single precision: if the input changes by 1e-7, the gradient
changes by a third. In double precision `in_place` agrees with plain JAX to 13 digits.""",
)
def matfree_lanczos(n: int) -> Any:
    from matfree import decomp

    diagonal = jnp.linspace(1, 100, 2000)
    decompose = decomp.tridiag_sym(n, reortho="none", custom_vjp=False, materialize=False)

    def decomposed(diagonal: Any) -> Any:
        found = decompose(lambda x, d: d * x + 0.1 * jnp.roll(x, 1) + 0.1 * jnp.roll(x, -1), jnp.ones(2000), diagonal)
        return found.J_small

    return decomposed, (diagonal,)


@program(
    "matfree",
    "solver",
    "decomp.hessenberg, Arnoldi without custom_vjp",
    "vectors",
    50,
    200,
    gradient=True,
    note="""Every step multiplies by all vectors so far, and JAX stores all of them for each step. `in_place` stores
rows. The cotangent of that product has all vectors in each step, and one copy of it is left. We switched the library's
own `custom_vjp` off for this measurement; it avoids the problem.""",
)
def matfree_arnoldi(n: int) -> Any:
    from matfree import decomp

    matrix = jax.random.normal(KEY, (400, 400)) / 20
    decompose = decomp.hessenberg(n, reortho="none", custom_vjp=False)
    return lambda matrix: decompose(lambda x, m: m @ x, jnp.ones(400), matrix).J_small, (matrix,)


@program("jax", "solver", "scipy.sparse.linalg.gmres, one restart", "restart", 50, 200)
def jax_gmres(n: int) -> Any:
    from jax.scipy.sparse.linalg import gmres

    matrix = jnp.eye(1000) * 2 + jax.random.normal(KEY, (1000, 1000)) / 40
    return lambda b: gmres(lambda x: matrix @ x, b, restart=n, maxiter=1, solve_method="incremental")[0], (
        jnp.ones(1000),
    )


@program(
    "jaxkd",
    "graph and tree",
    "nearest neighbours in a k-d tree, 256 queries",
    "neighbours",
    16,
    64,
    note="""The list of each query has at most 64 neighbours. Selecting the whole list takes no longer than writing one
neighbour.""",
)
def jaxkd_neighbours(n: int) -> Any:
    import jaxkd

    points = jax.random.normal(KEY, (5000, 3))
    return lambda points: jaxkd.build_and_query(points, points[:256], k=n), (points,)


@program(
    "jaxscape", "graph and tree", "LCPDistance, Bellman-Ford from 8 vertices", "side of a grid", 16, 32, gradient=True
)
def jaxscape_paths(n: int) -> Any:
    import jaxscape

    def distance(grid: Any) -> Any:
        graph = jaxscape.GridGraph(grid, fun=lambda x, y: (x + y) / 2)
        return jaxscape.LCPDistance()(graph, sources=jnp.arange(8), targets=jnp.arange(n * n))

    return distance, (jax.random.uniform(KEY, (n, n), minval=0.1),)


@program("diffrax", "solver", "Tsit5 with SaveAt(ts), 64 variables", "saved times", 250, 1000, gradient=True)
def diffrax_saved(n: int) -> Any:
    import diffrax

    def solved(y: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jnp.sin(jnp.roll(y, 1)) - y),
            diffrax.Tsit5(),
            0.0,
            10.0,
            10.0 / n,
            y,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0, 10, n)),
            stepsize_controller=diffrax.PIDController(1e-4, 1e-4, dtmax=10.0 / n),
            max_steps=2 * n,
        ).ys

    return solved, (jnp.linspace(-1, 1, 64),)


@program(
    "equinox",
    "solver",
    "a bounded while_loop over rows",
    "steps",
    64,
    256,
    gradient=True,
    note="""The loop copies its carry and selects between the copies. The argument `buffers=lambda carry: carry[1]`
tells it which array is written, but does not help if the loop reads rows too.""",
)
def equinox_loop(n: int) -> Any:
    from equinox.internal import while_loop

    def filled(x: Any) -> Any:
        def body(carry: Any) -> Any:
            i, rows = carry
            return i + 1, rows.at[i].set(jnp.sin(rows[i - 1]) + rows[i // 2])

        return while_loop(lambda c: c[0] < n, body, (1, x), max_steps=n, kind="bounded")[1]

    return filled, (jnp.ones((n, 64)),)


@program(
    "blackjax",
    "sampler",
    "nuts, 16 chains of 20 draws",
    "dimensions",
    100,
    400,
    note="""A `cond` within two `while_loop`s under `vmap` writes the checkpoints of a chain, and JAX selects between
all of them in each loop. `in_place` masks the write and carries the checkpoints through the loops. No array of 4 KiB
or more is copied or selected.""",
)
def blackjax_nuts(n: int) -> Any:
    import blackjax

    def chain(key: Any) -> Any:
        nuts = blackjax.nuts(lambda x: -0.5 * jnp.sum(x**2 * jnp.linspace(1, 9, n)), 0.1, jnp.ones(n))

        def step(state: Any, key: Any) -> Any:
            state, _ = nuts.step(key, state)
            return state, state.position

        return lax.scan(step, nuts.init(jnp.ones(n)), jax.random.split(key, 20))[1]

    return jax.vmap(chain), (jax.random.split(KEY, 16),)


@program("numpyro", "sampler", "NUTS through fori_collect", "draws", 250, 1000)
def numpyro_nuts(n: int) -> Any:
    import numpyro
    from numpyro.infer import NUTS
    from numpyro.util import fori_collect

    y = jnp.linspace(-1, 1, 20)

    def model(y: Any) -> None:
        mean = numpyro.sample("mean", numpyro.distributions.Normal(jnp.zeros(20), 1).to_event(1))
        numpyro.sample("y", numpyro.distributions.Normal(mean, 1).to_event(1), obs=y)

    def sampled(key: Any) -> Any:
        kernel = NUTS(model)
        state = kernel.init(key, 5, None, (y,), {})
        return fori_collect(0, n, lambda s: kernel.sample(s, (y,), {}), state, transform=lambda s: s.z, progbar=False)

    return sampled, (KEY,)


@program(
    "flashbax",
    "replay buffer",
    "add and sample of an item buffer, 500 steps",
    "length",
    2500,
    10000,
    note="""Nothing is copied. `in_place` is faster because one call reads all sampled rows.""",
)
def flashbax_items(n: int) -> Any:
    import flashbax

    buffer = flashbax.make_item_buffer(max_length=n, min_length=1, sample_batch_size=8)

    def filled(key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state = buffer.add(state, {"x": jax.random.normal(key, (64,))})
            return state, buffer.sample(state, key).experience["x"].sum()

        return lax.scan(step, buffer.init({"x": jnp.zeros(64)}), jax.random.split(key, 500))[1]

    return filled, (KEY,)


@program("flashbax", "replay buffer", "prioritised trajectories, 8 environments, 200 steps", "length", 1000, 4000)
def flashbax_prioritised(n: int) -> Any:
    import flashbax

    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=8,
        sample_batch_size=8,
        sample_sequence_length=4,
        period=1,
        min_length_time_axis=8,
        max_length_time_axis=n,
    )

    def filled(key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state = buffer.add(state, {"x": jax.random.normal(key, (8, 8, 16))})
            sample = buffer.sample(state, key)
            state = buffer.set_priorities(state, sample.indices, sample.experience["x"].sum((1, 2)) ** 2 + 0.1)
            return state, sample.experience["x"].sum()

        return lax.scan(step, buffer.init({"x": jnp.zeros(16)}), jax.random.split(key, 200))[1]

    return filled, (KEY,)


@program(
    "jumanji",
    "environment",
    "BinPack-v2, a random policy, vmap of 16",
    "steps",
    20,
    80,
    note="""Every step computes all 40 empty spaces again, as it should.""",
)
def jumanji_bin_pack(n: int) -> Any:
    return _environment("BinPack-v2", n)


@program(
    "jumanji",
    "environment",
    "Snake-v1, a random policy, vmap of 16",
    "steps",
    100,
    400,
    note="""A board has 12 by 12 cells. Selecting the whole board takes no longer than writing one cell.""",
)
def jumanji_snake(n: int) -> Any:
    return _environment("Snake-v1", n)


def _environment(name: str, n: int) -> Any:
    import jumanji

    environment = jumanji.make(name)

    def rollout(key: Any) -> Any:
        state, step = environment.reset(key)

        def act(carry: Any, key: Any) -> Any:
            state, step = carry
            mask = step.observation.action_mask
            action = jax.random.categorical(key, jnp.where(mask.ravel(), 0.0, -1e9))
            action = jnp.stack(jnp.unravel_index(action, mask.shape)) if mask.ndim > 1 else action
            state, step = environment.step(state, action)
            return (state, step), step.reward

        return lax.scan(act, (state, step), jax.random.split(key, n))[1]

    return jax.vmap(rollout), (jax.random.split(KEY, 16),)


@program(
    "pgx",
    "environment",
    "go_9x9, a random policy, vmap of 16",
    "moves",
    50,
    200,
    note="""A board has 81 points, and a game stores 162 hashes of 8 bytes. Selecting all of them takes no longer than
writing one.""",
)
def pgx_go(n: int) -> Any:
    import pgx

    environment = pgx.make("go_9x9")

    def game(key: Any) -> Any:
        def move(state: Any, key: Any) -> Any:
            action = jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, -1e9))
            state = environment.step(state, action)
            return state, state.rewards

        return lax.scan(move, environment.init(key), jax.random.split(key, n))

    return jax.vmap(game), (jax.random.split(KEY, 16),)


@program(
    "flax",
    "recurrent network",
    "linen.RNN of an LSTMCell, batch of 8",
    "steps",
    100,
    400,
    gradient=True,
    note="""XLA compiles the same instructions as for plain JAX, in both orders of the gradient and at all sizes.""",
)
def flax_lstm(n: int) -> Any:
    from flax import linen as nn

    model, x = nn.RNN(nn.LSTMCell(64)), jnp.ones((8, n, 16))
    return lambda params: model.apply(params, x), (model.init(KEY, x),)


@program(
    "keras",
    "recurrent network",
    "Bidirectional GRU with a mask, batch of 8",
    "steps",
    100,
    400,
    gradient=True,
    note="""The cotangent of the bias is two arrays instead of one, so the temporaries of the gradient of 100 steps take
3 KB more of 4 MB. In some processes, the C library returns them to the system after each run. Then a run has 1019
page faults, against none in plain JAX, and takes 1.3 times as long. Where it keeps freed memory
(`MALLOC_TRIM_THRESHOLD_`), neither has page faults, and both take the same time.""",
)
def keras_gru(n: int) -> Any:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layer = keras.layers.Bidirectional(keras.layers.GRU(64, return_sequences=True))
    x, mask = jax.random.normal(KEY, (8, n, 16)), jnp.arange(n) < jnp.arange(1, 9)[:, None] * n // 8
    layer(x, mask=mask)
    weights, others = ([v.value for v in vs] for vs in (layer.trainable_variables, layer.non_trainable_variables))
    return lambda weights: layer.stateless_call(weights, others, x, mask=mask)[0], (weights,)


@program("optax", "dynamic programming", "ctc_loss, batch of 8", "frames", 100, 400, gradient=True)
def optax_ctc(n: int) -> Any:
    import optax

    logits = jax.random.normal(KEY, (8, n, 32))
    labels = jax.random.randint(KEY, (8, n // 4), 1, 32)
    paddings = jnp.zeros((8, n)), jnp.zeros((8, n // 4))
    return lambda logits: optax.losses.ctc_loss(logits, paddings[0], labels, paddings[1]), (logits,)


@program(
    "jaxopt",
    "optimiser",
    "LBFGS, 15 unrolled steps",
    "history",
    50,
    200,
    gradient=True,
    note="""The step writes one row of the history, and two scans read it backwards from there. XLA puts one of the
scans after the write. `in_place` makes the write wait for both.""",
)
def jaxopt_lbfgs(n: int) -> Any:
    import jaxopt

    def minimum(scale: Any) -> Any:
        def f(x: Any) -> Any:
            return jnp.sum(scale * (x - 1) ** 2) + jnp.sum((x[1:] + x[:-1] ** 2) ** 2)

        options = {"implicit_diff": False, "linesearch": "backtracking"}
        solver = jaxopt.LBFGS(f, maxiter=15, tol=0.0, history_size=n, maxls=4, **options)
        return solver.run(jnp.zeros(100)).params

    return minimum, (jnp.linspace(1, 2, 100),)


@program("tinygp", "dynamic programming", "a quasiseparable solve", "points", 1000, 4000, gradient=True)
def tinygp_solve(n: int) -> Any:
    import tinygp

    t = jnp.linspace(0, 100, n)

    def likelihood(scale: Any) -> Any:
        kernel = tinygp.kernels.quasisep.Matern32(scale)
        return tinygp.GaussianProcess(kernel, t, diag=0.1).log_probability(jnp.sin(t))

    return likelihood, (jnp.asarray(1.5),)


@program(
    "transformers",
    "decoder",
    "Flax GPT-2, greedy, batch of 4",
    "tokens",
    64,
    256,
    note="""`dynamic_update_slice` writes one position of the keys and values, but XLA copies all of them for both
layers at every token.""",
)
def transformers_greedy(n: int) -> Any:
    return _gpt2(n, do_sample=False)


@program("transformers", "decoder", "Flax GPT-2, sampled with top_k, batch of 4", "tokens", 64, 256)
def transformers_sampled(n: int) -> Any:
    return _gpt2(n, do_sample=True, top_k=20, prng_key=jax.random.PRNGKey(0))


def _gpt2(n: int, **options: Any) -> Any:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    # No token is the last one, so that all that was asked for is written.
    tokens = {"bos_token_id": 0, "eos_token_id": 256, "pad_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=n + 8, n_embd=64, n_layer=2, n_head=4, **tokens)
    model = FlaxGPT2LMHeadModel(config)
    prompt = jax.random.randint(KEY, (4, 8), 1, 255)
    return lambda params: model.generate(prompt, params=params, max_length=n + 8, **options).sequences, (model.params,)


@program(
    "tfp-nightly",
    "sampler",
    "NoUTurnSampler, 16 chains of 20 draws",
    "dimensions",
    100,
    400,
    note="""The same pattern as in `blackjax`: `tensor_scatter_nd_update` in the inner `while_loop` writes one
checkpoint, and all of them are copied at each leaf.""",
)
def tfp_nuts(n: int) -> Any:
    from tensorflow_probability.substrates import jax as tfp

    kernel = tfp.mcmc.NoUTurnSampler(lambda x: -0.5 * jnp.sum(x**2 * jnp.linspace(1, 9, n), -1), step_size=0.1)

    def sampled(key: Any) -> Any:
        return tfp.mcmc.sample_chain(20, jnp.ones((16, n)), kernel=kernel, trace_fn=None, seed=key)

    return sampled, (KEY,)


@program(
    "tfp-nightly",
    "optimiser",
    "lbfgs_minimize on Rosenbrock's function, 100 steps",
    "memory",
    50,
    200,
    note="""`_queue_push` shifts the whole history by one row, with a `concat` and a `where`, and both loops over the
history read its rows. `in_place` makes the history a circular buffer.""",
)
def tfp_lbfgs(n: int) -> Any:
    from tensorflow_probability.substrates import jax as tfp

    def minimized(x: Any) -> Any:
        options = {"num_correction_pairs": n, "max_iterations": 100, "tolerance": 0.0}
        return tfp.optimizer.lbfgs_minimize(jax.value_and_grad(_rosenbrock), x, **options).position

    return minimized, (jnp.linspace(-1, 1, 100),)


def _rosenbrock(x: Any) -> Any:
    return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


@program("tfp-nightly", "sampler", "infer_trajectories, a filter of 256 particles", "observations", 50, 200)
def tfp_particles(n: int) -> Any:
    from tensorflow_probability.substrates import jax as tfp

    def inferred(seen: Any) -> Any:
        return tfp.experimental.mcmc.infer_trajectories(
            seen,
            tfp.distributions.Normal(0.0, 1.0),
            lambda step, state: tfp.distributions.Normal(0.9 * state, 0.5),
            lambda step, state: tfp.distributions.Normal(state, 0.3),
            num_particles=256,
            seed=KEY,
        )

    return inferred, (jnp.sin(jnp.linspace(0, 9, n)),)


@program("netket", "sampler", "ARDirectSampler of an ARNNDense, 64 samples", "spins", 16, 64)
def netket_autoregressive(n: int) -> Any:
    os.environ.setdefault("NETKET_ENABLE_X64", "0")
    import netket

    space = netket.hilbert.Spin(0.5, n)
    model = netket.models.ARNNDense(hilbert=space, layers=2, features=8)
    sampler = netket.sampler.ARDirectSampler(space)
    variables = model.init(jax.random.PRNGKey(0), jnp.ones((1, n)))

    def sampled(key: Any) -> Any:
        state = sampler.init_state(model, variables, key)
        return sampler.sample(model, variables, state=state, chain_length=64)[0]

    return sampled, (jax.random.PRNGKey(1),)


@program("netket", "sampler", "MetropolisLocal of an RBM, 16 chains of 20 sweeps", "spins", 25, 100)
def netket_metropolis(n: int) -> Any:
    os.environ.setdefault("NETKET_ENABLE_X64", "0")
    import netket

    space = netket.hilbert.Spin(0.5, n)
    model = netket.models.RBM(alpha=1, param_dtype=jnp.float32)
    sampler = netket.sampler.MetropolisLocal(space, n_chains=16)
    variables = model.init(jax.random.PRNGKey(0), jnp.ones((1, n)))

    def sampled(key: Any) -> Any:
        state = sampler.reset(model, variables, sampler.init_state(model, variables, key))
        return sampler.sample(model, variables, state=state, chain_length=20)[0]

    return sampled, (jax.random.PRNGKey(1),)


@program(
    "optimistix",
    "optimiser",
    "LBFGS, 100 steps",
    "history",
    50,
    200,
    gradient=True,
    note="""The loop carries both histories twice and writes them in a `cond`. `in_place` carries them once. Every step
multiplies all rows, which takes longer than the copies did. The gradient is that of `RecursiveCheckpointAdjoint`,
whose checkpoints store and restore both histories as a whole.""",
)
def optimistix_lbfgs(n: int) -> Any:
    import optimistix

    return _minimised(optimistix.LBFGS(rtol=0.0, atol=0.0, history_length=n)), (jnp.linspace(1, 2, 100),)


@program("optimistix", "optimiser", "BFGS, 100 steps", "dimensions", 50, 200, gradient=True)
def optimistix_bfgs(n: int) -> Any:
    import optimistix

    return _minimised(optimistix.BFGS(rtol=0.0, atol=0.0)), (jnp.linspace(1, 2, n),)


def _minimised(solver: Any) -> Any:
    import optimistix

    def minimum(scale: Any) -> Any:
        def f(x: Any, scale: Any) -> Any:
            return jnp.sum(scale * (x - 1) ** 2) + jnp.sum((x[1:] - x[:-1] ** 2) ** 2)

        adjoint = optimistix.RecursiveCheckpointAdjoint()
        start = jnp.zeros(len(scale))
        return optimistix.minimise(f, solver, start, scale, max_steps=100, throw=False, adjoint=adjoint).value

    return minimum


@program("dynamax", "dynamic programming", "GaussianHMM.fit_em, 8 states, 5 iterations", "observations", 250, 1000)
def dynamax_hmm(n: int) -> Any:
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(8, 4)
    return _fitted(model, n)


@program("dynamax", "dynamic programming", "LinearGaussianSSM.fit_em, 5 iterations", "observations", 250, 1000)
def dynamax_kalman(n: int) -> Any:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    return _fitted(LinearGaussianSSM(8, 4), n)


def _fitted(model: Any, n: int) -> Any:
    params, props = model.initialize(jax.random.PRNGKey(0))

    def fitted(seen: Any) -> Any:
        return model.fit_em(params, props, seen, num_iters=5, verbose=False)[1]

    return fitted, (jnp.cumsum(jax.random.normal(KEY, (n, 4)), 0) / 10,)


@program(
    "s2fft",
    "transform",
    "inverse_jax, on-the-fly recursions",
    "band limit",
    32,
    128,
    gradient=True,
    note="""The recursions are inside a primitive of s2fft, lowered by `mlir.lower_fun`. `in_place` looks into
it, and keeps the library's derivative rules. The rest of the time is the recursion itself: each step computes all of
`dl_entry` by a `where` and then writes one column of it.""",
)
def s2fft_inverse(n: int) -> Any:
    from s2fft.transforms import spherical

    def inverse(real: Any) -> Any:
        return spherical.inverse_jax(real + 0j, n, reality=True).real

    keep = jnp.abs(jnp.arange(-n + 1, n)) <= jnp.arange(n)[:, None]
    return inverse, (jax.random.normal(KEY, keep.shape) * keep,)


@program("s2fft", "transform", "forward_jax, on-the-fly recursions", "band limit", 32, 128, gradient=True)
def s2fft_forward(n: int) -> Any:
    from s2fft.transforms import spherical

    return lambda x: spherical.forward_jax(x, n, reality=True).real, (jax.random.normal(KEY, (n, 2 * n - 1)),)


@program(
    "brax",
    "replay buffer",
    "UniformSamplingQueue, insert and sample, 200 steps",
    "length",
    2500,
    10000,
    note="""The queue shifts its rows only if it is full, as the shortest one is at the end. The others never are.
`in_place` makes the queue a circular buffer and writes the eight new rows one by one.""",
)
def brax_queue(n: int) -> Any:
    return _queue(n, is_full=False)


def _queue(n: int, is_full: bool) -> Any:
    from brax.training.replay_buffers import UniformSamplingQueue

    queue = UniformSamplingQueue(n, {"x": jnp.zeros(64)}, sample_batch_size=8)

    def filled(key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state = queue.insert(state, {"x": jax.random.normal(key, (8, 64))})
            state, sample = queue.sample(state)
            return state, sample["x"].sum()

        state = queue.init(key)
        if is_full:
            state = queue.insert(state, {"x": jnp.zeros((n, 64))})
        return lax.scan(step, state, jax.random.split(key, 200))[1]

    return filled, (KEY,)


@program(
    "craftax",
    "environment",
    "Craftax-Classic-Symbolic-v1 with auto-reset, vmap of 4",
    "steps",
    10,
    40,
    note="""Every step makes a new world and selects it if an episode has ended. The whole map decides where mobs may
appear, and is written after that, in an order that XLA does not know. `in_place` orders the two, and copies a world
only at the end of an episode. The select of the map of mobs, which is empty in a new world, is left.""",
)
def craftax_classic(n: int) -> Any:
    from craftax.craftax_env import make_craftax_env_from_name

    environment = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=True)

    def rollout(key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            action = jax.random.randint(key, (), 0, environment.action_space().n)
            _, state, reward, _, _ = environment.step(key, state, action)
            return state, reward

        return lax.scan(step, environment.reset(key)[1], jax.random.split(key, n))

    return jax.vmap(rollout), (jax.random.split(jax.random.PRNGKey(0), 4),)


@program(
    "vbjax",
    "solver",
    "make_sdde, 64 nodes with delays",
    "steps",
    250,
    1000,
    gradient=True,
)
def vbjax_delays(n: int) -> Any:
    import vbjax

    keys = jax.random.split(KEY, 3)
    weights, lengths = jax.random.uniform(keys[0], (64, 64)), 50 * jax.random.uniform(keys[1], (64, 64))
    delays = vbjax.make_delay_helper(weights, lengths, dt=1.0, v_c=1.0)

    def drift(rows: Any, x: Any, t: Any, p: Any) -> Any:
        return -x + jnp.tanh(p * vbjax.delay_apply(delays, t, rows))

    _, loop = vbjax.make_sdde(0.1, delays.max_lag, drift, 0.1)
    return lambda noise: loop(noise, 0.05)[1], (jax.random.normal(keys[2], (delays.max_lag + 1 + n, 1, 64)),)


@program(
    "brax",
    "replay buffer",
    "a full UniformSamplingQueue, insert and sample, 200 steps",
    "length",
    1000,
    4000,
    note="""A full queue shifts all its rows at every insertion, by `jnp.roll`. `in_place` makes the queue a circular
buffer.""",
)
def brax_full_queue(n: int) -> Any:
    return _queue(n, is_full=True)


@program("jaxsim", "solver", "a chain of bodies, 50 steps of forward dynamics", "bodies", 8, 32)
def jaxsim_chain(n: int) -> Any:
    os.environ.setdefault("JAX_ENABLE_X64", "0")
    import jaxsim.api

    links = "".join(
        f"<link name='l{i}'><pose>0 0 {-0.1 * i} 0 0 0</pose><inertial><mass>1</mass><inertia><ixx>0.01</ixx>"
        f"<iyy>0.01</iyy><izz>0.01</izz><ixy>0</ixy><ixz>0</ixz><iyz>0</iyz></inertia></inertial></link>"
        for i in range(n)
    )
    joints = "".join(
        f"<joint name='j{i}' type='revolute'><parent>l{i}</parent><child>l{i + 1}</child><axis><xyz>1 0 0</xyz>"
        f"<limit><lower>-9</lower><upper>9</upper></limit></axis></joint>"
        for i in range(n - 1)
    )
    sdf = f"<sdf version='1.10'><model name='chain'>{links}{joints}</model></sdf>"
    model = jaxsim.api.model.JaxSimModel.build_from_model_description(sdf, is_urdf=False, time_step=1e-4)

    def simulated(positions: Any) -> Any:
        def step(data: Any, _: Any) -> Any:
            return jaxsim.api.model.step(model, data), data.joint_positions

        data = jaxsim.api.data.JaxSimModelData.build(model, joint_positions=positions)
        return lax.scan(step, data, None, length=50)[1]

    return simulated, (jnp.linspace(0, 0.5, n - 1),)
