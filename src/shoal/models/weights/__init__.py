"""The weights of linear layers: the forms in which they lie in memory, and the choice of a form.

Users may still read, write and save the weights.

matrix      one weight matrix and the products by it, in memory of huge pages
panels      packed for the product kernel in C, those of int8 too
parameter   a packed matrix as a tensor that reads, writes and saves as ever; whether weights
            were written
layers      the layers of a model, given their forms; which form and which packing; several
            layers as one matrix
groups      weights as whole numbers in groups, as in GGUF files
"""

from shoal.models.weights.layers import (
    LINEARS,
    PackedLinear,
    by_facts,
    lay_out,
    matches,
    matrix_of,
    nbytes,
    without_packing,
)
from shoal.models.weights.matrix import Matrix

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
