"""The passes between JAX and XLA, over the jaxpr of every program that has an op or a loop of ours.

`program` runs them before JAX lowers the program, in this order:

- `expand` inlines scans, calls and loops of ours, and `fences` removes the fences of inner loops.
- `absolute` rewrites absolute values that XLA gets wrong.
- `bounds` finds the indices that need no check, `repeated` reads each row once, and `uses` finds the ops that need no
  order.
- `record` has loops carry the first index that is out of range.
- `branches` reshapes conditionals, and `ordering` puts reads before updates.
- `slices` makes XLA's own slices, gathers and scatters of ops: `choice` chooses the ops, `agreement` has all ops on one
  buffer agree, and `slicing` has the functions.
- `columns` keeps factors of solves by columns.
- `deferred` has the calls in a program for several devices raise at its end.

Until `slices`, the index of an op says where boxes start along each axis, and examples may share it. A kernel takes the
numbers of all rows in each example: `slicing.flat` gives them to the ops that stay.

After `expand`, the passes read a program by `scopes`, its ops by `ownership` and `aliases`, and their lines by
`places`. They make equations by `equations`, often of functions in `_ops.starts`. Each pass leaves a program that can
be printed and run.
"""
