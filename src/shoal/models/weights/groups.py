"""Weights as whole numbers in groups along the inputs, each with a scale and a minimum.

They are the formats of GGUF files, and the 4-bit copy of a target that drafts for it. A weight is
`number * scale + minimum` in float32. Features that meet them are rounded to 16 bits and a scale a
group, so that a product adds whole numbers within a group (`tile.h`); or, if a matrix is exact,
they are not rounded, and the products have the same bits as products by the unpacked weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.weights.layers import matrix_of, starts
from shoal.models.weights.matrix import PACKED, Matrix, empty
from shoal.models.weights.panels import PANEL, Panels, filled_up, products
from shoal.native.build import SUFFIXES

BYTES_OF_16, BYTES_OF_32, NIBBLES_OF_32, HALVES_OF_32, CENTRED_OF_32 = range(1, 6)
"""The forms of packed groups; `kernels.h` has the same numbers."""
GROUP = 32
"""The number that inputs must be a multiple of."""
NIBBLE, CENTRE = 15, 8
"""The greatest number of 4 bits, and the number of a weight 0 where there are no minima."""
LEAST = 6e-8
"""The smallest scale: the smallest number of float16."""


@dataclass(frozen=True)
class Groups:
    """The weights [out, in] of a layer.

    A number times its scale is a float32 without rounding, or there are no minima.

    Attributes:
        numbers: [out, in], int8; or uint8 of 4 bits, which are 8 less if there are no minima.
        scales: [out, groups], float32 or float16.
        minima: [out, groups] in the dtype of the scales, or None for zeros.
    """

    numbers: Tensor
    scales: Tensor
    minima: Tensor | None = None

    @property
    def form(self) -> int:
        """The smallest form that holds the weights."""
        nibbles, halves = self.numbers.dtype == torch.uint8, self.scales.dtype == torch.float16
        if self.numbers.shape[1] != GROUP * self.scales.shape[1]:
            return BYTES_OF_16
        if nibbles and self.minima is not None:
            return HALVES_OF_32 if halves else NIBBLES_OF_32
        if self.minima is None and halves:
            return CENTRED_OF_32 if nibbles else BYTES_OF_32
        return BYTES_OF_16

    def dense(self) -> Tensor:
        """Returns the weights [out, in] float32."""
        out, inputs = self.numbers.shape
        wide = self._signed().view(out, self.scales.shape[1], -1) * self.scales.float()[..., None]
        if self.minima is not None:
            wide = wide + self.minima.float()[..., None]
        return wide.view(out, inputs)

    def _signed(self) -> Tensor:
        """Returns the numbers of the weights, int8."""
        numbers = self.numbers.to(torch.int8)
        centred = self.numbers.dtype == torch.uint8 and self.minima is None
        return numbers - CENTRE if centred else numbers

    def rows(self, order: Tensor) -> Groups:
        """Returns the weights of some outputs."""
        minima = None if self.minima is None else self.minima[order]
        return Groups(self.numbers[order], self.scales[order], minima)

    def in_bytes_of_16(self) -> Groups:
        """Returns the same weights in the form that can hold the weights of every other form."""
        times = self.numbers.shape[1] // 16 // self.scales.shape[1]
        minima = torch.zeros_like(self.scales) if self.minima is None else self.minima
        scales, minima = (
            each.float().repeat_interleave(times, 1) for each in (self.scales, minima)
        )
        return Groups(self._signed(), scales, minima)

    @classmethod
    def joined(cls, parts: Sequence[Groups]) -> Groups:
        """Returns the weights of several layers, one below the other."""
        if len(parts) == 1:
            return parts[0]
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
        minima = wide.amin(-1).half()
        scales = ((wide.amax(-1) - minima) / NIBBLE).clamp(min=LEAST).half()
        numbers = (wide - minima[..., None]) / scales[..., None]
        numbers = numbers.round().clamp(0, NIBBLE).to(torch.uint8)
        return cls(numbers.view(out, inputs), scales, minima)


class GroupMatrix(Matrix):
    """A matrix of groups, packed for the product kernel in C.

    Attributes:
        panels: [panels, groups, bytes] uint8, a parameter; of each group the scales of 16 outputs,
            their minima, and the numbers.
        kernel_form: the form of the groups.
        exact: True if features are not rounded.
    """

    def __init__(self, groups: Groups, bias: Tensor | None = None, exact: bool = False) -> None:
        if groups.numbers.shape[1] % GROUP:
            raise ValueError(f"groups need inputs that are a multiple of {GROUP}")
        groups = groups.in_bytes_of_16() if groups.form == BYTES_OF_16 else groups
        outputs, inputs = groups.numbers.shape
        self._take(_packed(groups), groups.form, (outputs, inputs), bias, exact)

    def _take(
        self, panels: Tensor, form: int, shape: tuple[int, int], bias: Tensor | None, exact: bool
    ) -> None:
        self.form, self.bias, self.kernel_form, self.exact = PACKED, bias, form, exact
        self.shape, self.dtype = shape, torch.float32
        self.device, self.epoch, self.stale, self.table = panels.device, 0, False, None
        self.panels: Tensor = nn.Parameter(panels, requires_grad=False)
        product = Panels(self.panels, bias, shape, shape[1], form=form, exact=exact)
        self.linear, self.linear_add, self.linear_mul = products(product.product)

    @classmethod
    def joined(cls, parts: Sequence[GroupMatrix], bias: Tensor | None) -> GroupMatrix:
        """Returns the matrix of several matrices, one below the other."""
        form, exact = parts[0].kernel_form, parts[0].exact
        if any(part.kernel_form != form or part.shape[0] % PANEL for part in parts):
            groups = [_unpacked(part.panels, part.kernel_form, part.shape) for part in parts]
            return cls(Groups.joined(groups), bias, exact)
        whole, panels_of_parts = cls.__new__(cls), [part.panels.detach() for part in parts]
        panels = empty((sum(map(len, panels_of_parts)), *panels_of_parts[0].shape[1:]), torch.uint8)
        outputs = sum(part.shape[0] for part in parts)
        torch.cat(panels_of_parts, out=panels)
        whole._take(panels, form, (outputs, parts[0].shape[1]), bias, exact)
        return whole

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
        groups = _unpacked(self.panels, self.kernel_form, self.shape)
        return type(self), (groups, self.bias, self.exact)


def _packed(groups: Groups) -> Tensor:
    """Returns the panels of groups."""
    numbers, count = filled_up(groups.numbers), groups.scales.shape[1]
    numbers = numbers.view(len(numbers), count, -1)
    if numbers.dtype == torch.uint8:
        quads = numbers.unflatten(-1, (-1, 2, 2))
        numbers = (quads[..., 0, :] | quads[..., 1, :] << 4).flatten(2)
    # Two numbers of one output as a word: PyTorch copies words far faster than pairs of bytes.
    pairs = numbers.view(torch.int16).view(-1, PANEL, count, numbers.shape[-1] // 2)
    factors = [groups.scales] if groups.minima is None else [groups.scales, groups.minima]
    parts = [filled_up(each).view(-1, PANEL, count).transpose(1, 2) for each in factors]
    parts += [pairs.permute(0, 2, 3, 1).flatten(2)]
    sizes = [part.shape[2] * part.dtype.itemsize for part in parts]
    panels = empty((len(pairs), count, sum(sizes)), torch.uint8)
    for part, room in zip(parts, panels.split(sizes, -1), strict=True):
        room.copy_(part.contiguous().view(torch.uint8))
    return panels


def _unpacked(panels: Tensor, form: int, shape: tuple[int, int]) -> Groups:
    """Returns the groups of panels."""
    out = shape[0]

    def rows(part: Tensor) -> Tensor:
        return part.transpose(1, 2).reshape(len(panels) * PANEL, -1)[:out].contiguous()

    dtype = torch.float32 if form in (BYTES_OF_16, NIBBLES_OF_32) else torch.float16
    size, factors = dtype.itemsize * PANEL, 1 if form in (BYTES_OF_32, CENTRED_OF_32) else 2
    parts = panels.split([size] * factors + [panels.shape[2] - size * factors], -1)
    pairs = parts[-1].unflatten(-1, (-1, PANEL, 2))
    if form in (BYTES_OF_16, BYTES_OF_32):
        pairs = pairs.contiguous().view(torch.int8)
    else:
        pairs = torch.stack([pairs & NIBBLE, pairs >> 4], 3).flatten(2, 3)
    numbers = rows(pairs.transpose(2, 3).flatten(3))
    scales = [rows(part.contiguous().view(dtype)) for part in parts[:-1]]
    return Groups(numbers, scales[0], scales[1] if factors == 2 else None)


class GroupLinear(nn.Module):
    """A layer y = x Wᵀ + b with weights in groups.

    Attributes:
        bias: [out] or None.
        packed: the panels of the matrix, of which this layer may be a part; read only.
    """

    packed: Tensor

    def __init__(self, groups: Groups, bias: Tensor | None = None, exact: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = groups.numbers.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._use(GroupMatrix(groups, self.bias, exact), 0)

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


class ReorderedLinear(nn.Module):
    """A layer that gets its inputs in another order.

    GPTQ with act-order groups inputs that do not lie side by side. No executor but the modules
    takes such a layer.

    Args:
        linear: the layer, whose groups of inputs lie side by side.
        order: [in] int64, the inputs in its order.
    """

    order: Tensor

    def __init__(self, linear: nn.Module, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [..., out] of [..., in]."""
        return self.linear(x.index_select(-1, self.order))


def parameter_count(model: nn.Module) -> int:
    """Returns the number of a model's weights, tied ones counted once."""
    grouped = [module for module in model.modules() if isinstance(module, GroupLinear)]
    return sum(layer.in_features * layer.out_features for layer in grouped) + sum(
        each.numel() for each in model.parameters() if each.is_floating_point() or not grouped
    )


@torch.no_grad()
def group_matrix_of(layers: Sequence[Any]) -> Matrix:
    """Returns the common matrix of layers with the same input, of which they are parts then.

    Of a model with some layers in groups, others have a matrix by `fusing.matrix_of`.
    """
    if not isinstance(layers[0], GroupLinear):
        return matrix_of(layers)
    first = layers[0].matrix
    if first.shape[0] == sum(layer.out_features for layer in layers) and all(
        layer.matrix is first and layer.start == start
        for layer, start in zip(layers, starts(layers), strict=True)
    ):
        return first
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        raise ValueError("layers of one matrix need all a bias or none")
    bias = torch.cat(biases) if biases else None
    matrix = GroupMatrix.joined([layer.matrix for layer in layers], bias)
    for layer, start in zip(layers, starts(layers), strict=True):
        if matrix.bias is not None:
            layer.bias = nn.Parameter(matrix.bias[start : start + layer.out_features], False)
        layer._use(matrix, start)
    return matrix
