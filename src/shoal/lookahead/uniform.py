"""One draft length for the whole batch, decided from counts alone: what Fixed, Bass, Heuristic and a user's own objects do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from shoal.types.requests import Row
from shoal.types.rounds import Outcome


@runtime_checkable
class Lookahead(Protocol):
    """Decides the draft length of the whole batch; a row never gets more than it has room for."""

    limit: int
    """The longest draft it will ever ask for; caches are sized by it."""

    def next_length(self) -> int:
        """Draft length of the coming round; 0 = plain decoding."""
        ...

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Hears, after each round, what each row was asked to draft and what was accepted (replacement and bonus not counted)."""
        ...


class Uniform:
    """A `Lookahead` as the engine asks it: the same length for every row, and no stopping on the way."""

    adaptive = False
    shorten = None
    may_speculate = True

    def __init__(self, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self.limit = lookahead.limit
        self._asked: list[int] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """The next length, but no more than a row has room for."""
        k = min(max(self.lookahead.next_length(), 0), self.limit)
        self._asked = [min(k, row.max_draft_length) for row in rows]
        return self._asked

    def learn(self, outcome: Outcome) -> None:
        """Passes the counts on. What a row was asked for counts as drafted where the drafter failed on the way, as if the position
        had been rejected: drafts that were thrown away must not decide on lengths, see `shoal.lookahead.controller.Controller`."""
        self.lookahead.update(self._asked if outcome.steps else outcome.drafted, outcome.accepted)
