"""Draft lengths by measured costs: every round maximises expected committed tokens per second, no draft at all included.

The gain of drafting follows from estimates of acceptance (`shoal.lookahead.acceptance`), its cost from passes that were made
(`shoal.lookahead.costs`). Both are learned during a run and kept between runs of the same pair. `shoal.lookahead.plan` weighs them
before a round. While drafting, the drafter's own confidence decides row by row whether the next draft is worth its cost (after
DISCO, Mamou et al. 2024). The decision on a position is made before its token is drawn, so that the uniforms of a position never
decide whether they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import LIMIT, Array
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.plan import Plan, best_plan, remaining_weights
from shoal.types.requests import Row
from shoal.types.rounds import Outcome

FIRST_LENGTHS = (4, 0, 4, 0)
"""Draft lengths of the very first rounds, when no cost is known: each kind of round twice, as first passes are slow."""
MIN_ACCEPTANCE = 0.1
"""Acceptance below which not even the prompts are fed to the drafter."""
TRIAL_ROWS = 16
"""Rows assumed before a run is known."""
TRIAL_SHARE = 0.005
"""Share of the time that goes into trying again whether a rejected drafter has become useful."""
MAX_BACKOFF = 16
"""Most plain rounds before a new plan is made for as many rows."""


class Auto:
    """The controller that `lookahead="auto"` names.

    Attributes:
        limit, adaptive: see `shoal.lookahead.controller.Controller`. costs: what it knows of the pair.
    """

    limit = LIMIT
    adaptive = True

    def __init__(self, costs: PairCosts) -> None:
        self.costs = costs
        self._plain_rounds = 0  # since the last draft
        self._backoff = Backoff()
        self._begin([], np.ones(0))

    def _begin(self, rows: Sequence[Row], longest: Array) -> None:
        """Forgets the last round's drafting. longest: most drafts of each row, [rows]."""
        self._rows, self._longest = [row.serial for row in rows], longest
        self._plan: Plan | None = None
        self._confidence: list[Array] = []  # [rows] at each position looked at
        self._weights = np.ones(len(longest))

    @property
    def may_speculate(self) -> bool:
        """False for a pair with next to no acceptance, until it is time for another trial."""
        costs = self.costs
        learning = costs.rounds < len(FIRST_LENGTHS)
        return learning or costs.acceptance.mean >= MIN_ACCEPTANCE or self._trial_is_due(TRIAL_ROWS)

    # ── before a round ──────────────────────────────────────────────────────────────────────────────────────────────

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Longest draft of each row; drafting may stop earlier."""
        self._begin(rows, np.minimum([row.max_draft_length for row in rows], self.limit))
        self._longest = np.minimum(self._longest, self._longest_of_any(rows, waiting))
        return self._longest.tolist()

    def _longest_of_any(self, rows: Sequence[Row], waiting: int) -> int:
        if self.costs.rounds < len(FIRST_LENGTHS):
            return FIRST_LENGTHS[self.costs.rounds]
        if self._backoff.is_over(len(rows)):
            self._make_plan(np.array([0 if waiting else row.remaining for row in rows]))
            if self._plan is not None:
                self._backoff = Backoff()
                return self.limit
            self._backoff.extend(len(rows))
        return int(self._trial_is_due(len(rows)))

    def _make_plan(self, remaining: Array) -> None:
        """remaining: see `remaining_weights`."""
        acceptance = self.costs.acceptance
        self._next = acceptance.by_position(self._rows)
        survival = self._next.cumprod(axis=1)
        survival[np.arange(self.limit) >= self._longest[:, None]] = 0.0
        self._weights = remaining_weights(remaining, survival)
        self._plan = best_plan(survival, self._weights, self.costs)
        if self._plan is not None:
            self._by_confidence = acceptance.by_confidence(self._rows)

    def _trial_is_due(self, rows: int) -> bool:
        """Whether one draft per row takes a small share of the plain rounds since the last. Its cost includes feeding the drafter
        what was decoded meanwhile."""
        verify = self.costs.verify.table(2 * rows)
        cost = self.costs.seconds_of_step(rows) * (1 + self._plain_rounds / 4) + verify[2 * rows] - verify[rows]
        return self.costs.plain_seconds * TRIAL_SHARE > cost

    # ── while drafting ──────────────────────────────────────────────────────────────────────────────────────────────

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        """How long each row's draft may still become, given the drafter's highest probability at `position`: `position` if the
        draft there is not worth verifying, and at most one more if another step is not worth its time."""
        now = np.asarray(confidence)
        self._confidence[position:] = [now]
        if self._plan is None:
            return self._longest.tolist()
        if position == 0:
            self._survival, self._ends = self._weights, self._longest
        self._survival = self._survival * self._by_confidence(now) * (self._ends > position)
        draws = self._survival > self._plan.position_cost
        self._survival = np.where(draws, self._survival, 0.0)
        self._ends = np.where(draws, self._ends, np.minimum(self._ends, position))
        if position + 1 < self.limit:
            expected = self._survival * self._next[:, position + 1] * (self._ends > position + 1)
            if np.maximum(expected - self._plan.position_cost, 0.0).sum() <= self._plan.step_cost:
                self._ends = np.minimum(self._ends, position + 1)
        return self._ends.tolist()

    # ── after a round ───────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, outcome: Outcome) -> None:
        """Adds what the round cost and brought to what is known of the pair."""
        costs, rows = self.costs, len(outcome.drafted)
        costs.learn_verify([1 + drafted for drafted in outcome.drafted], outcome.seconds - outcome.seconds_drafting)
        if not outcome.steps:
            costs.learn_plain(outcome.seconds)
            self._plain_rounds += 1
            return
        step = outcome.seconds_drafting / outcome.steps
        if self._plain_rounds <= 1 or step < costs.seconds_of_step(
            rows
        ):  # else the drafter was fed what was decoded meanwhile
            costs.draft.observe(rows, step)
        costs.plain_seconds, self._plain_rounds = 0.0, 0
        if self._plan is not None:
            costs.calibrate(float(self._weights @ np.add(outcome.accepted, 1)) / outcome.seconds / self._plan.rate)
        confidence = np.array(self._confidence) if self._confidence else np.empty((0, rows))
        # Beyond a row's longest draft the drafter may have seen padding, which tells nothing about its drafts.
        confidence[np.arange(len(confidence))[:, None] >= self._longest] = np.nan
        costs.acceptance.learn(self._rows, np.array(outcome.drafted), np.array(outcome.accepted), confidence)


class Backoff:
    """Plain rounds without a plan, as planning takes time, too: more of them each time that a plan for as many rows finds
    nothing."""

    def __init__(self) -> None:
        self._rows = self._length = self._left = 0

    def is_over(self, rows: int) -> bool:
        """Counts a round; whether it is time for a plan."""
        self._left -= 1
        return rows != self._rows or self._left < 0

    def extend(self, rows: int) -> None:
        """A plan found nothing."""
        self._length = min(2 * self._length + 1, MAX_BACKOFF) if rows == self._rows else 1
        self._rows, self._left = rows, self._length
