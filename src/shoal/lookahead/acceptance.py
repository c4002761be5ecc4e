"""Estimates of the acceptance of drafts: by draft position, by row, by the drafter's confidence.

Rounds with drafts are kept in a record, from which the acceptance is learned later. The number of
nodes of draft trees by depth decides the cost of a pass of the target over them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import nan
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
LIMIT = 16
"""The longest draft of `lookahead="auto"`.

At later positions even a good drafter's tokens are rarely committed.
"""


class Frequencies:
    """The fading hit rates of several bins, each drawn towards a prior of `weight` trials."""

    FADE = 0.98

    def __init__(self, prior: Array, weight: float) -> None:
        self._prior, self._weight = prior, weight
        self._hits, self._trials = np.zeros_like(prior), np.zeros_like(prior)

    def add(
        self, bins: npt.NDArray[np.intp], hits: Array, ages: npt.NDArray[np.intp], rounds: int
    ) -> None:
        """Adds the trials of some rounds.

        Args:
            bins: the bin of each trial.
            hits: the outcome of each trial, 0..1.
            ages: for each trial, the number of rounds after its own.
        """
        faded, size = self.FADE**rounds, len(self._prior)
        weights = self.FADE**ages
        self._hits = faded * self._hits + np.bincount(bins, weights * hits, size)
        self._trials = faded * self._trials + np.bincount(bins, weights, size)

    @property
    def mean(self) -> float:
        """The hit rate over all bins."""
        return float(
            (self._hits.sum() + self._weight * self._prior.mean())
            / (self._trials.sum() + self._weight)
        )

    def rates(self, prior: Array | float | None = None) -> Array:
        """Returns the hit rate of each bin.

        Args:
            prior: the rate of a bin without trials; None = the prior of the constructor.
        """
        prior = self._prior if prior is None else prior
        return (self._hits + self._weight * prior) / (self._trials + self._weight)


class DraftOutcome(NamedTuple):
    """The outcome of the drafts of a round.

    Attributes:
        drafted: the draft length of each row; at least one token of some row was looked at.
        accepted: the number of accepted tokens of each row.
        confidence: [rows] at each position looked at. It may have one more position per row than
            the row drafted, if the drafter made the step and its draft was not taken. That position
            counts with its estimated acceptance, so that the estimates by position cover all text
            and not only confident places. NaN if the drafter made no step. Empty if unknown.
    """

    drafted: Sequence[int]
    accepted: Sequence[int]
    confidence: Sequence[Sequence[float]]


class Acceptance:
    """A running estimate of the probability that a draft is accepted, if those before it were.

    It learns only from positions that were decided: up to and including a row's first rejection.

    Args:
        limit: the number of draft positions with an estimate of their own.
    """

    PRIOR, PRIOR_TRIALS, CONFIDENCE_TRIALS = 0.7, 8.0, 4.0
    """The prior acceptance rate of an unknown pair, and the number of trials that priors count as.

    `PRIOR_TRIALS` is for this prior, `CONFIDENCE_TRIALS` for the prior "acceptance equals
    confidence". With fewer trials, a few rejected drafts of a single row would end speculation.
    """
    EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.995)
    """The edges between the bins of the drafter's confidence."""
    ROW_STEP, ROW_FADE = 0.25, 0.97
    """The step of a row's own log-odds by one outcome, and the factor by which they fade per round.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._positions = Frequencies(np.full(limit, self.PRIOR), self.PRIOR_TRIALS)
        middles = (np.array([0.0, *self.EDGES]) + np.array([*self.EDGES, 1.0])) / 2
        self._confidences = Frequencies(middles, self.CONFIDENCE_TRIALS)
        self._rows: dict[Hashable, float] = {}

    @property
    def mean(self) -> float:
        """The acceptance rate over all positions and rows."""
        return self._positions.mean

    def by_position(self, rows: Sequence[Hashable]) -> Array:
        """Returns the conditional acceptance at each draft position, [rows, limit]."""
        return _shifted(
            self._positions.rates(self._positions.mean)[None, :], self._offsets(rows)[:, None]
        )

    def by_confidence(self, rows: Sequence[Hashable]) -> Array:
        """Returns the acceptance of drafts by the drafter's confidence, [rows, bins].

        The confidence is the drafter's highest probability; the bins lie between the `EDGES`.
        """
        return _shifted(self._confidences.rates(), self._offsets(rows)[:, None])

    def learn(self, rows: Sequence[Hashable], rounds: Sequence[DraftOutcome]) -> None:
        """Learns from the outcomes of rounds of the same rows, the oldest first."""
        fade = self.ROW_FADE ** len(rounds)
        self._rows = {row: self._rows.get(row, 0.0) * fade for row in rows}
        widths = [max(len(outcome.confidence), max(outcome.drafted)) for outcome in rounds]
        # The round of each line of the arrays below; a line is a position in a draft.
        which = np.repeat(np.arange(len(rounds)), widths)
        place = np.concatenate([np.arange(width) for width in widths])[:, None]
        drafted = np.array([outcome.drafted for outcome in rounds])[which]
        accepted = np.array([outcome.accepted for outcome in rounds])[which]
        confidence = np.concatenate(
            [
                _padded(outcome.confidence, width, len(rows))
                for outcome, width in zip(rounds, widths, strict=True)
            ]
        )
        ages = len(rounds) - 1 - which
        decided = (place < drafted) & (place <= accepted) & (place < self.limit)
        lines, columns = decided.nonzero()
        hits = (place[lines, 0] < accepted[lines, columns]).astype(float)
        bins = np.searchsorted(self.EDGES, confidence)
        sure = np.isfinite(confidence)
        of_sure = sure[lines, columns]
        positions = self._positions.rates(self._positions.mean)[np.minimum(place, self.limit - 1)]
        rates = np.where(sure, self._confidences.rates()[bins], positions)
        expected = _shifted(rates, self._offsets(rows))
        self._learn_rows(rows, expected, hits, lines=lines, columns=columns, ages=ages)
        self._confidences.add(
            bins[lines, columns][of_sure], hits[of_sure], ages[lines][of_sure], len(rounds)
        )
        more, whose = (
            sure & (place == drafted) & (drafted == accepted) & (place < self.limit)
        ).nonzero()
        where = np.concatenate([lines, more])
        outcomes = np.concatenate([hits, expected[more, whose]])
        self._positions.add(place[where, 0], outcomes, ages[where], len(rounds))

    def _learn_rows(
        self,
        rows: Sequence[Hashable],
        expected: Array,
        hits: Array,
        lines: Index,
        columns: Index,
        ages: Index,
    ) -> None:
        """Moves the log-odds of rows by outcomes.

        For a few outcomes the move is proportional to `ROW_STEP`. For many, it never goes beyond
        their joint estimate (an implicit step of the logistic loss).
        """
        weights = self.ROW_FADE ** ages[lines]
        chance = expected[lines, columns]
        residual = np.bincount(columns, weights * (hits - chance), len(rows))
        curvature = np.bincount(columns, weights * chance * (1 - chance), len(rows))
        moves = self.ROW_STEP * residual / (1 + self.ROW_STEP * curvature)
        for row, move in zip(rows, moves.tolist(), strict=True):
            self._rows[row] += move

    def _offsets(self, rows: Sequence[Hashable]) -> Array:
        return np.array([self._rows.get(row, 0.0) for row in rows])


def _padded(confidence: Sequence[Sequence[float]], width: int, rows: int) -> Array:
    """Returns the confidences as [width, rows], with NaN at positions that were not looked at."""
    padded = np.full((width, rows), np.nan)
    if confidence:
        padded[: len(confidence)] = confidence
    return padded


def _shifted(probability: Array, offset: Array) -> Array:
    """Returns the probabilities, moved by an offset in log-odds."""
    odds = np.exp(offset) * probability / np.maximum(1 - probability, 1e-6)
    return odds / (1 + odds)


Kind = TypeVar("Kind")


class Record:
    """The rounds that drafted for some rows, and went on as rows ended.

    Attributes:
        rows: the serial numbers of the rows at the beginning.
        outcomes: the outcomes of each round, for all of these rows.
        seconds: the seconds of the rounds in which none of the rows had ended.
        tokens: the tokens of these rounds, weighted as planned.
        full: the number of these rounds.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self.outcomes: list[DraftOutcome] = []
        self.seconds = self.tokens = 0.0
        self.full = 0
        # The indices in `rows` of the rows that are left; None = all.
        self._places: list[int] | None = None

    def narrow(self, rows: Sequence[int]) -> None:
        """Keeps only these of the rows, in this order."""
        places = {row: place for place, row in enumerate(self.rows)}
        self._places = [places[row] for row in rows]

    def add(self, outcome: DraftOutcome, seconds: float, tokens: float) -> None:
        """Adds a round of the rows that are left."""
        if self._places is None:
            self.seconds += seconds
            self.tokens += tokens
            self.full += 1
        else:
            drafted, accepted, confidence = outcome
            outcome = DraftOutcome(
                self._spread(drafted, 0),
                self._spread(accepted, 0),
                [self._spread(sure, nan) for sure in confidence],
            )
        self.outcomes.append(outcome)

    def _spread(self, values: Sequence[Kind], absent: Kind) -> list[Kind]:
        """Returns a value for each row at the beginning; `absent` for rows that have ended."""
        assert self._places is not None
        spread = [absent] * len(self.rows)
        for place, value in zip(self._places, values, strict=True):
            spread[place] = value
        return spread


FADE = 0.98
"""The factor by which earlier trees of a depth fade, for each new tree of that depth."""


class TreeSizes:
    """The mean number of nodes by depth; the depth itself until a tree has branched.

    Args:
        limit: the greatest depth with a mean of its own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sums: dict[int, list[float]] = {}  # depth -> [weight, nodes times weight]
        self._by_depth: Array | None = np.arange(limit + 1, dtype=float)

    def observe(self, depths: Sequence[int], nodes: Sequence[int] | None) -> None:
        """Adds the trees of a round.

        Args:
            depths: the depth of each row's tree.
            nodes: the nodes of each row's tree; None = all were chains.
        """
        if nodes is None and not self._sums:
            return
        for depth, count in zip(depths, depths if nodes is None else nodes, strict=True):
            if depth:
                weight, total = self._sums.get(min(depth, self._limit), [0.0, 0.0])
                self._sums[min(depth, self._limit)] = [FADE * weight + 1, FADE * total + count]
        self._by_depth = None

    @property
    def by_depth(self) -> Array:
        """The nodes of a tree of each depth 0..limit, [limit + 1].

        They are never fewer than the depth, nor than the nodes of a lower depth. Between observed
        depths the numbers lie on a straight line; beyond the deepest one each depth adds one node.
        """
        if self._by_depth is None:
            bases = sorted(self._sums)
            means = [self._sums[depth][1] / self._sums[depth][0] for depth in bases]
            depths = np.arange(self._limit + 1, dtype=float)
            nodes = np.interp(depths, [0, *bases], [0.0, *means]) + np.maximum(
                depths - bases[-1], 0
            )
            self._by_depth = np.maximum.accumulate(np.maximum(nodes, depths))
        return self._by_depth
