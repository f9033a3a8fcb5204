"""Read optimised HLO, the text of a compiled program.

`text` parses it, finds what runs in loops, and knows the lines of Python. `buffers` finds what a loop does to a buffer
that it carries. `ahead` compiles for a platform that need not be present.
"""
