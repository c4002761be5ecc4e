"""The shares of calls: while calls compete, each gets tokens by its weight, not by its rows.

Pure Python. Each call has a counter of the tokens that its rows have committed, divided by its
weight (the weighted virtual token counter of Sheng et al., OSDI 2024, arXiv 2401.00588); without
weights all calls get the same number. The call with the least counter admits the next row. A call
whose counter is more than `quantum` ahead of that of a waiting call gives it a slot: one of its
rows pauses at the end of a round. This row waits like any other row, and comes back with its
tokens. A new call begins with the least counter of the present calls, so that a call gains no
advantage by earlier idleness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.types.requests import Row

QUANTUM = 256
"""The default quantum, in tokens.

A request of 16 rows is ahead by as many after some 5 to 16 rounds, one of a single row after some
hundred.
"""


class Fairness:
    """The counters of the calls that have rows.

    Args:
        quantum: the lead of a counter over that of a waiting call before a row pauses, in tokens at
            weight 1; None = first come, first served, and no row pauses.
    """

    def __init__(self, quantum: int | None = None) -> None:
        self._quantum = quantum
        self._served: dict[int, float] = {}
        self._rows: Counter[int] = Counter()

    def enter(self, rows: Sequence[Row]) -> None:
        """Adds rows of a call, mostly a new one."""
        if rows:
            call = rows[0].call
            self._served.setdefault(call, min(self._served.values(), default=0))
            self._rows[call] += len(rows)

    def leave(self, row: Row) -> None:
        """Removes a row that has ended."""
        self._rows[row.call] -= 1
        if not self._rows[row.call]:
            del self._rows[row.call], self._served[row.call]

    def serve(self, row: Row, tokens: int) -> None:
        """Counts the tokens that a row, which has not ended, has committed."""
        self._served[row.call] += tokens / row.request.weight

    def first(self, calls: Iterable[int]) -> int:
        """Returns the call whose row is next.

        Args:
            calls: the calls that wait, in the order in which they came.
        """
        return (
            next(iter(calls)) if self._quantum is None else min(calls, key=self._served.__getitem__)
        )

    def to_pause(self, running: Sequence[Row], waiting: Iterable[int]) -> Row | None:
        """Returns the row that is to give its slot to a row of another call; None = no row.

        It belongs to the call that is furthest ahead. It is the row with the fewest tokens, and the
        last one of several. Rows that depend on others of their request
        do not pause.

        Args:
            running: the rows that run.
            waiting: the calls with rows that wait, in the order in which they came.
        """
        candidates = [row for row in running if not (row.request.resampled or row.request.distinct)]
        if self._quantum is None or not candidates:
            return None
        ahead = max((row.call for row in candidates), key=self._served.__getitem__)
        if self._served[ahead] - self._served[self.first(waiting)] <= self._quantum:
            return None
        return min(
            (row for row in candidates if row.call == ahead),
            key=lambda row: (len(row.tokens), -row.index),
        )
