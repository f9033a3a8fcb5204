"""Store functions that call the kernels with `jax.export`, and load them again.

A stored function contains the names of its kernels. The process that loads it must import `jax_tensorarray`, on a
machine with kernels for its platform. The names, operands and attributes of the calls are a contract with a number,
`CONTRACT_VERSION`. A newer release of this library runs every function that was stored under the same number. The
documentation of `jax.export` says which versions of JAX can read each other's files.

The contract, version 1. Every call is a typed XLA FFI call (API version 4). `buffer` is `[*batch, T, *elem]`, `index`
and `where` are `[*batch, *I]`, `value` is `[*batch, *I, *elem]`. An updated buffer is the first result and has the
memory of the first operand. XLA only waits for operands that follow the named ones; the kernels ignore them.

| target `jax_tensorarray_...` | operands | results | attributes |
|---|---|---|---|
| `read` | buffer, index, [where] | value | op, batch_dims, strict, masked, sorted, reverse |
| `write`, `add` | buffer, index, value, [where], [order] | buffer | the same |
| `swap` | buffer, index, value, [where], [order] | buffer, old rows | the same |
| `mask` | buffer, size `[*batch]` | buffer | batch_dims |
| `clear` | buffer, start `[*batch]`, stop `[*batch]` | buffer | batch_dims |
| `check` | index, size `[*batch]`, int32 | index, int32 | op, strict |
| `read_part` | buffer `[*batch, T, M, *elem]`, index `[*batch]`, parts `[*batch]` | row | batch_dims |
| `write_part` | buffer, index, row, parts | buffer | batch_dims |
| `fence` | buffer | buffer | |
| `empty` | | buffer | |
| `raise` | | int32 | |

The other ops of `csrc/combine.h` are called like `add`.

`op` (string) is the name of the op in messages, and after an `@` its place in the source: `ta_write@train.py:12`. If
it has several lines, line k is for position k of the index. If it begins with `>`, a CPU drops an index out of range,
and a call of `raise` later in the same run raises the error.

`batch_dims` (int64) is the number of batch axes. `index_dims` (int64, 1 if it is absent, and only in calls with
`strict`, `masked`, `sorted` and `reverse`) is the number of axes that stand for `T`. An index counts the rows of all of
them, the last axis fastest. The other attributes are bools:

- `strict`: an index out of range raises an error.
- `masked`: the call has a `where`.
- `sorted`: the call has an `order`, on GPUs: the positions sorted by row, int32.
- `reverse`: the call visits the positions last to first.
"""

from jax.export import DisabledSafetyCheck

import jax_tensorarray._ops  # noqa: F401  # the ops declare their calls
from jax_tensorarray._ops.calls import PREFIX, SIGNATURES

#: The version of the contract. A stored function may name calls of a lower number.
CONTRACT_VERSION = 1

#: The custom calls that a lowered function may contain.
TARGETS = tuple(PREFIX + name for name in SIGNATURES)


def disabled_checks() -> list[DisabledSafetyCheck]:
    """Return the checks that `jax.export.export` must skip, because it does not know our custom calls.

    >>> import jax, jax.numpy as jnp
    >>> from jax_tensorarray import ta_read
    >>> from jax_tensorarray.export import disabled_checks
    >>> f = jax.jit(jax.grad(lambda b: jnp.sum(ta_read(b, 1) ** 2)))
    >>> stored = jax.export.export(f, disabled_checks=disabled_checks())(jnp.arange(3.0))
    >>> stored.call(jnp.arange(3.0))
    Array([0., 2., 0.], dtype=float32)
    """
    return [DisabledSafetyCheck.custom_call(target) for target in TARGETS]


__all__ = ["CONTRACT_VERSION", "TARGETS", "disabled_checks"]
