"""Walk and rewrite jaxprs.

`jaxprs` has what every walk needs, `uses` the use-def chains, and `kinds` what the primitives of JAX do. `registry`
says what each primitive that runs jaxprs does with its operands and results, and how its equation is rebuilt around
other jaxprs: support for a new primitive begins with an entry there. `foreign` does so for primitives of other
libraries, whose jaxprs appear only when they are lowered. `refs` turns the refs in a jaxpr into arrays.
"""
