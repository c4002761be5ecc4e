"""The kernels in C for work on a CPU, compiled on the machine they run on, or carried by a wheel.

kernels.c            vectors of the processor
team.h               how many threads a region has
tile.h, pairs.h      sums of products in registers, and of pairs of bfloat16
typed.h, attend.h    products, rotary embedding with the write to the cache, RMS norm; attention
decode.h             a decoder's pass of these in one call
drawing.h            distributions, tokens drawn from them, the verdict on drafts
drafting.h           a drafter's step: a pass and a draw
kernels.h, structs   their arguments, in C and in Python
build                finds them, or has them compiled, once per machine
compiling            compiles them with the system's C compiler
"""
