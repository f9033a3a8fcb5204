"""TensorArray: the class, and what holds its rows.

`tensorarray` has the class. Outside of `jit` its rows are a version of a list that `history` keeps. `checks` converts
what users pass, and `flax` registers the class with flax's serialisation.
"""
