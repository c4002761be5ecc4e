"""The keys and values of prompts whose rows have left, for rows that begin with the same tokens.

Keys and values are copied out of a row and into another row. So each row's cells are its own, and
its passes are those of any row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.models.cache.layer import Moves
from shoal.models.cache.prefix_tree import PrefixTree
from shoal.models.cache.slots import SlotCache
from shoal.types.requests import Prefix

MIN_TOKENS = 8
"""The length of the shortest prefix that is worth copying."""
Pair = tuple[Tensor, Tensor]


class KeptPrefixes:
    """The kept tokens of one model.

    A tree gives the cells of the tokens; the cells are [cells, heads, dim] per layer, beside the
    model's caches. Rows are copied from a cache of the model and into one, which may be another
    cache: caches come and go with engines.

    Args:
        capacity: most tokens.
    """

    def __init__(self, capacity: int) -> None:
        self._tree = PrefixTree(capacity)
        self._layers: list[Pair] = []
        self._cells = 0

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes of all cells, taken or not."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer)

    def known(self, owner: str, tokens: Sequence[int]) -> int:
        """Returns the number of first tokens that are kept for the owner; 0 if too few to copy."""
        return len(self._found(owner, tokens))

    @torch.inference_mode()
    def load(
        self,
        cache: SlotCache,
        owner: str,
        tokens: Sequence[int],
        slot: int,
        prefix: Prefix | None = None,
    ) -> int:
        """Copies the kept tokens to the beginning of an empty slot, or into the shared store.

        Args:
            prefix: the place in the shared store; None = the slot.

        Returns:
            The number of tokens that were copied, from the first on.
        """
        cells = np.asarray(self._found(owner, tokens), dtype=np.int64)
        base = slot * cache.capacity if prefix is None else prefix.base
        moves = Moves()
        moves.add(cells, base + np.arange(len(cells)))
        for kept, (own, shared) in (
            zip(self._layers, _stores(cache), strict=True) if len(cells) else ()
        ):
            moves.carry_out(kept, own if prefix is None else shared)
        if prefix is None:
            cache.lengths[slot] = len(cells)
        return len(cells)

    @torch.inference_mode()
    def keep(self, cache: SlotCache, owner: str, tokens: Sequence[int], slot: int) -> None:
        """Keeps tokens that the row in a cache's slot begins with.

        Tokens that are not kept yet are copied.
        """
        start, cells = self._tree.add(owner, tokens)
        if not cells:
            return
        self._reserve(_stores(cache), max(cells) + 1)
        prefix = cache.prefixes[slot]
        offset, base = (0, 0) if prefix is None else (prefix.length, prefix.base)
        positions, into = np.arange(start, start + len(cells)), np.asarray(cells)
        stored = positions < offset
        from_slot, from_store = Moves(), Moves()
        from_slot.add(slot * cache.capacity + positions[~stored] - offset, into[~stored])
        from_store.add(base + positions[stored], into[stored])
        for kept, (own, shared) in zip(self._layers, _stores(cache), strict=True):
            from_slot.carry_out(own, kept)
            from_store.carry_out(shared, kept)

    def _found(self, owner: str, tokens: Sequence[int]) -> list[int]:
        cells = self._tree.find(owner, tokens)
        return cells if len(cells) >= MIN_TOKENS else []

    def _reserve(self, stores: Sequence[tuple[Pair, Pair]], cells: int) -> None:
        """Makes room for `cells` cells and keeps the tokens that are there.

        The room grows at least to twice the size before, if the capacity allows it.
        """
        if cells <= self._cells:
            return
        cells = max(cells, min(2 * self._cells, self._tree.capacity))
        for number, (own, _) in enumerate(stores):  # both sizes exist for one layer at a time
            layer = [tensor.new_empty(cells, *tensor.shape[2:]) for tensor in own]
            if self._cells:
                for new, before in zip(layer, self._layers[number], strict=True):
                    new[: self._cells] = before[: self._cells]
            self._layers[number : number + 1] = [(layer[0], layer[1])]
        self._cells = cells


def _stores(cache: SlotCache) -> list[tuple[Pair, Pair]]:
    """Returns a cache's keys and values by layer: those of the slots, and the shared ones."""
    return [
        ((keys, values), (shared_keys, shared_values))
        for keys, values, shared_keys, shared_values in cache.stores()
    ]
