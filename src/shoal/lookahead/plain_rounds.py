"""When a round is plain though drafts seem to pay: what they are compared with must be seen from
time to time.

Rounds with drafts teach what they cost themselves. What a plain round of as many rows costs they do
not teach: were it believed to be slow, as the first one of its kind met other work on the machine,
it would never be made again.
"""

from __future__ import annotations

FIRST, MOST = 16, 1024
"""Rounds with drafts until a plain one, of a size that was never plain, and of one that often
was."""
GROWTH = 4
"""By which a plain round of a size multiplies the wait for its next."""


class PlainRounds:
    """Counts the rounds of each number of rows, to a power of two; each plain round lengthens the
    wait for the next."""

    def __init__(self) -> None:
        self._drafted: dict[int, int] = {}  # rounds with drafts since the last plain one
        self._waits: dict[int, int] = {}

    def due(self, rows: int) -> bool:
        """Whether the next round of so many rows should be plain."""
        size = rows.bit_length()
        return self._drafted.get(size, 0) >= self._waits.get(size, FIRST)

    def drafted(self, rows: int) -> None:
        """A round with drafts is over."""
        size = rows.bit_length()
        self._drafted[size] = self._drafted.get(size, 0) + 1

    def plain(self, rows: int) -> bool:
        """A plain round is over; returns whether it was due."""
        due, size = self.due(rows), rows.bit_length()
        self._waits[size] = min(GROWTH * self._waits.get(size, FIRST), MOST)
        self._drafted[size] = 0
        return due
