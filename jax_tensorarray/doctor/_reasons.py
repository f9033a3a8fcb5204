"""Why `in_place` leaves something unchanged. Each tag is a heading of `docs/reference/messages.md`, and stays."""

#: By its name, the reason in words and what would help, which is empty if nothing need be done.
REASONS = {
    "all-rows": (
        "It takes all rows, so there are none to leave out.",
        "",
    ),
    "another-buffer": (
        "The cases are different buffers, so choosing one of them copies all of it.",
        "Choose what is read or written, and let both cases return the same buffer.",
    ),
    "another-layout": (
        "A product needs this buffer in another layout, but {by} needs it as it is.",
        "Make the buffer in the layout of the product: [batch, heads, length, dim].",
    ),
    "exchange-in-while": (
        "Two buffers of a while_loop change places, which moves both of them in every step.",
        "Use a scan or a fori_loop whose number of steps is known, or keep each buffer in its place.",
    ),
    "few-steps": (
        "Its rows move, but the loop has fewer than {least} steps, in which a ring buffer would gain nothing.",
        "",
    ),
    "foreign-primitive": (
        "in_place has no rule for {by}, and does not look inside it.",
        "Write it in terms of JAX's own functions, or give it only the rows that it needs.",
    ),
    "large-box": (
        "It is a box of a third of the buffer or more, which plain JAX moves as fast.",
        "",
    ),
    "large-share": (
        "It is a large part of the buffer: half of it at a known place, half of all single elements that are written, "
        "or as many rows as there are. Plain JAX moves it as fast.",
        "",
    ),
    "library-loop": (
        "It is in a loop of jax_tensorarray, into which in_place does not look.",
        "Write ta_read and ta_write there, or use the loop of jax.lax.",
    ),
    "long-round": (
        "The buffers change places in the carry, and are back in their places only after more than 6 steps.",
        "Keep each buffer in its place, and let an index say which of them is the next one.",
    ),
    "made-anew": (
        "A concatenation, a gather, a sort or a reversal in the same step makes all rows anew, so one row costs "
        "little beside it.",
        "Carry the buffer, and write the rows that change.",
    ),
    "made-in-the-step": (
        "What it chooses is made in the same step, so all of it is touched anyway.",
        "If it does not depend on the step, make it before the loop. If few rows of it differ, write only these.",
    ),
    "mask-of-elements": (
        "The condition is not the same for all rows, so any row may be one or the other.",
        "If few rows change, write only these: b.at[i].set(x).",
    ),
    "mask-product": (
        "It is multiplied by a mask of 0 and 1. As 0 times infinity is not 0, all rows may change.",
        "Choose instead: jnp.where(mask, row, b) writes one row, and jnp.where(mask, b, 0).sum(0) reads one.",
    ),
    "no-bound": (
        "JAX does not know how many steps this while_loop takes at most.",
        "To differentiate it, give in_place the argument max_steps=n.",
    ),
    "no-rule": (
        "No rule of in_place is for this form of the operation.",
        "Index one axis, or axes side by side: b[i], b[:, i], b[i, j], with the batch as the first axis.",
    ),
    "not-in-a-loop": (
        "It is not in a loop, and happens once.",
        "If the function is called in a Python loop, put in_place around a function that has no other loops in it.",
    ),
    "one-element": (
        "An array of one element has no rows.",
        "",
    ),
    "one-hot": (
        "The indices are not integers, or mode='one_hot' asks for a product.",
        "Index by integers, without this mode.",
    ),
    "other-combination": (
        "The rows are combined in a way that no row op has: .at[].apply, bools that are added, or complex maxima.",
        "Read the rows, compute, and write them: b.at[i].set(f(b[i])).",
    ),
    "packed-type": (
        "Elements of fewer than 8 bits are packed, and have no row ops.",
        "Use int8 or uint8.",
    ),
    "read-as-a-whole": (
        "Its rows move, but it is read as a whole, in order, by {by}.",
        "Reorder what it is combined with: the rows of a ring buffer are all there, in another order.",
    ),
    "read-before-the-choice": (
        "Both cases are updates of the same buffer, and one of them is read before the choice.",
        "Read after the choice, or read the buffer before both updates.",
    ),
    "ref": (
        "A ref that is passed in, or used by a custom_vjp, stays a ref.",
        "Make it in the function by jax.new_ref, and freeze it there, or pass arrays.",
    ),
    "rows-twice": (
        "Several rows are multiplied, divided or lowered to a minimum, and one of them may occur twice.",
        "If none does, say unique_indices=True.",
    ),
    "several-boxes": (
        "Several boxes along more than one axis are written at once.",
        "Write them one after another, in a loop, or as rows of one axis.",
    ),
    "small-buffer": (
        "Its rows move, but it has fewer than {least} bytes, which are moved as fast as a ring buffer is.",
        "",
    ),
    "symbolic-shape": (
        "A size is a symbol of jax.export, so the size of the buffer is not known.",
        "Export the function with numbers as sizes.",
    ),
    "too-large": (
        "An axis of the buffer has 2**31 elements or more.",
        "Divide this axis into two.",
    ),
    "whole-view": (
        "The rows are those of an array that the step computes from a whole buffer, in a form that cannot be computed "
        "row by row.",
        "Read the rows first, and compute with these.",
    ),
}
