"""The wait for a new plan after one that did not pay."""

from __future__ import annotations

MOST = 16
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

    def extend(self, rows: int) -> None:
        """Starts a wait, after no plan was found that pays."""
        if self._as_many(rows):
            self._length = min(2 * self._length + 1, MOST)
        else:
            self._rows, self._length = rows, 1
        self._left = self._length

    def _as_many(self, rows: int) -> bool:
        return 4 * abs(rows - self._rows) <= self._rows
