"""The tensors of one layer in a slot cache, and the copying of tokens from one cache to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""The number of bytes of a cache line and of the widest vectors."""


@dataclass
class Layer:
    """The keys and values of one layer; value dims may differ from key dims (MLA).

    Attributes:
        keys: [slots, capacity, heads, dim].
        values: [slots, capacity, heads, value dim].
        shared_keys: [cells, heads, dim].
        shared_values: [cells, heads, value dim].
    """

    keys: Tensor
    values: Tensor
    shared_keys: Tensor
    shared_values: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the slots."""
        return self.keys, self.values

    def resize(self, slots: int, capacity: int, cells: int, used: int) -> None:
        """Enlarges or cuts the tensors.

        Of the first `used` tokens in each slot, those that fit are kept.
        """
        size, kept = (slots, capacity), (slots, min(used, capacity))
        self.keys, self.values = (
            resized(tensor, size, kept) for tensor in (self.keys, self.values)
        )
        self.shared_keys, self.shared_values = (
            resized(tensor, (cells,), (cells,)) for tensor in (self.shared_keys, self.shared_values)
        )


def allocated(states: Tensor, *size: int) -> Tensor:
    """Returns zeros [*size, heads, dim] for states [rows, heads, q, dim].

    The cells must be zero because a masked key is multiplied by 0, and 0 * NaN would be NaN.
    """
    return zeros(states, (*size, states.shape[1], states.shape[3]))


def resized(tensor: Tensor, size: tuple[int, ...], kept: tuple[int, ...]) -> Tensor:
    """Returns the tensor with its first dimensions enlarged or cut; itself where nothing changes.

    The old elements within `kept` are copied.
    """
    if tensor.shape[: len(size)] == size:
        return tensor
    resized = zeros(tensor, (*size, *tensor.shape[len(size) :]))
    part = tuple(slice(min(lengths)) for lengths in zip(tensor.shape, kept, strict=False))
    resized[part] = tensor[part]
    return resized


def zeros(like: Tensor, size: tuple[int, ...]) -> Tensor:
    """Returns zeros of a tensor's dtype on its device.

    On a CPU the system makes a page when something is first written there, so that room which no
    row uses costs neither time nor memory.
    """
    if like.device.type != "cpu":
        return like.new_zeros(size)
    count = math.prod(size) * like.element_size()
    buffer = np.zeros(count + ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return torch.from_numpy(buffer[start : start + count]).view(like.dtype).view(size)


class Moves:
    """The cells whose keys and values are copied, in all layers alike."""

    def __init__(self) -> None:
        self._cells: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def add(self, source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        """Adds tokens to copy, from and to these flat cells, [tokens] int64 each."""
        if len(source):
            self._cells.append((source, target))

    def carry_out(self, stores: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copies the added tokens from stores to targets, [..., heads, dim] each."""
        if not self._cells:
            return
        at, to = (
            torch.from_numpy(np.concatenate(cells)).to(stores[0].device)
            for cells in zip(*self._cells, strict=True)
        )
        for store, target in zip(stores, targets, strict=True):
            width = store.shape[-2] * store.shape[-1]
            target.view(-1, width).index_copy_(0, to, store.view(-1, width).index_select(0, at))
