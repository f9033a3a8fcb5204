"""Public TensorFlow programs with a `tf.TensorArray`, ported literally: how many lines change, and why.

`python -m benchmarks.ports` prints the tables of `benchmarks/results/ports.md`. The programs come from PyPI. Only the
lines that change are kept here.
"""
