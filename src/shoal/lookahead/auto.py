"""Draft lengths by measured costs: every round maximises expected committed tokens per second.

The choice includes no draft at all. The gain of drafting follows from estimates of acceptance
(`shoal.lookahead.acceptance`), its cost from passes that were made (`shoal.lookahead.costs`). Both
are learned during a run and kept between runs of the same pair. `shoal.lookahead.plan` weighs them,
and ends drafts by the plan; a plan is kept for several rounds, as making one takes time.

Even if the estimates are wrong, `shoal.lookahead.safeguards` bounds the loss against plain
decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from operator import add, mul
from typing import TYPE_CHECKING

import numpy as np

from shoal.lookahead import Controller
from shoal.lookahead.acceptance import LIMIT, DraftOutcome, Record
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.plan import (
    TRIAL_ROWS,
    DraftPlan,
    Stopping,
    Unfed,
    acceptance_of,
    best_plan,
    remaining_weights,
    repays,
    trial_is_due,
)
from shoal.lookahead.safeguards import Backoff
from shoal.types.requests import Row

if TYPE_CHECKING:
    from shoal.types.rounds import Outcome

FIRST_ROUNDS = (False, True, True, False, True, True)
"""The kinds of the very first rounds, before any cost is known: True for a trial.

First passes are slow, so plain rounds come twice and trials four times: the median of four target
passes, and the fastest of four proposals, are good though two were disturbed. The second trial of
two finds the drafter's code and weights in the caches, as rounds of a plan do. The first round is
plain, so that no token waits for an unknown drafter.
"""
MIN_ACCEPTANCE = 0.1
"""The acceptance rate below which an engine is made without the drafter, until a trial is due."""
FIRST_STEPS = 2
"""The number of tokens that the first trials draft for each row; later trials draft one.

Two steps tell the cost of a step and the cost of any proposal.
"""
ASSUMED_ROWS = 16
"""The number of rows that is assumed before a run is known."""
LEARNED = 32
"""The number of rounds after which plans are kept for several rounds."""
PLAN_ROUNDS = 8
"""The number of rounds for which a plan by confidence is kept while the rows are the same."""
FEW = 8
"""A plan is kept until more than 1 / `FEW` of its rows have ended: planning takes time as well."""


ALIKE = 4
"""The number of runs of plain rounds of the same rows of which one is learned.

The others are only counted: they teach the same between two plans, and learning takes time.
"""
TOGETHER = 8
"""The number of plain rounds that are computed to learn the cost of one.

Plain decoding computes the same number (`shoal.engine.multi_step.MOST_ROUNDS`). Each of fewer
rounds in one go costs more, so drafts would be compared with too slow a plain decoding.
"""


class Auto(Controller):
    """The controller that `lookahead="auto"` names.

    Attributes:
        costs: the costs and acceptance rates of the pair.
        unfed: the tokens that the drafter has not computed.
        rounds_of_a_plan: the number of rounds for which a plan is kept while the rows are the same.
    """

    limit = LIMIT
    adaptive = True
    rounds_of_a_plan = PLAN_ROUNDS

    def __init__(self, costs: PairCosts) -> None:
        self.costs = costs
        self.unfed = Unfed()
        self._rows: list[int] = []  # serial numbers
        self._record = Record(())
        self._waiting = False
        self._plan: DraftPlan | None = None  # None = there is no plan
        self._age = 0  # rounds since the plan was made
        self._unfed_tokens = 0
        self._longest: list[int] = []
        self._alike = 0  # plain runs since one that was learned, this one included
        self._confidence: list[Sequence[float]] = []  # by position, then row
        # The seconds of a plain round of these rows; None = to be computed.
        self._plain: float | None = None

    @property
    def may_speculate(self) -> bool:
        """False for a pair with next to no acceptance, until it is time for another trial."""
        costs = self.costs
        learning = costs.rounds < len(FIRST_ROUNDS)
        return (
            learning
            or costs.acceptance.mean >= MIN_ACCEPTANCE
            or trial_is_due(ASSUMED_ROWS, 0, costs)
        )

    # ── before a round ────────────────────────────────────────────────────────────────────────────

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        """Returns the longest draft of each row; drafting may stop earlier."""
        serials = [row.serial for row in rows]
        same = serials == self._rows and (waiting > 0) == self._waiting
        self.costs.follow(serials)
        plain = self._plan is None and not any(self._longest)
        if same and plain and self.costs.backoff.waits(len(rows)):
            self._alike = 0 if self.costs.runs.doubts(len(rows)) else (self._alike + 1) % ALIKE
            return self._longest
        self._alike = 0
        if not same:
            self.unfed.change(rows)
            self.costs.credit.run.whole &= not waiting
            if not self._goes_on(serials, waiting > 0):
                self._learn_acceptance()
                self._rows, self._waiting = serials, waiting > 0
                self._plan = self._plain = None
                self._record = Record(serials)
        self._confidence, costs = [], self.costs
        drafting = self._rows_to_draft_for(rows)
        longest = (
            self._plan.longest
            if self._plan is not None
            else FIRST_STEPS
            if costs.rounds < len(FIRST_ROUNDS)
            else 1
        )
        if len(drafting) == len(rows):
            self._longest = [min(row.max_draft_length, longest) for row in rows]
        else:
            to_draft = {row.serial for row in drafting}
            self._longest = [
                min(row.max_draft_length, longest) if row.serial in to_draft else 0 for row in rows
            ]
            self.unfed.leave(rows)
        self._unfed_tokens = self.unfed.feed(drafting) if drafting else 0
        return self._longest

    def repeat(self, rows: Sequence[Row]) -> list[int]:
        """Returns the lengths of the last round for its rows that have not ended."""
        serials = [row.serial for row in rows]
        self.costs.follow(serials)
        if serials != self._rows:
            places = {serial: place for place, serial in enumerate(self._rows)}
            self._longest = [self._longest[places[serial]] for serial in serials]
            self.unfed.change(rows)
            self._narrow(serials)
        self._confidence, self._age = [], self._age + 1
        drafts = any(self._longest)
        self._unfed_tokens = self.unfed.feed(rows) if drafts else 0
        if not drafts:
            self.costs.backoff.skip(1)
        return self._longest

    def _goes_on(self, serials: list[int], waiting: bool) -> bool:
        """Keeps the plan if only a few of its rows have ended; returns True if it is kept."""
        rows = len(self._record.rows)
        if self._plan is None or waiting != self._waiting or FEW * (rows - len(serials)) > rows:
            return False
        if not set(self._rows) >= set(serials):
            return False
        self._narrow(serials)
        return True

    def _narrow(self, serials: list[int]) -> None:
        """Keeps only these of the rows, in this order."""
        places = {row: place for place, row in enumerate(self._rows)}
        left = [places[serial] for serial in serials]
        self._record.narrow(serials)
        if self._plan is not None:
            self._plan.keep(left)
        self._rows, self._plain = serials, None

    def _rows_to_draft_for(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Returns all rows if there is a plan, a few for a trial, or none."""
        costs = self.costs
        if costs.rounds < len(FIRST_ROUNDS):
            return self.unfed.cheapest(rows, TRIAL_ROWS) if FIRST_ROUNDS[costs.rounds] else ()
        if costs.plain_rounds.due(len(rows)):
            return ()
        if self._holds:
            self._age += 1
            return rows
        if self._plan is None and costs.backoff.waits(len(rows)):
            return ()
        self._learn_acceptance()
        self._plan = self._plain = None
        if costs.credit.allows_plans:
            self._plan = self._best(rows, waiting=self._waiting)
        if self._plan is not None:
            costs.backoff, self._age = Backoff(), 1
            return rows
        costs.backoff.extend(len(rows))
        trial_rows = self.unfed.cheapest(rows, TRIAL_ROWS)
        return trial_rows if trial_is_due(len(rows), self.unfed.tokens(trial_rows), costs) else ()

    @property
    def _holds(self) -> bool:
        """True if there is a plan that is kept for the next round."""
        return (
            self._plan is not None
            and self.costs.credit.allows_plans
            and self._age < self.rounds_of_a_plan
            and self.costs.rounds > LEARNED
        )

    @property
    def steady(self) -> bool:
        """True if this round and the next are plain, for any outcome of this round."""
        return not any(self._longest) and self._rounds_to_a_plan > 1

    @property
    def plain_rounds(self) -> int:
        """The number of plain rounds, from the one that has its lengths, that may come in one go.

        It holds if the last lengths were 0, and as long as the rows stay the same. The next plan
        waits for the end of a run: a round by itself costs two or three of a run.
        """
        return max(self._rounds_to_a_plan, TOGETHER)

    @property
    def _rounds_to_a_plan(self) -> int:
        if self._plan is not None or self.costs.rounds < len(FIRST_ROUNDS):
            return TOGETHER
        return 1 + self.costs.backoff.left

    def promise(self, rows: Sequence[Row]) -> float:
        """Returns the tokens per second of the best plan for these rows.

        Returns 0 if no plan pays, with the tokens that the drafter must compute before it.
        """
        self._learn_acceptance()
        plan = self._best(rows, waiting=True)
        return 0.0 if plan is None else plan.rate

    def pause(self, rows: Sequence[Row]) -> None:
        """Notes that another drafter drafts for these rows."""
        self.unfed.leave(rows)

    def _best(self, rows: Sequence[Row], *, waiting: bool) -> DraftPlan | None:
        """Returns the best plan for these rows; None if plain decoding is better, or the plan does
        not bring back the work before it.

        Args:
            waiting: True if other rows wait for slots, so that all committed tokens count alike.
        """
        costs = self.costs
        following, survival = acceptance_of(rows, costs)
        remaining = np.array([row.remaining for row in rows])
        weights = np.ones(len(rows)) if waiting else remaining_weights(remaining, survival, costs)
        plan = best_plan(survival, weights, costs)
        if plan is None or not repays(plan.rate, rows, self.unfed, costs):
            return None
        by_confidence = costs.acceptance.by_confidence([row.serial for row in rows])
        return Stopping(plan, weights.tolist(), by_confidence.tolist(), following.tolist())

    # ── while drafting ────────────────────────────────────────────────────────────────────────────

    @property
    def shorten(self) -> Callable[[int, Sequence[float]], list[int]] | None:
        """The rule that ends drafts by confidence; None if there is none."""
        return self._shorten

    def _shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        """Returns the longest length that each row's draft may still reach.

        This is `position` if the draft there is not worth verifying, and at most one more if
        another step is not worth its time.

        Args:
            confidence: the drafter's highest probability at this position, for each row.
        """
        self._confidence[position:] = [confidence]
        if not isinstance(self._plan, Stopping):
            return self._longest
        if position == 0:
            self._plan.begin(self._longest)
        return self._plan.shorten(position, confidence)

    # ── after a round ─────────────────────────────────────────────────────────────────────────────

    def learn(self, outcome: Outcome) -> None:
        """Learns the costs and the outcome of a round."""
        costs, rows = self.costs, len(outcome.drafted)
        if self._alike and outcome.rounds > 1:
            costs.credit.wait(outcome)
            costs.backoff.skip(outcome.rounds - 1)
            return
        learning = costs.rounds < len(FIRST_ROUNDS)
        costs.rounds += 1 if learning else outcome.rounds
        costs.credit.run.add(outcome, learning=learning)
        own = outcome.drafted if outcome.nodes is None else outcome.nodes
        forced = outcome.forced or [0] * rows
        passes = costs.verify if outcome.rounds == 1 else costs.runs
        whole = passes.observe(
            costs.positions(list(map(add, own, forced))) + outcome.riding,
            outcome.seconds - outcome.seconds_drafting,
        )
        more = 0.0  # the seconds that are owed to forced tokens, and to a prompt's
        if outcome.forced is not None or outcome.riding:
            more = whole - costs.verify.seconds(costs.positions(own))
            whole -= more
        if not outcome.steps:
            self._plain = None
            if costs.learn_plain(rows, outcome.rounds, whole):  # the plan goes on if it still pays
                self._learn_acceptance()
                self._plan = None
            return
        costs.plain_rounds.drafted(rows)
        costs.trees.observe(outcome.drafted, outcome.nodes)
        if self._plain is None:
            self._plain = costs.seconds_plain(rows)
        drafting = costs.observe_drafting(
            rows, outcome.steps, outcome.seconds_drafting, outcome.seconds_between
        )
        plain, total = self._plain, whole + drafting + outcome.seconds_planning
        if self._unfed_tokens:
            costs.preparing.observe(self._unfed_tokens, outcome.seconds_preparing)
            preparing = min(
                outcome.seconds_preparing, 2 * costs.preparing.seconds(self._unfed_tokens)
            )
            if self._plan is not None:
                costs.credit.invest(preparing)
            else:
                total += preparing
        weights = None if self._plan is None else self._plan.weights
        accepted = outcome.accepted if weights is None else map(mul, weights, outcome.accepted)
        tokens = rows + sum(accepted)
        if not learning:  # the first drafts are made to learn their cost
            costs.credit.drafted(plain, total, tokens / rows * plain - total)
        self._record.add(
            DraftOutcome(
                outcome.drafted, outcome.accepted, _within_lengths(self._confidence, self._longest)
            ),
            outcome.seconds + outcome.seconds_planning - more,
            tokens,
        )

    def _learn_acceptance(self) -> None:
        """Learns the acceptance from the rounds since the last call."""
        record = self._record
        if record.outcomes:
            self.costs.acceptance.learn(record.rows, record.outcomes)
            if self._plan is not None and record.full:
                brought = record.tokens / record.seconds / self._plan.rate
                self.costs.calibrate(len(record.rows), brought, record.full)
        self._record = Record(self._rows)


def _within_lengths(
    confidence: Sequence[Sequence[float]], lengths: Sequence[int]
) -> Sequence[Sequence[float]]:
    """Returns the confidences at the positions within each row's longest draft.

    The others are NaN: beyond that length the drafter may have seen padding.
    """
    if min(lengths) >= len(confidence):
        return confidence
    return [
        [sure if longest > position else nan for sure, longest in zip(own, lengths, strict=True)]
        for position, own in enumerate(confidence)
    ]
