"""The queue of rows without a slot. Pure Python; choosing the next row costs nothing per row that waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from shoal.types.requests import Row


class Waiting:
    """A queue: first come, first served. Rows of one call without deadlines follow prompt by prompt, so that each prompt is
    computed once.

    Rows of one call with a deadline take turns, as time may be over before all have run: every prompt gets its first sample before
    any gets its second. Turn i has the rows of index i, one of each prompt. Within a turn the order is free, and rows whose prompts
    are in the caches go first.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[Row, int] = OrderedDict()  # in the order of the queue
        self._rows: dict[tuple[int, int], Row] = {}  # by turn and group
        self._next_turn = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._turns)

    def __contains__(self, row: Row) -> bool:
        return row in self._turns

    def add(self, rows: Sequence[Row]) -> None:
        """Rows of one call join the queue; without deadlines each is a turn of its own."""
        timed = any(row.deadline is not None for row in rows)
        for i, row in enumerate(sorted(rows, key=lambda row: row.index) if timed else rows):
            turn = self._next_turn + (row.index if timed else i)
            self._turns[row] = turn
            self._rows[turn, row.group] = row
        self._next_turn = 1 + (next(reversed(self._turns.values())) if rows else self._next_turn)

    def remove(self, row: Row) -> None:
        """A row leaves the queue. Raises KeyError if it is not in it."""
        del self._rows[self._turns.pop(row), row.group]

    def first(self, cached: Iterable[int]) -> Row:
        """The next row: of those in the first turn one whose prompt is cached, else the first of them.

        Args:
            cached: groups whose prompts are in the caches, and may be replaced by the prompts of other rows.
        """
        row, turn = next(iter(self._turns.items()))
        found = (self._rows.get((turn, group)) for group in cached)
        return next((other for other in found if other is not None), row)
