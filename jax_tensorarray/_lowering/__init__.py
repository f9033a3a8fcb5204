"""The passes between JAX and XLA, over the jaxpr of every program that has an op or a loop of ours.

`program` runs them before JAX lowers the program, in this order:

- `expand` inlines scans, calls and loops of ours, and `fences` removes the fences of inner loops.
- `absolute` rewrites absolute values that XLA gets wrong.
- `bounds` finds the indices that need no check, `repeated` reads each row once, and `uses` finds the ops that need no
  order.
- `record` makes loops carry the first index that is out of range.
- `branches` reshapes conditionals, and `ordering` puts reads before updates.
- `slices` turns ops into XLA's own slices, gathers and scatters: `choice` chooses the ops, `agreement` gives all ops on
  one buffer the same form, and `slicing` has the functions.
- `columns` stores the factors of triangular solves by columns.
- `deferred` moves the errors of a program for several devices to its end.

Until `slices`, the index of an op says where boxes start along each axis, and examples may share it. A kernel takes the
numbers of all rows of each example, so `slicing.flat` computes them for the ops that remain calls.

After `expand`, the passes read a program by `scopes`, its ops by `ownership` and `aliases`, and their lines by
`places`. They make equations by `equations`, often by tracing functions of `_ops.starts`. The result of each pass can
be printed and run.
"""
