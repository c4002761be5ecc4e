"""The layers of passes on a GPU: a decoder of the Llama family in nine kernels a layer.

The weights are those of an unmodified model.

triton_decoder  the pass
operations      products with weights of 8 bits, and the steps between products
layer_kernels   the Triton kernels of `operations`
gpu_draws       the distributions and draws of a round
draw_kernels    the Triton kernels of `gpu_draws`
"""
