"""Weights as whole numbers in groups along the inputs, each with a scale and a minimum.

They are the formats of GGUF files, and the 4-bit copy of a target that drafts for it. A weight is
`number * scale + minimum` in float32, and activations keep their format: the products have the bits
of those by the weights that the format stands for (`tile.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.weights.fusing import starts
from shoal.models.weights.matrix import PACKED, Matrix
from shoal.models.weights.pages import empty
from shoal.models.weights.panels import PANEL, Panels, products
from shoal.native.build import SUFFIXES

BYTES_OF_16, BYTES_OF_32, NIBBLES_OF_32 = 1, 2, 3
"""The forms of packed groups; `kernels.h` has the same numbers."""
GROUP = 32
"""The number that inputs must be a multiple of."""
NIBBLE = 15
"""The greatest number of 4 bits."""
LOW_BITS = 0xFF
"""The bits of a float32 scale that are cleared.

A number times the scale then needs no rounding.
"""


@dataclass(frozen=True)
class Groups:
    """The weights [out, in] of a layer.

    A number times its scale is a float32 without rounding, or there are no minima.

    Attributes:
        numbers: [out, in], int8, or uint8 of 4 bits.
        scales: [out, groups] float32.
        minima: [out, groups] float32, or None for zeros.
    """

    numbers: Tensor
    scales: Tensor
    minima: Tensor | None = None

    @property
    def form(self) -> int:
        """The smallest form that holds the weights."""
        if self.numbers.shape[1] != GROUP * self.scales.shape[1]:
            return BYTES_OF_16
        if self.minima is None:
            return BYTES_OF_32
        return NIBBLES_OF_32 if self.numbers.dtype == torch.uint8 else BYTES_OF_16

    def dense(self) -> Tensor:
        """Returns the weights [out, in] float32."""
        out, inputs = self.numbers.shape
        wide = self.numbers.view(out, self.scales.shape[1], -1) * self.scales[..., None]
        return (wide if self.minima is None else wide + self.minima[..., None]).view(out, inputs)

    def rows(self, order: Tensor) -> Groups:
        """Returns the weights of some outputs."""
        minima = None if self.minima is None else self.minima[order]
        return Groups(self.numbers[order], self.scales[order], minima)

    def in_bytes_of_16(self) -> Groups:
        """Returns the same weights in the form that holds those of any other."""
        times = self.numbers.shape[1] // 16 // self.scales.shape[1]
        minima = torch.zeros_like(self.scales) if self.minima is None else self.minima
        scales, minima = (each.repeat_interleave(times, 1) for each in (self.scales, minima))
        return Groups(self.numbers.to(torch.int8), scales, minima)

    @classmethod
    def joined(cls, parts: Sequence[Groups]) -> Groups:
        """Returns the weights of several layers, one below the other."""
        if len({part.form for part in parts}) > 1:
            parts = [part.in_bytes_of_16() for part in parts]
        minima = [part.minima for part in parts if part.minima is not None]
        return cls(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(minima) if minima else None,
        )

    @classmethod
    def in_4_bits(cls, weight: Tensor) -> Groups:
        """Rounds weights [out, in] to 16 numbers between the least and the greatest of a group."""
        out, inputs = weight.shape
        wide = weight.detach().float().view(out, inputs // GROUP, GROUP)
        minima, maxima = wide.amin(-1), wide.amax(-1)
        scales = ((maxima - minima).clamp(min=1e-12) / NIBBLE).view(torch.int32)
        scales = (scales & ~LOW_BITS).view(torch.float32)
        numbers = ((wide - minima[..., None]) / scales[..., None]).round().clamp(0, NIBBLE)
        return cls(numbers.to(torch.uint8).view(out, inputs), scales, minima)


class GroupMatrix(Matrix):
    """A matrix of groups, packed for the product kernel in C.

    Attributes:
        panels: [panels, groups, bytes] uint8, a parameter; of each group the scales of 16 outputs,
            their minima, and the numbers.
        kernel_form: the form of the groups.
    """

    def __init__(self, groups: Groups, bias: Tensor | None = None) -> None:
        if groups.numbers.shape[1] % GROUP:
            raise ValueError(f"groups need inputs that are a multiple of {GROUP}")
        groups = groups.in_bytes_of_16() if groups.form == BYTES_OF_16 else groups
        self.form, self.bias, self.kernel_form = PACKED, bias, groups.form
        self.shape, self.dtype = (len(groups.numbers), groups.numbers.shape[1]), torch.float32
        self.device, self.epoch, self.stale, self.table = groups.numbers.device, 0, False, None
        self._groups = groups.scales.shape[1]
        made = _packed(groups)
        place = empty(made.shape, made.dtype).copy_(made)
        self.panels: Tensor = nn.Parameter(place, requires_grad=False)
        product = Panels(self.panels, bias, self.shape, self.shape[1], form=self.kernel_form)
        self.linear, self.linear_add, self.linear_mul = products(product.product)

    @property
    def whole(self) -> bool:
        """True: inputs need no padding."""
        return True

    def dense(self) -> Tensor:
        """Returns the weights [out, in] float32; a copy."""
        return _unpacked(self.panels, self.kernel_form, self.shape).dense()

    def nbytes(self) -> int:
        return self.panels.nbytes

    def __reduce__(self) -> Any:
        return type(self), (_unpacked(self.panels, self.kernel_form, self.shape), self.bias)


def _packed(groups: Groups) -> Tensor:
    """Returns the panels of groups."""
    count = groups.scales.shape[1]
    fill = -len(groups.numbers) % PANEL
    numbers = F.pad(groups.numbers, (0, 0, 0, fill))
    numbers = numbers.view(-1, PANEL, count, numbers.shape[1] // count).permute(0, 2, 3, 1)
    if groups.form == NIBBLES_OF_32:
        numbers = numbers[:, :, ::2] | numbers[:, :, 1::2] << 4
    factors = [groups.scales] if groups.minima is None else [groups.scales, groups.minima]
    parts = [
        F.pad(each, (0, 0, 0, fill)).view(-1, PANEL, count).transpose(1, 2).contiguous()
        for each in factors
    ]
    parts = [part.view(torch.uint8) for part in (*parts, numbers.contiguous().flatten(2))]
    return torch.cat(parts, -1)


def _unpacked(panels: Tensor, form: int, shape: tuple[int, int]) -> Groups:
    """Returns the groups of panels."""
    out, count = shape[0], panels.shape[1]

    def rows(part: Tensor) -> Tensor:
        return part.permute(0, 3, 1, 2).reshape(len(panels) * PANEL, -1)[:out].contiguous()

    size = 4 * PANEL
    factors = 1 if form == BYTES_OF_32 else 2
    parts = panels.split([size] * factors + [panels.shape[2] - size * factors], -1)
    numbers = parts[-1].unflatten(-1, (-1, PANEL))
    if form == NIBBLES_OF_32:
        numbers = torch.stack([numbers & NIBBLE, numbers >> 4], 3).flatten(2, 3)
    else:
        numbers = numbers.contiguous().view(torch.int8)
    scales = [
        rows(part.contiguous().view(torch.float32).view(-1, count, 1, PANEL)) for part in parts[:-1]
    ]
    return Groups(rows(numbers), scales[0], scales[1] if factors == 2 else None)


class GroupLinear(nn.Module):
    """A layer y = x Wᵀ + b with weights in groups.

    Attributes:
        bias: [out] or None.
        packed: the panels of the matrix, of which this layer may be a part; read only.
    """

    packed: Tensor

    def __init__(self, groups: Groups, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = groups.numbers.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._use(GroupMatrix(groups, self.bias), 0)

    def _use(self, matrix: GroupMatrix, start: int) -> None:
        self.matrix, self.start = matrix, start
        self.packed = matrix.panels

    @property
    def weight(self) -> Tensor:
        """A tensor of the weights' shape, without data."""
        return torch.empty(self.out_features, self.in_features, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., out] of [..., in], in the dtype of `x`."""
        rows = x.reshape(-1, self.in_features)
        if x.dtype in SUFFIXES and self.matrix.adds(self.matrix.bias):
            y = self.matrix.linear(rows)
        else:
            y = self.matrix.linear(rows.float()).to(x.dtype)
        stop = self.start + self.out_features
        y = y if len(y.T) == self.out_features else y[:, self.start : stop].contiguous()
        return y.view(*x.shape[:-1], self.out_features)


@torch.no_grad()
def group_matrix_of(layers: Sequence[GroupLinear]) -> GroupMatrix:
    """Returns the common matrix of layers with the same input, of which they are parts then."""
    first = layers[0].matrix
    if first.shape[0] == sum(layer.out_features for layer in layers) and all(
        layer.matrix is first and layer.start == start
        for layer, start in zip(layers, starts(layers), strict=True)
    ):
        return first
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        raise ValueError("layers of one matrix need all a bias or none")
    parts = [
        _unpacked(layer.matrix.panels, layer.matrix.kernel_form, layer.matrix.shape)
        for layer in layers
    ]
    matrix = GroupMatrix(Groups.joined(parts), torch.cat(biases) if biases else None)
    for layer, start in zip(layers, starts(layers), strict=True):
        if matrix.bias is not None:
            layer.bias = nn.Parameter(matrix.bias[start : start + layer.out_features], False)
        layer._use(matrix, start)
    return matrix
