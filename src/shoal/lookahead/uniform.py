"""One draft length for the whole batch, decided from counts alone: the protocol of Fixed, Bass,
Heuristic and simple own objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from shoal.types.requests import Row
from shoal.types.rounds import Outcome


@runtime_checkable
class Lookahead(Protocol):
    """Decides the draft length of the whole batch. A row near its end gets a shorter draft
    (`Row.max_draft_length`)."""

    limit: int
    """The longest draft that it ever asks for; caches are sized for it."""

    def next_length(self) -> int:
        """Draft length of the coming round; 0 = plain decoding."""
        ...

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """After each round: what each row was asked to draft, and how much was accepted
        (replacement and bonus not counted)."""
        ...


class Uniform:
    """A `Lookahead` as a `Controller`: the same length for every row, and no draft is shortened."""

    adaptive = False
    shorten = None
    may_speculate = True

    def __init__(self, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self.limit = lookahead.limit
        self._asked: list[int] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """The next length, but at most `Row.max_draft_length`."""
        k = min(max(self.lookahead.next_length(), 0), self.limit)
        self._asked = [min(k, row.max_draft_length) for row in rows]
        return self._asked

    def learn(self, outcome: Outcome) -> None:
        """Passes the counts on. Where the drafter failed in the middle of a draft, the length that
        was asked for counts as drafted, as if the position had been rejected: lengths must not
        depend on rejected drafts (`adaptive` of `shoal.lookahead.controller.Controller`)."""
        self.lookahead.update(self._asked if outcome.steps else outcome.drafted, outcome.accepted)
