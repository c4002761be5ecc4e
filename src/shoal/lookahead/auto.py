"""Draft lengths that know their price: every round maximises expected committed tokens per second, 0 drafts included.

The value of drafting follows from estimates of acceptance, the price from passes that were made; both are learned as the run goes
and kept between runs of the same pair. A plan takes draft positions of all rows in the order of their probability of being
committed (the greedy rule of DySpec's tree builder, Xiong et al. 2024, with the whole batch as one tree) and ends where tokens per
second are highest. That rate is what time is worth; so the plan puts a price on a position and on a drafter step (Dinkelbach 1967,
on ratios). While drafting, the drafter's own confidence decides row by row whether the next draft is worth its price (after DISCO,
Mamou et al. 2024): the decision on a position is made before its token is drawn, so a row's luck at a position never decides
whether that luck is used.

Once nothing waits for a slot, the run is as long as its slowest row: a token then counts for more in rows that are further from
their end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import Acceptance, Array
from shoal.lookahead.costs import CostCurve
from shoal.types.requests import Row
from shoal.types.rounds import Outcome

LIMIT = 16
"""Longest draft: the survival of even a good drafter's next token is small beyond."""
OPENING = (4, 0, 4, 0)
"""Draft lengths of the very first rounds, when no price is known: each kind twice, as first passes are slow."""
MIN_ACCEPTANCE = 0.1
"""Acceptance below which not even the prompts are fed to the drafter."""
TRIAL_ROWS = 16
"""Rows to reckon with before a run is known."""
TRIAL_SHARE = 0.005
"""Share of the time that goes into asking again whether a hopeless drafter has become useful."""
CALIBRATION_SHARE = 0.02
"""What one round's result counts for when plans are compared with what came of them; what is learned so fades in plain rounds."""
MIN_CALIBRATION, MAX_CALIBRATION = 0.5, 1.2
"""Prices that are off by more say nothing about plans."""
MAX_BACKOFF = 16
"""Most plain rounds before a new plan is made for as many rows."""


class PairCosts:
    """What is known of a pair on this machine; outlives the engines that use it.

    Attributes:
        acceptance: of drafts. verify: seconds of a round without its drafting, by positions of the target's pass.
        draft: seconds of a drafter step, by rows. packed: a pass costs its real positions, not rows times the longest.
        idle_seconds: spent without drafting since the last draft. rounds: heard of so far.
        calibration: what rounds with drafts bring per second, over what their plans promised; plans are corrected by it.
    """

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        self.acceptance = Acceptance(LIMIT)
        self.verify, self.draft = CostCurve(), CostCurve()
        self.idle_seconds, self.rounds, self.calibration = 0.0, 0, 1.0


class Auto:
    """The controller. See the module's text.

    Attributes:
        limit: longest draft. adaptive: lengths depend on more than committed tokens (see `shoal.lookahead.controller.Controller`).
    """

    limit = LIMIT
    adaptive = True

    def __init__(self, pair_costs: PairCosts) -> None:
        self.costs = pair_costs
        self._idle_rounds = 0
        self._backoff = Backoff()
        self._begin([], np.ones(0))

    def _begin(self, rows: Sequence[Row], room: Array) -> None:
        """Forgets the last round's drafting."""
        self._rows, self._room, self._rate = [row.serial for row in rows], room, 0.0
        self._confidence: list[Array] = []
        self._weights = np.ones(len(room))

    @property
    def may_speculate(self) -> bool:
        """False for a pair known to be hopeless, until it is time to ask again."""
        costs = self.costs
        return costs.rounds < len(OPENING) or costs.acceptance.mean >= MIN_ACCEPTANCE or self._trial_is_due(TRIAL_ROWS)

    # ── before a round ──────────────────────────────────────────────────────────────────────────────────────────────

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Longest draft of each row; drafting may stop earlier."""
        self._begin(rows, np.minimum([row.max_draft_length for row in rows], self.limit))
        self._room = np.minimum(self._room, self._most(rows, waiting))
        return self._room.tolist()

    def _most(self, rows: Sequence[Row], waiting: int) -> int:
        """Longest draft of any row."""
        if self.costs.rounds < len(OPENING):
            return OPENING[self.costs.rounds]
        if self._backoff.over(len(rows)):
            if self._plan(np.array([0 if waiting else row.remaining for row in rows])):
                self._backoff = Backoff()
                return self.limit
            self._backoff.again(len(rows))
        return int(self._trial_is_due(len(rows)))

    def _plan(self, left: Array) -> bool:
        """Finds the positions that are worth verifying and sets the prices; False = plain decoding.

        Args:
            left: tokens that each row may still get; zeros if others wait for its slot.
        """
        rows = len(left)
        self._next = self.costs.acceptance.by_position(self._rows)
        survival = self._next.cumprod(axis=1)
        survival[np.arange(self.limit) >= self._room[:, None]] = 0.0
        if left.any():
            rounds = left / (1 + survival.sum(axis=1))
            self._weights = rounds / rounds.mean()
        worth = (self._weights[:, None] * survival).ravel()
        order = np.argsort(-worth, kind="stable")
        steps = np.maximum.accumulate(order % self.limit) + 1
        drafts = np.arange(1, len(order) + 1)
        sizes = rows + (drafts if self.costs.packed else rows * steps)
        verify = self.costs.verify.table(rows * (self.limit + 1))
        step = self._seconds_of_step(rows)
        rates = (rows + worth[order].cumsum()) / (verify[sizes] + step * steps)
        best = int(rates.argmax())
        if self.costs.calibration * rates[best] <= rows / verify[rows]:
            return False
        self._rate = float(self.costs.calibration * rates[best])
        # Over all of the way from plain decoding: between neighbours most of the difference is noise, and beyond lies guesswork.
        self._position_price = self._rate * float((verify[sizes[best]] - verify[rows]) / (sizes[best] - rows))
        self._step_price = self._rate * step
        self._accepting = self.costs.acceptance.by_confidence(self._rows)
        return True

    def _seconds_of_step(self, rows: int) -> float:
        return float(self.costs.draft.table(rows)[rows]) if self.costs.draft.known else 0.0

    def _trial_is_due(self, rows: int) -> bool:
        """Catching up with what was decoded meanwhile is part of the price."""
        verify = self.costs.verify.table(2 * rows)
        price = self._seconds_of_step(rows) * (1 + self._idle_rounds / 4) + verify[2 * rows] - verify[rows]
        return self.costs.idle_seconds * TRIAL_SHARE > price

    # ── while drafting ──────────────────────────────────────────────────────────────────────────────────────────────

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        """How long each row's draft may still become, given the drafter's highest probability at `position`: no longer than
        that if the draft there is not worth verifying, and one more if another step is not worth its time."""
        now = np.asarray(confidence)
        self._confidence[position:] = [now]
        if not self._rate:
            return self._room.tolist()
        if position == 0:
            self._survival, self._ends = self._weights, self._room
        self._survival = self._survival * self._accepting(now) * (self._ends > position)
        draws = self._survival > self._position_price
        self._survival = np.where(draws, self._survival, 0.0)
        self._ends = np.where(draws, self._ends, np.minimum(self._ends, position))
        if position + 1 < self.limit:
            expected = self._survival * self._next[:, position + 1] * (self._ends > position + 1)
            if np.maximum(expected - self._position_price, 0.0).sum() <= self._step_price:
                self._ends = np.minimum(self._ends, position + 1)
        return self._ends.tolist()

    # ── after a round ───────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, outcome: Outcome) -> None:
        """Hears what the round cost and brought."""
        costs = self.costs
        costs.rounds += 1
        fed = [1 + drafted for drafted in outcome.drafted]
        positions = sum(fed) if costs.packed else len(fed) * max(fed)
        costs.verify.observe(positions, outcome.seconds - outcome.seconds_drafting)
        if not outcome.steps:
            costs.idle_seconds += outcome.seconds
            costs.calibration += CALIBRATION_SHARE * (1 - costs.calibration)
            self._idle_rounds += 1
            return
        step = outcome.seconds_drafting / outcome.steps
        if self._idle_rounds <= 1 or step < self._seconds_of_step(len(fed)):  # else much of it was catching up
            costs.draft.observe(len(fed), step)
        costs.idle_seconds, self._idle_rounds = 0.0, 0
        if self._rate:
            brought = float(self._weights @ np.add(outcome.accepted, 1)) / outcome.seconds / self._rate
            corrected = costs.calibration * (1 + CALIBRATION_SHARE * (min(max(brought, 0.5), 2.0) - 1))
            costs.calibration = min(max(corrected, MIN_CALIBRATION), MAX_CALIBRATION)
        confidence = np.array(self._confidence) if self._confidence else np.empty((0, len(fed)))
        # Beyond a row's room the drafter may have seen padding: that says nothing of its drafts.
        confidence[np.arange(len(confidence))[:, None] >= self._room] = np.nan
        costs.acceptance.learn(self._rows, np.array(outcome.drafted), np.array(outcome.accepted), confidence)


class Backoff:
    """Plain rounds without a plan, more of them each time that a plan for as many rows finds nothing: planning costs, too."""

    def __init__(self) -> None:
        self._rows = self._length = self._left = 0

    def over(self, rows: int) -> bool:
        """Time for a plan."""
        self._left -= 1
        return rows != self._rows or self._left < 0

    def again(self, rows: int) -> None:
        """A plan found nothing."""
        self._length = min(2 * self._length + 1, MAX_BACKOFF) if rows == self._rows else 1
        self._rows, self._left = rows, self._length
