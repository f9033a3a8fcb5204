"""`in_place`: a transformation that replaces a program's operations on rows of buffers by row ops.

`api` has the public function, and `arguments` what it passes through as it is. It traces a program, and `repair`
evaluates the jaxpr again, one equation after the other: its table `RULES` lists the primitives that it changes. What
runs jaxprs is run with repaired ones, as `_jaxprs.registry` says. The rules are in six modules: `rows` for slices,
gathers and scatters, `views` for rows of what is computed from a whole buffer, `selects` for choices between two
versions of a buffer, `sums` and `factors` for the sums and products in gradients of plain JAX, and `control` for loops,
which has `twins` find the buffers that a loop carries twice. They share what they know about values through `values`;
`equinox` has rules for primitives of that library. Rings (in `registers`), layouts and stacks are values in another
representation, for which `representations` has the walk. `noted` has `checkify` see the operations that are gone. Two
modules come before: `early` repairs loops that the program itself differentiates, and `refs` turns refs into arrays.
`explained` keeps what `inspect.explain` says. `package` puts under `in_place` what another package jits: `source`
changes its source, and `jit` is what that calls then.
"""
