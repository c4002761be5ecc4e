"""Where the drafts of a round end: while drafting, the drafter's own confidence decides row by row
whether the next draft is worth its cost (after DISCO, Mamou et al. 2024).

The decision on a position is made before its token is drawn, so that the uniforms of a position
never decide whether they are used. It is asked between two steps of a drafter, which may take a
tenth of a millisecond each: for the rows of a batch a loop is faster than operations on arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from shoal.lookahead.acceptance import Acceptance
from shoal.lookahead.plan import Plan


class Stopping:
    """Ends drafts by a plan, in as many rounds as the plan holds for.

    Args:
        plan: what a position and a step must bring.
        weights: [rows], what a committed token of the row counts.
        by_confidence: see `Acceptance.by_confidence`.
        by_position: [rows, positions], see `Acceptance.by_position`.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[float],
        by_confidence: Sequence[Sequence[float]],
        by_position: Sequence[Sequence[float]],
    ) -> None:
        self.plan = plan
        self._weights, self._by_confidence, self._by_position = weights, by_confidence, by_position
        self._ends: list[int] = []
        self._open: list[
            float
        ] = []  # of each row: its weight times the probability that all drafts so far are accepted

    def keep(self, places: Sequence[int]) -> None:
        """Only these rows are left, in this order."""
        self._weights = [self._weights[place] for place in places]
        self._by_confidence = [self._by_confidence[place] for place in places]
        self._by_position = [self._by_position[place] for place in places]

    def begin(self, longest: Sequence[int]) -> None:
        """A round, or its drafting, begins."""
        self._ends = list(longest)
        self._open = [
            weight if end > 0 else 0.0 for weight, end in zip(self._weights, longest, strict=True)
        ]

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        """See `shoal.lookahead.auto.Auto.shorten`."""
        ends, survivals, edges, cost = (
            self._ends,
            self._open,
            Acceptance.EDGES,
            self.plan.position_cost,
        )
        after, worth = position + 1, 0.0
        for row, sure in enumerate(confidence):
            survival = survivals[row]
            if not survival:
                continue
            survival *= self._by_confidence[row][bisect_left(edges, sure)]
            if survival <= cost:
                ends[row], survivals[row] = position, 0.0
            elif ends[row] <= after:
                survivals[row] = 0.0
            else:
                survivals[row], gain = survival, survival * self._by_position[row][after] - cost
                worth += gain if gain > 0 else 0.0
        if worth <= self.plan.step_cost:
            self._ends = ends = [min(end, after) for end in ends]
        return ends
