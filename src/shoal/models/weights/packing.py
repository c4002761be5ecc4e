"""The choice between the packing of the kernels in C and that of oneDNN, by facts.

Panels cost less per call and read the weights once, in order. oneDNN packs weights where there is
no C compiler, and those of bytes for tiles (AMX), which its kernels use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models import formats
from shoal.models.weights.int8 import Int8Matrix, Int8PanelMatrix
from shoal.models.weights.matrix import PACKED, Matrix
from shoal.models.weights.panels import PanelMatrix
from shoal.native.build import SUFFIXES, missing
from shoal.native.processor import cpu_flags

BYTE_TILES = "amx_int8"


def packing(dtype: torch.dtype) -> type[Matrix] | None:
    """Returns the class of packed matrices of a dtype on this CPU.

    Returns None where weights of that dtype are not packed.
    """
    if dtype not in formats.cpu().packs:
        return None
    return PanelMatrix if dtype in SUFFIXES and not missing() else Matrix


def packed(weight: Tensor, bias: Tensor | None, *, table: bool = False) -> Matrix:
    """Returns a matrix of weights [out, in] in the packing of their dtype; see `Matrix`."""
    return (packing(weight.dtype) or Matrix)(weight, bias, PACKED, table=table)


def byte_packing() -> type[Int8Matrix] | None:
    """Returns the class of packed matrices of bytes, whose sums must be exact.

    Returns None where weights of bytes are not packed.
    """
    if torch.int8 not in formats.cpu().packs:
        return None
    return Int8Matrix if missing() or BYTE_TILES in cpu_flags() else Int8PanelMatrix
