"""The copying of tokens from one cache to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
