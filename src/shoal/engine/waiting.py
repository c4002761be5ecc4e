"""The queue of rows without a slot, and the rows whose deadline has passed.

Pure Python. The choice of the next row does not loop over the other rows, and the check of
deadlines does not loop over rows with time left.

While calls compete, each gets tokens by its weight, not by its rows. Each call has a counter of the
tokens that its rows have committed, divided by its weight (the weighted virtual token counter of
Sheng et al., OSDI 2024, arXiv 2401.00588); without weights all calls get the same number. The call
with the least counter admits the next row. If a call's counter is more than `quantum` ahead of a
waiting call's counter, the call gives it a slot: one of its rows pauses at the end of a round. This
row waits like any other row, and comes back with its tokens. A new call begins with the least
counter of the present calls, so that a call gains no advantage by earlier idleness.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from shoal.types.requests import Row


class Waiting:
    """The rows that wait, by call, in the order of the calls (`Turns`).

    Attributes:
        interrupted: returns True if a step is to return between two pieces of a prompt: rows wait
            to be added or cancelled.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Turns] = {}
        self._count = 0
        self.interrupted: Callable[[], bool] = lambda: False

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        return (row for turns in self._calls.values() for row in turns)

    def __contains__(self, row: Row) -> bool:
        return row in self._calls.get(row.call, ())

    @property
    def calls(self) -> Iterable[int]:
        """The calls that have rows here, in the order in which they came."""
        return self._calls.keys()

    def add(self, rows: Sequence[Row]) -> None:
        """Adds the rows of one call to the queue."""
        if rows:
            self._calls[rows[0].call] = Turns(rows)
            self._count += len(rows)

    def put_back(self, row: Row) -> None:
        """Puts a row that had a slot first among the rows of its call."""
        if row.call not in self._calls:
            self._calls = dict(sorted({**self._calls, row.call: Turns([])}.items()))
        self._calls[row.call].put_back(row)
        self._count += 1

    def remove(self, row: Row) -> None:
        """Removes a row; raises KeyError if it is not in the queue."""
        turns = self._calls[row.call]
        turns.remove(row)
        self._count -= 1
        if not turns:
            del self._calls[row.call]

    def first(self, call: int, cached: Iterable[int]) -> Row:
        """Returns the next row of a call, see `Turns.first`."""
        return self._calls[call].first(cached)


class Turns:
    """The rows of one call that wait.

    Without deadlines they follow prompt by prompt, so that each prompt is computed once: each row
    is a turn of its own. Rows with a deadline take turns, as time may be over before all have run:
    every prompt gets its first sample before any gets its second. Turn i has the rows of index i,
    one of each prompt. Within a turn the order is free, and rows whose prompts are in the caches go
    first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._turns: OrderedDict[Row, int] = OrderedDict()  # in the order of the queue
        self._rows: dict[tuple[int, int], Row] = {}  # by turn and group
        timed = any(row.deadline is not None for row in rows)
        for i, row in enumerate(sorted(rows, key=lambda row: row.index) if timed else rows):
            turn = row.index if timed else i
            self._turns[row] = turn
            self._rows[turn, row.group] = row
        self._before = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._turns)

    def __contains__(self, row: object) -> bool:
        return row in self._turns

    def put_back(self, row: Row) -> None:
        """Puts a row first, in a turn of its own."""
        self._before -= 1
        self._turns[row] = self._before
        self._turns.move_to_end(row, last=False)
        self._rows[self._before, row.group] = row

    def remove(self, row: Row) -> None:
        """Removes a row; raises KeyError if it is not here."""
        del self._rows[self._turns.pop(row), row.group]

    def first(self, cached: Iterable[int]) -> Row:
        """Returns the next row.

        It is a row of the first turn whose prompt is cached, or else the first row of that turn.

        Args:
            cached: the groups whose prompts are in the caches, and may be replaced by the prompts
                of other rows.
        """
        row, turn = next(iter(self._turns.items()))
        candidates = (self._rows.get((turn, group)) for group in cached)
        return next((other for other in candidates if other is not None), row)


class GroupSizes:
    """The rows that wait or run: how many each group has, and the numbers of their calls."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self._calls = itertools.count()
        self._paused = itertools.count(-2, -1)  # no group of a request, and not `NO_GROUP`

    def enter(self, rows: Sequence[Row]) -> None:
        """Adds the rows of a call, and gives them its number."""
        call = next(self._calls)
        for row in rows:
            row.call = call
        self.sizes.update(row.group for row in rows)

    def come_back(self, row: Row) -> None:
        """Adds a row again that has left."""
        self.sizes[row.group] += 1

    def pause(self, row: Row) -> None:
        """Adds a row that has left as the only one of a new group."""
        row.pause(next(self._paused))
        row.prefix = None
        self.sizes[row.group] = 1

    def leave(self, row: Row) -> bool:
        """Removes a row; returns True if it was the last one of its group."""
        self.sizes[row.group] -= 1
        if self.sizes[row.group]:
            return False
        del self.sizes[row.group]
        return True


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

    def seconds_per_token(self, rows: Iterable[Row]) -> float:
        """Returns the least time budget per token of these rows; infinity without deadlines."""
        if not self._rows:
            return math.inf
        limits = [row.request.limits for row in rows]
        return min(
            math.inf if each.time_budget is None else each.time_budget / each.max_new_tokens
            for each in limits
        )

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


QUANTUM = 256
"""The default quantum, in tokens.

A request of 16 rows is ahead by as many after some 5 to 16 rounds, one of a single row after some
hundred.
"""


class Fairness:
    """The counters of the calls that have rows.

    Args:
        quantum: the lead of a counter over a waiting call's counter before a row pauses, in tokens
            at weight 1; None = first come, first served, and no row pauses.
    """

    def __init__(self, quantum: int | None = None) -> None:
        self._quantum = quantum
        self._tokens: dict[int, float] = {}
        self._rows: Counter[int] = Counter()

    def enter(self, rows: Sequence[Row]) -> None:
        """Adds rows of a call, mostly a new one."""
        if rows:
            call = rows[0].call
            self._tokens.setdefault(call, min(self._tokens.values(), default=0))
            self._rows[call] += len(rows)

    def leave(self, row: Row) -> None:
        """Removes a row that has ended."""
        self._rows[row.call] -= 1
        if not self._rows[row.call]:
            del self._rows[row.call], self._tokens[row.call]

    def serve(self, row: Row, tokens: int) -> None:
        """Counts the tokens that a row, which has not ended, has committed."""
        self._tokens[row.call] += tokens / row.request.weight

    def first(self, calls: Iterable[int]) -> int:
        """Returns the call whose row is next.

        Args:
            calls: the calls that wait, in the order in which they came.
        """
        return (
            next(iter(calls)) if self._quantum is None else min(calls, key=self._tokens.__getitem__)
        )

    def to_pause(self, running: Sequence[Row], waiting: Iterable[int]) -> Row | None:
        """Returns the row that is to give its slot to a row of another call; None = no row.

        It belongs to the call that is furthest ahead. It is the row with the fewest tokens; among
        equals the last row. Rows that depend on others of their request do not pause.

        Args:
            running: the rows that run.
            waiting: the calls with rows that wait, in the order in which they came.
        """
        candidates = [row for row in running if not (row.request.resampled or row.request.distinct)]
        if self._quantum is None or not candidates:
            return None
        ahead = max((row.call for row in candidates), key=self._tokens.__getitem__)
        if self._tokens[ahead] - self._tokens[self.first(waiting)] <= self._quantum:
            return None
        return min(
            (row for row in candidates if row.call == ahead),
            key=lambda row: (len(row.tokens), -row.index),
        )
