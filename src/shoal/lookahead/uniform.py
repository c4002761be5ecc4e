"""One draft length for the whole batch, decided from counts alone.

The protocol of Fixed, Bass, Heuristic and simple own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from shoal.types.requests import Row
from shoal.types.rounds import Outcome


@runtime_checkable
class Lookahead(Protocol):
    """A controller that decides one draft length for the whole batch.

    A row near its end gets a shorter draft (`Row.max_draft_length`).
    """

    limit: int
    """The longest draft that the controller ever asks for; caches are sized for it."""

    def next_length(self) -> int:
        """Returns the draft length of the coming round; 0 = plain decoding."""
        ...

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns from a round.

        Args:
            drafted: the number of tokens that each row was asked to draft.
            accepted: the number of tokens accepted of them, without replacement and bonus.
        """
        ...


class Uniform:
    """A `Lookahead` as a `Controller`: one length for every row, and no draft is shortened."""

    adaptive = False
    shorten = None
    may_speculate = True

    def __init__(self, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self.limit = lookahead.limit
        self._asked: list[int] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Returns the next length for each row, at most `Row.max_draft_length`."""
        k = min(max(self.lookahead.next_length(), 0), self.limit)
        self._asked = [min(k, row.max_draft_length) for row in rows]
        return self._asked

    def learn(self, outcome: Outcome) -> None:
        """Passes the counts on to the `Lookahead`.

        If the drafter failed in the middle of a draft, the length that was asked for counts as
        drafted, as if the position had been rejected: lengths must not depend on rejected drafts
        (`adaptive` of `shoal.lookahead.controller.Controller`).
        """
        self.lookahead.update(self._asked if outcome.steps else outcome.drafted, outcome.accepted)
