"""How many rows run at once: a number that the caller gives, or as many as raise tokens per second,
by measured rounds.

Pure Python, but for the curve of costs. Nothing here changes a row's tokens: uniforms belong to
rows, not to batches.
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
"""Rows at first, when no cost is known; never fewer than that because of measured costs."""
MOST = 256
"""Most rows of `AutoBatchSize`, as in vLLM's `max_num_seqs`."""
GAIN = 0.03
"""Gain in tokens per second below which the smaller of two sizes is preferred: its rows end sooner
and take less memory."""
FIRST_TRIES = 2
"""Rounds of the first size before others are tried, as the first passes of a process are slow. Of
others one is enough to go on, and only many rounds lead back."""
CHANGE_ROUNDS = 16
"""Rounds of a size in a row that must speak for another that was tried."""
MOST_RISE = 1.2
"""A round counts as at most so many times the estimate of its size: disturbances only ever slow
down."""
MANY_BATCHES = 4
"""Batches to come beyond which it does not matter that the last one is smaller."""
BUDGET_SHARE = 0.5
"""Part of a row's time budget within which it should get all its tokens, so that rows that wait get
a turn, too."""


class BatchSize(Protocol):
    """Decides how many rows run at once.

    Attributes:
        most: the largest number it ever gives; prompts are stored, and a server's queue is sized,
            for so many.
        bounds_memory: rows beyond `FIRST` wait where the machine has too little memory for them,
            even without a limit in bytes.
    """

    @property
    def most(self) -> int: ...

    @property
    def bounds_memory(self) -> bool: ...

    def rows(self, running: int, waiting: int, seconds_per_token: float) -> int:
        """Most rows in slots in the coming round; rows in slots stay there if they are more. Asked
        only while rows wait.

        Args:
            running: rows in slots.
            waiting: rows without one, at least one.
            seconds_per_token: the smallest time budget of a row, by the tokens that it may get;
                infinity without time budgets.
        """
        ...

    def learn(self, rows: int, committed: int, seconds: float) -> None:
        """A round of so many rows committed so many tokens in that time, prompts not counted."""
        ...


class FixedBatchSize:
    """The number that a caller gave."""

    bounds_memory = False

    def __init__(self, most: int) -> None:
        if most < 1:
            raise RequestError(f"max_batch must be >= 1, got {most!r}")
        self.most = most

    def rows(self, running: int, waiting: int, seconds_per_token: float) -> int:
        return self.most

    def learn(self, rows: int, committed: int, seconds: float) -> None:
        """Nothing to learn."""


class AutoBatchSize:
    """As many rows as raise tokens per second; what `max_batch="auto"` means. Keeps what it learned
    between engines.

    The cost of a size is the time in which each of its rows gets one token: the time of a round by
    the tokens that a row got in it on average. So the costs of plain and of speculative rounds are
    compared by what they bring, with the draft lengths that were right for so many rows. This
    object decides the rows, slowly; the draft length controller then decides the lengths for these
    rows, in every round. Neither waits for the other.

    Sizes are FIRST, 2 FIRST, 4 FIRST, ... `MOST`. While rows wait:

    - A size that was not tried is tried on the way up, in one round or `FIRST_TRIES`. So the batch
      grows from FIRST at first.
    - Then the smallest size is right whose tokens per second are within `GAIN` of the best. If that
      is the largest that was tried, the next one is tried.
    - Another size that was tried is taken only when `CHANGE_ROUNDS` rounds of this one in a row
      speak for it; a smaller one as rows end: no row ever loses its slot. A slow round counts at
      most `MOST_RISE` times its estimate, and is forgotten by then. Estimates of sizes that are not
      used any more are forgotten (`shoal.lookahead.costs.CostCurve`): they are then tried again.
    - Of rows that are no multiple of the size, equal batches are made of up to twice the size, as
      far as their cost is no worse: 24 rows at size 16 run at once, as 16 and then 8 would take
      longer.
    - A deadline bounds the size: each row should get all its tokens within `BUDGET_SHARE` of its
      time budget. Sizes that were not tried count in proportion to the largest that was. Never
      below FIRST: rows are few then anyway.
    """

    most = MOST
    bounds_memory = True

    def __init__(self) -> None:
        self.costs = CostCurve()
        self._tries: Counter[int] = Counter()
        self._size, self._against = FIRST, 0

    def rows(self, running: int, waiting: int, seconds_per_token: float) -> int:
        asked = running + waiting
        untried = next(
            (size for size in self._sizes(self._size) if running <= size and not self._tried(size)),
            0,
        )
        if untried:
            rows = untried if asked >= 2 * untried else asked
        else:
            rows = self._in_equal_batches(self._size, asked)
        return min(rows, self._within(seconds_per_token), MOST)

    def learn(self, rows: int, committed: int, seconds: float) -> None:
        if 2 * rows > FIRST and committed:  # smaller sizes are never compared
            size, cost = rounded(rows), seconds * rows / committed
            known = self.costs.at(size)
            self._tries[size] = 1 + (self._tries[size] if known is not None else 0)
            self.costs.observe(rows, cost if known is None else min(cost, MOST_RISE * known))
            self._settle(rows)

    @staticmethod
    def _sizes(most: int) -> list[int]:
        return [FIRST << i for i in range((most // FIRST).bit_length())]

    def _tried(self, size: int) -> bool:
        return (
            self._tries[size] >= (FIRST_TRIES if size == FIRST else 1)
            and self.costs.at(size) is not None
        )

    def _settle(self, rows: int) -> None:
        """Chooses the size by the costs of those that were tried; `rows` run."""
        tried = [size for size in self._sizes(MOST) if self._tried(size)]
        if not tried:  # maybe more rows than that joined at once, and others come later
            self._size = max(
                self._size, next(size for size in self._sizes(MOST) if size >= min(rows, MOST))
            )
            return
        table = self.costs.table(MOST)
        rates = [size / table[size] for size in tried]
        best = next(
            size for size, rate in zip(tried, rates, strict=True) if rate >= (1 - GAIN) * max(rates)
        )
        wanted = min(2 * best, MOST) if best == tried[-1] <= self._size else best
        if wanted == self._size:
            self._against = 0
        elif (
            rounded(rows) == self._size
        ):  # else its estimate is as old as the last round of that size
            self._against += 1
        if self._against >= CHANGE_ROUNDS or (wanted > self._size and not self._tried(wanted)):
            self._size, self._against = wanted, 0

    def _in_equal_batches(self, size: int, asked: int) -> int:
        """At least `size`: a number of which `asked` is nearly a multiple, unless it costs more per
        row. With many batches to come the last one matters little."""
        if asked > MANY_BATCHES * size:
            return size
        rows = min(math.ceil(asked / max(asked // size, 1)), MOST)
        table = self.costs.table(max(rows, size))
        return (
            rows if rows > size and table[rows] / rows <= (1 + GAIN) * table[size] / size else size
        )

    def _within(self, seconds_per_token: float) -> int:
        """Most rows that each get a token in `BUDGET_SHARE` of that time."""
        if math.isinf(seconds_per_token):
            return MOST
        largest, seconds = self.costs.largest, BUDGET_SHARE * seconds_per_token
        table = self.costs.table(largest) if largest else [seconds]
        if table[largest] > seconds:
            return max(bisect_right(table, seconds) - 1, FIRST)
        return max(int(largest * seconds / table[largest]), FIRST)


class BatchSizes:
    """Batch sizes that outlive engines: one for each pair (or whatever stands for it) and draft
    length rule, as with others rounds cost and bring something else."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[str, AutoBatchSize]] = WeakKeyDictionary()

    def of(self, max_batch: int | str, pair: object, lookahead: object) -> BatchSize:
        """What a user's `max_batch` means. Raises RequestError for anything but "auto" and integers
        from 1 on."""
        if isinstance(require_max_batch(max_batch), int):
            return FixedBatchSize(int(max_batch))
        name = (
            str(lookahead)
            if isinstance(lookahead, (str, int, type(None)))
            else type(lookahead).__name__
        )
        return self._known.setdefault(pair, {}).setdefault(name, AutoBatchSize())


def batch_size_of(max_batch: int | BatchSize) -> BatchSize:
    """A number as a `FixedBatchSize`, anything else as it is. Raises RequestError for a number
    below 1."""
    return FixedBatchSize(max_batch) if isinstance(max_batch, int) else max_batch


def require_max_batch(value: object) -> int | str:
    """A `max_batch` as users give it. Raises RequestError for anything but "auto" and integers from
    1 on."""
    if value == "auto" or (isinstance(value, int) and value >= 1):
        return value  # type: ignore[return-value]
    raise RequestError(f"max_batch must be 'auto' or an integer >= 1, got {value!r}")


def most_rows(max_batch: int | str) -> int:
    """The most rows that such a `max_batch` ever runs at once."""
    return max_batch if isinstance(max_batch, int) else MOST
