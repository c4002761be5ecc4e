"""How long no plan is made after one found nothing."""

from __future__ import annotations

MOST = 16
"""Most plain rounds before a new plan is made for as many rows."""


class Backoff:
    """Plain rounds without a plan, as planning takes time, too: more of them each time that a plan
    for about as many rows, to a quarter, finds nothing. On a server their number changes in every
    round."""

    def __init__(self) -> None:
        self._rows = self._length = self._left = 0

    def is_over(self, rows: int) -> bool:
        """Counts a round; whether it is time for a plan."""
        self._left -= 1
        return self._left < 0 or not self._as_many(rows)

    def extend(self, rows: int) -> None:
        """A plan found nothing."""
        if self._as_many(rows):
            self._length = min(2 * self._length + 1, MOST)
        else:
            self._rows, self._length = rows, 1
        self._left = self._length

    def _as_many(self, rows: int) -> bool:
        return 4 * abs(rows - self._rows) <= self._rows
