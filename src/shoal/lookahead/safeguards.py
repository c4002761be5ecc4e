"""The safeguards where estimates are wrong: a bound of the loss, and plain rounds to compare with.

Drafting may lose a small share of the time spent against plain decoding. Plans may promise more
than drafts bring: the pair has hardly been seen, its costs were measured while the machine was
busy, or the gain is so small that noise decides. An account pays for the time by which a round with
drafts exceeds plain rounds for the same tokens, the drafter's prompts included. The income is a
share of all time; without credit no tokens are drafted. So a run takes at most `1 + SHARE` times as
long as plain decoding, up to the loss before the account is first read (`FIRST`) and the last round
that it paid for.

A round with drafts is compared with plain rounds of as many rows. Drafts of unequal luck pull rows
apart, so that a run ends with rounds of a few rows, which cost more a token; plain decoding of the
same rows has none, and rounds may all seem to gain while the run loses. So a run whose rows began
together is compared once more when it is over: with plain rounds of the rows that would be left.

Plain rounds stand among rounds with drafts, so that the cost of a plain round stays known. Rounds
with drafts teach their own costs, but not the cost of a plain round of the same number of rows. If
the first plain round met other work on the machine, plain rounds would be believed to be slow, and
none would ever be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.types.rounds import Outcome

SHARE = 0.005
"""The share of the time of all rounds that drafting may lose in the long run."""
FIRST = 4.0
"""The first credit, in plain rounds, before there is any time to take a share of.

It is given once for a pair, not for each run.
"""
MOST = 32.0
"""The most credit that can be saved up, in plain rounds.

A pair that stops paying loses no more than this of its gain.
"""


class WholeRun:
    """The rounds of rows that began together.

    Args:
        rows: the serial numbers of the rows.

    Attributes:
        whole: True if no other row took part so far, and no token but drafts and their followers
            was committed.
        seconds: the seconds of rounds with drafts, prompts of the drafter included, and those of
            the plain rounds as they are estimated.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self.whole, self.seconds = bool(rows), 0.0
        self._rounds = 0
        self._accepted = [0] * len(rows)
        self._ended: list[int] = []  # the tokens of rows that are no longer there

    def follows(self, rows: Sequence[int]) -> bool:
        """Notes the rows of the next round; returns False if they are those of another run."""
        accepted = dict(zip(self.rows, self._accepted, strict=True))
        if accepted.keys().isdisjoint(rows):
            return False
        self.whole &= accepted.keys() >= set(rows)
        left = accepted.keys() - set(rows)
        self._ended += [self._rounds + accepted[row] for row in left]
        self.rows, self._accepted = list(rows), [accepted.get(row, 0) for row in rows]
        return True

    def add(self, outcome: Outcome, *, learning: bool = False) -> None:
        """Adds a round, or plain rounds, of all rows.

        Args:
            outcome: their outcome.
            learning: True if drafts were made to learn their cost, which the account does not pay.
        """
        learning &= bool(outcome.steps)
        self.whole &= outcome.forced is None and not (outcome.riding or learning)
        self._rounds += outcome.rounds
        if outcome.steps:
            self._accepted = list(map(add, self._accepted, outcome.accepted))

    def seconds_plain(self, seconds_plain: Callable[[int], float]) -> float:
        """Returns the seconds in which plain decoding commits the tokens of each row.

        Args:
            seconds_plain: returns the seconds of a plain round of so many rows.
        """
        tokens = sorted(self._ended + [self._rounds + more for more in self._accepted])
        return sum(
            (after - before) * seconds_plain(len(tokens) - place)
            for place, (before, after) in enumerate(pairwise([0, *tokens]))
            if after > before
        )


class Credit:
    """An account of seconds.

    Attributes:
        seconds: the seconds that drafting may lose; negative after a round that took more.
        invested: the seconds spent on prompts, which later rounds must bring back; taken from the
            account as soon as a round is plain, or the rows are others.
        run: the rounds since all rows were new.
        waiting: the number of plain rounds whose share is not added yet.
    """

    def __init__(self) -> None:
        self.seconds = self.invested = 0.0
        self.run = WholeRun(())
        self.waiting = 0
        self._most = self._before = 0.0  # `_before` is what the account held at the run's begin
        self._longest = 0.0  # the seconds of the longest plain round of the run
        self._last = 0.0  # the seconds of a plain round of those that came last
        self._opened = False

    def follow(self, rows: Sequence[int], seconds_plain: Callable[[int], float]) -> None:
        """Notes the rows of the next round; a run that is over is compared with plain decoding.

        Args:
            rows: the serial numbers of the rows.
            seconds_plain: see `WholeRun.seconds_plain`.
        """
        run = self.run
        if run.follows(rows):
            return
        if self.waiting:
            self.plain(self._last, 0)
        self.settle()
        if run.whole and run.seconds:
            saved = run.seconds_plain(seconds_plain) - run.seconds
            self.seconds = min(self.seconds, self._before + saved + SHARE * run.seconds)
        self.run, self._before, self._longest = WholeRun(rows), self.seconds, 0.0

    def invest(self, seconds: float) -> None:
        """Notes seconds spent on prompts."""
        self.invested += seconds
        self.run.seconds += seconds

    def settle(self) -> None:
        """Takes invested seconds from the account: no later round will bring them back."""
        self.seconds, self.invested = self.seconds - self.invested, 0.0

    def wait(self, outcome: Outcome) -> None:
        """Counts plain rounds, whose share comes with that of the next ones."""
        self.run.add(outcome)
        self.waiting += outcome.rounds

    def plain(self, plain_round: float, rounds: int = 1, *, settle: bool = True) -> None:
        """Adds the share of plain rounds, and of those that wait.

        Args:
            plain_round: the seconds of a round.
            settle: False for a plain round between rounds with drafts.
        """
        if not self._opened:
            self._opened, self.seconds = True, FIRST * plain_round
            self._before = self.seconds
        rounds, self.waiting, self._last = rounds + self.waiting, 0, plain_round
        if settle:
            self.settle()
        self.run.seconds += plain_round * rounds
        self._add(SHARE * plain_round * rounds, plain_round)

    def drafted(self, plain_round: float, seconds: float, saved: float) -> None:
        """Adds the gain or the loss of a round with drafts.

        Args:
            plain_round: the seconds of a plain round of the same number of rows.
            seconds: the seconds of this round.
            saved: the seconds in which plain decoding commits the same tokens, less `seconds`;
                negative if the round was slower.
        """
        self.run.seconds += seconds
        returned = min(max(saved, 0.0), self.invested)
        self.invested -= returned
        self._add(SHARE * seconds + saved - returned, plain_round)

    def _add(self, seconds: float, plain_round: float) -> None:
        self._longest = max(self._longest, plain_round)
        self._most = MOST * self._longest
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


FIRST_WAIT, MOST_WAIT = 16, 1024
"""The number of rounds with drafts before a plain one.

`FIRST_WAIT` is for a size without a plain round yet, `MOST_WAIT` for one with many.
"""
GROWTH = 4
"""The factor by which a plain round of a size multiplies the wait for its next."""


class PlainRounds:
    """A count of the rounds of each number of rows, to a power of two.

    Each plain round lengthens the wait for the next.
    """

    def __init__(self) -> None:
        self._drafted: dict[int, int] = {}  # rounds with drafts since the last plain one
        self._waits: dict[int, int] = {}

    def due(self, rows: int) -> bool:
        """Returns True if the next round of this number of rows should be plain."""
        size = rows.bit_length()
        return self._drafted.get(size, 0) >= self._waits.get(size, FIRST_WAIT)

    def drafted(self, rows: int) -> None:
        """Counts a round with drafts."""
        size = rows.bit_length()
        self._drafted[size] = self._drafted.get(size, 0) + 1

    def plain(self, rows: int) -> bool:
        """Counts a plain round; returns True if it was due."""
        due, size = self.due(rows), rows.bit_length()
        self._waits[size] = min(GROWTH * self._waits.get(size, FIRST_WAIT), MOST_WAIT)
        self._drafted[size] = 0
        return due


LONGEST = 128
"""The most plain rounds before a new plan is made for about the same number of rows."""


class Backoff:
    """A count of plain rounds without a plan, because planning takes time, too.

    The wait grows each time that no plan pays for about the same number of rows. "About" is a
    difference of at most a quarter: on a server the number changes in every round.
    """

    def __init__(self) -> None:
        self._rows = self._length = self._left = 0

    def waits(self, rows: int) -> bool:
        """Counts a round; returns False if it is time for a plan."""
        if self._left < 1 or not self._as_many(rows):
            return False
        self._left -= 1
        return True

    @property
    def left(self) -> int:
        """The number of rounds until it is time for a plan, if the number of rows stays about the
        same.
        """
        return max(self._left, 0)

    def skip(self, rounds: int) -> None:
        """Counts rounds for which `waits` was not asked."""
        self._left -= rounds

    def extend(self, rows: int) -> None:
        """Starts a wait, after no plan was found that pays."""
        if self._as_many(rows):
            self._length = min(2 * self._length + 1, LONGEST)
        else:
            self._rows, self._length = rows, 1
        self._left = self._length

    def _as_many(self, rows: int) -> bool:
        return 4 * abs(rows - self._rows) <= self._rows
