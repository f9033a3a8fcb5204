"""`in_place`: a transformation of programs, after which what they do with rows of buffers is done by the row ops.

`api` is what users call. It has a program traced, and `repair` evaluates the jaxpr once more, one equation after the
other: `repair.RULES` is the table of the primitives that it does not leave as they are. `rows` has the rules of slices,
gathers and scatters, `selects` those of what chooses between two versions of a buffer, `sums` those of what the
gradient of plain JAX is made of, and `control` those of loops, conditionals and calls. `values` is what they tell each
other.
"""
