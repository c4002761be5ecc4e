"""The rows of a slot cache: their places, lengths and tokens, and the tensors that hold them.

Each layer keeps two tensors [slots, capacity, kv heads, head dim]. A row owns one slot; appending
writes its new columns in place at the row's own length, and rolling back is setting that length.
Tokens move in three cases only: a finished row's slot is filled from the end (compaction), a
group's prompt is copied to a sibling, an accepted path of a draft tree moves together.

Beside its slots a layer has the *shared store*, two flat tensors [cells, kv heads, head dim]. A
group's prompt may lie there once (`Prefix`); the slots of its rows then hold their tails only.

A cache may round keys and values once, when they are written (`rounded`). A head of a token is then
stored as bytes, with its scale behind them, so that whatever moves tokens moves their scales.

`Layer` has the tensors of one layer, and copies tokens from one cache to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import InternalError
from shoal.models.cache.mixing import StateMarks
from shoal.types.requests import Prefix

ALIGNMENT = 64
"""The number of bytes of a cache line and of the widest vectors."""


SCALE_BYTES = 4
"""The number of bytes of the float32 scale behind a head's rounded features."""
LEAST_SCALE = 2.0**-126
"""The least scale, the smallest normal float32: a head of zeros is divided by it."""


def rounded(states: Tensor) -> Tensor:
    """Rounds keys or values [..., dim] to signed bytes with a float32 scale a head and token.

    The scale is that with which the largest feature is 127. The kernel `heads` computes the same
    bits. NaN and infinities make all features of the head NaN.

    Returns:
        [..., dim + SCALE_BYTES] int8.
    """
    features = states.float()
    scales = (features.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=LEAST_SCALE)
    numbers = (features / scales).nan_to_num().round().to(torch.int8)
    return torch.cat([numbers, (scales + 0 * scales).view(torch.int8)], dim=-1)


def unrounded(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns keys or values [..., dim] of those that `rounded` made, [..., dim + SCALE_BYTES]."""
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES].float() * scales).to(dtype)


@dataclass
class Layer:
    """The keys and values of one layer; value dims may differ from key dims (MLA).

    Attributes:
        dtype: the number format in which the model computes them.
        keys: [slots, capacity, heads, dim].
        values: [slots, capacity, heads, value dim].
        shared_keys: [cells, heads, dim].
        shared_values: [cells, heads, value dim].
    """

    dtype: torch.dtype
    keys: Tensor
    values: Tensor
    shared_keys: Tensor
    shared_values: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the slots."""
        return self.keys, self.values

    def resize(self, slots: int, capacity: int, cells: int, used: int) -> None:
        """Enlarges or cuts the tensors; keeps those of a slot's first `used` tokens that fit."""
        size, part = (slots, capacity), (slots, min(used, capacity))
        self.keys, self.values = (
            resized(tensor, size, part) for tensor in (self.keys, self.values)
        )
        self.shared_keys, self.shared_values = (
            resized(tensor, (cells,), (cells,)) for tensor in (self.shared_keys, self.shared_values)
        )


def resized(tensor: Tensor, size: tuple[int, ...], within: tuple[int, ...]) -> Tensor:
    """Enlarges or cuts the first dimensions; returns the tensor itself if nothing changes.

    The old elements within `within` are copied.
    """
    if tensor.shape[: len(size)] == size:
        return tensor
    resized = zeros(tensor, (*size, *tensor.shape[len(size) :]))
    part = tuple(slice(min(lengths)) for lengths in zip(tensor.shape, within, strict=False))
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


class RowStore:
    """The tokens of up to `slots` rows of unequal lengths, between passes.

    Attributes:
        slots: number of rows that there is room for.
        capacity: number of tokens per row that there is room for.
        cells: number of tokens that there is room for in the shared store.
        lengths: valid tokens per row, those in the shared store included; everything beyond is
            garbage that the masks hide.
        prefixes: for each slot, the place of its row's first tokens in the shared store; None if
            they lie in the slot.
        gaps: number of each row's tokens that are left out, so that its `lengths` are less than its
            positions.
        marks: the states after blocks of prompts, of rows whose layers keep states.
        rounds: True if keys and values are rounded when they are written.
    """

    def __init__(self) -> None:
        self._layers: list[Layer] = []
        self.rounds = False
        self.slots = self.capacity = self.cells = 0
        self.lengths: list[int] = []
        self.prefixes: list[Prefix | None] = []
        self.gaps: list[int] = []
        self.marks = StateMarks()

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Makes room for `slots` rows of `capacity` tokens in their slots, and for `cells` cells.

        Keeps the tokens that are there; never shrinks.
        """
        self._resize(max(slots, self.slots), max(capacity, self.capacity), max(cells, self.cells))

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Frees the slots, tokens and cells beyond these sizes; no row may use them."""
        self._resize(min(slots, self.slots), min(capacity, self.capacity), min(cells, self.cells))

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        longest = max(
            (length - self._offset(slot) for slot, length in enumerate(self.lengths)), default=0
        )
        try:
            for layer in self._layers:
                layer.resize(slots, capacity, cells, longest)
        except BaseException:  # out of memory, most likely: all layers must stay of one size
            for layer in self._layers:
                layer.resize(self.slots, self.capacity, self.cells, longest)
            raise
        for slot in range(slots, self.slots):
            self.marks.forget(slot)
        self.lengths = self.lengths[:slots] + [0] * (slots - self.slots)
        self.prefixes = self.prefixes[:slots] + [None] * (slots - self.slots)
        self.gaps = self.gaps[:slots] + [0] * (slots - self.slots)
        self.slots, self.capacity, self.cells = slots, capacity, cells

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        """Lets a new row take the slot, with the tokens of its prefix or none."""
        self.prefixes[slot], self.lengths[slot] = prefix, 0 if prefix is None else prefix.length
        self.gaps[slot] = 0
        self.marks.forget(slot)

    def clear(self) -> None:
        """Empties all slots."""
        for slot in range(self.slots):
            self.enter(slot)

    def rollback(self, slot: int, length: int) -> None:
        """Forgets all tokens from `length` on. O(1): nothing moves."""
        prefix = self.prefixes[slot]
        offset = 0 if prefix is None else prefix.length
        if not offset <= length <= self.lengths[slot]:
            shared = f", {offset} of them shared" if prefix else ""
            raise InternalError(
                f"cannot roll slot {slot} of length {self.lengths[slot]} back to {length}{shared}"
            )
        self.lengths[slot] = length
        if self.marks.on:
            self.marks.cut(slot, length)

    def keep(self, slot: int, length: int, columns: Sequence[int]) -> None:
        """Keeps some columns of the last block and forgets the others.

        The columns, a path of a draft tree, become the tokens at `length`, `length` + 1, ...
        Columns 0, 1, ... lie there already: nothing moves, and the call is a `rollback`.

        Args:
            length: tokens of the row before the block.
            columns: rising.

        Raises:
            InternalError: for columns that the row does not have, or that do not rise.
        """
        if columns == range(len(columns)):
            return self.rollback(slot, length + len(columns))
        rising = all(a < b for a, b in pairwise([-1, *columns]))
        if (
            not rising
            or not self._offset(slot)
            <= length
            <= length + max(columns, default=-1) + 1
            <= self.lengths[slot]
        ):
            raise InternalError(
                f"cannot keep columns {list(columns)} of slot {slot} from {length} to "
                f"{self.lengths[slot]}"
            )
        first = next((i for i, column in enumerate(columns) if column != i), len(columns))
        if first < len(columns):
            block = length - self._offset(slot)
            self.gather(slot, block + first, [block + column for column in columns[first:]])
        self.lengths[slot] = length + len(columns)

    @torch.inference_mode()  # tensors of a pass in this mode can only be changed in it
    def gather(self, slot: int, start: int, cells: Sequence[int]) -> None:
        """Moves tokens `cells` of the slot to `start` and on, in place; the ranges may overlap."""
        index = torch.tensor(cells, device=self._layers[0].keys.device)
        for layer in self._layers:
            for tensor in layer.tensors():
                tensor[slot, start : start + len(cells)] = tensor[slot, index]

    def reaches(self, slot: int, length: int) -> bool:
        """Returns True if the slot can be cut or copied to its first `length` tokens."""
        return length <= self.lengths[slot]

    def hold(self, slot: int) -> None:
        """Ensures that the present tokens of the slot can be copied later."""

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of slot `source`, without shared ones, to `target`."""
        tail = length - self._offset(source)
        if source != target:
            for layer in self._layers:
                for tensor in layer.tensors():
                    tensor[target, :tail] = tensor[source, :tail]
        self.prefixes[target], self.lengths[target] = self.prefixes[source], length
        self.gaps[target] = self.gaps[source]
        self.marks.put(target, self.marks.of(source))
        self.marks.cut(target, length)

    @torch.inference_mode()
    def take(
        self, source: RowStore, slots: Sequence[int | None], first: int, recent: int, layers: int
    ) -> None:
        """Makes slots 0, 1, ... hold some tokens of these slots of another cache.

        The tokens are the `first` ones and the `recent` ones, or all tokens of a row that has no
        more. Keys are copied as they are, at the positions that they have in the other cache.

        Args:
            slots: None leaves a slot empty.
            layers: number of the other cache's layers, from the first on.
        """
        for layer in source._layers[len(self._layers) : layers]:
            self._layers.append(layer_like(self, layer.dtype, layer.keys, layer.values))
        own, shared = Moves(), Moves()
        for slot, other in enumerate(slots):
            self.enter(slot)
            if other is None:
                continue
            length = source.lengths[other]
            prefix = source.prefixes[other]
            offset = source._offset(other)
            self.gaps[slot] = max(0, length - first - recent)
            self.lengths[slot] = length - self.gaps[slot]
            positions = np.arange(self.lengths[slot])
            positions[first:] += self.gaps[slot]
            cells = slot * self.capacity + np.arange(self.lengths[slot])
            stored = positions < offset
            own.add(other * source.capacity + positions[~stored] - offset, cells[~stored])
            if prefix is not None:
                shared.add(prefix.base + positions[stored], cells[stored])
        for mine, theirs in zip(self._layers, source._layers, strict=False):
            own.carry_out(theirs.tensors(), mine.tensors())
            shared.carry_out((theirs.shared_keys, theirs.shared_values), mine.tensors())

    @torch.inference_mode()
    def zero_tail(self, slot: int, length: int) -> None:
        """Zeroes the keys and values of the slot from position `length` on."""
        for layer in self._layers:
            for tensor in layer.tensors():
                tensor[slot, max(0, length - self._offset(slot)) :] = 0

    @torch.inference_mode()
    def zero_non_finite(self, slot: int) -> None:
        """Zeroes all NaN and infinite values of the slot and its prefix, at any position."""
        prefix = self.prefixes[slot]
        for layer in self._layers:
            parts = [tensor[slot] for tensor in layer.tensors()]
            if prefix is not None:
                cells = slice(prefix.base, prefix.base + prefix.length)
                parts += [layer.shared_keys[cells], layer.shared_values[cells]]
            for tensor in parts:
                if self.rounds:  # numbers that are not finite have a scale that is not
                    scales = tensor[..., -SCALE_BYTES:].contiguous().view(torch.float32)
                    finite = scales.nan_to_num_(0.0, 0.0, 0.0).view(torch.int8)
                    tensor[..., -SCALE_BYTES:] = finite
                else:
                    tensor.nan_to_num_(0.0, 0.0, 0.0)

    def _offset(self, slot: int) -> int:
        """Returns the position of the first token in the slot."""
        prefix = self.prefixes[slot]
        return 0 if prefix is None else prefix.length

    def bytes_per_token(self) -> int:
        """Returns the bytes of one token of one row over all layers; 0 before the first pass."""
        return sum(
            t.element_size() * t.shape[2:].numel()
            for layer in self._layers
            for t in layer.tensors()
        )

    @property
    def measured(self) -> bool:
        """True if a pass has shown how many bytes rows take."""
        return self.bytes_per_token() + self.bytes_per_slot() > 0

    def bytes_per_slot(self) -> int:
        """Returns the bytes of a row that do not grow with its tokens."""
        return 0

    def nbytes(self) -> int:
        """Returns the number of allocated bytes."""
        tokens = self.slots * self.capacity + self.cells
        own = tokens * self.bytes_per_token() + self.slots * self.bytes_per_slot()
        return own + self.marks.nbytes

    def _add_layer(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the stores of a layer with keys and values like these, [rows, heads, q, dim]."""
        pair = [states[:, :, :1].transpose(1, 2) for states in (key_states, value_states)]
        stored = [rounded(states) for states in pair] if self.rounds else pair
        self._layers.append(layer_like(self, key_states.dtype, *stored))


def layer_like(store: RowStore, dtype: torch.dtype, *like: Tensor) -> Layer:
    """Makes stores for tokens of the same shape and dtype, [rows, q, heads, dim].

    The cells must be zero because a masked key is multiplied by 0, and 0 * NaN would be NaN.
    """
    sizes = (store.slots, store.capacity), (store.cells,)
    tensors = (zeros(states, (*size, *states.shape[2:])) for size in sizes for states in like)
    return Layer(dtype, *tensors)
