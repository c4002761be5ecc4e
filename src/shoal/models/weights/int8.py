"""A weight matrix of int8 whose products round their activations to 8 bits, too.

Every output has a scale, and every token has one, so that rows do not influence each other. Sums
are integers and exact: a CPU whose oneDNN multiplies bytes by packed weights, a CPU whose oneDNN
does not, and the kernels in C get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.models.weights.matrix import ACTIVATIONS, AS_IS, PACKED, Matrix, Products
from shoal.models.weights.panels import PANEL, Panels, place_of, products
from shoal.native.build import SUFFIXES

ZERO = 128
"""The zero of the unsigned bytes that x86 multiplies by signed ones."""


Sums = Callable[[Tensor], Tensor]
"""A function q [tokens, in] int8 -> q Wᵀ * scales, [tokens, out] float32; it may overwrite q."""


def rounded_product(x: Tensor, sums: Sums, bias: Tensor | None) -> Tensor:
    """Computes x Wᵀ + b in float32, x [tokens, in] rounded to int8 with one scale per token."""
    rows = x.float()
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    y = sums((rows / scales).round().to(torch.int8)).mul_(scales)
    return y if bias is None else y + bias


def plain_sums(q: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Computes `Sums` by weights that are not packed."""
    return torch._int_mm(q, weight.t()).float().mul_(scales)


class Int8Matrix(Matrix):
    """The matrix of y = x Wᵀ + b with W int8 [out, in] and a scale per output.

    x and y are of one floating dtype, which may be any. The forms are "as-is" and "packed".

    Attributes:
        scales: [out] float32; the weights are W * scales[:, None].
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None = None, form: str = AS_IS
    ) -> None:
        self.scales = scales
        super().__init__(weight, bias, form)

    def _packed(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)

    def _unpacked(self) -> Tensor:
        return self._weight.to_dense().t().contiguous()

    def _products(self) -> Products:
        sums, bias = self._sums(), self.bias

        def linear(x: Tensor, activation: str = "none") -> Tensor:
            y = rounded_product(x, sums, bias)
            return (y if activation == "none" else ACTIVATIONS[activation](y)).to(x.dtype)

        def linear_add(x: Tensor, other: Tensor) -> Tensor:
            return rounded_product(x, sums, bias).add_(other).to(x.dtype)

        def linear_mul(x: Tensor, other: Tensor) -> Tensor:
            return rounded_product(x, sums, bias).mul_(other).to(x.dtype)

        return linear, linear_add, linear_mul

    def _sums(self) -> Sums:
        weight, scales = self._weight, self.scales
        if self.form != PACKED:
            return lambda q: plain_sums(q, weight, scales)
        pointwise = torch.ops.onednn.qlinear_pointwise.default
        zeros = torch.zeros(self.shape[0], dtype=torch.int32)

        def sums(q: Tensor) -> Tensor:
            shifted = q.view(torch.uint8).bitwise_xor_(ZERO)  # q + 128
            return pointwise(
                shifted,
                1.0,
                ZERO,
                weight,
                scales.float(),
                zeros,
                None,
                1.0,
                0,
                torch.float32,
                "none",
                [],
                "",
            )

        return sums

    def __reduce__(self) -> Any:
        return type(self), (self.dense(), self.scales, self.bias, self.form)


GROUP = 4
"""The number of bytes that one instruction multiplies for each output."""


class Int8PanelMatrix(Int8Matrix):
    """An int8 matrix whose products are computed by the kernel in C.

    Packed weights are [panels, inputs / 4, 16, 4]; zeros fill up inputs and outputs.

    Attributes:
        zeros: [out] int32, 128 times the sum of each output's bytes: the product's excess, as
            activations are shifted by 128.
    """

    zeros: Tensor

    def _packed(self, weight: Tensor) -> Tensor:
        padded = F.pad(
            weight.contiguous(), (0, -weight.shape[1] % GROUP, 0, -weight.shape[0] % PANEL)
        )
        made = padded.view(len(padded) // PANEL, PANEL, -1, GROUP).transpose(1, 2)
        zeros = ZERO * weight.sum(dim=1, dtype=torch.int32)
        if hasattr(self, "_weight"):  # kernels know the addresses
            self.zeros.copy_(zeros)
        else:
            self.zeros = zeros
        return place_of(self, made)

    @property
    def panels(self) -> Tensor:
        """The packed weights, whose address does not change."""
        return self._weight

    @property
    def whole(self) -> bool:
        """True if there are panels, and inputs need no padding."""
        return self.form == PACKED and self.shape[1] % GROUP == 0

    def _unpacked(self) -> Tensor:
        out, width = self.shape
        return (
            self._weight.transpose(1, 2)
            .reshape(len(self._weight) * PANEL, -1)[:out, :width]
            .contiguous()
        )

    def _products(self) -> Products:
        if self.form != PACKED:
            return super()._products()
        panels = Panels(
            self._weight,
            self.bias,
            self.shape,
            self._weight.shape[1] * GROUP,
            self.scales,
            self.zeros,
        )

        def product(x: Tensor, kind: int, other: Tensor | None = None) -> Tensor:
            bias = panels.bias
            if x.dtype in SUFFIXES and (bias is None or bias.dtype == x.dtype):
                return panels.product(x, kind, other)
            wide = replace(panels, bias=None if bias is None else bias.float())
            return wide.product(x.float(), kind, None if other is None else other.float()).to(
                x.dtype
            )

        return products(product)
