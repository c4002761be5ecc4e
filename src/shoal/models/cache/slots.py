"""The slot-based ragged KV cache behind Transformers' Cache API.

No other file touches Transformers' cache classes.

Each layer keeps two tensors [slots, capacity, kv heads, head dim]. A row owns one slot; appending
writes its new columns in place at the row's own length, and rolling back is setting that length.
Tokens move in three cases only: a finished row's slot is filled from the end (compaction), a
group's prompt is copied to a sibling, an accepted path of a draft tree moves together.

Beside its slots a layer has the *shared store*, two flat tensors [cells, kv heads, head dim]. A
group's prompt may lie there once (`Prefix`); the slots of its rows then hold their tails only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.errors import InternalError
from shoal.models.cache.layer import Layer, Moves, allocated
from shoal.models.cache.pass_plan import Plan
from shoal.types.requests import Prefix

LayerStores = tuple[Tensor, Tensor, Tensor, Tensor]
"""The keys and values of a layer's slots, and those of its shared store."""


class SlotCache(Cache):
    """The keys and values of up to `slots` rows of unequal lengths, for one model.

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
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._layers: list[Layer] = []
        self._layer: Layer | None = None
        self.slots = self.capacity = self.cells = 0
        self.lengths: list[int] = []
        self.prefixes: list[Prefix | None] = []
        self.gaps: list[int] = []
        self.plan: Plan | None = None
        self._written: Tensor | None = None
        self._addresses: array[int] | None = None

    # ── for the engine ────────────────────────────────────────────────────────────────────────────

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Makes room for `slots` rows of `capacity` tokens in their slots, and for `cells` cells.

        Keeps the tokens that are there; never shrinks.
        """
        self._resize(max(slots, self.slots), max(capacity, self.capacity), max(cells, self.cells))

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Gives back the slots, tokens and cells beyond these sizes, which nobody needs."""
        self._resize(min(slots, self.slots), min(capacity, self.capacity), min(cells, self.cells))

    def _resize(self, slots: int, capacity: int, cells: int) -> None:
        self._addresses = None
        used = max(
            (length - self._offset(slot) for slot, length in enumerate(self.lengths)), default=0
        )
        try:
            for layer in self._layers:
                layer.resize(slots, capacity, cells, used)
        except BaseException:  # out of memory, most likely: all layers must stay of one size
            for layer in self._layers:
                layer.resize(self.slots, self.capacity, self.cells, used)
            raise
        self.lengths = self.lengths[:slots] + [0] * (slots - self.slots)
        self.prefixes = self.prefixes[:slots] + [None] * (slots - self.slots)
        self.gaps = self.gaps[:slots] + [0] * (slots - self.slots)
        self.slots, self.capacity, self.cells = slots, capacity, cells

    def enter(self, slot: int, prefix: Prefix | None = None) -> None:
        """Lets a new row take the slot, with the tokens of its prefix or none."""
        self.prefixes[slot], self.lengths[slot] = prefix, 0 if prefix is None else prefix.length
        self.gaps[slot] = 0

    def clear(self) -> None:
        """Empties all slots."""
        for slot in range(self.slots):
            self.enter(slot)

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
        self.plan, self._written = plan, None

    def end(self) -> None:
        """Ends the pass: its real tokens (not the unused columns) now count."""
        assert self.plan is not None
        self.wrote(self.plan)
        self.plan = self._written = self._layer = None

    def wrote(self, plan: Plan, ahead: int = 0) -> None:
        """Notes that the plan's tokens, and `ahead` more of each row, are in their cells."""
        if plan.into is None:
            for slot, length in zip(plan.slots, plan.lengths, strict=True):
                self.lengths[slot] = length + ahead

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

    def rollback(self, slot: int, length: int) -> None:
        """Forgets all tokens from `length` on. O(1): nothing moves."""
        if not self._offset(slot) <= length <= self.lengths[slot]:
            shared = f", {self._offset(slot)} of them shared" if self.prefixes[slot] else ""
            raise InternalError(
                f"cannot roll slot {slot} of length {self.lengths[slot]} back to {length}{shared}"
            )
        self.lengths[slot] = length

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
        """Moves tokens `cells` of the slot to `start`, `start` + 1, ..., in place.

        The ranges may overlap.
        """
        index = torch.tensor(cells, device=self._layers[0].keys.device)
        for layer in self._layers:
            for tensor in layer.tensors():
                tensor[slot, start : start + len(cells)] = tensor[slot, index]

    def reaches(self, slot: int, length: int) -> bool:
        """Returns True if the slot can be cut or copied to its first `length` tokens."""
        return length <= self.lengths[slot]

    def hold(self, slot: int) -> None:
        """Sees to it that the tokens that the slot has now can be copied later."""

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens of slot `target` those of slot `source`.

        Tokens in the shared store stay there.
        """
        tail = length - self._offset(source)
        if source != target:
            for layer in self._layers:
                for tensor in layer.tensors():
                    tensor[target, :tail] = tensor[source, :tail]
        self.prefixes[target], self.lengths[target] = self.prefixes[source], length
        self.gaps[target] = self.gaps[source]

    @torch.inference_mode()
    def take(
        self, source: SlotCache, slots: Sequence[int | None], first: int, recent: int, layers: int
    ) -> None:
        """Makes slots 0, 1, ... hold some tokens of these slots of another cache.

        The tokens are the `first` ones and the `recent` ones, or all tokens of a row that has no
        more. Keys are copied as they are, at the positions that they have in the other cache.

        Args:
            slots: None leaves a slot empty.
            layers: number of the other cache's layers, from the first on.
        """
        for layer in source._layers[len(self._layers) : layers]:
            self._add_layer(layer.keys.transpose(1, 2), layer.values.transpose(1, 2))
        own, shared = Moves(), Moves()
        for slot, taken in enumerate(slots):
            self.enter(slot)
            if taken is None:
                continue
            length, prefix, offset = (
                source.lengths[taken],
                source.prefixes[taken],
                source._offset(taken),
            )
            self.gaps[slot] = max(0, length - first - recent)
            self.lengths[slot] = length - self.gaps[slot]
            positions = np.arange(self.lengths[slot])
            positions[first:] += self.gaps[slot]
            cells = slot * self.capacity + np.arange(self.lengths[slot])
            stored = positions < offset
            own.add(taken * source.capacity + positions[~stored] - offset, cells[~stored])
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
            held = [tensor[slot] for tensor in layer.tensors()]
            if prefix is not None:
                cells = slice(prefix.base, prefix.base + prefix.length)
                held += [layer.shared_keys[cells], layer.shared_values[cells]]
            for tensor in held:
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
        """Returns the bytes that a row takes beside those of its tokens."""
        return 0

    def nbytes(self) -> int:
        """Returns the number of allocated bytes."""
        tokens = self.slots * self.capacity + self.cells
        return tokens * self.bytes_per_token() + self.slots * self.bytes_per_slot()

    # ── during a pass ─────────────────────────────────────────────────────────────────────────────

    def make_layers(self, layers: int, states: Tensor) -> None:
        """Makes those of a model's `layers` layers that no pass has made yet.

        Args:
            states: keys, or values, of the shape [rows, heads, q, dim].
        """
        for _ in range(len(self._layers), layers):
            self._add_layer(states, states)

    def _add_layer(self, key_states: Tensor, value_states: Tensor) -> None:
        self._addresses = None
        sizes, pair = ((self.slots, self.capacity), (self.cells,)), (key_states, value_states)
        self._layers.append(Layer(*(allocated(states, *size) for size in sizes for states in pair)))

    @property
    def written(self) -> Tensor:
        """The flat cells that the pass writes to, [tokens of the pass] int64 (`Plan.cells`)."""
        if self.plan is None:
            raise InternalError("a SlotCache was used outside of a planned forward pass")
        if self._written is None:
            self._written = self.plan.cells(self.capacity)
        return self._written

    def write(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Writes the keys and values of the pass's tokens in layer `index`.

        Args:
            keys: [tokens, heads, dim].
            values: [tokens, heads, dim].
        """
        for store, states in zip(self._stores(index), (keys, values), strict=True):
            store.view(-1, store.shape[-2] * store.shape[-1]).index_copy_(
                0, self.written, states.reshape(self.written.numel(), -1)
            )

    def written_stores(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the stores of layer `index` for passes that write keys and values themselves."""
        return self._stores(index)

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the plan's rows in a layer, [rows, heads, kv, dim] each.

        They are views when the slots are consecutive.
        """
        keys, values = self._stores(index)
        return self._rows(keys).transpose(1, 2), self._rows(values).transpose(1, 2)

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
        return self._layer.shared_keys, self._layer.shared_values

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the longest row's length before the pass; 0 outside of a pass.

        Transformers uses the length only for default positions and masks, which shoal always passes
        itself.
        """
        return max(self.plan.starts) if self.plan is not None else 0

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
