"""Read optimised HLO, the text of a compiled program.

`text` parses it, and finds the operations in loops and their lines of Python. `buffers` finds the operations of a loop
on all of a buffer that it carries, and `arguments` the arguments that a program copies. `ahead` compiles for a platform
that need not be present.
"""
