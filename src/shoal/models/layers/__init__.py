"""The layers of passes on a GPU: a decoder of the Llama family in nine kernels a layer.

The weights are those of an unmodified model.

kernels       the Triton kernels
operations    launches the kernels
drawing       draws of a drafter's steps
draw_kernels  the Triton kernels of the draws
decoder       the pass
eight_bit     linear layers with weights of one byte
"""
