"""A lean pass: a decoder of the Llama family computed in few operations, from the weights of an unmodified Transformers model.

decoder         what the pass computes, read off the model
forward         the pass
native, plain   norms, heads and attention: by the kernels in C, or by PyTorch
"""
