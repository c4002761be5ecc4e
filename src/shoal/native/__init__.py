"""Kernels in C for work on a CPU, compiled on the machine they run on.

kernels.c, typed.h   products, attention, rotary embedding with the write to the cache, RMS norm
drawing.h            distributions, and tokens drawn from them
kernels.h, structs   their arguments, in C and in Python
build                compiles them with the system's C compiler, once per machine
processor            what the processor can do
"""
