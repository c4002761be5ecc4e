"""Sequential Monte Carlo over the rows of a request (`exact="smc"`).

The rows are particles with the weights of `shoal.constraints.dressing`. When the weights of running
rows have become too unequal, these rows are drawn anew: a row of small weight becomes a copy of one
of large weight and goes on by a seed of its own, and all get the mean of their weights (Del Moral,
Doucet, Jasra 2006; for language models Lew et al. 2023, arXiv 2306.03081).

Weighted averages over a request keep their expectation, however far each row has come and whatever
decides the length of a round. The final worth of a row's text depends on its tokens alone, since
drafts do not change the distribution of tokens, and systematic resampling gives each text copies in
proportion to its weight, in the mean. Rows that have ended keep their text and weight, and so do
rows that wait: any set of rows that is chosen by their texts may be resampled by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from shoal.sampling.uniforms import Purpose, row_seed, uniforms
from shoal.types.requests import Row
from shoal.types.samples import effective, log_mean

LEAST = 0.5
"""The share of the rows below which their effective number causes resampling."""


Tell = Callable[[Sequence[tuple[Row, Row]]], None]
"""A function that prepares a drafter or guide for copies, as `Drafter.replace`."""


class Slots(Protocol):
    """A cache, as far as copies of rows need it (`shoal.models.cache.SlotCache`)."""

    lengths: list[int]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of slot `source` to slot `target`."""


def resample(rows: Sequence[Row], cache: Slots, tell: Sequence[Tell]) -> int:
    """Resamples the requests that ask for it and whose rows have too unequal weights.

    Args:
        rows: the rows that have had a round and run on.
        cache: the target's cache, which holds their tokens but the last.
        tell: tell the drafter and the guide of the copies, if there are any.

    Returns:
        The number of rows that became copies.
    """
    groups: dict[int, list[Row]] = {}
    # By index: the order of the slots depends on other requests.
    for row in sorted([row for row in rows if row.request.resampled], key=lambda row: row.index):
        groups.setdefault(row.group, []).append(row)
    copies = [copy for group in groups.values() for copy in _copies(group)]
    for prepare in tell if copies else ():
        prepare(copies)
    for row, source in copies:
        row.become(source, row_seed(row.seed, row.rounds))
        cache.copy(source.slot, row.slot, cache.lengths[source.slot])
    return len(copies)


def _copies(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Returns rows that are to become copies, each with the row that it copies.

    All rows get the mean weight. The list is empty, and weights are kept, if they are equal enough.
    """
    logs = [row.log_weight for row in rows]
    mean = log_mean(logs)
    if mean == -math.inf or effective(logs) >= LEAST * len(rows):
        return []
    counts = systematic(logs, float(uniforms(rows[0].seed, rows[0].rounds, Purpose.RESAMPLE)))
    for row in rows:
        row.log_weight = mean
    sources = [row for row, count in zip(rows, counts, strict=True) for _ in range(count - 1)]
    gone = [row for row, count in zip(rows, counts, strict=True) if not count]
    return list(zip(gone, sources, strict=True))


def systematic(logs: Sequence[float], uniform: float) -> list[int]:
    """Returns how often each of some items is drawn, in the mean in proportion to its weight.

    There are as many draws as items.

    Args:
        logs: the natural logs of the weights; not all -inf.
        uniform: a number in [0, 1), by which all draws are made.
    """
    mean = log_mean(logs)
    sums = [0.0, *accumulate(math.exp(each - mean) for each in logs)]
    ends = [math.floor(each - uniform) for each in sums]
    last = math.floor(len(logs) - uniform)
    ends = [*(min(each, last) for each in ends[:-1]), last]  # against rounding errors
    return [after - before for before, after in pairwise(ends)]
