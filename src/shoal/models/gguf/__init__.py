"""The models in GGUF files, whose passes llama.cpp computes.

library    finds llama.cpp
model      reads a file
sequences  the cache: a row is a sequence of llama.cpp's memory
kept       rows that are kept for later rows
tokenizer  makes a tokenizer of the file's vocabulary
runner     joins them

The executor is `shoal.models.executors.llama_cpp`.
"""
