"""The number of rows that run at once: the caller's number, or the number with most tokens per
second.

Measured rounds find the second number. Pure Python, except the curve of costs. The batch size does
not change a row's tokens: uniforms belong to rows, not to batches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from shoal.errors import RequestError
from shoal.lookahead.costs import CostCurve, rounded

FIRST = 16
"""The number of rows at first, when no cost is known; measured costs never make it smaller."""
MOST = 256
"""The most rows of `AutoBatchSize`, as in vLLM's `max_num_seqs`."""
GAIN = 0.03
"""The gain in tokens per second below which the smaller of two sizes is preferred.

Its rows end sooner and take less memory.
"""
FIRST_TRIES = 2
"""The rounds of the first size before other sizes are tried.

The first passes of a process are slow. Other sizes need one round to go on, and many rounds to go
back.
"""
CHANGE_ROUNDS = 16
"""The rounds of a size in a row that must speak for another size that was tried."""
MOST_RISE = 1.2
"""The bound of a round's time, as a multiple of its size's estimate.

Disturbances only ever slow down.
"""
MANY_BATCHES = 4
"""The number of batches to come beyond which a smaller last one does not matter."""
BUDGET_SHARE = 0.5
"""The part of a row's time budget within which it should get all its tokens.

The rest lets waiting rows get a turn, too.
"""


class BatchSize(Protocol):
    """A rule that decides the number of rows that run at once.

    Attributes:
        most: the largest number it ever gives; prompts are stored, and a server's queue is sized,
            for this number of rows.
        bounds_memory: True if rows beyond `FIRST` wait when the machine has too little memory for
            them, even without a limit in bytes.
    """

    @property
    def most(self) -> int: ...

    @property
    def bounds_memory(self) -> bool: ...

    def rows(self, running: int, waiting: int, seconds_per_token: float) -> int:
        """Returns the most rows in slots in the coming round; rows beyond it stay.

        Called only while rows wait.

        Args:
            running: the number of rows in slots.
            waiting: the number of rows without a slot, at least one.
            seconds_per_token: the smallest time budget of a row, divided by the tokens that it may
                get; infinity without time budgets.
        """

    def learn(self, rows: int, committed: int, seconds: float) -> None:
        """Learns from a round that took `seconds`, those of prompts not counted."""


class FixedBatchSize:
    """A number of rows that a caller gave."""

    bounds_memory = False

    def __init__(self, most: int) -> None:
        if most < 1:
            raise RequestError(f"max_batch must be >= 1, got {most!r}")
        self.most = most

    def rows(self, running: int, waiting: int, seconds_per_token: float) -> int:
        return self.most

    def learn(self, rows: int, committed: int, seconds: float) -> None:
        """Learns nothing: the number of rows is fixed."""


class RoundCosts(CostCurve):
    """The seconds of a round by its number of rows.

    First rounds are believed at once: more rows that are really slower would cost every call, and a
    size is tried again once it is forgotten.
    """

    DOUBTED = 1


class AutoBatchSize:
    """The batch size of `max_batch="auto"`: as many rows as raise tokens per second.

    It keeps its estimates between engines. The cost of a size is the time in which each of its rows
    gets one token: the time of a round, divided by the mean number of tokens per row. So plain and
    speculative rounds are compared by their tokens, with the draft lengths that were right for that
    number of rows. This object decides the rows, slowly; the draft length controller then decides
    the lengths for these rows, in every round. Neither waits for the other.

    Sizes are FIRST, 2 FIRST, 4 FIRST, ... `MOST`. While rows wait:

    - A size that was not tried is tried on the way up, in one round or `FIRST_TRIES`. So the batch
      grows from FIRST at first.
    - Then the smallest size is right whose tokens per second are within `GAIN` of the best. If that
      is the largest that was tried, the next one is tried.
    - The size changes to another tried size only after `CHANGE_ROUNDS` rounds in a row in which the
      other size is better. It becomes smaller only as rows end: no row ever loses its slot. A slow
      round counts at most `MOST_RISE` times its estimate, and is forgotten by then. Estimates of
      sizes that are no longer used are forgotten (`shoal.lookahead.costs.CostCurve`): they are then
      tried again.
    - If the number of rows is no multiple of the size, they form equal batches of up to twice the
      size, as far as their cost is no worse: 24 rows at size 16 run at once, as 16 and then 8 would
      take longer.
    - A deadline bounds the size: each row should get all its tokens within `BUDGET_SHARE` of its
      time budget. Sizes that were not tried count in proportion to the largest that was. The size
      never falls below FIRST: rows are few then anyway.
    """

    most = MOST
    bounds_memory = True

    def __init__(self) -> None:
        self.costs = RoundCosts()
        self._tries: Counter[int] = Counter()
        self._size, self._against = FIRST, 0

    def rows(self, running: int, waiting: int, seconds_per_token: float) -> int:
        total = running + waiting
        untried = next(
            (
                size
                for size in self._sizes(self._size)
                if running <= size and not self._is_known(size)
            ),
            0,
        )
        if untried:
            rows = untried if total >= 2 * untried else total
        else:
            rows = self._in_equal_batches(self._size, total)
        return min(rows, self._within(seconds_per_token), MOST)

    def learn(self, rows: int, committed: int, seconds: float) -> None:
        if 2 * rows > FIRST and committed:  # smaller sizes are never compared
            size, cost = rounded(rows), seconds * rows / committed
            estimate = self.costs.at(size)
            self._tries[size] = 1 + (self._tries[size] if estimate is not None else 0)
            self.costs.observe(rows, cost if estimate is None else min(cost, MOST_RISE * estimate))
            self._settle(rows)

    @staticmethod
    def _sizes(most: int) -> list[int]:
        return [FIRST << i for i in range((most // FIRST).bit_length())]

    def _is_known(self, size: int) -> bool:
        return (
            self._tries[size] >= (FIRST_TRIES if size == FIRST else 1)
            and self.costs.at(size) is not None
        )

    def _settle(self, rows: int) -> None:
        """Chooses the size by the costs of the tried sizes, while `rows` rows run."""
        sizes = [size for size in self._sizes(MOST) if self._is_known(size)]
        if not sizes:  # more rows than the size may join at once
            self._size = max(
                self._size, next(size for size in self._sizes(MOST) if size >= min(rows, MOST))
            )
            return
        table = self.costs.table(MOST)
        rates = [size / table[size] for size in sizes]
        best = next(
            size for size, rate in zip(sizes, rates, strict=True) if rate >= (1 - GAIN) * max(rates)
        )
        target = min(2 * best, MOST) if best == sizes[-1] <= self._size else best
        if target == self._size:
            self._against = 0
        # Rounds of other sizes do not renew the estimate of this size.
        elif rounded(rows) == self._size:
            self._against += 1
        if self._against >= CHANGE_ROUNDS or (target > self._size and not self._is_known(target)):
            self._size, self._against = target, 0

    def _in_equal_batches(self, size: int, total: int) -> int:
        """Returns a number of rows of which `total` is nearly a multiple, at least `size`.

        Returns `size` if the number costs more per row, or if many batches are to come, because the
        last one then matters little.
        """
        if total > MANY_BATCHES * size:
            return size
        rows = min(math.ceil(total / max(total // size, 1)), MOST)
        table = self.costs.table(max(rows, size))
        return (
            rows if rows > size and table[rows] / rows <= (1 + GAIN) * table[size] / size else size
        )

    def _within(self, seconds_per_token: float) -> int:
        """Returns the most rows that each get a token in `BUDGET_SHARE` of that time."""
        if math.isinf(seconds_per_token):
            return MOST
        largest, seconds = self.costs.largest, BUDGET_SHARE * seconds_per_token
        table = self.costs.table(largest) if largest else [seconds]
        if table[largest] > seconds:
            return max(bisect_right(table, seconds) - 1, FIRST)
        return max(int(largest * seconds / table[largest]), FIRST)


class BatchSizes:
    """A set of batch sizes that outlive engines, one for each pair and draft length rule.

    With another pair or rule, rounds have other costs and acceptance. Another object may stand for
    the pair.
    """

    def __init__(self) -> None:
        self._by_pair: WeakKeyDictionary[Any, dict[str, AutoBatchSize]] = WeakKeyDictionary()

    def of(self, max_batch: int | str, pair: object, lookahead: object) -> BatchSize:
        """Returns the batch size for a user's `max_batch`, checked by `require_max_batch`."""
        if isinstance(require_max_batch(max_batch), int):
            return FixedBatchSize(int(max_batch))
        name = (
            str(lookahead)
            if isinstance(lookahead, (str, int, type(None)))
            else type(lookahead).__name__
        )
        return self._by_pair.setdefault(pair, {}).setdefault(name, AutoBatchSize())


def batch_size_of(max_batch: int | BatchSize) -> BatchSize:
    """Returns the batch size, a number as a `FixedBatchSize`; raises RequestError below 1."""
    return FixedBatchSize(max_batch) if isinstance(max_batch, int) else max_batch


def require_max_batch(value: object) -> int | str:
    """Returns a `max_batch`; raises RequestError unless it is "auto" or an integer above 0."""
    if value == "auto" or (isinstance(value, int) and value >= 1):
        return value  # type: ignore[return-value]
    raise RequestError(f"max_batch must be 'auto' or an integer >= 1, got {value!r}")


def most_rows(max_batch: int | str) -> int:
    """Returns the most rows that such a `max_batch` ever runs at once."""
    return max_batch if isinstance(max_batch, int) else MOST
