"""What happens to a program between JAX and XLA.

`pipeline` runs the passes over every lowered module that has an op of ours. In this order, `bounds` finds the indices
that need no check, `uses` the ops that need no order, `record` has loops carry the first index that is out of range,
`branches` reshapes conditionals, `ordering` puts reads before updates, `slices` chooses the calls that become XLA's own
slices, gathers and scatters, which `slicing` writes, `fallback` replaces the calls that are left on platforms without
kernels, and `partition` says how XLA divides the calls that stay.

Until `slices`, the index of a call says where boxes start along each axis, and examples may share it. A kernel takes
the numbers of all rows in each example: `build.flatten` gives them to the calls that stay.

All of them read a module by `mlir`, its calls by `calls` and what is updated by `ownership`, and write by `build`.
"""
