"""The choice of the form of weights and of their packing, by facts.

The form changes the rounding, and with it the tokens of a seed, so no clock decides.

Panels cost less per call and read the weights once, in order. oneDNN packs weights where there is
no C compiler.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shoal.models import formats
from shoal.models.weights.int8 import Int8Matrix, Int8PanelMatrix
from shoal.models.weights.matrix import AS_IS, INPUT_MAJOR, PACKED, Key, Matrix
from shoal.models.weights.panels import PanelMatrix
from shoal.native.build import SUFFIXES, missing


def by_facts(keys: Collection[Key]) -> dict[Key, str]:
    """Returns the forms with packing wherever weights of the dtype can be packed."""
    plain = without_packing(keys)
    return {key: plain[key] if packing(key[1]) is None else PACKED for key in keys}


def without_packing(keys: Collection[Key]) -> dict[Key, str]:
    """Returns the forms without packing: input-major where MKL multiplies, which is in float32."""
    return {
        (shape, dtype): INPUT_MAJOR if dtype == torch.float32 and formats.cpu().mkl else AS_IS
        for shape, dtype in keys
    }


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
    """Returns the class of packed matrices of bytes; None where they are not packed."""
    return None if missing() else Int8PanelMatrix
