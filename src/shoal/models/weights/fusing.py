"""The fusing of linear layers with the same input: one matrix and product in place of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shoal.models.weights.layers import packed, use_packed
from shoal.models.weights.matrix import AS_IS, PACKED, Matrix
from shoal.models.weights.parameter import PackedWeight


@torch.no_grad()
def matrix_of(layers: Sequence[nn.Linear]) -> Matrix:
    """Returns the matrix by which layers with the same input compute.

    It is the matrix of the one layer, or that of all layers, one below the other. Several layers
    get a common matrix, packed if the weight of the first is. From then on their weights and biases
    are rows of the matrix, so nothing is stored twice, and a write into them is a write into the
    matrix. `matches` says whether the matrix is still theirs. The weights of several layers must
    not be tied to others.

    Raises:
        ValueError: some have a bias and some have none, or unlike inputs or dtypes.
    """
    if len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        raise ValueError(
            "layers of one matrix need the same input, the same dtype, and all a bias or none"
        )
    first: Any = layers[0].weight
    if _packed(first) and matches(first.matrix, layers):
        return first.matrix
    form = PACKED if _packed(first) else AS_IS
    dense, bias = joined([plain(layer.weight) for layer in layers]), None
    if layers[0].bias is not None:
        bias = joined([layer.bias.detach() for layer in layers])
    table = any(
        _packed(weight) and weight.matrix.table is not None
        for weight in (layer.weight for layer in layers)
    )
    matrix = (
        packed(dense, bias, table=table)
        if form == PACKED
        else Matrix(dense, bias, form, table=table)
    )
    for layer, start in zip(layers, starts(layers), strict=True):
        stop = start + layer.out_features
        if form != PACKED:
            layer.weight.data = dense[start:stop]
        elif isinstance(layer.weight, PackedWeight):
            layer.weight.data = PackedWeight.rows(matrix, start, stop)
        else:
            use_packed(
                layer,
                nn.Parameter(PackedWeight.rows(matrix, start, stop), layer.weight.requires_grad),
            )
        if bias is not None:
            layer.bias.data = bias[start:stop]
    return matrix


def matches(matrix: Matrix, layers: Sequence[nn.Linear]) -> bool:
    """Returns True if these layers still compute by this matrix.

    If a weight or bias of theirs was replaced by another tensor, they do not.
    """
    return all(
        _is_part(matrix, start, layer) for layer, start in zip(layers, starts(layers), strict=True)
    )


def _is_part(matrix: Matrix, start: int, layer: nn.Linear) -> bool:
    weight = layer.weight
    if not matrix.adds(layer.bias, start):
        return False
    if _packed(weight):
        return weight.matrix is matrix and weight.start == start
    if matrix.form == PACKED:
        return False
    dense, own = matrix.dense()[start:], plain(weight)
    return (
        own.data_ptr() == dense.data_ptr()
        and own.dtype == dense.dtype
        and own.stride() == dense.stride()
    )


def starts(layers: Sequence[Any]) -> list[int]:
    """Returns the first row of each layer in their common matrix."""
    sizes = [layer.out_features for layer in layers]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _packed(weight: Tensor) -> TypeGuard[PackedWeight]:
    return isinstance(weight, PackedWeight) and weight.matrix.form == PACKED


def plain(weight: Tensor) -> Tensor:
    """Returns an ordinary tensor of these weights: their own memory, unless they are packed."""
    return weight.of(weight.matrix.dense()) if isinstance(weight, PackedWeight) else weight.detach()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns one tensor of the rows of all parts.

    There is no copy where they lie one after the other already. The tensor is input-major if all
    are.
    """
    first, place = parts[0], parts[0].storage_offset()
    adjacent = True
    for part in parts:
        same = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.stride() == first.stride()
        )
        adjacent = adjacent and same and part.storage_offset() == place
        place += len(part) * part.stride(0)
    if adjacent:
        return first.as_strided(
            (sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset()
        )
    if first.dim() == 2 and all(part.stride(0) == 1 and not part.is_contiguous() for part in parts):
        return torch.cat([part.t() for part in parts], 1).t()
    return torch.cat(list(parts))
