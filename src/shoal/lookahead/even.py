"""Draft lengths for rounds in which all rows draft equally many tokens, known before they begin.

A device that computes captured rounds goes on with the next round before the host has seen this
one (`shoal.drafting.captured_inputs`). It cannot if the host ends drafts by the drafter's
confidence, nor if the next length depends on this round. So a plan has one length for all rows, by
the acceptance at each position, and holds for several rounds. Where a pass costs the same for any
number of positions, confidence brings 2 to 6 % (`benchmarks/stopping.py --flat 0.1`); the time of
the host, which it costs, is 11 to 14 % of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.lookahead.acceptance import Array
from shoal.lookahead.auto import Auto
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.plan import DraftPlan, acceptance_of
from shoal.types.requests import Row

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""The draft lengths of plans. They are few, as each has functions of its own to capture."""
SLOWEST = 8.0
"""The exponent of the mean over rows of the rounds until their ends, while no row waits.

With 1 all rows count alike, with infinity the slowest one alone, which the batch ends with.
"""


@dataclass(frozen=True)
class EvenPlan:
    """Rounds in which all rows draft equally many tokens.

    Attributes:
        rate: the expected committed tokens per second.
        longest: the draft length.
        weights: None: committed tokens of all rows count alike.
    """

    rate: float
    longest: int
    weights: None = None

    def keep(self, places: Sequence[int]) -> None:
        """Does nothing: a plan of fewer rows is the same."""


def best_even_plan(survival: Array, remaining: Array | None, costs: PairCosts) -> EvenPlan | None:
    """Returns the plan whose rows end first; None if plain decoding is expected to be faster.

    Args:
        survival: see `shoal.lookahead.plan.best_plan`.
        remaining: [rows], the tokens that each row may still get; None if other rows wait for
            slots, so that all committed tokens count alike.
        costs: the costs of the pair.
    """
    rows, limit = survival.shape
    lengths = np.array([length for length in LENGTHS if length <= limit])
    tokens = 1 + np.insert(survival.cumsum(axis=1), 0, 0.0, axis=1)[:, lengths]
    positions = rows * (1 + lengths)
    seconds = costs.verify.table(int(positions.max()))[positions]
    seconds[1:] += costs.seconds_starting(rows) + costs.seconds_step(rows) * (lengths[1:] - 1)
    seconds[1:] /= costs.calibration(rows)
    # The cost of larger passes than any so far is unknown: a plan may grow by doubling.
    seconds[positions > 2 * max(costs.verify.largest, rows)] = np.inf
    if remaining is None:
        speeds = tokens.sum(axis=0) / seconds
    else:
        rounds = remaining[:, None] / tokens
        speeds = 1 / (seconds * (rounds**SLOWEST).mean(axis=0) ** (1 / SLOWEST))
    best = int(speeds.argmax())
    return (
        EvenPlan(float(tokens[:, best].sum() / seconds[best]), int(lengths[best])) if best else None
    )


class EvenAuto(Auto):
    """The controller that `lookahead="auto"` names where rounds are captured."""

    rounds_of_a_plan = 16

    @property
    def shorten(self) -> Callable[[int, Sequence[float]], list[int]] | None:
        """None: no draft is shortened."""
        return None

    @property
    def steady(self) -> bool:
        """True if the next round has the lengths of this one, whatever comes of it."""
        return self._holds or super().steady

    def _best(self, rows: Sequence[Row], *, waiting: bool) -> DraftPlan | None:
        _, survival = acceptance_of(rows, self.costs)
        remaining = None if waiting else np.array([row.remaining for row in rows])
        return best_even_plan(survival, remaining, self.costs)
