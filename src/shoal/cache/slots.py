"""Slot-based ragged KV cache behind Transformers' Cache API; the only file that touches its cache classes.

Each layer keeps two tensors [slots, capacity, kv heads, head dim]. A row owns one slot; appending writes its new columns in
place at the row's own length, rolling back is setting that length, and nothing ever moves except when a finished row's slot
is filled from the end (compaction) or a group's prompt is copied to a sibling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.cache.plan import Plan
from shoal.errors import InternalError


@dataclass
class _Layer:
    """Keys and values of one layer, each [slots, capacity, heads, dim]; value dims may differ from key dims (MLA)."""

    keys: Tensor
    values: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


class SlotCache(Cache):
    """KV of up to `slots` rows of unequal lengths for one model.

    Attributes:
        lengths: valid tokens per slot; everything beyond is garbage that the masks hide.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._layers: list[_Layer] = []
        self.slots = 0
        self.capacity = 0
        self.lengths: list[int] = []
        self.plan: Plan | None = None
        self._cells: Tensor | None = None

    # ── what the engine does with it ────────────────────────────────────────────────────────────────────────────────

    def reserve(self, slots: int, capacity: int) -> None:
        """Makes room for `slots` rows of `capacity` tokens, keeping what is there; never shrinks."""
        slots, capacity = max(slots, self.slots), max(capacity, self.capacity)
        if (slots, capacity) == (self.slots, self.capacity):
            return
        for layer in self._layers:
            for name in ("keys", "values"):
                setattr(layer, name, _grown(getattr(layer, name), slots, capacity))
        self.lengths += [0] * (slots - self.slots)
        self.slots, self.capacity = slots, capacity

    def begin(self, plan: Plan) -> None:
        """Announces a forward pass; `update` then writes where the plan says."""
        top = plan.kv
        if top > self.capacity or max(plan.slots) >= self.slots:
            raise InternalError(f"cache of {self.slots} x {self.capacity} got slot {max(plan.slots)}, length {top}")
        self.plan, self._cells = plan, plan.cells(self.capacity)

    def end(self) -> None:
        """The pass is over: its real tokens (not the unused columns) now count."""
        assert self.plan is not None
        self.wrote(self.plan)
        self.plan = self._cells = None

    def wrote(self, plan: Plan) -> None:
        """The plan's tokens are in the cells."""
        for slot, length in zip(plan.slots, plan.lengths, strict=True):
            self.lengths[slot] = length

    def stores(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, for passes that write them themselves."""
        return [layer.tensors() for layer in self._layers]

    def rollback(self, slot: int, length: int) -> None:
        """Forgets everything from `length` on. O(1): nothing moves."""
        if length > self.lengths[slot]:
            raise InternalError(f"cannot roll slot {slot} of length {self.lengths[slot]} back to {length}")
        self.lengths[slot] = length

    @torch.inference_mode()  # what a forward pass in that mode wrote can only be changed in it
    def copy(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens of `target` those of `source`."""
        if source != target:
            for layer in self._layers:
                for tensor in layer.tensors():
                    tensor[target, :length] = tensor[source, :length]
        self.lengths[target] = length

    def bytes_per_token(self) -> int:
        """Bytes one token of one row takes over all layers; 0 before the first pass."""
        return sum(t.element_size() * t[0, 0].numel() for layer in self._layers for t in layer.tensors())

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.slots * self.capacity * self.bytes_per_token()

    # ── what a Transformers model asks of it ────────────────────────────────────────────────────────────────────────

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends [rows, heads, q, dim], or packed [1, heads, tokens, dim], at the plan's cells; returns all keys and values of
        the plan's rows, [rows, heads, kv, dim], as views when the slots are consecutive."""
        plan, cells = self.plan, self._cells
        if plan is None or cells is None:
            raise InternalError("a SlotCache was used outside of a planned forward pass")
        if layer_idx == len(self._layers):
            self._layers.append(_Layer(*(self._allocate(states) for states in (key_states, value_states))))
        layer = self._layers[layer_idx]
        return self._append(layer.keys, key_states, plan, cells), self._append(layer.values, value_states, plan, cells)

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros, not empty: a masked key still meets a finite value, and 0 * NaN would be NaN.
        return states.new_zeros(self.slots, self.capacity, states.shape[1], states.shape[3])

    @staticmethod
    def _append(store: Tensor, states: Tensor, plan: Plan, cells: Tensor) -> Tensor:
        flat = store.view(-1, store.shape[2] * store.shape[3])
        flat.index_copy_(0, cells, states.transpose(1, 2).reshape(cells.numel(), -1))
        if plan.first_slot is not None:
            rows = store[plan.first_slot : plan.first_slot + plan.rows, : plan.kv]
        else:
            rows = store[torch.tensor(plan.slots, device=store.device), : plan.kv]
        return rows.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Transformers only uses this for default positions and masks, which shoal always passes itself."""
        return max(self.plan.starts) if self.plan is not None else 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return (self.plan.kv if self.plan is not None else 0), 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` before Transformers 5.15."""
        return self.capacity

    def __len__(self) -> int:
        return len(self._layers)


def _grown(tensor: Tensor, slots: int, capacity: int) -> Tensor:
    grown = tensor.new_zeros(slots, capacity, *tensor.shape[2:])
    grown[: tensor.shape[0], : tensor.shape[1]] = tensor
    return grown
