"""Search a game tree with mctx as it is: `in_place` makes a simulation cost the same however large the tree is.

`mctx.muzero_policy` keeps its trees as arrays `[batch, nodes, actions]` that it carries through nested loops under
`jax.vmap`. At every level of every simulation plain JAX copies all of them or selects between all of them, so the time
of a simulation grows with the tree. Nothing in mctx is changed here, nor in the game: the search is wrapped.

    python examples/tree_search.py

(it needs mctx: `pip install mctx`) looks for the best moves in a few positions of tic-tac-toe, and prints them beside
what exhaustive search says; what plain JAX does to whole trees in its loops; and the time of a simulation as the trees
grow, with and without `in_place`.
"""

import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_tensorarray import doctor, in_place

try:
    import mctx
except ImportError as e:
    raise SystemExit("This example needs mctx: pip install mctx") from e

# --- the game --------------------------------------------------------------------------------------------------

LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])

#: Who is to move is `x`.
POSITIONS = ("xx.oo....", "x.o..o..x", "o..xx.o..", ".........")


def board_of(position):
    """Return a board, with 1 for the player who is to move and -1 for the other."""
    return np.array([{"x": 1, "o": -1, ".": 0}[c] for c in position], np.int8)


def is_won(board, player):
    return jnp.any(jnp.all(board[LINES] == player, axis=-1))


def is_over(board):
    return is_won(board, 1) | is_won(board, -1) | jnp.all(board != 0)


def play(board, action):
    """Return the board as the other player sees it, and the reward of the move. After the end nothing happens."""
    over = is_over(board)
    moved = jnp.where(over, board, board.at[action].set(1))
    reward = jnp.where(~over & is_won(moved, 1), 1.0, 0.0)
    return jnp.where(over, board, -moved), reward


def play_out(key, board):
    """Make random moves for both, to the end. Return what they come to for the player who is to move."""

    def move(i, state):
        board, value, sign = state
        free = jnp.where(board == 0, 0.0, -jnp.inf)
        action = jax.random.categorical(jax.random.fold_in(key, i), jnp.where(jnp.all(board != 0), 0.0, free))
        board, reward = play(board, action)
        return board, value + sign * reward, -sign

    return jax.lax.fori_loop(0, 9, move, (board, 0.0, 1.0))[1]


def logits(board):
    return jnp.where(board == 0, 0.0, -1e9)


# --- the search ------------------------------------------------------------------------------------------------


def after(_, key, actions, boards):
    """Return the next boards, and what they are worth, in the form for mctx."""
    boards, rewards = jax.vmap(play)(boards, actions)
    over = jax.vmap(is_over)(boards)
    values = jax.vmap(play_out)(jax.random.split(key, len(boards)), boards)
    output = mctx.RecurrentFnOutput(
        reward=rewards,
        discount=jnp.where(over, 0.0, -1.0),  # what is good for one player is bad for the other
        prior_logits=jax.vmap(logits)(boards),
        value=jnp.where(over, 0.0, values),
    )
    return output, boards


def search(key, boards, simulations):
    """Return the output of mctx: the moves, and the trees."""
    root = mctx.RootFnOutput(
        prior_logits=jax.vmap(logits)(boards),
        value=jax.vmap(play_out)(jax.random.split(key, len(boards)), boards),
        embedding=boards,
    )
    return mctx.muzero_policy(
        (), key, root, after, simulations, invalid_actions=boards != 0, dirichlet_fraction=0.0, temperature=0.0
    )


def searches(simulations):
    """Return the same search without and with `in_place`."""
    plain = functools.partial(search, simulations=simulations)
    return {"plain JAX": plain, "in_place": in_place(plain)}


# --- exhaustive search -----------------------------------------------------------------------------------------


@functools.cache
def best(position):
    """Return the worth of a position to `x`, the player to move, and the moves that get it."""
    boards = [position[:k] + "x" + position[k + 1 :] for k, c in enumerate(position) if c == "."]
    moves = [k for k, c in enumerate(position) if c == "."]
    values = []
    for board in boards:
        if any(all(board[k] == "x" for k in line) for line in LINES):
            values.append(1)
        elif "." not in board:
            values.append(0)
        else:
            values.append(-best(board.translate(str.maketrans("xo", "ox")))[0])
    return max(values), {move for move, value in zip(moves, values, strict=True) if value == max(values)}


# --- the script ------------------------------------------------------------------------------------------------


def seconds(f, *args):
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def main(simulations: int = 400, sizes: Sequence[int] = (125, 500, 2000)):
    """Search, and show the results. Return the moves that are found."""
    key, boards = jax.random.key(0), jnp.stack([board_of(p) for p in POSITIONS])
    found = {name: jax.jit(f)(key, boards) for name, f in searches(simulations).items()}
    moves = np.asarray(found["in_place"].action).tolist()
    for position, move in zip(POSITIONS, moves, strict=True):
        value, good = best(position)
        drawn = position[:move] + "X" + position[move + 1 :]
        rows = "   ".join(drawn[k : k + 3] for k in (0, 3, 6))
        print(f"{rows}   {'as good as any' if move in good else 'a mistake'}: worth {value}")
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), *(f.search_tree for f in found.values()))
    print(f"The trees are {'the same, bit for bit' if jax.tree.all(same) else 'different'}.")

    for name, f in searches(simulations).items():
        trees = 4 * boards.size * simulations // 9  # bytes: one number for every node
        print(f"{name}: {len(doctor.loop_copies(f, min_bytes=trees)(key, boards))} operations on whole trees in loops")
    print("\nMicroseconds of a simulation:\n\nsimulations  plain JAX   in_place  plain JAX / in_place")
    for n in sizes:
        plain, ours = (seconds(jax.jit(f), key, boards) / n * 1e6 for f in searches(n).values())
        print(f"{n:11} {plain:10.1f} {ours:10.1f} {plain / ours:21.1f}")
    return moves


if __name__ == "__main__":
    main()
