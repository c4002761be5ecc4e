"""Who drafts for a row where several drafters may: by how often the first token was accepted that
each proposed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.types.requests import Row
from shoal.types.rounds import Verdict

SURE = 0.6
"""Acceptance expected of the last drafter's first token, of which nothing was heard: from this
confidence on a row is left to one that reads text. In suffix decoding, what followed once, after a
match of 9 tokens, or twice, and nothing else did, after one of 3."""
PRIOR = 4.0
"""Rounds that this counts as; and of a row, rounds that what all rows said counts as."""
FADE = 0.98
"""Of what was heard, by round: a drafter that was left comes back."""


@dataclass
class Tally:
    """First tokens that a drafter proposed: how many were accepted, and how many should have been
    by its confidence."""

    accepted: float = 0.0
    expected: float = 0.0

    def rate(self, prior: float) -> float:
        """Accepted of those expected; `prior` where nothing was heard."""
        return (self.accepted + PRIOR * prior) / (self.expected + PRIOR)

    def add(self, accepted: bool, expected: float) -> None:
        self.accepted, self.expected = (
            FADE * self.accepted + accepted,
            FADE * self.expected + expected,
        )

    def fade(self) -> None:
        self.accepted, self.expected = FADE * self.accepted, FADE * self.expected


class FirstTokens:
    """What came of first tokens, by drafter, over all rows and of each row.

    Args:
        members: how many drafters there are. The confidence of all but the last is compared with
            what the last one's are worth.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._all = [Tally() for _ in range(members)]
        self._rows: dict[Row, list[Tally]] = {}
        self._round: dict[
            Row, tuple[int, float]
        ] = {}  # who proposed, and how many accepted tokens it expected

    def takes(self, row: Row, member: int, confidence: float) -> bool:
        """Whether a row is left to a drafter that is so sure of its first token."""
        last = self._members - 1
        own = self._rows.get(row, self._all)
        believed = confidence * own[member].rate(self._all[member].rate(1.0))
        return believed >= own[last].rate(self._all[last].rate(SURE))

    def proposed(
        self,
        rows: Sequence[Row],
        whose: Sequence[int],
        confidence: Sequence[float],
        drafted: Sequence[int],
    ) -> None:
        """Who proposed for each row of a round, how sure it was (1 of the last), and how many
        tokens."""
        each = zip(rows, whose, confidence, drafted, strict=True)
        self._round = {row: (member, sure) for row, member, sure, count in each if count}

    def learn(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """The round is over."""
        if not self._round:
            return
        for row, path in zip(rows, verdict.lists[0], strict=True):
            known = self._round.get(row)
            if known is None:
                continue
            own = self._rows.setdefault(row, [Tally() for _ in range(self._members)])
            for member, tally in enumerate(own):
                if member != known[0]:
                    tally.fade()
            for tally in (own[known[0]], self._all[known[0]]):
                tally.add(len(path) > 0, known[1])
        self._round = {}

    def forget(self, rows: Sequence[Row]) -> None:
        """Rows left."""
        for row in rows:
            self._rows.pop(row, None)
            self._round.pop(row, None)
