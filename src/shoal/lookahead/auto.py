"""Draft lengths that know their price: every round maximises expected committed tokens per second, 0 drafts included.

The value of drafting follows from estimates of acceptance, the price from passes that were made; both are learned as the run goes
and kept between runs of the same pair. A plan spreads the verified positions over rows by their probability of being committed
(the greedy rule of DySpec's tree builder, Xiong et al. 2024, with the whole batch as one tree). While drafting, the drafter's own
confidence decides row by row whether the next draft is worth its price (after DISCO, Mamou et al. 2024): the decision on a
position is made before its token is drawn, so a row's luck at a position never decides whether that luck is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.lookahead.acceptance import Acceptance, Array
from shoal.lookahead.costs import Curve
from shoal.request import Row
from shoal.round import Outcome

LIMIT = 16
"""Longest draft: the survival of even a good drafter's next token is small beyond."""
OPENING = (4, 0, 4, 0)
"""Draft lengths of the very first rounds, when no price is known: each kind twice, as first passes are slow."""
HOPELESS = 0.1
"""Acceptance below which not even the prompts are fed to the drafter."""
TRIAL_ROWS = 16
"""Rows to reckon with before a run is known."""
TRUTH_SHARE = 0.05
"""What one round's result counts for when plans are compared with what came of them."""
LEAST_TRUTH, MOST_TRUTH = 0.5, 1.2
"""Prices that are off by more say nothing about plans."""
TRIAL_SHARE = 0.005
"""Share of the time that goes into asking again whether a hopeless drafter has become useful."""


class Knowledge:
    """What is known of a pair on this machine; outlives the engines that use it.

    Attributes:
        acceptance: of drafts. verify: seconds of a round without its drafting, by positions of the target's pass.
        draft: seconds of a drafter step, by rows. packed: a pass costs its real positions, not rows times the longest.
        idle_seconds: spent without drafting since the last draft. rounds: heard of so far.
        truth: what rounds with drafts bring per second, over what their plans promised; plans are corrected by it.
    """

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        self.acceptance = Acceptance(LIMIT)
        self.verify, self.draft = Curve(), Curve()
        self.idle_seconds, self.rounds, self.truth = 0.0, 0, 1.0


class Auto:
    """The controller. See the module's text.

    Attributes:
        limit: longest draft. adaptive: lengths depend on more than committed tokens (see `shoal.lookahead.Controller`).
    """

    limit = LIMIT
    adaptive = True

    def __init__(self, knowledge: Knowledge) -> None:
        self.known = knowledge
        self._confidence: list[Array] = []
        self._idle_rounds = 0
        self._rate = self._position_price = self._step_price = 0.0
        self._survival = self._room = np.ones(0)
        self._rows: Sequence[int] = ()
        self._accepting = knowledge.acceptance.by_confidence(self._rows)

    @property
    def hopeful(self) -> bool:
        """False for a pair known to be hopeless, until it is time to ask again."""
        known = self.known
        return known.rounds < len(OPENING) or known.acceptance.mean >= HOPELESS or self._trial_is_due(TRIAL_ROWS)

    # ── before a round ──────────────────────────────────────────────────────────────────────────────────────────────

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Longest draft of each row; drafting may stop earlier."""
        self._rows, self._confidence, self._survival = [id(row) for row in rows], [], np.ones(len(rows))
        self._accepting = self.known.acceptance.by_confidence(self._rows)
        room = self._room = np.minimum([row.room for row in rows], self.limit)
        if self.known.rounds < len(OPENING):
            self._rate = 0.0
            return np.minimum(room, OPENING[self.known.rounds]).tolist()
        if self._plan(room):
            return room.tolist()
        if self._trial_is_due(len(rows)):
            self._rate = 0.0
            return np.minimum(room, 1).tolist()
        return [0] * len(rows)

    def _plan(self, room: Array) -> bool:
        """Finds the best number of drafter steps and verified positions; sets the prices; False = plain decoding."""
        rows = len(room)
        survival = self.known.acceptance.by_position(self._rows).cumprod(axis=1)
        survival[np.arange(self.limit) >= room[:, None]] = 0.0
        order = np.argsort(-survival, axis=None, kind="stable")
        steps = np.arange(self.limit + 1)
        inside = (order % self.limit) < steps[:, None]
        tokens = rows + np.where(inside, survival.ravel()[order], 0.0).cumsum(axis=1)
        drafts = inside.cumsum(axis=1)
        positions = rows + (drafts if self.known.packed else np.broadcast_to(rows * steps[:, None], drafts.shape))
        verify = self.known.verify.table(rows * (self.limit + 1))
        self._step_price = self._seconds_of_step(rows)
        rate = tokens / (verify[positions] + steps[:, None] * self._step_price)
        plain = rows / verify[rows]
        best = np.unravel_index(rate.argmax(), rate.shape)
        if self.known.truth * rate[best] <= plain:
            return False
        size = int(positions[best])
        self._rate = float(self.known.truth * rate[best])
        # Over all of the way from plain decoding: between neighbours most of the difference is noise, and beyond lies guesswork.
        self._position_price = self._rate * float(verify[size] - verify[rows]) / max(size - rows, 1)
        return True

    def _seconds_of_step(self, rows: int) -> float:
        return float(self.known.draft.table(rows)[rows]) if self.known.draft.known else 0.0

    def _trial_is_due(self, rows: int) -> bool:
        """Catching up with what was decoded meanwhile is part of the price."""
        verify = self.known.verify.table(2 * rows)
        price = self._seconds_of_step(rows) * (1 + self._idle_rounds / 4) + verify[2 * rows] - verify[rows]
        return self.known.idle_seconds * TRIAL_SHARE > price

    # ── while drafting ──────────────────────────────────────────────────────────────────────────────────────────────

    def goes_on(self, confidence: Sequence[float]) -> list[bool]:
        """Which rows draw a draft at the next position, given the drafter's highest probability there."""
        now = np.asarray(confidence)
        self._confidence.append(now)
        if not self._rate:
            return [True] * len(now)
        self._survival *= self._accepting(now) * (self._room >= len(self._confidence))
        gain = self._survival - self._position_price
        worth = gain > 0
        if gain[worth].sum() <= self._rate * self._step_price:
            worth[:] = False
        self._survival[~worth] = 0.0
        return worth.tolist()

    # ── after a round ───────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, outcome: Outcome) -> None:
        """Hears what the round cost and brought."""
        known = self.known
        known.rounds += 1
        fed = [1 + drafted for drafted in outcome.drafted]
        positions = sum(fed) if known.packed else len(fed) * max(fed)
        known.verify.observe(positions, outcome.seconds - outcome.seconds_drafting)
        if not outcome.steps:
            known.idle_seconds += outcome.seconds
            self._idle_rounds += 1
            return
        step = outcome.seconds_drafting / outcome.steps
        if self._idle_rounds <= 1 or step < self._seconds_of_step(len(self._rows)):  # else much of it was catching up
            known.draft.observe(len(self._rows), step)
        known.idle_seconds, self._idle_rounds = 0.0, 0
        if self._rate:
            brought = (sum(outcome.accepted) + len(fed)) / outcome.seconds / self._rate
            corrected = known.truth * (1 + TRUTH_SHARE * (min(max(brought, 0.5), 2.0) - 1))
            known.truth = min(max(corrected, LEAST_TRUTH), MOST_TRUTH)
        confidence = np.array(self._confidence) if self._confidence else np.empty((0, len(self._rows)))
        known.acceptance.learn(self._rows, np.array(outcome.drafted), np.array(outcome.accepted), confidence)
