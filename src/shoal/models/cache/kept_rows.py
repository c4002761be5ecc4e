"""Copies of whole rows for later rows that begin alike, of caches that tokens cannot be cut from.

A model whose layers keep recurrent states goes on from a state alone: so such a row is kept with
its states after some of its tokens (`StateCache.marks`), and a later row begins with as many tokens
as one of these states has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.models.cache import SlotCache
from shoal.models.cache.kept_prompts import MIN_TOKENS, KeptPrefixes
from shoal.models.cache.mixing import RowCopy, is_marked
from shoal.models.cache.states import StateCache
from shoal.types.requests import Prefix


class _KeptRow(NamedTuple):
    """A kept row.

    Attributes:
        owner: the row's owner.
        tokens: the row's tokens, [tokens] int64.
        state: the row's keys, values and states.
    """

    owner: str
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    state: Any


class KeptRows(KeptPrefixes):
    """The kept tokens of one model, row by row.

    The row that was not used for the longest time is given up first.

    Args:
        capacity: the most that all rows take, in the unit of `_size`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._capacity = capacity
        self._rows: OrderedDict[int, _KeptRow] = OrderedDict()
        self._number = 0

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes of the kept rows."""
        return sum(row.state.nbytes for row in self._rows.values())

    @abstractmethod
    def _size(self, state: Any) -> int:
        """Returns the share of the capacity that a row takes."""

    @abstractmethod
    def _usable(self, state: Any, count: int) -> int:
        """Returns the most tokens, `count` at most, that a later row can begin with."""

    @abstractmethod
    def _state_of(self, cache: Any, slot: int) -> Any:
        """Returns a copy of a row."""

    @abstractmethod
    def _restore(self, cache: Any, slot: int, state: Any, count: int) -> None:
        """Copies the first tokens of a copy to an empty slot."""

    def _kept_tokens(self, cache: Any, slot: int, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the first tokens of a row that will be kept; none if there is no room."""
        return tokens if MIN_TOKENS <= cache.lengths[slot] <= self._capacity else ()

    def kept_length(self, owner: str, tokens: Sequence[int]) -> int:
        """Returns the number of first tokens that are kept for the owner; 0 if too few to copy."""
        return self._longest(owner, tokens)[0]

    def load(
        self,
        cache: SlotCache,
        owner: str,
        tokens: Sequence[int],
        slot: int,
        prefix: Prefix | None = None,
    ) -> int:
        """Copies the kept tokens to a slot of a cache; returns their number."""
        count, number = self._longest(owner, tokens)
        if count:
            self._restore(cache, slot, self._rows[number].state, count)
            self._rows.move_to_end(number)
        return count

    def keep(self, cache: SlotCache, owner: str, tokens: Sequence[int], slot: int) -> None:
        """Keeps tokens that the row in a cache's slot begins with, unless they are kept."""
        tokens = self._kept_tokens(cache, slot, tokens)
        count, number = self._longest(owner, tokens)
        if count >= len(tokens):
            return
        if count and count == len(self._rows[number].tokens):  # that row begins this one
            del self._rows[number]
        self._number += 1
        self._rows[self._number] = _KeptRow(owner, np.array(tokens), self._state_of(cache, slot))
        while sum(self._size(row.state) for row in self._rows.values()) > self._capacity:
            self._rows.popitem(last=False)

    def _longest(self, owner: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the longest common prefix of the tokens and a kept row, and that row's number.

        Both are 0 where the tokens are too few.
        """
        prompt, best = np.array(tokens), (0, 0)
        for number, row in self._rows.items():
            length = min(len(prompt), len(row.tokens))
            differ = np.flatnonzero(prompt[:length] != row.tokens[:length])
            count = self._usable(row.state, int(differ[0]) if len(differ) else length)
            if row.owner == owner and count > best[0]:
                best = count, number
        return best if best[0] >= MIN_TOKENS else (0, 0)


class KeptStates(KeptRows):
    """The kept tokens of a model whose layers keep recurrent states.

    Args:
        capacity: the most bytes of keys, values and states.
        block: the number of tokens between two states (`Mixers.block`).
    """

    def __init__(self, capacity: int, block: int) -> None:
        super().__init__(capacity)
        self._block = block

    def serves(self, cache: SlotCache) -> None:
        """Lets a cache keep states at the ends of blocks of prompts."""
        cache.marks.on = True

    def settle(self, cache: SlotCache, slot: int) -> None:
        """Lets a cache forget such states of a row that has been kept, or will not be."""
        cache.marks.forget(slot)

    def reachable(self, count: int, tokens: int) -> int:
        """Returns how many of the `count` first tokens of a prompt a later row may begin with."""
        size = self._block
        blocks = range(count // size, 0, -1)
        return next((n * size for n in blocks if is_marked(n, tokens // size)), 0)

    def _size(self, state: RowCopy) -> int:
        return state.nbytes

    def _usable(self, state: RowCopy, count: int) -> int:
        return max((mark.length for mark in state.marks if mark.length <= count), default=0)

    def _kept_tokens(self, cache: StateCache, slot: int, tokens: Sequence[int]) -> Sequence[int]:
        marks = cache.marks.of(slot)
        return tokens[: marks[-1].length] if marks else ()

    @torch.inference_mode()
    def _state_of(self, cache: StateCache, slot: int) -> RowCopy:
        marks = cache.marks.of(slot)
        end = marks[-1].length
        stores = (layer[:2] for layer in cache.stores())
        return RowCopy([[one[slot, :end].clone() for one in pair] for pair in stores], marks)

    @torch.inference_mode()
    def _restore(self, cache: StateCache, slot: int, state: RowCopy, count: int) -> None:
        marks = [mark for mark in state.marks if mark.length <= count]
        cache.enter(slot, begun=marks[-1])
        for layer, kept in zip(cache.stores(), state.layers, strict=True):
            for store, own in zip(layer[:2], kept, strict=True):
                store[slot, :count] = own[:count]
        cache.marks.put(slot, marks)
