"""Time, memory and compile time of this library against what there is, in one run: `python -m benchmarks --help`."""
