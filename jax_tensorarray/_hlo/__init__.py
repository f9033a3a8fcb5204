"""Read optimised HLO, the text of a compiled program.

`text` finds instructions, and the lines of Python behind them. `buffers` finds what a loop does to a buffer that it
carries. `ahead` compiles for a platform that need not be present.
"""
