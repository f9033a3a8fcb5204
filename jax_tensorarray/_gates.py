"""The thresholds of the cost model: from which sizes on an optimisation pays, with the measurement of each number.

A gate decides what a program costs, never what it computes. The random programs of the tests run with all gates open,
with all of them shut, and as they are. So a rule looks its gate up here each time. A limit of how far an analysis
looks, such as `bounds._DEEPEST`, is in the file of the analysis.
"""

# --- in_place: which accesses become row ops ---------------------------------------------------------------------

#: The share of a buffer's rows from which an access to several of them stays as it is. Row ops would gain little, and
#: `h[:, i]` of all columns takes 1.5 times as long.
ROWS_SHARE = 1.0

#: The share of a buffer from which writes of single elements stay as they are. Their gradient finds which write of an
#: element came last, which takes 1.4 to 1.7 times as long as to make the whole array (CPU, jax 0.12).
ELEMENTS_SHARE = 0.5

#: The share from which a box along several axes stays as it is. Whoever moves it does as much anyway, and the gradient
#: of `a.at[1:-1, 1:-1].add(a[:-2, 1:-1])` takes 1.1 to 1.5 times as long as in plain JAX if `a` has 24 * 24 to 48 * 48
#: elements. Boxes of a quarter take at most 1.0 times as long (CPU, jax 0.12).
BOX_SHARE = 1 / 3

#: Of rows of n numbers, k that may be the same are compared with each other if k * (k + 8 * n + 128) is at most this
#: share of the numbers in the buffer. Then `.at[].divide` takes 0.04 to 0.5 times as long, 1.3 times in one case, and
#: its gradient at most 0.06 times as long (CPU, jax 0.12, rows of 1, 8 and 64 floats, k from 2 to 8). If the share is 8
#: times as large, it takes up to 7 times as long.
COMPARED_SHARE = 1 / 16

#: The largest share that a slice from a place known while tracing may have as a row op. Then its gradient takes 0.85
#: times as long, or less. A larger one gains nothing, and `jnp.roll`, which is made of two, takes 1.5 times as long
#: (CPU, jax 0.12, 64 rows).
KNOWN_SHARE = 0.5

#: A read of at least this share of a buffer counts as a read of all of it when a scan chooses what it stores. Attention
#: over keys and values in the columns of one buffer reads halves: its gradient stored 24 MB, and stores 0.6.
READ_SHARE = 0.25

#: A `jnp.arange` of at most so many elements is made in each step, where XLA knows its numbers. Made before the loop it
#: is an operand: a gather of 20 rows by `(i * jnp.arange(20)) % n` takes 2.3 times as long then (CPU, jax 0.12).
COUNTED = 64

# --- in_place: how carries are represented -----------------------------------------------------------------------

#: A register of at least so many bytes is a ring. To move all rows of a smaller one takes at most 1.1 times as long
#: (CPU, jax 0.12; rows of 1 to 64 floats).
REGISTER_BYTES = 128

#: If each example has an index or a choice of its own, accesses by it pay for examples of at least so many bytes: rings
#: with a start per example, and branches instead of selects. To move all of a smaller example takes at most 1.1 times
#: as long (CPU, jax 0.12, batches of 8).
EXAMPLE_BYTES = 4096

#: From this number of steps on, a loop gains more time than to put the rows of a ring in order takes (CPU, jax 0.12, 64
#: to 4096 rows).
RING_STEPS = 3

#: A select by a mask that is true for one row stays in an array of fewer bytes, and so does one by a mask that each
#: example has for itself. From these sizes on row ops take at most 0.7 times as long (CPU, jax 0.12, 8 examples, rows
#: of 1 and 16 floats); 8 buffers of 32 floats take 1.7 times as long.
MASKED_BYTES = 512
MASKED_BYTES_OF_EXAMPLES = 4096

#: At most this many steps are merged into one, where carries change places.
ROUND_STEPS = 6

# --- loops: what a gradient keeps --------------------------------------------------------------------------------

#: A tape of smaller buffers and residuals costs no more than a log of them.
LOGGED_BYTES = 1024

#: Residuals of at most this many bytes are kept.
KEPT_BYTES = 64

#: A scan with a large index keeps a tape of its own if what it then makes again is so many times what it keeps.
MADE_AGAIN = 4

#: A residual is computed again if this takes at most this many operations for each of its bytes. To keep a byte means
#: to write and to read it. In that time a processor does some ten operations on bytes that it has at hand, and a GPU
#: some fifty. But of the operations of a gradient, those of the step itself are only a third: to compute all of a step
#: again takes a third more time. So a residual counts as slow to compute only if it takes many times as many
#: operations.
REPEATED_WORK = 512

#: A loop keeps a tape of at most so many bytes for all of its steps if undo would compute more than this many
#: operations again for each byte that it saves. For such a tape the gradient with undo takes 1.1 to 1.8 times as long
#: as plain JAX's (`exp` of all of a buffer, 1.2 to 6 operations per byte; 0.8 to 1.2 times for `tanh`), and 0.4 to 1.0
#: times for up to 0.7 operations. If the tape takes 6 MB or more, undo takes 0.5 to 1.1 times as long even for `exp`,
#: but 1.4 times for `logsumexp` (CPU, jax 0.12, rows of 24 floats).
TAPE_BYTES = 1 << 22
UNDONE_WORK = 1

#: A checkpoint that computes a step again is left out if its gradient then keeps at most this many times as much.
OPENED_SHARE = 1.25

#: Rows of fewer bytes stay on the device: sending them takes longer, and XLA cannot send a scalar to a TPU's host.
SENT_BYTES = 128

# --- lowering: slices or calls, and their order ------------------------------------------------------------------

#: The most rows of an op that become slices. On a GPU each slice is a kernel, and one of ours does them all.
SLICES = 16

#: The most rows that become slices where they may be one gather or scatter instead, which costs 0.1 us in a loop,
#: whatever the number of rows. Slices of so few rows leave the loop one function.
SLICES_ON_CPU = 4

#: The most bytes that an op may both read and write by slices if a branch has to order these. In a loop over longer
#: rows XLA runs each branch by itself, which takes longer than the one call that does both: gradients of programs of
#: `benchmarks.harm` take 1.0 to 1.7 times as long (jax 0.10.2).
SLICED_BYTES = 64

#: A masked write over all rows of a buffer of at least so many bytes first asks whether the mask is true for any
#: example. Then a step in which no example is emptied takes 0.02 to 0.25 times as long, and one in which all are, 0.12
#: to 0.24 times. With 16 KiB it is 0.9 to 1.2 times (CPU, jax 0.12, 2 and 8 examples of 8 KiB to 256 KiB).
REPLACED_BYTES = 1 << 16

#: So many elements of a function like `tanh` are computed before several rows are written, and not by each slice. From
#: 0.12 on XLA compiles a loop of slices as one function, without vectors: 256 tanh take 0.4 us there, 0.1 else.
VECTOR_ELEMENTS = 128

#: A smaller array is copied in less time than XLA loses by an order that it has to keep. On jax 0.10, where that is a
#: conditional, a sieve takes 2.5 times as long with one, a heap 7 times, and a search for cycles 25 times.
ORDERED_BYTES = 1024

#: Likewise for an array that is read as a whole: this takes longer than copying it, and a small one is not worth the
#: wait.
ORDERED_BYTES_OF_ALL = 16384

#: Up to this many positions in a batch a thread of a GPU reads them all: in about 2 us, and a sort takes more.
SCANNED_POSITIONS = 128
