"""The models in GGUF files, whose passes the kernels in C or llama.cpp compute.

contents         reads a file's facts and weights
own              makes a model for the kernels in C of them
gguf_model       finds llama.cpp, and gives it the file
sequences        the cache: a row is a sequence of llama.cpp's memory
state_sequences  the cache of models with recurrent states
tokenizer        makes a tokenizer of the file's vocabulary
gguf_runner      joins them, with the executor, and keeps rows for later rows
"""
