"""Kernels in C for passes on a CPU, compiled on the machine they run on.

kernels.c, typed.h, kernels.h   attention, rotary embedding with the write to the cache, RMS norm
build                           compiles them with the system's C compiler, once per machine
structs                         their arguments
attention                       the attention method on top
"""
