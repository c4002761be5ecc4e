"""How much time drafting may lose against plain decoding: a small share of the time that was spent,
whatever else is believed.

Plans may promise what drafts do not keep: the pair has hardly been seen, its costs were measured
while the machine was busy, or there is so little to gain that noise decides. What a round with
drafts took beyond the plain rounds that would have committed the same tokens is taken from an
account, prompts of the drafter included. Without credit nothing is drafted, and a share of all time
is what comes in. So the time of a run is at most `1 + SHARE` times that of plain decoding, up to
what is lost before the account is first read (`FIRST`) and the last round that it paid for.
"""

from __future__ import annotations

SHARE = 0.005
"""Of the time of all rounds: what drafting may lose in the long run."""
FIRST = 2.0
"""Plain rounds: what it may lose before there is any time to take a share of. Once for a pair, not
for a run."""
MOST = 16.0
"""Plain rounds: the most that can be saved up. A pair that stops to be worth it loses no more of
what it has gained."""


class Credit:
    """An account of seconds.

    Attributes:
        seconds: that drafting may lose; negative after a round that took more.
        invested: in prompts, which later rounds must bring back; taken from the account as soon as
            a round is plain, or the rows are others.
    """

    def __init__(self) -> None:
        self.seconds = self.invested = 0.0
        self._most = 0.0
        self._opened = False

    def settle(self) -> None:
        """Nothing more will come of what was invested."""
        self.seconds, self.invested = self.seconds - self.invested, 0.0

    def plain(self, plain_round: float, *, settle: bool = True) -> None:
        """A plain round is over, which took so many seconds. settle: it is not one between rounds
        with drafts."""
        if not self._opened:
            self._opened, self.seconds = True, FIRST * plain_round
        if settle:
            self.settle()
        self._add(SHARE * plain_round, plain_round)

    def drafted(self, plain_round: float, spent: float, saved: float) -> None:
        """A round with drafts is over.

        Args:
            plain_round: seconds of a plain round of as many rows.
            spent: seconds of this one.
            saved: seconds that its tokens would have taken plainly, less `spent`; negative if it
                was slower.
        """
        returned = min(max(saved, 0.0), self.invested)
        self.invested -= returned
        self._add(SHARE * spent + saved - returned, plain_round)

    def _add(self, seconds: float, plain_round: float) -> None:
        self._most = MOST * plain_round
        self.seconds = min(self.seconds + seconds, self._most)

    @property
    def allows_plans(self) -> bool:
        """Whether a round may draft that is believed to be worth it."""
        return self.seconds >= 0 and self.invested <= self.seconds + self._most

    def allows_trial(self, cost: float, plain_round: float) -> bool:
        """Whether a round may draft only to learn, for so many seconds: out of what came in, the
        first credit is for plans. A trial that costs more than can be saved is paid off
        afterwards."""
        return self.seconds >= min(cost + FIRST * plain_round, MOST * plain_round)
