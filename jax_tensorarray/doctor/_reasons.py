"""Why `in_place` leaves something unchanged. Each tag is a heading of `docs/reference/messages.md`, and stays."""

#: By its name, the reason in words and a way to help, which is empty if there is nothing to do.
REASONS = {
    "all-rows": (
        "It reads or writes every row, so there is nothing to save.",
        "",
    ),
    "another-buffer": (
        "The cases are different buffers, so choosing one of them copies all of it.",
        "Choose the row or the index instead, and let both cases return the same buffer.",
    ),
    "another-layout": (
        "A product needs this buffer in another layout, but {by} needs it in its own.",
        "Make the buffer in the layout of the product: [batch, heads, length, dim].",
    ),
    "discarded-version": (
        "Only rows of this version are read, and then it is discarded. XLA computes these rows alone. In place, the "
        "buffer would be copied, since the version before may be used on.",
        "",
    ),
    "exchange-in-while": (
        "Two buffers of a while_loop change places, so XLA moves both of them in every step.",
        "Use a scan or a fori_loop with a known number of steps, or keep each buffer at its position in the carry.",
    ),
    "few-steps": (
        "Its rows move, but the loop has fewer than {least} steps. A circular buffer would gain nothing.",
        "",
    ),
    "foreign-primitive": (
        "in_place has no rule for {by}, and does not look inside it.",
        "Write it with JAX's own functions, or pass it only the rows that it needs.",
    ),
    "large-box": (
        "It is a box of a third of the buffer or more. Plain JAX moves such a box as fast.",
        "",
    ),
    "large-share": (
        "It is a large part of the buffer: half of it at a known index, half of all elements if it writes single "
        "elements, or as many rows as there are. Plain JAX moves such a part as fast.",
        "",
    ),
    "library-loop": (
        "It is in a loop of jax_tensorarray. in_place does not look inside such a loop.",
        "Write ta_read and ta_write there, or use the loop of jax.lax.",
    ),
    "long-round": (
        "The buffers change places in the carry, and return to their places only after more than 6 steps.",
        "Keep each buffer at its position, and let an index say which of them is next.",
    ),
    "made-anew": (
        "A concatenation, a gather, a sort or a reversal in the same step computes every row, so one row costs little "
        "beside it.",
        "Carry the buffer, and write only the rows that change.",
    ),
    "made-in-the-step": (
        "The same step makes one of the arrays to choose from, so it touches all of that array anyway.",
        "If it does not depend on the step, make it before the loop. If few of its rows differ, write only these.",
    ),
    "mask-of-elements": (
        "The condition differs between rows, so any row may come from either case.",
        "If few rows change, write only these: b.at[i].set(x).",
    ),
    "mask-product": (
        "It is multiplied by a mask of 0 and 1. Since 0 times infinity is not 0, every row may change.",
        "Choose instead: jnp.where(mask, row, b) writes one row, and jnp.where(mask, b, 0).sum(0) reads one.",
    ),
    "no-bound": (
        "JAX does not know the largest number of steps of this while_loop.",
        "To differentiate it, pass max_steps=n to in_place.",
    ),
    "no-rule": (
        "in_place has no rule for this form of the operation.",
        "Index one axis, or neighbouring axes: b[i], b[:, i], b[i, j], with the batch as the first axis.",
    ),
    "not-in-a-loop": (
        "It is not in a loop, and happens once.",
        "If you call the function in a Python loop, put in_place around a function without other loops.",
    ),
    "one-element": (
        "An array of one element has no rows.",
        "",
    ),
    "one-hot": (
        "The indices are not integers, or mode='one_hot' asks for a product.",
        "Index with integers, without this mode.",
    ),
    "other-combination": (
        "No row op combines rows in this way: .at[].apply, a sum of bools, or a maximum of complex numbers.",
        "Read the rows, compute, and write them: b.at[i].set(f(b[i])).",
    ),
    "packed-type": (
        "Elements of fewer than 8 bits are packed, and have no row ops.",
        "Use int8 or uint8.",
    ),
    "read-as-a-whole": (
        "Its rows move, but {by} reads all of them in order.",
        "Reorder the other operand instead: a circular buffer has all rows, in another order.",
    ),
    "read-before-the-choice": (
        "Both cases are updates of the same buffer, and the step reads one of them before the choice.",
        "Read after the choice, or read the buffer before both updates.",
    ),
    "ref": (
        "A ref stays a ref if the caller passes it in, or if a custom_vjp uses it.",
        "Make it in the function with jax.new_ref, and freeze it there, or pass arrays.",
    ),
    "rows-twice": (
        "Several rows are multiplied, divided or lowered to a minimum, and one of them may occur twice.",
        "If none does, pass unique_indices=True.",
    ),
    "several-boxes": (
        "The operation writes several boxes along more than one axis at once.",
        "Write them one after another, in a loop, or as rows of one axis.",
    ),
    "small-buffer": (
        "Its rows move, but it has fewer than {least} bytes. A circular buffer would be no faster.",
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
        "The step computes an array from a whole buffer, and reads rows of it. in_place cannot compute these alone.",
        "Read the rows first, and compute with these.",
    ),
}
