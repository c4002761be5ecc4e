"""The time that drafting may lose against plain decoding: a small share of the time spent.

Plans may promise more than drafts bring: the pair has hardly been seen, its costs were measured
while the machine was busy, or the gain is so small that noise decides. The time of a round with
drafts beyond that of the plain rounds for the same tokens is taken from an account, prompts of the
drafter included. The income is a share of all time; without credit no tokens are drafted. So the
time of a run is at most `1 + SHARE` times that of plain decoding, up to the loss before the account
is first read (`FIRST`) and the last round that it paid for.
"""

from __future__ import annotations

SHARE = 0.005
"""The share of the time of all rounds that drafting may lose in the long run."""
FIRST = 2.0
"""The first credit, in plain rounds, before there is any time to take a share of.

It is given once for a pair, not for each run.
"""
MOST = 16.0
"""The most credit that can be saved up, in plain rounds.

A pair that stops paying loses no more than this of its gain.
"""


class Credit:
    """An account of seconds.

    Attributes:
        seconds: the seconds that drafting may lose; negative after a round that took more.
        invested: the seconds spent on prompts, which later rounds must bring back; taken from the
            account as soon as a round is plain, or the rows are others.
    """

    def __init__(self) -> None:
        self.seconds = self.invested = 0.0
        self._most = 0.0
        self._opened = False

    def settle(self) -> None:
        """Takes invested seconds from the account: no later round will bring them back."""
        self.seconds, self.invested = self.seconds - self.invested, 0.0

    def plain(self, plain_round: float, rounds: int = 1, *, settle: bool = True) -> None:
        """Adds the share of plain rounds.

        Args:
            plain_round: the seconds of a round.
            rounds: the number of rounds.
            settle: False for a plain round between rounds with drafts.
        """
        if not self._opened:
            self._opened, self.seconds = True, FIRST * plain_round
        if settle:
            self.settle()
        self._add(SHARE * plain_round * rounds, plain_round)

    def drafted(self, plain_round: float, spent: float, saved: float) -> None:
        """Adds the gain or the loss of a round with drafts.

        Args:
            plain_round: the seconds of a plain round of as many rows.
            spent: the seconds of this round.
            saved: the seconds in which plain decoding commits the same tokens, less `spent`;
                negative if the round was slower.
        """
        returned = min(max(saved, 0.0), self.invested)
        self.invested -= returned
        self._add(SHARE * spent + saved - returned, plain_round)

    def _add(self, seconds: float, plain_round: float) -> None:
        self._most = MOST * plain_round
        self.seconds = min(self.seconds + seconds, self._most)

    @property
    def allows_plans(self) -> bool:
        """True if a round may draft whose plan pays."""
        return self.seconds >= 0 and self.invested <= self.seconds + self._most

    def allows_trial(self, cost: float, plain_round: float) -> bool:
        """Returns True if a round may draft only to learn.

        Trials are paid from the income; the first credit is for plans. A trial that costs more than
        can be saved up is paid off afterwards.

        Args:
            cost: the seconds that the trial costs.
            plain_round: the seconds of a plain round.
        """
        return self.seconds >= min(cost + FIRST * plain_round, MOST * plain_round)
