"""`in_place`: a transformation that replaces a program's operations on rows of buffers by row ops.

`api` has the public function. It traces a program, and `repair` evaluates the jaxpr again, one equation after the
other: the table `repair.RULES` lists the primitives that it changes. The rules are in four modules: `rows` for slices,
gathers and scatters, `selects` for choices between two versions of a buffer, `sums` for the sums in gradients of plain
JAX, and `control` for loops, conditionals and calls. They share what they know about values through `values`.
"""
