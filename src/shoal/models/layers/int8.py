"""Weight-only int8 on CUDA: linear layers whose weights are read as bytes where few tokens are computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_TOKENS = 64
"""Beyond that a product computes more than it reads: weights are unpacked for it, as for prompts."""
OUTPUTS, INPUTS, STAGES = 32, 128, 4
"""Of a program of the kernel: outputs, and inputs per step; steps in flight."""


def product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ * scales + bias, [tokens, out] in the dtype of x.

    Args:
        x: [tokens, in], contiguous. weight: [out, in] int8, contiguous. scales: [out] float32. bias: [out] or None.
    """
    tokens, outputs = len(x), len(weight)
    if tokens > MOST_TOKENS:
        return F.linear(x, (weight * scales[:, None]).to(x.dtype), bias)
    from shoal.models.layers import kernels

    out = x.new_empty(tokens, outputs)
    block = token_block(tokens)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernels.int8_product[(-(-outputs // OUTPUTS), -(-tokens // block))](
            x, weight, scales, bias, out, tokens, x.shape[1], outputs, BLOCK_T=block, BLOCK_N=OUTPUTS, BLOCK_K=INPUTS,
            num_warps=4, num_stages=STAGES,
        )  # fmt: skip
    return out


def token_block(tokens: int) -> int:
    """Tokens of a program: all of them, in a power of two that tensor cores take."""
    return max(16, 1 << (tokens - 1).bit_length())


class WeightOnlyInt8(nn.Module):
    """y = x Wᵀ + b with int8 weights and a scale per output; activations keep their dtype.

    Attributes:
        weight: [out, in] int8. scales: [out] float32. bias: [out] or None.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        wide = layer.weight.detach().float()
        scales = wide.abs().amax(dim=1).clamp(min=1e-12) / 127
        self.weight = nn.Parameter((wide / scales[:, None]).round().to(torch.int8), requires_grad=False)
        self.scales, self.bias = nn.Parameter(scales, requires_grad=False), layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        y = product(x.reshape(-1, x.shape[-1]), self.weight, self.scales, self.bias)
        return y.view(*x.shape[:-1], self.out_features)
