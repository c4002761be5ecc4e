"""The models in GGUF files, whose passes the kernels in C or llama.cpp compute.

library    finds llama.cpp
contents   reads a file's facts and weights
rotary     reads its rotary positions
own        makes a model for the kernels in C of them
model      gives it to llama.cpp
sequences  the cache: a row is a sequence of llama.cpp's memory
kept       rows that are kept for later rows
tokenizer  makes a tokenizer of the file's vocabulary
runner     joins them

The executor is `shoal.models.executors.llama_cpp`.
"""
