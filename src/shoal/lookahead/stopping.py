"""The ends of the drafts of a round: the drafter's confidence decides on each next draft.

After DISCO, Mamou et al. 2024: drafting goes on in a row while the next draft is worth its cost.
The decision on a position is made before its token is drawn, so the uniforms of a position never
decide whether they are used. It is made between two steps of a drafter, which may take a tenth of a
millisecond each: for the rows of a batch a loop is faster than operations on arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from shoal.lookahead.acceptance import Acceptance
from shoal.lookahead.plan import RoundPlan


class Stopping:
    """A rule that ends drafts by a plan, in as many rounds as the plan is kept.

    Args:
        plan: the tokens that a position and a step must bring.
        weights: [rows], the weight of a committed token of each row.
        by_confidence: see `Acceptance.by_confidence`.
        by_position: [rows, positions], see `Acceptance.by_position`.
    """

    def __init__(
        self,
        plan: RoundPlan,
        weights: Sequence[float],
        by_confidence: Sequence[Sequence[float]],
        by_position: Sequence[Sequence[float]],
    ) -> None:
        self.plan = plan
        self._weights, self._by_confidence, self._by_position = weights, by_confidence, by_position
        self._ends: list[int] = []
        # For each row, its weight times the probability that all drafts so far are accepted.
        self._open: list[float] = []

    def keep(self, places: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self._weights = [self._weights[place] for place in places]
        self._by_confidence = [self._by_confidence[place] for place in places]
        self._by_position = [self._by_position[place] for place in places]

    def begin(self, longest: Sequence[int]) -> None:
        """Begins a round, or its drafting."""
        self._ends = list(longest)
        self._open = [
            weight if end > 0 else 0.0 for weight, end in zip(self._weights, longest, strict=True)
        ]

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        """Shortens drafts, see `shoal.lookahead.auto.Auto.shorten`."""
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
