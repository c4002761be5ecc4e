"""The kept rows of a GGUF file's model, for later rows that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.models.cache import SlotCache
from shoal.models.cache.kept_prompts import MIN_TOKENS, KeptPrefixes
from shoal.models.gguf.sequences import RowState, Sequences
from shoal.types.requests import Prefix


class _KeptRow(NamedTuple):
    """A kept row.

    Attributes:
        owner: the row's owner.
        tokens: the row's tokens, [tokens] int64.
        state: the row's keys and values, as llama.cpp writes them down.
    """

    owner: str
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    state: RowState


class KeptSequences(KeptPrefixes):
    """The kept tokens of one model, row by row.

    The row that was not used for the longest time is given up first.

    Args:
        capacity: most tokens.
        window: width of the model's sliding windows, 0 without. llama.cpp does not write down the
            tokens before the window of a row's end, so that a longer row can only be used whole.
    """

    def __init__(self, capacity: int, window: int) -> None:
        super().__init__(capacity)
        self._capacity, self._window = capacity, window
        self._rows: OrderedDict[int, _KeptRow] = OrderedDict()
        self._number = 0

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes of the kept rows."""
        return sum(row.state.nbytes for row in self._rows.values())

    def known(self, owner: str, tokens: Sequence[int]) -> int:
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
        assert isinstance(cache, Sequences)
        count, number = self._longest(owner, tokens)
        if count:
            cache.restore(slot, self._rows[number].state, count)
            self._rows.move_to_end(number)
        return count

    def keep(self, cache: SlotCache, owner: str, tokens: Sequence[int], slot: int) -> None:
        """Keeps tokens that the row in a cache's slot begins with, unless they are kept."""
        assert isinstance(cache, Sequences)
        count, number = self._longest(owner, tokens)
        if count >= len(tokens) or not MIN_TOKENS <= cache.lengths[slot] <= self._capacity:
            return
        if count and count == len(self._rows[number].tokens):  # that row begins this one
            del self._rows[number]
        self._number += 1
        self._rows[self._number] = _KeptRow(owner, np.array(tokens), cache.state_of(slot))
        while sum(row.state.length for row in self._rows.values()) > self._capacity:
            self._rows.popitem(last=False)

    def _longest(self, owner: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the number of tokens that the best row shares with these, and the row's number.

        Both are 0 where the shared tokens are too few.
        """
        wanted, best = np.array(tokens), (0, 0)
        for number, row in self._rows.items():
            length = min(len(wanted), len(row.tokens))
            differ = np.flatnonzero(wanted[:length] != row.tokens[:length])
            count = int(differ[0]) if len(differ) else length
            whole = (
                not self._window or row.state.length <= self._window or count == row.state.length
            )
            if row.owner == owner and whole and count > best[0]:
                best = count, number
        return best if best[0] >= MIN_TOKENS else (0, 0)
