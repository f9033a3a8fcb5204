"""The thresholds of the cost model: from which sizes on an optimisation pays, with the measurement of each number.

A gate affects the cost of a program, never its results. Tests run their random programs with all gates open, with all
gates shut, and with these. So a rule looks its gate up here each time. A limit on the depth of an analysis, such as
`bounds._DEEPEST`, is in the file of the analysis.
"""

# --- in_place: which accesses become row ops ---------------------------------------------------------------------

#: `in_place` rewrites an access to several rows of a buffer below this share of the rows. Beyond it, row ops gain
#: little, and `h[:, i]` of all columns takes 1.5 times as long.
ROWS_SHARE = 1.0

#: `in_place` rewrites writes of single elements below this share of a buffer. Their gradient must find the last write
#: of each element, which takes 1.4 to 1.7 times as long as computing the whole array (CPU, jax 0.12).
ELEMENTS_SHARE = 0.5

#: `in_place` rewrites a box along several axes below this share of a buffer. Moving a larger one costs as much anyway,
#: and the gradient of `a.at[1:-1, 1:-1].add(a[:-2, 1:-1])` takes 1.1 to 1.5 times as long as in plain JAX if `a` has 24
#: * 24 to 48 * 48 elements. Boxes of a quarter take at most 1.0 times as long (CPU, jax 0.12).
BOX_SHARE = 1 / 3

#: We compare k indices that may be equal, of rows of n numbers, if k * (k + 8 * n + 128) is at most this share of the
#: numbers in the buffer. Then `.at[].divide` takes 0.04 to 0.5 times as long, 1.3 times in one case, and its gradient
#: at most 0.06 times as long (CPU, jax 0.12, rows of 1, 8 and 64 floats, k from 2 to 8). With 8 times this share, it
#: takes up to 7 times as long.
COMPARED_SHARE = 1 / 16

#: The largest share of a buffer for a slice with a constant start to become a row op. Up to this share, its gradient
#: takes 0.85 times as long, or less. A larger one gains nothing, and `jnp.roll`, two slices, takes 1.5 times as long
#: (CPU, jax 0.12, 64 rows).
KNOWN_SHARE = 0.5

#: When a scan chooses its residuals, reads of at least this share of a buffer in a step count as a read of all of it.
#: Attention over keys and values in the columns of one buffer reads halves: its gradient stored 24 MB, and stores 0.6.
#: Each of 32 layers may read its part of one cache: the gradient of 128 steps stored 39 MB, and stores 6.
READ_SHARE = 0.25

#: We compute a `jnp.arange` of at most so many elements in each step, where XLA knows its numbers. Computed before the
#: loop it is an operand, and a gather of 20 rows by `(i * jnp.arange(20)) % n` takes 2.3 times as long (CPU, jax 0.12).
COUNTED = 64

# --- in_place: how carries are represented -----------------------------------------------------------------------

#: A shift register of at least so many bytes becomes a circular buffer. Moving all rows of a smaller one takes at most
#: 1.1 times as long (CPU, jax 0.12; rows of 1 to 64 floats).
REGISTER_BYTES = 128

#: Accesses with an index or a predicate per example pay for examples of at least so many bytes: circular buffers with a
#: start per example, and branches instead of selects. Moving all of a smaller example takes at most 1.1 times as long
#: (CPU, jax 0.12, batches of 8).
EXAMPLE_BYTES = 4096

#: From this number of steps on, a circular buffer gains more time than the reordering of its rows after the loop takes
#: (CPU, jax 0.12, 64 to 4096 rows).
RING_STEPS = 3

#: We rewrite a select by a mask for one row in arrays of at least so many bytes, and by a mask per example in examples
#: of at least so many bytes. Then row ops take at most 0.7 times as long (CPU, jax 0.12, 8 examples, rows of 1 and 16
#: floats). With 8 buffers of 32 floats they take 1.7 times as long.
MASKED_BYTES = 512
MASKED_BYTES_OF_EXAMPLES = 4096

#: We merge at most so many steps into one if carries are permuted.
ROUND_STEPS = 6

# --- loops: residuals --------------------------------------------------------------------------------

#: A tape of smaller buffers and residuals costs no more than a log of them.
LOGGED_BYTES = 1024

#: We store residuals of at most so many bytes, and do not recompute them.
KEPT_BYTES = 64

#: A scan becomes a loop with a tape if the recomputed residuals have more than so many times the bytes of the stored
#: ones.
RECOMPUTED_SHARE = 4

#: We recompute a residual if this takes at most so many operations for each of its bytes. Storing a byte means to write
#: and to read it. In that time a CPU does some ten operations on bytes in its cache, and a GPU some fifty. But the step
#: itself has only a third of the operations of its gradient, so recomputing all of a step takes a third more time. So a
#: residual counts as slow only with many times as many operations.
REPEATED_WORK = 512

#: A loop stores a tape of at most so many bytes for all its steps if undo would repeat more than so many operations for
#: each byte that it saves. For such a tape the gradient with undo takes 0.6 to 1.6 times as long as plain JAX's (`exp`,
#: `tanh`, `sin` and `logsumexp` of all of a buffer, five operations per byte), and 0.4 to 1.0 times for up to 0.7
#: operations. If the tape takes 3 MB or more, undo takes 0.2 to 1.1 times as long (CPU, jax 0.12, 20 to 1000 rows of 1
#: to 240 floats).
TAPE_BYTES = 1 << 21
UNDONE_WORK = 1

#: We remove a checkpoint that recomputes a step if the gradient then stores at most so many times as much.
OPENED_SHARE = 1.25

#: Smaller rows stay on the device: sending them takes longer, and XLA cannot send a scalar to the host of a TPU.
SENT_BYTES = 128

# --- lowering: slices or calls, and their order ------------------------------------------------------------------

#: An op on at most so many rows becomes slices. On a GPU each slice is a kernel, and one of ours moves all rows.
SLICES = 16

#: An op on at most so many rows becomes slices if it may also be one gather or scatter, which costs 0.1 us in a loop
#: for any number of rows. With few slices, XLA compiles the loop to one function.
SLICES_ON_CPU = 4

#: The same for updates that neither return old rows nor have a mask. With five to eight rows, slices take 0.6 to 1.0
#: times as long as one scatter, their gradients 0.25 to 1.0 times. Reads of eight rows would take up to 2.3 times as
#: long. Rows of several examples are not counted here: often another op of the loop stays a scatter, so XLA would run
#: each slice by itself, and `full_cond` would take 4 times as long (CPU, jax 0.12, rows of 1 to 512 floats).
SLICES_OF_UPDATES = 8

#: An op reads and writes a row of at most so many bytes by slices if a branch must order the two. For longer rows XLA
#: does not compile the branch into the loop, which takes longer than one call: gradients of programs of
#: `benchmarks.harm` take 1.0 to 1.7 times as long (jax 0.10.2).
SLICED_BYTES = 64

#: A masked write over all rows of a buffer of at least so many bytes is in a branch on `any(mask)`. Then a step without
#: an active example takes 0.02 to 0.25 times as long, and one in which all are active 0.12 to 0.24 times. With 16 KiB
#: it takes 0.9 to 1.2 times as long (CPU, jax 0.12, 2 and 8 examples of 8 KiB to 256 KiB).
REPLACED_BYTES = 1 << 16

#: From so many elements of a function like `tanh` on, several rows are not written by slices. Since 0.12 XLA compiles a
#: loop of slices to one function, which is not vectorised: 256 tanh take 0.4 us there, and 0.1 us otherwise.
VECTOR_ELEMENTS = 128

#: If a step computes with an array of so many bytes, an update of several rows is one scatter, as in plain JAX, or a
#: call: then XLA computes in threads, if it reads and writes 512 KiB. For seven programs of four examples, slices take
#: 0.2 to 1.9 times as long as plain JAX at 1 and 2 MiB, and scatters 0.2 to 1.2 times. At 512 KiB they take 0.2 to 1.3
#: and 0.2 to 1.2 times, and at 256 KiB 0.2 to 1.6 and 0.3 to 1.4 times. Slices are faster where XLA copies for the
#: scatter. `h.at[three].add(x)` before `0.99 * h` of 400 KB takes 1.4 times as long by slices (two cores, jax 0.12).
THREADED_BYTES = 1 << 18

#: From so many elements on, arithmetic of all rows of a buffer is not fused with an update of a row before or after it.
#: For 60 floats, the gradient of `normalised_weights` takes 0.84 instead of 1.13 times as long as plain JAX, three
#: updates before `-b` 1.0 instead of 1.4 times, and the gradient of `c + b` after an update 0.5 instead of 1.2 times.
#: For 16 floats a barrier changes nothing (CPU, jax 0.12).
APART_ELEMENTS = 32

#: So many updates of whole rows of an array of one number are fused with the arithmetic after them, and no more. For
#: 256 rows of 256 floats, four take 0.1 to 0.5 times as long as with a barrier, and eight 3 to 5 times (jax 0.12).
FUSED_UPDATES = 4

#: Copying a smaller array takes less time than an order that XLA must keep. On jax 0.10, where the order is a
#: conditional, a sieve takes 2.5 times as long with one, a heap 7 times, and a search for cycles 25 times.
ORDERED_BYTES = 1024

#: The same for an array that a GPU reads as a whole, and for a carry that a step computes as a whole. That takes longer
#: than the copy, so the copy of a small array matters less than the order.
ORDERED_BYTES_OF_ALL = 16384

#: With at most so many positions per example, each thread of a GPU reads all of them. This takes about 2 us, and a sort
#: takes more.
SCANNED_POSITIONS = 128
