"""The plan of one round: the number of drafts of a batch that are worth their cost.

A plan takes draft positions of all rows in the order of their probability of being committed (the
greedy rule of DySpec's tree builder, Xiong et al. 2024, with the whole batch as one tree) and ends
at the highest number of expected tokens per second. A position of a tree costs the nodes by which
trees of its depth exceed trees of the depth before. The rate converts seconds into tokens, so the
plan says how many tokens a verified position and a drafter step must bring (Dinkelbach 1967, on
ratios).

The drafter's confidence decides on each next draft of a round. After DISCO, Mamou et al. 2024:
drafting goes on in a row while the next draft is worth its cost. The decision on a position is made
before its token is drawn, so the uniforms of a position never decide whether they are used. It is
made between two steps of a drafter, which may take a tenth of a millisecond each: for the rows of a
batch a loop is faster than operations on arrays.

A drafter computes no tokens of a row until it drafts for the row. How many it lacks, as its
controller sees it, is a cost of the plan, too (`Unfed`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.lookahead.acceptance import LIMIT, Acceptance, Array
from shoal.lookahead.costs import PairCosts
from shoal.types.requests import Row

TRIAL_ROWS = 2
"""The number of rows that a trial drafts for: the drafter computes the prompts of these only."""
DOUBTED_PRICE = 2.0
"""The most that a trial is believed to cost, in plain rounds, while its cost is doubted.

Otherwise a few slow first trials would put off the next for thousands of rounds. A trial that costs
more is paid off afterwards.
"""


class Unfed:
    """The tokens that must be computed before the next draft.

    The counts hold for a draft model (`shoal.drafting.draft_slots`). Other drafters need 0 seconds
    for these tokens.
    """

    def __init__(self) -> None:
        # By serial number: the tokens that the drafter had of a row when it last drafted for it.
        self._tokens: dict[int, int] = {}
        # The rows that the last round drafted for; the drafter has all their tokens but the last.
        self._current: set[int] = set()
        self._groups: dict[int, int] = {}  # the groups of the rows with tokens

    def change(self, rows: Sequence[Row]) -> None:
        """Forgets rows that have left."""
        serials = {row.serial for row in rows}
        self._current &= serials
        self._tokens = {
            serial: count for serial, count in self._tokens.items() if serial in serials
        }
        self._groups = {
            serial: group for serial, group in self._groups.items() if serial in serials
        }

    def tokens(self, rows: Sequence[Row]) -> int:
        """Returns the number of tokens that these rows lack; a shared prompt counts once."""
        groups, lacking = set(self._groups.values()), 0
        for row in rows:
            if row.serial in self._current:
                continue
            cached = self._tokens.get(row.serial)
            if cached is None:
                cached = row.prompt_length if row.group in groups else 0
                groups.add(row.group)
            lacking += len(row.tokens) - cached
        return lacking

    def cheapest(self, rows: Sequence[Row], most: int) -> Sequence[Row]:
        """Returns the rows that may draft and lack the fewest tokens."""
        return sorted(
            (row for row in rows if row.max_draft_length), key=lambda row: self.tokens([row])
        )[:most]

    def feed(self, rows: Sequence[Row]) -> int:
        """Notes that a round drafts for these rows, and no others.

        Returns:
            The number of tokens that must be computed before.
        """
        if len(self._current) == len(rows):
            return 0
        lacking = self.tokens(rows)
        self._current = {row.serial for row in rows}
        self._groups |= {row.serial: row.group for row in rows}
        return lacking

    def leave(self, rows: Sequence[Row]) -> None:
        """Notes that a round does not draft for all of these rows."""
        if self._current:
            self._tokens |= {
                row.serial: len(row.tokens) for row in rows if row.serial in self._current
            }
            self._current = set()


TYPICAL = 4
"""The draft length at which the costs of one row and of all rows are compared."""
STEP_MARGIN = 1.3
"""The margin of a drafter step over the average plan, in tokens for the same time.

Long drafts of a few rows leave the other rows behind, which costs time in the end; by
`benchmarks/virtual.py`.
"""
HORIZON = 128
"""The number of tokens of a row within which a plan must bring back the work done before it."""


INVESTMENT_MARGIN = 2.0
"""The factor by which a plan must bring that work back.

The time is spent at once, and the gain is an estimate.
"""


class DraftPlan(Protocol):
    """A plan of rounds with drafts. Rows of it may end before it does."""

    @property
    def rate(self) -> float:
        """The expected committed tokens per second."""

    @property
    def longest(self) -> int:
        """The longest draft of a row."""

    @property
    def weights(self) -> Sequence[float] | None:
        """The weight of a committed token of each row; None = all count alike."""

    def keep(self, places: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""


@dataclass(frozen=True)
class RoundPlan:
    """A round with drafts.

    Attributes:
        rate: the expected committed tokens per second, with the weights of the plan.
        position_cost: the tokens that could be committed elsewhere in the time of one verified
            position, of trees one depth.
        step_cost: the tokens that could be committed elsewhere in the time of one drafter step.
    """

    rate: float
    position_cost: float
    step_cost: float


def best_plan(survival: Array, weights: Array, costs: PairCosts) -> RoundPlan | None:
    """Returns the plan with the most expected tokens per second; None if plain decoding has more.

    Args:
        survival: [rows, positions], the probability that a draft and all before it are accepted; 0
            at positions that may not be drafted.
        weights: [rows], the weight of a committed token of each row.
    """
    rows, limit = survival.shape
    gains = (weights[:, None] * survival).ravel()
    order = np.argsort(-gains, kind="stable")
    steps = np.maximum.accumulate(order % limit) + 1
    drafts, nodes = np.arange(1, len(order) + 1), costs.trees.by_depth
    columns = np.diff(nodes)[order % limit].cumsum() if costs.packed else rows * nodes[steps]
    positions = rows + np.ceil(columns - 1e-6).astype(int)
    verify = costs.verify.table(int(positions.max()))
    start, step = costs.seconds_starting(rows), costs.seconds_step(rows)
    rates = (rows + gains[order].cumsum()) / (verify[positions] + start + step * (steps - 1))
    # The cost of larger passes than any so far is unknown: a plan may grow by doubling.
    rates[positions > 2 * max(costs.verify.largest, rows)] = 0.0
    best = int(rates.argmax())
    rate = costs.calibration(rows) * float(rates[best])
    plain = costs.seconds_plain(rows)
    if rate <= rows / plain:
        return None
    # The slope from plain decoding to the plan: between neighbouring sizes most of the difference
    # is noise, and beyond the plan nothing was measured.
    drafted = drafts[best] if costs.packed else rows * steps[best]
    seconds_per_position = (verify[positions[best]] - plain) / drafted
    return RoundPlan(rate, rate * float(seconds_per_position), STEP_MARGIN * rate * step)


def acceptance_of(rows: Sequence[Row], costs: PairCosts) -> tuple[Array, Array]:
    """Returns the acceptance at each position and its running product, [rows, limit] each.

    The product is the probability that a draft and all before it are accepted.
    """
    longest = np.array([row.max_draft_length for row in rows])
    following = costs.acceptance.by_position([row.serial for row in rows])
    survival = following.cumprod(axis=1)
    survival[np.arange(LIMIT) >= longest[:, None]] = 0.0
    return following, survival


def repays(rate: float, rows: Sequence[Row], unfed: Unfed, costs: PairCosts) -> bool:
    """Returns True if the plan brings back the seconds that the drafter needs before it can begin.

    Only the next `HORIZON` tokens of each row count.

    Args:
        rate: the tokens per second of the plan.
        rows: the rows of the plan. Most end before they have all tokens that they may get.
        unfed: the tokens that the drafter has not computed.
    """
    remaining = np.array([row.remaining for row in rows])
    preparing = costs.seconds_preparing(unfed.tokens(rows))
    plain = costs.seconds_plain(len(remaining)) / len(remaining)
    return (
        float(np.minimum(remaining, HORIZON).sum()) * (plain - 1 / rate)
        >= INVESTMENT_MARGIN * preparing
    )


def trial_is_due(rows: int, unfed: int, costs: PairCosts) -> bool:
    """Returns True if there is credit for drafts of a few rows.

    Args:
        unfed: the number of tokens that the drafter has to compute first.
    """
    plain, nodes = costs.seconds_plain(rows), math.ceil(costs.trees.by_depth[1])
    cost = (
        costs.seconds_starting(rows)
        + costs.verify.seconds(rows + (TRIAL_ROWS if costs.packed else rows) * nodes)
        - plain
    )
    if costs.starting.doubts(rows):
        cost = min(cost, DOUBTED_PRICE * plain)
    return costs.credit.allows_trial(cost + costs.seconds_preparing(unfed), plain)


def remaining_weights(remaining: Array, survival: Array, costs: PairCosts) -> Array:
    """Returns the weight of a committed token of each row, [rows], 1 on average.

    These are the weights for rounds in which no row waits for a slot. A committed token brings its
    row's end nearer by 1 / (tokens per round). One round less saves the row's marginal cost in the
    batch, or, for the row that ends last, a whole round of a single row, which costs many times as
    much. Each row may be the last one, with a probability that grows with the distance from its
    end.

    Args:
        remaining: [rows], the tokens that each row may still get, at least 1.
        survival: see `best_plan`.
    """
    rows, speed = len(remaining), 1 + survival.sum(axis=1)
    rounds = remaining / speed
    # Numbers of rounds deviate by their square roots.
    last = np.exp((rounds - rounds.max()) / np.sqrt(rounds.max()))
    typical = 1 + math.ceil(costs.trees.by_depth[TYPICAL])
    alone, together = (
        costs.verify.seconds(typical * n) + costs.seconds_drafting(n, TYPICAL) for n in (1, rows)
    )
    beside = max((together - alone) / max(rows - 1, 1), 0.01 * alone)
    weights = (beside + alone * last / last.sum()) / speed
    return np.asarray(weights / weights.mean())


class Stopping:
    """A rule that ends drafts by a plan, in all rounds for which the plan is kept.

    Args:
        plan: the tokens that a position and a step must bring.
        weights: [rows], the weight of a committed token of each row.
        by_confidence: see `Acceptance.by_confidence`.
        by_position: [rows, positions], see `Acceptance.by_position`.

    Attributes:
        weights: as given, of the rows that are left.
        longest: the longest draft of a row.
    """

    longest = LIMIT

    def __init__(
        self,
        plan: RoundPlan,
        weights: Sequence[float],
        by_confidence: Sequence[Sequence[float]],
        by_position: Sequence[Sequence[float]],
    ) -> None:
        self.plan = plan
        self.weights, self._by_confidence, self._by_position = weights, by_confidence, by_position
        self._ends: list[int] = []
        # For each row, its weight times the probability that all drafts so far are accepted.
        self._open: list[float] = []

    @property
    def rate(self) -> float:
        """The expected committed tokens per second."""
        return self.plan.rate

    def keep(self, places: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.weights = [self.weights[place] for place in places]
        self._by_confidence = [self._by_confidence[place] for place in places]
        self._by_position = [self._by_position[place] for place in places]

    def begin(self, longest: Sequence[int]) -> None:
        """Begins a round, or its drafting."""
        self._ends = list(longest)
        self._open = [
            weight if end > 0 else 0.0 for weight, end in zip(self.weights, longest, strict=True)
        ]

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        """Shortens drafts, see `shoal.lookahead.auto.Auto.shorten`."""
        ends = self._ends
        survivals = self._open
        edges = Acceptance.EDGES
        cost = self.plan.position_cost
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
