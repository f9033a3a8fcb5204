"""Walk and rewrite jaxprs.

`jaxprs` has the helpers of every walk, `uses` the use-def chains, and `kinds` a table of JAX's primitives. `registry`
has an entry for each higher-order primitive: the operands and results of its jaxprs, and how to rebuild its equation
around other jaxprs. Support for a new primitive begins with an entry there. `foreign` treats primitives of other
libraries, whose jaxprs appear only when JAX lowers them. `refs` replaces refs by arrays.
"""
