"""`in_place`: a transformation of functions, after which their loops read and write rows of buffers by row ops.

    b = b.at[i].set(jnp.sin(b[j]))
    # becomes
    b = ta_write(b, i, jnp.sin(ta_read(b, j)))

It traces a function and evaluates the jaxpr again, one equation after the other, by tables of rules. An equation that
runs jaxprs is rebuilt around rewritten ones, as `_jaxprs.registry` says.

- Entry: `api` has the decorator, and `early` the loops that the function itself differentiates. `package` puts under
  `in_place` what another package jits: `source` rewrites that package so that it calls `jit`. `switch` turns all of
  this off, and `off` explains the gradients that are missing then.
- Arguments and results: `arguments` splits them into traced and static leaves, `changes` returns side effects as
  results (`nnx` for modules of Flax NNX, `surroundings` for what Haiku and Linen keep), and `pickling` sends functions.
- Interpreter: `repair` evaluates jaxprs in the `values` that rules know something about, and `control` rewrites loops.
- Rules: `rows` for slices, gathers and scatters, `views` for rows of what is computed from a buffer, `parts` for views
  that are put back, `selects` for choices between versions, `masks` for one-hot masks, `sums` for cotangents,
  `factors` for products, and `equinox` for primitives of that library.
- Analyses: `maps`, `access` and `boxes` say where a view is in its buffer, `indices` whether two indices are equal,
  `patterns` which masks are one-hot, and `twins` which carries are equal.
- Representations other than one array, evaluated by `representations`: circular buffers (`registers` and `rings`),
  permuted axes (`layouts`), and slices of a carried stack (`stacks`).
- Reports and checks: `explained`, `choices`, `log`, `noted` for `checkify`, `checking` and `strictness`.
"""
