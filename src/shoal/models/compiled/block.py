"""The buffers of a captured pass, their sizes, and the cache that a model meets inside.

All inputs that change from round to round lie in the buffers. There are few sizes, so that the
captures of one run serve the next.

Plans, context variables and lists of lengths, as ordinary passes use them, would be frozen into a
captured graph. Here the same attention methods are called with masks made of a block's buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from shoal.models.attention import Masks
from shoal.models.attention.methods import Method
from shoal.models.cache import LayerStores, Plan
from shoal.models.cache.pass_plan import Array, chain_words

FEWEST_KEYS = 64
KEYS_OF_KERNEL = 256
"""The number of keys that capacities are multiples of where a kernel attends."""


class Bucket(NamedTuple):
    """The shape of a captured pass: rows, columns of the block, keys per row."""

    rows: int
    q: int
    keys: int


def keys_for(keys: int, capacity: int) -> int:
    """Returns the number of keys that a pass over at least `keys` keys spans.

    The number is a power of two, but no more than the cache has.

    Args:
        keys: keys in the slot of the longest row, after the pass.
        capacity: tokens that a slot of the cache holds.
    """
    return min(max(1 << (keys - 1).bit_length(), FEWEST_KEYS), capacity)


def step_up(size: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most half as much again."""
    power = 1 << (size - 1).bit_length()
    between = 3 * power // 4
    return between if power > 2 and size <= between else power


def reservation(slots: int, capacity: int, *, by_kernel: bool) -> tuple[int, int]:
    """Returns the slots and the capacity to reserve for `slots` rows of `capacity` tokens.

    The slots are the rows of a bucket and a scratch slot. The capacity is a length that other runs
    will ask for as well, so that rounds captured for one run serve the next; a capacity of 0 stays
    0.

    Padding has a slot, not a cell of another row's: padded attention reads whole slots, and would
    meet there the keys that padding wrote.

    Args:
        by_kernel: True if a kernel attends, which reads lengths on the device; captured rounds over
            whole slots then cost no more, and capacities need not be powers of two.
    """
    if not capacity:
        return step_up(slots) + 1, 0
    if by_kernel:
        return step_up(slots) + 1, -(-capacity // KEYS_OF_KERNEL) * KEYS_OF_KERNEL
    return step_up(slots) + 1, step_up(max(capacity, FEWEST_KEYS))


MOST_LAYOUTS = 64
"""The number of layouts that a block keeps."""


class Block:
    """The buffers of a pass, of fixed address and shape, refilled from the host before each round.

    Padding (rows beyond the real ones, columns beyond a row's count) stands at a valid position,
    sees valid keys and writes to the scratch cell, which no real row reads.

    Args:
        scratch: the cell that padding writes to.
        numbers: a buffer for all but the tokens, [`size`] int64; None = one of its own.

    Attributes:
        q: columns of the bucket.
        kv: keys of the bucket.
        scratch: the cell that padding writes to.
        tokens: [rows, q] int64.
        positions: [rows, q] int64.
        cells: flat cells of the cache to write to, [rows * q] int64.
        words: the columns of the block that each column sees (`shoal.models.cache.pass_plan`),
            [rows, q] int64, in a chain the lower triangle; None for a block of one column.
        bounds: starts, counts, offsets and bases of the rows, [4, rows] int64.
    """

    def __init__(
        self, bucket: Bucket, scratch: int, device: torch.device, numbers: Tensor | None = None
    ) -> None:
        self.bucket, self.scratch = bucket, scratch
        self.q, self.kv, self.common_keys = bucket.q, bucket.keys, 0
        block, rows = bucket.rows * bucket.q, bucket.rows
        self._chain = chain_words(bucket.q)
        # Constants of `move`: the columns, the words of a chain, the numbers of the rows.
        self._columns = torch.arange(bucket.q, device=device)
        self._words_of_chain = torch.from_numpy(self._chain).to(device)
        self._rows = torch.arange(rows, device=device)
        self._whole: Tensor | None = None
        # By the counts, offsets and bases of the rows, which few rounds change.
        self._layouts: dict[tuple[Any, ...], tuple[Array, Array]] = {}
        if numbers is None:
            self._whole = torch.zeros(self.size(bucket) + block, dtype=torch.long, device=device)
            self._numbers = self._whole[: self.size(bucket)]
            # The building of a pass then writes to the scratch cell only.
            self._numbers.copy_(torch.from_numpy(self.empty()))
            self.tokens = self._whole[self.size(bucket) :].view(rows, bucket.q)
        else:
            self._numbers = numbers
            self.tokens = torch.zeros(rows, bucket.q, dtype=torch.long, device=device)
        positions, words, self.cells, bounds = self._numbers.split([block, block, block, 4 * rows])
        self.positions, self.bounds = positions.view(rows, bucket.q), bounds.view(4, rows)
        self.words = words.view(rows, bucket.q) if bucket.q > 1 else None

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Returns the number of a block's numbers, the tokens aside."""
        return (3 * bucket.q + 4) * bucket.rows

    def empty(self) -> Array:
        """Returns the numbers of a block of unused columns only, [`size`] int64 on the host."""
        block, rows = self.bucket.rows * self.bucket.q, self.bucket.rows
        return np.repeat([0, 1, self.scratch, 0], [block, block, block, 4 * rows])

    @property
    def inputs(self) -> Tensor:
        """The inputs of a pass: the block's numbers and then its tokens, [numbers] int64.

        They are one buffer where the block has a buffer of its own, else a copy.
        """
        if self._whole is None:
            return torch.cat([self._numbers, self.tokens.flatten()])
        return self._whole

    @property
    def firsts(self) -> Tensor:
        """The index of each row's column 0 in its slot, [rows] int64 (`Layout.firsts`)."""
        return self.bounds[0] - self.bounds[2]

    @property
    def places(self) -> Tensor:
        """The positions minus the rows' offsets, [rows, q] int64 (`Layout.places`)."""
        return self.positions - self.bounds[2][:, None]

    def placed(self, plan: Plan, capacity: int) -> Array:
        """Returns the numbers of a block whose rows, all of them chains, are where the plan says.

        Returns:
            [`size`] int64 on the host.
        """
        widths = (tuple(plan.counts), tuple(plan.offsets), tuple(plan.bases), capacity)
        if widths not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[widths] = self._layout(plan, capacity)
        numbers, row_of = self._layouts[widths]
        starts = np.zeros(self.bucket.rows + 1, dtype=np.int64)
        starts[: plan.rows] = plan.starts
        return numbers + starts[row_of]

    def _layout(self, plan: Plan, capacity: int) -> tuple[Array, Array]:
        """Returns the part of `placed` that does not depend on the rows' starts.

        Returns:
            The numbers of rows that start at 0; and for each number the row whose start is added to
            it, or the number of rows where none is. Both have the shape [`size`].
        """
        rows, q = self.bucket.rows, self.bucket.q
        bounds = np.zeros((4, rows), dtype=np.int64)
        bounds[1:, : plan.rows] = [plan.counts, plan.offsets, plan.bases]
        counts, offsets = (bound[:, None] for bound in bounds[1:3])
        columns, row = np.arange(q), np.arange(rows)[:, None]
        # Unused columns repeat the row's last column.
        last, real = np.minimum(columns, np.maximum(counts - 1, 0)), columns < counts
        cells = np.where(real, row * capacity - offsets + columns, self.scratch)
        moving = [row + 0 * columns, np.full((rows, q), rows), np.where(real, row, rows)]
        still = np.full((3, rows), rows)
        return (
            np.concatenate([last, self._chain[last], cells, bounds], axis=None),
            np.concatenate([*moving, row, still], axis=None),
        )

    def move(self, starts: Tensor, counts: Tensor, capacity: int) -> None:
        """Puts the rows, all of them chains, elsewhere in their slots, on the device.

        The block then holds the numbers that `placed` computes on the host.

        Args:
            starts: the position of each row's first column, [rows] int64; 0 for unused rows.
            counts: the columns of each row, [rows] int64; 0 for unused rows.
            capacity: the cells of a slot.
        """
        last = torch.minimum(self._columns, (counts - 1).clamp(min=0)[:, None])
        torch.add(starts[:, None], last, out=self.positions)
        if self.words is not None:
            self.words.copy_(self._words_of_chain[last])
        firsts = self._rows * capacity - self.bounds[2] + starts
        cells = torch.where(
            self._columns < counts[:, None], firsts[:, None] + self._columns, self.scratch
        )
        self.cells.copy_(cells.flatten())
        self.bounds[0].copy_(starts)
        self.bounds[1].copy_(counts)

    @property
    def moving(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The positions, cells, starts and counts of a block of one column.

        The first three grow by the counts where the block moves on.
        """
        return self.positions, self.cells, self.bounds[0], self.bounds[1]

    def advance(self) -> None:
        """Moves the real rows of a block of one column on by a token, on the device."""
        positions, cells, starts, counts = self.moving
        positions.add_(counts[:, None])
        cells.add_(counts)
        starts.add_(counts)


Stores = list[LayerStores]
"""The keys and values of each layer.

Slots have [slots, capacity, kv heads, dim], shared prompts [cells, kv heads, dim].
"""


class View(Cache):
    """The rows of a bucket in a slot cache, behind Transformers' Cache API.

    Args:
        block: says where a pass writes.
        stores: the slot cache's own tensors.
        method: attends.
        shares: True if rows may have a prefix.
    """

    def __init__(self, block: Block, stores: Stores, method: Method, shares: bool) -> None:
        super().__init__(layers=[])
        self.block, self.masks, self.method, self.shares = block, Masks(block), method, shares
        self._stores, self._layer = stores, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes [rows, heads, q, dim] to the block's cells.

        Returns:
            All keys and values, [rows, heads, keys, dim].
        """
        self._layer = layer_idx
        keys, values, *_ = self._stores[layer_idx]
        return self._stored(keys, key_states), self._stored(values, value_states)

    def _stored(self, store: Tensor, states: Tensor) -> Tensor:
        bucket, cells = self.block.bucket, self.block.cells
        flat = store.view(-1, store.shape[2] * store.shape[3])
        flat.index_copy_(0, cells, states.transpose(1, 2).reshape(bucket.rows * bucket.q, -1))
        return self._of_rows(store)

    @property
    def cells(self) -> Tensor:
        """The flat cells that the pass writes, [rows * q] int64."""
        return self.block.cells

    def unpacked(self, query: Tensor) -> Tensor:
        """Converts [tokens, heads, dim] to [rows, q, heads, dim]."""
        return query.view(self.block.bucket.rows, self.block.bucket.q, *query.shape[1:])

    def packed(self, attended: Tensor) -> Tensor:
        """Converts [rows, q, heads, dim] to [tokens, heads, dim]."""
        return attended.flatten(0, 1)

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all slots in a layer, [slots, capacity, heads, dim] each.

        They are for layers that write keys and values themselves.
        """
        self._layer = layer
        return self._stores[layer][:2]

    def both(self) -> list[Tensor]:
        """Returns the keys and the values of all slots and layers, [slots, capacity, ...] each."""
        return [store for stores in self._stores for store in stores[:2]]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values of the bucket's rows, [rows, heads, keys, dim] each."""
        keys, values = self.stores(layer)
        return self._of_rows(keys), self._of_rows(values)

    def _of_rows(self, store: Tensor) -> Tensor:
        bucket = self.block.bucket
        return store[: bucket.rows, : bucket.keys].transpose(1, 2)

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the shared store of the layer that was updated last, [cells, heads, dim] each.

        Returns (None, None) if no row can have a prefix.
        """
        return self._stores[self._layer][2:] if self.shares else (None, None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: Transformers needs it only for default positions and masks.

        Those are always given.
        """
        return 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self.block.bucket.keys, 0

    def __len__(self) -> int:
        return len(self._stores)
