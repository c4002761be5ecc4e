"""Plain rounds among rounds with drafts, so that the cost of a plain round stays known.

Rounds with drafts teach their own costs, but not the cost of a plain round of as many rows. If the
first plain round met other work on the machine, plain rounds would be believed to be slow, and none
would ever be made again.
"""

from __future__ import annotations

FIRST, MOST = 16, 1024
"""The number of rounds with drafts before a plain one.

`FIRST` is for a size without a plain round yet, `MOST` for one with many.
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
        return self._drafted.get(size, 0) >= self._waits.get(size, FIRST)

    def drafted(self, rows: int) -> None:
        """Counts a round with drafts."""
        size = rows.bit_length()
        self._drafted[size] = self._drafted.get(size, 0) + 1

    def plain(self, rows: int) -> bool:
        """Counts a plain round; returns True if it was due."""
        due, size = self.due(rows), rows.bit_length()
        self._waits[size] = min(GROWTH * self._waits.get(size, FIRST), MOST)
        self._drafted[size] = 0
        return due


LONGEST = 64
"""The most plain rounds before a new plan is made for as many rows."""


class Backoff:
    """A count of plain rounds without a plan, because planning takes time, too.

    The wait grows each time that no plan pays for about as many rows, to a quarter: on a server the
    number of rows changes in every round.
    """

    def __init__(self) -> None:
        self._rows = self._length = self._left = 0

    def is_over(self, rows: int) -> bool:
        """Counts a round; returns True if it is time for a plan."""
        self._left -= 1
        return self._left < 0 or not self._as_many(rows)

    @property
    def left(self) -> int:
        """The number of rounds of as many rows until it is time for a plan."""
        return max(self._left, 0)

    def skip(self, rounds: int) -> None:
        """Counts rounds for which `is_over` was not asked."""
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
