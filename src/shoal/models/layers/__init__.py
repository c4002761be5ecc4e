"""The layers of captured passes on a GPU: a decoder of the Llama family in nine kernels a layer, by an unmodified model's weights.

kernels     the Triton kernels
operations  what launches them
decoder     the pass
eight_bit   linear layers with weights of one byte
"""
