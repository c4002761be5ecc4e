"""How often tokens occur in a row so far, counted once each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenCounts:
    """Running counts over a list of tokens that only grows.

    Attributes:
        ids: the tokens that occur, each once. counts: how often, in the same order. read: tokens counted so far, of the whole list.
    """

    def __init__(self, start: int = 0) -> None:
        self.ids, self.counts, self.read = array("q"), array("q"), start
        self._places: dict[int, int] = {}

    def upto(self, tokens: Sequence[int]) -> TokenCounts:
        """Counts those of `tokens` that were appended since the last call; returns itself."""
        for i in range(self.read, len(tokens)):
            self._count(tokens[i])
        self.read = max(self.read, len(tokens))
        return self

    def of(self, token: int) -> int:
        """How often a token occurs."""
        place = self._places.get(token)
        return 0 if place is None else self.counts[place]

    def _count(self, token: int) -> None:
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.counts.append(0)
        self.counts[place] += 1
