"""How likely drafts are to be accepted: by draft position, by row, by the drafter's own confidence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LIMIT = 16
"""Longest draft of `lookahead="auto"`: beyond, even a good drafter's next token is rarely committed."""


class Frequencies:
    """Fading hit rates of several bins, each drawn towards a prior that counts as `weight` trials."""

    FADE = 0.98

    def __init__(self, prior: Array, weight: float) -> None:
        self._prior, self._weight = prior, weight
        self._hits, self._trials = np.zeros_like(prior), np.zeros_like(prior)

    def add(self, bins: npt.NDArray[np.intp], hits: Array) -> None:
        """One round's trials: the bin of each, and its outcome in 0..1."""
        self._hits *= self.FADE
        self._trials *= self.FADE
        np.add.at(self._hits, bins, hits)
        np.add.at(self._trials, bins, 1.0)

    @property
    def mean(self) -> float:
        """Over all bins."""
        return float((self._hits.sum() + self._weight * self._prior.mean()) / (self._trials.sum() + self._weight))

    def rates(self, prior: Array | float | None = None) -> Array:
        """Hit rate of each bin; `prior`: that of a bin without trials."""
        prior = self._prior if prior is None else prior
        return (self._hits + self._weight * prior) / (self._trials + self._weight)


class Acceptance:
    """Running estimates of the probability that a draft is accepted, given that those before it in its round were.

    Learns only from positions that were decided: up to and including a row's first rejection.

    Args:
        limit: draft positions kept apart.
    """

    PRIOR, PRIOR_TRIALS, CONFIDENCE_TRIALS = 0.7, 8.0, 4.0
    """Acceptance expected of an unknown pair; the number of trials that this prior counts as; the number of trials that the prior
    "acceptance equals confidence" counts as. With fewer, a few rejected drafts of a single row would end speculation."""
    EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.995])
    """Bins of the drafter's confidence."""
    ROW_STEP, ROW_FADE = 0.25, 0.97
    """How far one outcome moves a row's own log-odds, and how they fade."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._positions = Frequencies(np.full(limit, self.PRIOR), self.PRIOR_TRIALS)
        middles = (np.concatenate([[0.0], self.EDGES]) + np.concatenate([self.EDGES, [1.0]])) / 2
        self._confidences = Frequencies(middles, self.CONFIDENCE_TRIALS)
        self._rows: dict[Hashable, float] = {}

    @property
    def mean(self) -> float:
        """Over all positions and rows."""
        return self._positions.mean

    def by_position(self, rows: Sequence[Hashable]) -> Array:
        """[rows, limit]: conditional acceptance at each draft position of each row."""
        return _shifted(self._positions.rates(self._positions.mean)[None, :], self._offsets(rows)[:, None])

    def by_confidence(self, rows: Sequence[Hashable]) -> Callable[[Array], Array]:
        """confidence [rows] -> acceptance [rows] of drafts that the drafter draws with it (its highest probability)."""
        table = _shifted(self._confidences.rates(), self._offsets(rows)[:, None])  # made once a round, read at every step
        every = np.arange(len(rows))
        return lambda confidence: table[every, self._bins(confidence)]

    def learn(self, rows: Sequence[Hashable], drafted: Array, accepted: Array, confidence: Array) -> None:
        """Learns from a round's outcome.

        Args:
            drafted, accepted: tokens per row, [rows]. confidence: [steps, rows], steps >= max(drafted); may hold one more
                position per row than it drafted (the drafter made the step, and its draft was not taken): that position counts with
                its estimated acceptance, so that the estimates by position are those of all text, not of confident places only.
                NaN where the drafter made no step.
                [0, rows] if unknown.
        """
        self._rows = {row: self._rows.get(row, 0.0) * self.ROW_FADE for row in rows}
        width = max(len(confidence), int(drafted.max(initial=0)))
        place = np.arange(width)[:, None]
        decided = (place < drafted) & (place <= accepted) & (place < self.limit)
        places, which = decided.nonzero()
        hits = (places < accepted[which]).astype(float)
        if not len(confidence):
            self._positions.add(places, hits)
            return
        bins = self._bins(confidence)
        expected = _shifted(self._confidences.rates()[bins], self._offsets(rows))
        self._confidences.add(bins[places, which], hits)
        for row, residual in zip(which.tolist(), (hits - expected[places, which]).tolist(), strict=True):
            self._rows[rows[row]] += self.ROW_STEP * residual
        looked = (place == drafted) & (drafted == accepted) & (place < self.limit) & np.isfinite(confidence)
        more, whose = looked.nonzero()
        self._positions.add(np.concatenate([places, more]), np.concatenate([hits, expected[more, whose]]))

    def _offsets(self, rows: Sequence[Hashable]) -> Array:
        return np.array([self._rows.get(row, 0.0) for row in rows])

    def _bins(self, confidence: Array) -> npt.NDArray[np.intp]:
        return np.searchsorted(self.EDGES, confidence)


def _shifted(probability: Array, offset: Array) -> Array:
    """Probabilities moved by that much in log-odds."""
    odds = np.exp(offset) * probability / np.maximum(1 - probability, 1e-6)
    return odds / (1 + odds)
