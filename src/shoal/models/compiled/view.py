"""The cache and masks that a model meets inside a static pass: functions of static tensors alone.

Plans, context variables and lists of lengths, as the dynamic path uses them, would be frozen into a
captured graph. Here the same attention methods are called with masks made of a block's buffers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from shoal.models.attention.inputs import Masks
from shoal.models.attention.methods import Method
from shoal.models.cache.slots import LayerStores
from shoal.models.compiled.block import Block

Stores = list[LayerStores]
"""The keys and values of each layer.

Those of the slots are [slots, capacity, kv heads, dim], those of shared prompts [cells, kv heads,
dim].
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
        return self._written(keys, key_states), self._written(values, value_states)

    def _written(self, store: Tensor, states: Tensor) -> Tensor:
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
        """Returns the keys and values of the bucket's rows in a layer.

        Returns:
            [rows, heads, keys, dim] each.
        """
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
