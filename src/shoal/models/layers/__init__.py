"""The layers of passes on a GPU: a decoder of the Llama family in nine kernels a layer, by an
unmodified model's weights.

kernels     the Triton kernels
operations  what launches them
decoder     the pass
plan_state  the pass under way, where nothing is captured
eight_bit   linear layers with weights of one byte
"""
