"""Kernels in C for work on a CPU, compiled on the machine they run on.

kernels.c, typed.h, kernels.h   attention, rotary embedding with the write to the cache, RMS norm
build                           compiles them with the system's C compiler, once per machine
structs                         their arguments
processor                       what the processor can do
"""
