"""A weight matrix of int8 with a scale per output; activations keep their format.

The products are those of the matrix that the bytes and scales stand for, up to the rounding of
float32: a byte is a float without rounding, and a sum is scaled at its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.models.weights.matrix import ACTIVATIONS, AS_IS, PACKED, Matrix, Products
from shoal.models.weights.panels import PANEL, Panels, filled_up, place_of, products
from shoal.native.build import SUFFIXES

GROUP = 2
"""The number that the inputs of packed bytes are a multiple of: pairs of bfloat16 are unpacked."""


def plain_product(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x Wᵀ * scales + b in float32, or in the format of `x` if that is wider.

    Args:
        x: [tokens, in].
        weight: [out, in] int8.
        scales: [out] float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(wide), weight.to(wide)).mul_(scales)
    return y if bias is None else y + bias


class Int8Matrix(Matrix):
    """The matrix of y = x Wᵀ + b with W int8 [out, in] and a scale per output, in rows.

    x and y are of one floating dtype, which may be any.

    Attributes:
        scales: [out] float32; the weights are W * scales[:, None].
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None = None, form: str = AS_IS
    ) -> None:
        self.scales = scales
        super().__init__(weight, bias, form)

    def _products(self) -> Products:
        weight, scales, bias = self._weight, self.scales, self.bias

        def linear(x: Tensor, activation: str = "none") -> Tensor:
            y = plain_product(x, weight, scales, bias)
            return (y if activation == "none" else ACTIVATIONS[activation](y)).to(x.dtype)

        def linear_add(x: Tensor, other: Tensor) -> Tensor:
            return plain_product(x, weight, scales, bias).add_(other).to(x.dtype)

        def linear_mul(x: Tensor, other: Tensor) -> Tensor:
            return plain_product(x, weight, scales, bias).mul_(other).to(x.dtype)

        return linear, linear_add, linear_mul

    def __reduce__(self) -> Any:
        return type(self), (self.dense(), self.scales, self.bias, self.form)


class Int8PanelMatrix(Int8Matrix):
    """An int8 matrix whose products are computed by the kernel in C.

    Packed weights are [panels, inputs, 16]; zeros fill up inputs and outputs.
    """

    def _packed(self, weight: Tensor) -> Tensor:
        rows = filled_up(weight, GROUP)
        panels = rows.view(len(rows) // PANEL, PANEL, -1).transpose(1, 2)
        return place_of(self, panels.shape, panels.dtype).copy_(panels)

    @property
    def panels(self) -> Tensor:
        """The packed weights, whose address does not change."""
        return self._weight

    @property
    def whole(self) -> bool:
        """True if there are panels, and inputs need no padding."""
        return self.form == PACKED and self.shape[1] % GROUP == 0

    def nbytes(self) -> int:
        return self._weight.nbytes

    def _unpacked(self) -> Tensor:
        out, width = self.shape
        rows = self._weight.transpose(1, 2).reshape(len(self._weight) * PANEL, -1)
        return rows[:out, :width].contiguous()

    def _products(self) -> Products:
        if self.form != PACKED:
            return super()._products()
        panels = Panels(self._weight, self.bias, self.shape, self._weight.shape[1], self.scales)

        def product(x: Tensor, kind: int, other: Tensor | None = None) -> Tensor:
            bias = panels.bias
            if x.dtype in SUFFIXES and (bias is None or bias.dtype == x.dtype):
                return panels.product(x, kind, other)
            wide = replace(panels, bias=None if bias is None else bias.float())
            return wide.product(x.float(), kind, None if other is None else other.float()).to(
                x.dtype
            )

        return products(product)
