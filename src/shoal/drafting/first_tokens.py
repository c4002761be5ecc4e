"""The choice of a drafter for each row, by the acceptance of the first tokens of each drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.types.requests import Row
from shoal.types.rounds import Verdict

SURE = 0.6
"""The prior acceptance rate of the model's first draft token.

Until there is data, a text drafter gets a row if its confidence is at least this. In suffix
decoding this holds for a token that followed a match of 9 tokens once, or a match of 3 tokens
twice, if no other token followed.
"""
PRIOR = 4.0
"""The number of rounds that a prior counts as.

The prior of all rows is `SURE` for the last drafter and 1 for the others; the prior of a row is the
rate of all rows.
"""
FADE = 0.98
"""The factor by which counts fade in each round, so that a drafter that was left gets a new chance.
"""


@dataclass
class Tally:
    """The first tokens that a drafter proposed.

    Attributes:
        accepted: the number of accepted tokens, fading.
        expected: the number of tokens that would be accepted by the drafter's confidence, fading.
    """

    accepted: float = 0.0
    expected: float = 0.0

    def rate(self, prior: float) -> float:
        """Returns the ratio of accepted to expected tokens; `prior` if there are no counts."""
        return (self.accepted + PRIOR * prior) / (self.expected + PRIOR)

    def add(self, accepted: bool, expected: float) -> None:
        self.accepted, self.expected = (
            FADE * self.accepted + accepted,
            FADE * self.expected + expected,
        )

    def fade(self) -> None:
        self.accepted, self.expected = FADE * self.accepted, FADE * self.expected


class FirstTokens:
    """The counts of first tokens by drafter, over all rows and for each row.

    Args:
        members: the number of drafters. The confidence of all drafters but the last is compared
            with the worth of the last one's first tokens.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._all = [Tally() for _ in range(members)]
        self._rows: dict[Row, list[Tally]] = {}
        # For each row: the drafter that proposed, and the accepted tokens that it expected.
        self._round: dict[Row, tuple[int, float]] = {}

    def takes(self, row: Row, member: int, confidence: float) -> bool:
        """Returns True if the row is left to a drafter with this confidence in its first token."""
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
        """Notes the proposals of a round.

        Args:
            rows: the rows.
            whose: for each row, the drafter that proposed.
            confidence: for each row, the drafter's confidence; 1 for the last drafter.
            drafted: for each row, the draft length.
        """
        each = zip(rows, whose, confidence, drafted, strict=True)
        self._round = {row: (member, sure) for row, member, sure, count in each if count}

    def learn(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Counts the first tokens of a round that is over."""
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
        """Forgets rows that have left."""
        for row in rows:
            self._rows.pop(row, None)
            self._round.pop(row, None)
