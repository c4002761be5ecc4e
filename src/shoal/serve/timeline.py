"""The times at which the rows of a request got slots and tokens, for the metrics."""

from __future__ import annotations

from shoal.serve.metrics import Metrics
from shoal.types.rounds import Commit


class Timeline:
    """The times of a request's rows; the engine thread's own.

    Args:
        rows: the number of rows.
    """

    def __init__(self, rows: int) -> None:
        self._started = False
        self._first: list[float | None] = [None] * rows  # end of its first round
        self._last = [0.0] * rows  # end of its last round so far
        self._later = [0] * rows  # tokens after the first round

    def record(self, metrics: Metrics, index: int, commit: Commit, now: float) -> None:
        """Reports the slot and the tokens of a row in a round to the metrics.

        Args:
            index: the number of the row.
            commit: the row's commit.
            now: the end of the round, by the clock of `Request.submitted_at`.
        """
        row, request = commit.row, commit.row.request
        if not self._started and row.started_at is not None:
            self._started = True
            metrics.request_started(row.started_at - request.submitted_at)
        if commit.tokens:
            if self._first[index] is None:
                self._first[index] = now
                metrics.first_tokens(now - request.submitted_at)
            else:
                self._later[index] += len(commit.tokens)
                metrics.next_tokens(now - self._last[index])
            self._last[index] = now
        if commit.sample is not None:
            metrics.row_ended(commit.sample, self._pace(index))

    def _pace(self, index: int) -> float | None:
        first, later = self._first[index], self._later[index]
        return (self._last[index] - first) / later if first is not None and later else None
