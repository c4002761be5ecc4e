"""The lean pass: a decoder of the Llama family in few operations.

It takes the weights of an unmodified Transformers model.

decoder   the model, read off its modules
whole     the pass in one call of C, and a drafter's steps in one call each
forward   the pass layer by layer; norms, heads and attention by the kernels in C
"""
