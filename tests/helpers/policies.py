"""Lookahead policies that know their costs, or that are always sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from shoal.lookahead.auto import LEARNED
from shoal.lookahead.controller import Auto, Controller, EvenAuto, PairCosts
from shoal.lookahead.costs import CostCurve
from shoal.types.rounds import Outcome


def auto(verify: dict[int, float], draft: float, acceptance: float, packed: bool = True) -> Auto:
    """A controller that knows these costs and has seen this acceptance at every position."""
    pair_costs = PairCosts(packed)
    pair_costs.verify, pair_costs.draft, pair_costs.rounds = KnownCosts(verify), KnownCosts({1: draft, 64: draft}), 100
    pair_costs.start = pair_costs.draft
    seen = pair_costs.acceptance._positions
    seen._trials[:], seen._hits[:] = 50.0, 50.0 * acceptance
    return Auto(pair_costs)


class KnownCosts(CostCurve):
    """Costs that stay what they are, so that a run does not depend on the machine's mood."""

    def __init__(self, costs: Mapping[int, float]) -> None:
        super().__init__()
        for size, seconds in costs.items():
            super().observe(size, seconds)

    def observe(self, size: int, seconds: float) -> float:
        return self.seconds(size)


def known_costs() -> PairCosts:
    """Costs of a target whose pass costs little more for many positions, and of a drafter ten times as cheap."""
    pair_costs = PairCosts(packed=False)
    pair_costs.verify, pair_costs.draft = KnownCosts({1: 1.0, 100: 1.5}), KnownCosts({1: 0.1, 16: 0.1})
    pair_costs.start = pair_costs.draft
    return pair_costs


def with_known_costs() -> Auto:
    """`Auto` with known costs."""
    return Auto(known_costs())


def even_with_known_costs() -> EvenAuto:
    """`EvenAuto` with known costs, which has made its first plans."""
    pair_costs = known_costs()
    pair_costs.rounds = LEARNED + 1
    return EvenAuto(pair_costs)


LIMIT = 7


class Confident(Controller):
    """Drafts end where the drafter is less sure than `least`, all of them where few rows go on. Notes what it is asked and told.

    Args:
        ragged: lengths 0 to 7 by row and round, sometimes 0 for all.
    """

    limit, adaptive = LIMIT, True

    def __init__(self, least: float, ragged: bool = False, few: int = 1) -> None:
        self.least, self.ragged, self.few = least, ragged, few
        self.round, self.open, self.asked, self.told = 0, list[bool](), list[Any](), list[Outcome]()

    def lengths(self, rows: Sequence[Any], waiting: int) -> list[int]:
        self.round += 1
        own = [(self.round * (2 + b)) % (LIMIT + 1) if self.ragged else LIMIT for b in range(len(rows))]
        self.ends = [min(length, row.max_draft_length) for length, row in zip(own, rows, strict=True)]
        self.asked.append([])
        return self.ends

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        if position == 0:
            self.asked[-1] = []  # from the start
            self.kept = list(self.ends)
        drafted_for = [sure if end > position else nan for sure, end in zip(confidence, self.ends, strict=True)]
        self.asked[-1].append((position, drafted_for))  # of other rows the drafter has seen padding
        self.kept = [
            end if sure >= self.least or end < position else position
            for end, sure in zip(self.kept, confidence, strict=True)
        ]
        if sum(end > position for end in self.kept) < self.few:
            self.kept = [min(end, position + 1) for end in self.kept]
        return self.kept

    def learn(self, outcome: Outcome) -> None:
        self.told.append(outcome)
