"""What to do about a loop that copies a buffer."""

import sys

#: What to do, by the cause.
ADVICE = {
    "swapped": "The buffer changes its place in the carry (`return (b, a)`), which moves it in memory. Keep each in "
    "its place: exchange rows, or let the number of the step say which of two is read and which written.",
    "twice": "The loop carries one buffer in several places (`return new, new`), and XLA copies what has been written "
    "for each of them. Carry it once, and use it where the others are used. in_place does so.",
    "layout": "{} needs the axes of the buffer in another order than the loop keeps them in, so XLA moves all "
    "of it in every step. Keep it in the order of the product: for einsum('bhd,blhd->bhl', q, cache) as "
    "[batch, heads, length, dim], not as [batch, length, heads, dim]. in_place does so.",
    "checkpoint": "jax.checkpoint runs the body again in the backward pass, for which each step keeps the whole "
    "buffer. Read by ta_read, write by ta_write, and give it the policy checkpoint_policies.save_reads.",
    "select_vmap": "jax.vmap of a cond or a while_loop whose predicate is batched runs both sides. It selects between "
    "whole buffers or, where they are only read, between their gradients, and copies what all examples share. Read "
    "rows by ta_read(b, i) and write them by ta_write(b, i, x), which are masked instead.",
    "select": "A select (jnp.where, lax.select, or a plain write or read whose index may be out of range) touches all "
    "rows. In place of jnp.where(p, new_buffer, buffer) use ta_write(buffer, i, x, where=p), and ta_read for reads. "
    "If an example starts again (`jnp.where(done, first, state)`), make `first` before the loop: what is made anew in "
    "every step is computed in every step.",
    "gradient": "The transpose of a plain write (`.at[i].set`) takes a row out of the cotangent and the transpose of a "
    "plain read (`b[i]`) adds one to it, in no order that XLA knows. Write by ta_write(b, i, x), add by ta_add, and "
    "read by ta_read(b, i); rows of another axis take axis=, and elements a tuple as index.",
    "beside": "Something in the loop still uses the buffer from before this update, and XLA keeps a copy for it. Read "
    "rows by ta_read(b, i) and write them by ta_write(b, i, x), which are put in an order that needs no copy; rows of "
    "another axis take axis=, and elements a tuple as index.",
    "ours": "This update is in place by itself, but something in the loop still uses the old buffer: plain indexing "
    "(use ta_read), the whole of it, or a version from before the update. Read by ta_read, before the update.",
    "whole": "{} computes with all rows of the buffer in every step, which takes its time whatever is done. The copy "
    "beside it can go: compute with the buffer only after this update, or only before it, in what the new row is made "
    "of. Read single rows by ta_read(b, i), and write by ta_write(b, i, x).",
    "sum": "A cond or an inner loop that reads a few rows has a gradient of the size of the buffer, and so has a cond "
    "that jax.vmap turns into a select. Read by ta_read(b, i), whose gradient is added in place.",
    "anew": "The loop computes every row in every step. If that is what it should do, leave it; otherwise update the "
    "rows that change, by ta_write, ta_add or ta_swap.",
    "save": "Every step keeps the whole buffer: as a stacked output, or for the backward pass. With jax.checkpoint, "
    "read by ta_read and give it the policy checkpoint_policies.save_reads. Stack rows rather than buffers.",
    "kept": "The derivative of a step needs all of the buffer, so JAX keeps it for every step. Under in_place a loop "
    "keeps the rows that a step overwrites, and puts them back; so do scan, fori_loop and while_loop of "
    "jax_tensorarray if the buffer is written by ta_write. What a step overwrites as a whole is kept by all of them.",
    "tape": "The body computes with the whole buffer, so the tape of the loop holds it for every step. With "
    "residuals='undo', or 'auto' where that chooses it, the loop keeps the rows that a step overwrites: for this the "
    "body has to write them by ta_write, ta_add or ta_swap.",
}

#: The causes by the names that reports print. Each is a heading of `docs/reasons.md`, and stays the same.
NAMES = {
    "swapped": "changes-places",
    "twice": "carried-twice",
    "layout": "layout-of-a-product",
    "checkpoint": "checkpoint-keeps-buffers",
    "select_vmap": "batched-choice",
    "select": "whole-select",
    "gradient": "gradient-of-plain-rows",
    "beside": "old-version-used",
    "ours": "read-after-write",
    "whole": "read-as-a-whole",
    "sum": "sum-of-gradients",
    "anew": "made-anew",
    "save": "kept-for-each-step",
    "kept": "kept-for-the-gradient",
    "tape": "kept-on-the-tape",
}

#: What to do about an argument that is copied in every call.
OF_ARGUMENTS = {
    "not donated": "The program changes a few rows of {0}, and returns it. Without donation the old rows have to stay, "
    "so XLA copies all of them first. If the old {0} is not needed after a call, donate it: jax.jit(f, "
    "donate_argnums=...).",
    "donated": "Something reads old rows of {0} beside the update, or a cond leaves it as it is in one branch: XLA "
    "keeps a copy for that. Under in_place reads come first and branches write rows: jax.jit(in_place(f), "
    "donate_argnums=...). Or read by ta_read, and write by ta_write(..., where=p) in place of the cond.",
    "eager": "An update outside of jit copies the whole array. Jit all of the step and donate the array: jax.jit(f, "
    "donate_argnums=...). A TensorArray is updated in place outside of jit too.",
    "exchanged": "{0} comes back in the place of another argument of its type (`return b, a`), whose memory it then "
    "gets. Return each argument in its place.",
}

#: What to do about a program that takes more time for each step the more steps there are, though nothing is copied.
OF_GROWTH = (
    "No loop copies a buffer and none computes with all rows, but a step takes longer, or more memory, the longer the "
    "loop. A view that is made in the loop (`q.T[i]`, `q.astype(t)[i]`) may be made anew in every step: make it before "
    "the loop. The gradient of a plain read (`b[i]`) may be an array as large as `b`: read by ta_read(b, i)."
)

#: What to try if a program has been differentiated before `in_place` sees it.
OF_GRADIENT = (
    "This was tried on the finished gradient. Write jax.grad(in_place(f)), or in_place around all that calls jax.grad: "
    "then the loop is repaired before it is differentiated, which does more."
)

#: The line that puts a program under `in_place`, by the framework that compiles it. The key is a module of that one.
_LINES = {
    "flax.nnx": ("Flax NNX", "nnx.jit(in_place(step))"),
    "equinox": ("Equinox", "eqx.filter_jit(in_place(step))"),
    "haiku": ("Haiku", "jax.jit(in_place(hk.transform(f).apply))"),
}


def line_to_write() -> str:
    """Return the line that puts a program under `in_place`, also for each framework that has been imported."""
    more = [f"{line} with {name}" for module, (name, line) in _LINES.items() if module in sys.modules]
    return "; ".join(["jax.jit(jax_tensorarray.in_place(f))", *more])


#: What to do about the loops of jaxlib 0.11.1: a line of prose, and a line to copy.
OF_JAXLIB = (
    "jaxlib 0.11.1 makes many small loops on CPUs quadratic: upgrade it, or set\n"
    "XLA_FLAGS=--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"
)
