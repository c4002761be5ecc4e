"""Requests whose rows are drawn together: by sequential Monte Carlo, or without replacement.

`exact="smc"`: The rows are particles with the weights of `shoal.constraints.dressing`. When the
weights of running rows have become too unequal, these rows are drawn anew: a row of small weight
becomes a copy of a row of large weight and goes on by a seed of its own, and all rows get the mean
of their weights (Del Moral, Doucet, Jasra 2006; for language models Lew et al. 2023, arXiv
2306.03081).

Weighted averages over a request keep their expectation for any lengths of rounds and any progress
of the rows. The final worth of a row's text depends on its tokens alone, since drafts do not change
the distribution of tokens, and systematic resampling gives each text copies in proportion to its
weight, in the mean. Rows that have ended and rows that wait keep their text and weight: any set of
rows that is chosen by their texts may be resampled by itself.

`exact="distinct"`: The first row of a request draws its text from p, the second from p without this
text, and so on in the order of their indexes, like the incremental sampling of Shi, Bieber and
Sutton 2020 (arXiv 2002.09067). Here p is the law of rows without `exact`: each token is drawn from
those that the constraints allow. A trie has the share c(w) of the texts beginning with w that is
left, and rows draw by it (`shoal.constraints.estimates`).

The rows run together all the same. A row whose text ends is held outside the slots until the rows
before it have drawn theirs. When a text x is drawn, c falls to c'. Each row behind it, which has
written w, goes on by c' with probability c'(w) / c(w); else it begins again. The reason: its text
had the law of p without the texts drawn before, and would be rejected if it became x. It becomes x
with probability 1 - c'(w) / c(w), so this rejection is decided at once, and given that it does not,
its further tokens have the law of c'. A row without new tokens just begins by c'. So each text has
the law of p without all texts that were drawn before it, and neither the lengths of rounds nor the
order in which rows end matter.

A weight is a sum of two parts (Des Raj 1956). Let S be the probability of all texts that were drawn
before a text. The first part is 1 - S: the text is a sample of the share that was left. The second
part is the text's own probability, once for each row behind it: such a row draws from the share
without this text. Under constraints both are multiplied by the weight of `exact=True`. Averages
over all rows of a request are unbiased; without constraints the weights have the mean 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from shoal.constraints.estimates import Trie
from shoal.engine.commit import finish, visible_text
from shoal.engine.running_rows import Batch
from shoal.sampling.uniforms import Purpose, row_seed, uniforms
from shoal.types.requests import Row
from shoal.types.rounds import Commit
from shoal.types.samples import effective, log_mean

LEAST = 0.5
"""The share of the rows below which their effective number causes resampling."""


Tell = Callable[[Sequence[tuple[Row, Row]]], None]
"""A function that prepares a drafter or guide for copies, as `Drafter.replace`."""


class Slots(Protocol):
    """The part of a cache that copies of rows use (`shoal.models.cache.SlotCache`)."""

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
    targets = [row for row, count in zip(rows, counts, strict=True) if not count]
    return list(zip(targets, sources, strict=True))


def systematic(logs: Sequence[float], uniform: float) -> list[int]:
    """Returns the number of draws of each item; its mean is proportional to the item's weight.

    There are as many draws as items.

    Args:
        logs: the natural logs of the weights; not all -inf.
        uniform: the number in [0, 1) that makes all draws.
    """
    mean = log_mean(logs)
    sums = [0.0, *accumulate(math.exp(each - mean) for each in logs)]
    ends = [math.floor(each - uniform) for each in sums]
    last = math.floor(len(logs) - uniform)
    ends = [*(min(each, last) for each in ends[:-1]), last]  # against rounding errors
    return [after - before for before, after in pairwise(ends)]


class _Draws(NamedTuple):
    """The draws of a request.

    Attributes:
        rows: the rows that have not drawn their text, in order.
        first: a row as they all began, which never runs.
    """

    rows: list[Row]
    first: Row


class Distinct:
    """The requests of an engine that draw texts without replacement.

    Args:
        batch: the batch, from which rows leave and to which they come back.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._draws: dict[Trie, _Draws] = {}

    def begin(self, rows: list[Row]) -> None:
        """Adds the rows of a request, if they are to differ."""
        if rows[0].request.distinct:
            first = replace(rows[0], tokens=[])
            first.become(rows[0], rows[0].seed)
            self._draws[first.beginning.trie] = _Draws(list(rows), first)

    def with_joint_draws(self, commits: list[Commit]) -> list[Commit]:
        """Returns commits, followed by the commits of rows whose text is drawn now.

        Args:
            commits: the commits of a round, or of rows that were cut.
        """
        if not self._draws:
            return commits
        tries = dict.fromkeys(
            commit.row.beginning.trie
            for commit in commits
            if commit.row.request.distinct and commit.row.finish_reason
        )
        return [*commits, *(joint for trie in tries for joint in self._draw_held_rows(trie))]

    def _draw_held_rows(self, trie: Trie) -> Iterator[Commit]:
        """Draws the texts of held rows, as long as the first row that is left is held."""
        rows, first = self._draws[trie]
        while rows and rows[0].finish_reason:
            row = rows.pop(0)
            if row.held_at is None:
                continue  # it was cut
            row.log_weight = _log_weight(row, trie.root.estimate, len(rows))
            sample, row.held_at = finish(row, row.held_at), None
            if self._batch.drafter is not None:
                self._batch.drafter.end([row])
            yield Commit(row, [], 0, visible_text(row, sample), sample)
            for other in list(_rows_to_restart(row, rows)):
                self._batch.restart(other, first, row_seed(other.seed, row.index))
        if not rows:
            del self._draws[trie]


def _log_weight(row: Row, left: float, behind: int) -> float:
    """Returns the natural log of the weight of a row.

    Args:
        left: the share of all texts that have not been drawn before.
        behind: the number of rows that draw after it.
    """
    return row.log_allowed + math.log(left + behind * math.exp(sum(row.processed_logprobs)))


def _rows_to_restart(row: Row, others: Iterable[Row]) -> Iterator[Row]:
    """Takes the text of a row out of the trie; yields the rows behind it that begin again.

    The last row is yielded first: each one goes to the head of the queue.
    """
    running = [
        (other, other.beginning.estimate)
        for other in others
        if other.new_tokens and (other.finish_reason is None or other.held_at is not None)
    ]
    row.beginning.take()
    for other, before in reversed(running):
        uniform = float(uniforms(other.seed, row.index, Purpose.DISTINCT))
        if uniform * before >= other.beginning.estimate:
            yield other
