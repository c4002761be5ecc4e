"""The weights of linear layers: the forms in which they lie in memory, and the choice of a form.

Users may still read, write and save the weights.

matrix      one weight matrix and the products by it
panels      packed for the product kernel in C
pages       the memory of packed weights
packing     which form and which packing
parameter   a packed matrix as a tensor that reads, writes and saves as ever
layers      the layers of a model, given their forms
fusing      several layers as one matrix
int8        weights of int8
saving      `save_pretrained`
"""

from shoal.models.weights.fusing import matches, matrix_of
from shoal.models.weights.layers import LINEARS, PackedLinear, lay_out, nbytes
from shoal.models.weights.matrix import Matrix
from shoal.models.weights.packing import by_facts, without_packing

__all__ = [
    "LINEARS",
    "Matrix",
    "PackedLinear",
    "by_facts",
    "lay_out",
    "matches",
    "matrix_of",
    "nbytes",
    "without_packing",
]
