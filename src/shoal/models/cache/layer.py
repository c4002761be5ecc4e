"""The tensors of one layer in a slot cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Layer:
    """Keys and values of one layer, [slots, capacity, heads, dim] and shared [cells, heads, dim]; value dims may differ from key
    dims (MLA)."""

    keys: Tensor
    values: Tensor
    shared_keys: Tensor
    shared_values: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The slots'."""
        return self.keys, self.values

    def resize(self, slots: int, capacity: int, cells: int) -> None:
        """Makes room, or takes it back, keeping what fits."""
        self.keys, self.values = (_resized(tensor, slots, capacity) for tensor in (self.keys, self.values))
        self.shared_keys, self.shared_values = (_resized(tensor, cells) for tensor in (self.shared_keys, self.shared_values))


def allocated(states: Tensor, *size: int) -> Tensor:
    """Zeros [*size, heads, dim] for states [rows, heads, q, dim]: a masked key is multiplied by 0, and 0 * NaN would be NaN."""
    return states.new_zeros(*size, states.shape[1], states.shape[3])


def _resized(tensor: Tensor, *size: int) -> Tensor:
    """The tensor with its first dimensions enlarged or cut; itself where nothing changes."""
    if tensor.shape[: len(size)] == size:
        return tensor
    resized = tensor.new_zeros(*size, *tensor.shape[len(size) :])
    kept = tuple(slice(min(lengths)) for lengths in zip(tensor.shape, size, strict=False))
    resized[kept] = tensor[kept]
    return resized
