"""`in_place`: a transformation that replaces a program's operations on rows of buffers by row ops.

`api` has the public function. `arguments` splits arguments and results into what JAX sees and what passes by it,
`changes` carries out what a function changes in its arguments (`nnx` in modules of Flax NNX, `surroundings` what Haiku
and Linen keep around it), and `pickling` sends the function to another process. `api` traces a program, and `repair`
evaluates the jaxpr again, one equation after the other: its table `RULES` lists the primitives that it changes. What
runs jaxprs is run with repaired ones, as `_jaxprs.registry` says. The rules are in six modules: `rows` for slices,
gathers and scatters, `views` for rows of what is computed from a whole buffer, `selects` for choices between two
versions of a buffer, `sums` and `factors` for the sums and products in gradients of plain JAX, and `control` for loops,
which has `twins` find the buffers that a loop carries twice. They share what they know about values through `values`;
`equinox` has rules for primitives of that library. Rings (in `registers`), layouts and stacks are values in another
representation, for which `representations` has the walk. `noted` has `checkify` see the operations that are gone. Two
modules come before: `early` repairs loops that the program itself differentiates, and `_jaxprs.refs` turns refs into
arrays. `explained` keeps what `doctor.explain` says. `package` puts under `in_place` what another package jits:
`source` changes its source, and `jit` is what that calls then. `switch` turns all of this off, and `off` explains the
gradients that are missing then. `checking` compares results with those of the program as it is written, `strictness`
looks for copies in compiled programs, and `log` writes one line per trace.
"""
