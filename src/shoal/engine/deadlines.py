"""Rows whose deadline has passed.

Pure Python. A query takes no time for rows that have time left.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from shoal.types.requests import Row


class Deadlines:
    """A heap of the rows with a deadline.

    A row that leaves early stays in the heap until it comes to the top, or until more than half of
    the heap has left. Then all of these are dropped together, so that leaving costs O(1) on
    average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Row]] = []
        self._rows: set[Row] = set()
        self._added = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Adds the rows that have a deadline."""
        for row in rows:
            if row.deadline is not None:
                self._added += 1  # equal deadlines: in the order in which they were added
                heappush(self._heap, (row.deadline, self._added, row))
                self._rows.add(row)

    def discard(self, row: Row) -> None:
        """Removes the row, if it was added."""
        self._rows.discard(row)
        if len(self._heap) > 2 * len(self._rows):
            self._heap = [entry for entry in self._heap if entry[2] in self._rows]
            heapify(self._heap)

    def due(self, now: float) -> list[Row]:
        """Removes and returns the rows whose deadline has passed, the earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            row = heappop(self._heap)[2]
            if row in self._rows:
                self._rows.remove(row)
                due.append(row)
        return due
