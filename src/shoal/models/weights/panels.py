"""Matrices packed for the product kernel in C, also those of int8.

The panels of 16 outputs are read from memory once and in order.

A matrix of int8 has a scale per output; activations keep their format. The products equal products
by the matrix of bytes times scales, up to the rounding of float32: a byte is a float without
rounding, and a sum is scaled at its end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.models.weights.matrix import ACTIVATIONS, AS_IS, PACKED, Matrix, Products, empty
from shoal.native import ProductStruct
from shoal.native.build import SUFFIXES, library

PANEL = 16
"""The number of outputs of a panel."""
GROUP = {torch.float32: 1, torch.bfloat16: 2}
"""The number of inputs whose weights lie side by side for each output, by dtype.

One instruction multiplies them.
"""
PLAIN, SILU, ADD, MUL = range(4)
"""The kinds of a product, by the use of its result; `kernels.h` has the same numbers."""


def place_of(matrix: Matrix, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the place of a matrix's panels, which never changes as kernels know its address."""
    if not hasattr(matrix, "_weight"):
        matrix._weight = empty(shape, dtype)
    return matrix._weight


def filled_up(rows: Tensor, columns: int = 1) -> Tensor:
    """Returns a matrix with zeros behind it, up to whole panels and a multiple of columns.

    A matrix that needs none is not copied, only made contiguous.
    """
    fill = (-rows.shape[1] % columns, -len(rows) % PANEL)
    return F.pad(rows, (0, fill[0], 0, fill[1])) if any(fill) else rows.contiguous()


class PanelMatrix(Matrix):
    """A matrix with weights as [panels, inputs, 16], bfloat16 as [panels, inputs / 2, 16, 2].

    Zeros fill up inputs and outputs. Each sum runs over the inputs in their order, independently of
    the other tokens of the product. So a token's result has the same bits in every batch.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, form: str = PACKED, *, table: bool = False
    ) -> None:
        super().__init__(weight, bias, form, table=table)

    @classmethod
    def joined(cls, parts: Sequence[PanelMatrix], bias: Tensor | None) -> PanelMatrix:
        """Returns the matrix of several, one below the other; only the last may have gaps."""
        whole, panels = cls.__new__(cls), [part.panels for part in parts]
        whole.form, whole.bias, whole.table = PACKED, bias, None
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        whole._describe((outputs, inputs), panels[0])
        shape = (sum(map(len, panels)), *panels[0].shape[1:])
        torch.cat(panels, out=place_of(whole, shape, whole.dtype))
        whole.linear, whole.linear_add, whole.linear_mul = whole._products()
        return whole

    def _packed(self, weight: Tensor) -> Tensor:
        """Packs weights; new weights get the place of the old ones, as kernels know its address.

        A new matrix is packed by the one thread that makes it, as there are many of them: the
        threads of PyTorch would spin at the end of each while they wait for one another.
        """
        group, rewritten = GROUP[self.dtype], hasattr(self, "_weight")
        rows = filled_up(weight, group)
        # As words of 32 bits PyTorch copies a transposed matrix twenty times as fast as in pairs.
        words = rows.view(torch.int32).view(len(rows) // PANEL, PANEL, -1).transpose(1, 2)
        place = place_of(self, (*words.shape, group), self.dtype)
        target = place.view(torch.int32)[..., 0]
        if rewritten:
            target.copy_(words)
        else:
            np.copyto(target.numpy(), words.numpy())
        return place

    @property
    def panels(self) -> Tensor:
        """The packed weights, whose address does not change."""
        return self._weight

    @property
    def whole(self) -> bool:
        """True if there are panels, and inputs need no padding."""
        return self.form == PACKED and self.shape[1] % GROUP[self.dtype] == 0

    def _unpacked(self) -> Tensor:
        out, width = self.shape
        return (
            self._weight.transpose(1, 2)
            .reshape(len(self._weight) * PANEL, -1)[:out, :width]
            .contiguous()
        )

    def _products(self) -> Products:
        if self.form == PACKED:
            return _products(self._weight, self.bias, self.shape)
        return super()._products()

    def nbytes(self) -> int:
        return self._weight.nbytes + (
            0 if self.table is None or self.form != PACKED else self.table.nbytes
        )

    def __reduce__(self) -> Any:
        return _again, (self.dense(), self.bias, self.form, self.table is not None)


def _again(weight: Tensor, bias: Tensor | None, form: str, table: bool) -> PanelMatrix:
    return PanelMatrix(weight, bias, form, table=table)


def _products(weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Products:
    return products(Panels(weight, bias, shape, weight.shape[1] * GROUP[weight.dtype]).product)


@dataclass(frozen=True)
class Panels:
    """The weights that the kernel multiplies by.

    Attributes:
        weight: the panels.
        bias: [out] or None.
        shape: (out, in).
        width: inputs with their padding.
        scales: scales of bytes, see `kernels.h`; else None.
        form: the form of groups, see `shoal.models.weights.groups`; else 0.
        exact: True if features that meet groups stay float32.
    """

    weight: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    width: int
    scales: Tensor | None = None
    form: int = 0
    exact: bool = False

    def product(self, x: Tensor, kind: int, other: Tensor | None = None) -> Tensor:
        """Computes x [..., in], float32 or bfloat16 -> [..., out] in the same dtype."""
        outputs, inputs = self.shape
        rows = x.reshape(-1, inputs)
        rows = F.pad(rows, (0, self.width - inputs)) if self.width > inputs else rows.contiguous()
        y = rows.new_empty(len(rows), outputs)
        if other is not None:
            other = other.contiguous()
        read = (self.weight, self.bias, self.scales, rows, other, y)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in read)
        kernel: Any = getattr(library(), f"product_{SUFFIXES[rows.dtype]}")
        numbers = len(rows), self.width, outputs, kind, torch.get_num_threads()
        if kernel(ctypes.byref(ProductStruct(*numbers, self.form, self.exact, *addresses))):
            raise MemoryError("no memory for the features of a product")
        return y.view(*x.shape[:-1], outputs)


class _Product(Protocol):
    """A function like `Panels.product`."""

    def __call__(self, x: Tensor, kind: int, other: Tensor | None = None) -> Tensor: ...


def products(product: _Product) -> Products:
    """Returns the products of a matrix by the kernel."""

    def linear(x: Tensor, activation: str = "none") -> Tensor:
        if activation in ("silu", "swish"):
            return product(x, SILU)
        y = product(x, PLAIN)
        return y if activation == "none" else ACTIVATIONS[activation](y)

    def linear_add(x: Tensor, other: Tensor) -> Tensor:
        return product(x, ADD, other)

    def linear_mul(x: Tensor, other: Tensor) -> Tensor:
        return product(x, MUL, other)

    return linear, linear_add, linear_mul


PAIR = 2
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
        rows = filled_up(weight, PAIR)
        panels = rows.view(len(rows) // PANEL, PANEL, -1).transpose(1, 2)
        return place_of(self, panels.shape, panels.dtype).copy_(panels)

    @property
    def panels(self) -> Tensor:
        """The packed weights, whose address does not change."""
        return self._weight

    @property
    def whole(self) -> bool:
        """True if there are panels, and inputs need no padding."""
        return self.form == PACKED and self.shape[1] % PAIR == 0

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
