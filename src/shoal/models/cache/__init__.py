"""The slot-based ragged KV cache behind Transformers' Cache API.

No other file touches Transformers' cache classes. The rows of the cache are in
`shoal.models.cache.row_store`; here are the passes over them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.errors import InternalError
from shoal.models.cache.pass_plan import Plan
from shoal.models.cache.row_store import Layer, RowStore, rounded, unrounded
from shoal.types.requests import Prefix

__all__ = ["Plan", "SlotCache"]


LayerStores = tuple[Tensor, Tensor, Tensor, Tensor]
"""The keys and values of a layer's slots, and those of its shared store."""


class SlotCache(RowStore, Cache):
    """The keys and values of up to `slots` rows of unequal lengths, for one model.

    Args:
        rounds: True if keys and values are rounded when they are written (`rounded`).

    Attributes:
        plan: the plan of the pass under way; None outside of passes.
    """

    def __init__(self, rounds: bool = False) -> None:
        Cache.__init__(self, layers=[])
        RowStore.__init__(self)
        self.rounds = rounds
        self._layer: Layer | None = None
        self.plan: Plan | None = None
        self._cells: Tensor | None = None
        self._addresses: array[int] | None = None

    def next_plan(
        self, slots: Sequence[int], counts: Sequence[int], device: torch.device, **options: Any
    ) -> Plan:
        """Makes the plan of a pass that appends counts[b] tokens to each slot.

        Args:
            counts: the number of tokens of each row.
            options: see `Plan`.
        """
        return Plan(
            slots,
            [self.lengths[slot] for slot in slots],
            counts,
            device,
            prefixes=[self.prefixes[slot] for slot in slots],
            gaps=[self.gaps[slot] for slot in slots],
            **options,
        )

    # ── the stores ────────────────────────────────────────────────────────────────────────────────

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        self._addresses = None
        super()._resize(slots, capacity, cells)

    def _add_layer(self, key_states: Tensor, value_states: Tensor) -> None:
        self._addresses = None
        super()._add_layer(key_states, value_states)

    def make_layers(self, layers: int, states: Tensor) -> None:
        """Makes the layers, out of a model's `layers`, that no pass has made yet.

        Args:
            states: keys, or values, of the shape [rows, heads, q, dim].
        """
        for _ in range(len(self._layers), layers):
            self._add_layer(states, states)

    def stores(self) -> list[LayerStores]:
        """Returns the keys and values of each layer, those of the slots and the shared ones.

        They are for passes that write and read keys and values themselves.
        """
        return [self.stores_of(index) for index in range(len(self._layers))]

    def stores_of(self, index: int) -> LayerStores:
        """Returns the keys and values of a layer, those of its slots and the shared ones."""
        layer = self._layers[index]
        return layer.keys, layer.values, layer.shared_keys, layer.shared_values

    def addresses(self, into: Prefix | None = None) -> array[int]:
        """Returns the addresses of `stores`, [layers, 4] int64, for kernels that take addresses.

        The addresses are good until the cache changes its size.

        Args:
            into: a prompt on its way into the shared store, whose place there is the slot of the
                pass.
        """
        if into is not None:
            return array(
                "q",
                [address for stores in self.stores() for address in _as_slot(into, *stores[2:])],
            )
        if self._addresses is None:
            self._addresses = array(
                "q", [tensor.data_ptr() for stores in self.stores() for tensor in stores]
            )
        return self._addresses

    # ── a pass ────────────────────────────────────────────────────────────────────────────────────

    def begin(self, plan: Plan) -> None:
        """Announces a forward pass, in which `update` writes to the plan's cells."""
        if plan.into is not None:
            if plan.into.base + plan.kv > self.cells:
                raise InternalError(
                    f"shared store of {self.cells} cells got {plan.kv} tokens at {plan.into.base}"
                )
        elif plan.kv > self.capacity or max(plan.slots) >= self.slots:
            raise InternalError(
                f"cache of {self.slots} x {self.capacity} got slot {max(plan.slots)}, length "
                f"{plan.kv}"
            )
        self.plan, self._cells = plan, None

    def end(self) -> None:
        """Ends the pass: its real tokens (not the unused columns) now count."""
        assert self.plan is not None
        self.wrote(self.plan)
        self.plan = self._cells = self._layer = None

    def wrote(self, plan: Plan, ahead: int = 0) -> None:
        """Notes that the plan's tokens, and `ahead` more of each row, are in their cells."""
        if plan.into is None:
            for slot, length in zip(plan.slots, plan.lengths, strict=True):
                self.lengths[slot] = length + ahead

    @property
    def written(self) -> Tensor:
        """The flat cells that the pass writes to, [tokens of the pass] int64 (`Plan.cells`)."""
        if self.plan is None:
            raise InternalError("a SlotCache was used outside of a planned forward pass")
        if self._cells is None:
            self._cells = self.plan.cells(self.capacity)
        return self._cells

    def write(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values of the pass's tokens in layer `index`.

        Args:
            keys: [tokens, heads, dim].
            values: [tokens, heads, dim].
        """
        if self.rounds:
            keys, values = rounded(keys), rounded(values)
        for store, states in zip(self._stores(index), (keys, values), strict=True):
            store.view(-1, store.shape[-2] * store.shape[-1]).index_copy_(
                0, self.written, states.reshape(self.written.numel(), -1)
            )

    def written_stores(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the stores of layer `index` for passes that write keys and values themselves."""
        return self._stores(index)

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the plan's rows in a layer, [rows, heads, kv, dim] each.

        They are views when the slots are consecutive and the cache does not round.
        """
        stores = self._stores(index)
        keys, values = (_features(self._layer, self._rows(store), self.rounds) for store in stores)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _rows(self, store: Tensor) -> Tensor:
        plan = self.plan
        assert plan is not None
        if plan.into is not None:
            return store[None, plan.into.base : plan.into.base + plan.kv]
        if plan.first_slot is not None:
            return store[plan.first_slot : plan.first_slot + plan.rows, : plan.kv]
        return store[torch.tensor(plan.slots, device=store.device), : plan.kv]

    def _stores(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the stores of layer `index` that the pass under way writes keys and values to."""
        self._layer = layer = self._layers[index]
        if self.plan is None:
            raise InternalError("a SlotCache was used outside of a planned forward pass")
        return (
            layer.tensors() if self.plan.into is None else (layer.shared_keys, layer.shared_values)
        )

    def shared(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the keys and values in the shared store of the layer that was updated last.

        Returns:
            [cells, heads, dim] each; (None, None) in a pass without a prefix.
        """
        if self._layer is None or self.plan is None or not self.plan.shares:
            return None, None
        layer = self._layer
        keys, values = (
            _features(layer, one, self.rounds) for one in (layer.shared_keys, layer.shared_values)
        )
        return keys, values

    def attached(self) -> AbstractContextManager[None]:
        """Returns a context that a model's own modules compute the pass in."""
        return nullcontext()

    # ── for a Transformers model ──────────────────────────────────────────────────────────────────

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [rows, heads, q, dim], or packed [1, heads, tokens, dim], at the plan's cells.

        Returns:
            All keys and values of the plan's rows, [rows, heads, kv, dim], as views when the slots
            are consecutive.
        """
        if self.plan is None:
            raise InternalError("a SlotCache was used outside of a planned forward pass")
        if layer_idx == len(self._layers):
            self._add_layer(key_states, value_states)
        self.write(
            layer_idx,
            *(states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states)),
        )
        return self.rows(layer_idx)

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """Returns the longest row's length before the pass; 0 outside of a pass.

        Transformers uses the length only for default positions and masks, which shoal always passes
        itself. A layer that asks for its own adds its columns' numbers to it, to have positions:
        such a pass is packed, and the layer is told how far those are off, [tokens] int64.
        """
        plan = self.plan
        if plan is None:
            return 0
        if layer_idx is None or not (plan.packed or plan.rows == 1):
            return max(plan.starts)
        positions = plan.pack(plan.positions)[0]
        return positions - torch.arange(len(positions), device=plan.device)

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return (self.plan.kv if self.plan is not None else 0), 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Returns the capacity; Transformers before 5.15 calls `get_max_length` by this name."""
        return self.capacity

    def __len__(self) -> int:
        return len(self._layers)


def _as_slot(into: Prefix, keys: Tensor, values: Tensor) -> tuple[int, int, int, int]:
    """Returns a layer's addresses for a pass whose only slot is the prompt's place in the store."""
    own = [
        store.data_ptr() + into.base * store.stride(0) * store.element_size()
        for store in (keys, values)
    ]
    return own[0], own[1], keys.data_ptr(), values.data_ptr()


def _features(layer: Layer | None, stored: Tensor, rounds: bool) -> Tensor:
    """Returns stored keys or values as a layer computes with them."""
    assert layer is not None
    return unrounded(stored, layer.dtype) if rounds else stored
