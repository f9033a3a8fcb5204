"""What to do about a loop that copies a buffer."""

#: The advice for each cause. A cause is a heading of `docs/reference/messages.md`, and its name never changes. The
#: advice begins with `in_place` if `in_place` removes the cause.
ADVICE = {
    "changes-places": "Put in_place around the function: it removes these copies. The loop returns a buffer at another "
    "position of the carry (`return b, a`), so XLA moves the buffer. By hand: keep each buffer at its position, and "
    "let the step number decide which buffer the step reads and which one it writes.",
    "carried-twice": "Put in_place around the function: it removes this copy. The loop carries one buffer several "
    "times (`return new, new`), and XLA copies each update for each of them. By hand: carry the buffer once.",
    "layout-of-a-product": "Put in_place around the function: it stores the buffer in the order that the product "
    "needs. {} needs the axes of the buffer in another order, so XLA moves the whole buffer in every step. By hand: "
    "for einsum('bhd,blhd->bhl', q, cache) store the cache as [batch, heads, length, dim].",
    "checkpoint-keeps-buffers": "Put in_place around the function: it stores rows instead of buffers. jax.checkpoint "
    "runs the body again in the backward pass, so each step stores the whole buffer. By hand: read with ta_read, write "
    "with ta_write, and pass policy=checkpoint_policies.save_reads.",
    "batched-choice": "Put in_place around the function: it masks single rows instead. jax.vmap of a cond or a "
    "while_loop with a batched predicate runs both sides, and then selects between whole buffers or their gradients. "
    "By hand: read with ta_read(b, i), and write with ta_write(b, i, x).",
    "whole-select": "Put in_place around the function: it writes one row with a mask instead. A select (jnp.where, "
    "lax.select, or a plain read or write whose index may be out of range) computes every row. By hand: "
    "ta_write(buffer, i, x, where=p) instead of jnp.where(p, new_buffer, buffer). If an example starts again "
    "(`jnp.where(done, first, state)`), make `first` before the loop.",
    "gradient-of-plain-rows": "Put in_place around the function: it gives the reads and writes of the backward pass an "
    "order that needs no copy. The gradients of plain reads (`b[i]`) and plain writes (`.at[i].set`) change the "
    "cotangent without such an order, so XLA copies it. By hand: read with ta_read(b, i), write with ta_write(b, i, "
    "x), and add with ta_add(b, i, x).",
    "old-version-used": "Put in_place around the function: it reads before it writes, which needs no copy. The loop "
    "still uses the buffer from before this update, so XLA keeps a copy of that version. By hand: read with ta_read(b, "
    "i), and write with ta_write(b, i, x).",
    "read-after-write": "This row op needs no copy by itself, but the loop still uses the version of the buffer from "
    "before the update. Read the rows of that version with ta_read before the update. If the index of the read depends "
    "on the new version, compute the index from the value that you write.",
    "read-as-a-whole": "Put in_place around the function: it removes this copy. {} reads every row of the buffer in "
    "every step; that cost stays. By hand: let the step read the whole buffer only before this update or only after "
    "it.",
    "sum-of-gradients": "Put in_place around the function: it adds only the rows. A cond or an inner loop that reads a "
    "few rows has a gradient as large as the buffer, and XLA adds all of it. By hand: read with ta_read(b, i).",
    "made-anew": "The loop computes every row in every step. If you want that, leave it. Otherwise update only the "
    "rows that change, with ta_write, ta_add or ta_swap.",
    "kept-for-each-step": "Every step stores the whole buffer: as a stacked output, or for the backward pass. Stack "
    "the rows that you need instead of the buffer. Under jax.checkpoint, read with ta_read and pass "
    "policy=checkpoint_policies.save_reads.",
    "kept-for-the-gradient": "Put in_place around the function: it stores only the rows that a step overwrites. The "
    "derivative of a step needs the whole buffer, so JAX stores the buffer for every step. By hand: use scan, "
    "fori_loop or while_loop of jax_tensorarray, and write with ta_write. A buffer that a step overwrites as a whole "
    "is stored in any case.",
    "kept-on-the-tape": "The body computes with the whole buffer, so the tape of this loop stores the buffer for every "
    "step. Give the loop residuals='undo': then it stores only the rows that a step overwrites. For this the body has "
    "to write rows with ta_write, ta_add or ta_swap.",
}

#: What to do about an argument that is copied in every call.
OF_ARGUMENTS = {
    "not donated": "The program changes a few rows of {0} and returns it. Without donation XLA must preserve the "
    "old {0}, so it copies all rows first. If you do not need the old {0} after the call, donate it: pass "
    "donate_argnums to jax.jit.",
    "donated": "Put in_place under jax.jit, and keep the donation: in_place reads before it writes, and writes rows "
    "in branches. XLA copies {0} because the program reads old rows beside the update, or because one branch of a "
    "cond returns it unchanged. By hand: read with ta_read, and write with ta_write(..., where=p) instead of the "
    "cond.",
    "eager": "An update outside of jit copies the whole array. Put the whole step under jax.jit, and donate the "
    "array with donate_argnums. A TensorArray is updated in place outside of jit too.",
    "exchanged": "The program returns {0} at the position of another argument of its type (`return b, a`), and XLA "
    "gives it the memory of that argument. Return each argument at its own position.",
}

#: What to do about a program that takes more time for each step the more steps there are, though nothing is copied.
OF_GROWTH = (
    "Put in_place around the function, if it helps above. No loop copies a buffer or computes with all rows, but the "
    "time or the memory per step grows with the number of steps. The loop may compute a view (`q.T[i]`, "
    "`q.astype(t)[i]`) again in every step: compute it before the loop. The gradient of a plain read (`b[i]`) may be "
    "an array as large as `b`: read with ta_read(b, i)."
)

#: What to try if only the finished program, which may be a gradient, could be tried.
OF_GRADIENT = (
    "The doctor tried in_place on the finished gradient. Put in_place around the function that jax.grad "
    "differentiates, or around all that calls jax.grad: then in_place rewrites the loop before JAX differentiates it, "
    "which does more."
)


#: What to do about the loops of jaxlib 0.11.1: a line of prose, and a line to copy.
OF_JAXLIB = (
    "jaxlib 0.11.1 makes many small loops on CPUs quadratic: upgrade it, or set\n"
    "XLA_FLAGS=--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=0"
)
