"""Which rows are due. Pure Python; asking costs nothing per row that is not."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from shoal.types.requests import Row


class Deadlines:
    """Rows with a deadline: a heap. A row that leaves early stays in it until it comes to the top, or until more than half of the
    heap has left; then they are all dropped together, so that leaving costs O(1) on average."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Row]] = []
        self._rows: set[Row] = set()
        self._added = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Those of the rows that have a deadline are watched from now on."""
        for row in rows:
            if row.deadline is not None:
                self._added += 1  # of equal deadlines the first come is told first
                heappush(self._heap, (row.deadline, self._added, row))
                self._rows.add(row)

    def discard(self, row: Row) -> None:
        """The row, if it is watched, is watched no longer."""
        self._rows.discard(row)
        if len(self._heap) > 2 * len(self._rows):
            self._heap = [entry for entry in self._heap if entry[2] in self._rows]
            heapify(self._heap)

    def due(self, now: float) -> list[Row]:
        """Rows whose deadline has passed, the earliest first; they are watched no longer."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            row = heappop(self._heap)[2]
            if row in self._rows:
                self._rows.remove(row)
                due.append(row)
        return due
