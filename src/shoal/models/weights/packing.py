"""Which packing: that of the kernels in C, or that of oneDNN; decided by facts.

Panels take 0.6 to 1.05 of the time of oneDNN's blocks at 1 to 40 tokens with AVX-512, float32 and bfloat16. Tiles (AMX) multiply 40
tokens in the time of one, which only oneDNN's kernels use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models import formats
from shoal.models.native.build import missing
from shoal.models.weights.matrix import PACKED, Matrix
from shoal.models.weights.panels import SUFFIXES, PanelMatrix

TILES = "AMX-BF16"


def packing(dtype: torch.dtype) -> type[Matrix] | None:
    """The class of packed matrices of a dtype on this CPU; None where weights of that dtype are not packed."""
    cpu = formats.cpu()
    if dtype not in cpu.packs:
        return None
    return PanelMatrix if dtype in SUFFIXES and cpu.products.get(dtype) != TILES and not missing() else Matrix


def packed(weight: Tensor, bias: Tensor | None, *, table: bool = False) -> Matrix:
    """Weights [out, in] in the packing of their dtype; see `Matrix`."""
    return (packing(weight.dtype) or Matrix)(weight, bias, PACKED, table=table)
