"""The order of a model's weights in memory.

A decoding pass is small products [tokens, in] x [in, out]. Libraries keep weights as [out, in], and MKL repacks them in every
float32 product of more than about ten tokens, which can cost more than the product. Kept input-major they need no repacking: the
same numbers under the same shape, only the strides change. The order follows facts and no measurement: it changes the rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal import formats


def transposed(weight: Tensor) -> Tensor:
    """The same matrix [out, in], laid out in memory as [in, out]."""
    return weight.t().contiguous().t()


@torch.no_grad()
def lay_out(hf: Any) -> str:
    """Keeps the float32 weights of a model's linear layers input-major where MKL multiplies them; returns what was done.

    Changes strides only, of a model that is ours: shapes, values and names stay, tied weights stay tied.
    """
    layers = [layer for layer in hf.modules() if type(layer) is nn.Linear and layer.weight.device.type == "cpu"]
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight.dtype == torch.float32}.values()
    if not weights or not formats.cpu().mkl:
        return "output-major"
    for weight in weights:
        weight.data = transposed(weight.data)
    return "input-major"
