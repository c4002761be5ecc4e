"""How many drafts of a batch are worth their cost: the plan of one round.

A plan takes draft positions of all rows in the order of their probability of being committed (the greedy rule of DySpec's tree
builder, Xiong et al. 2024, with the whole batch as one tree) and ends where expected tokens per second are highest. That rate
converts seconds into tokens, so the plan says how many tokens a verified position and a drafter step must bring (Dinkelbach 1967,
on ratios).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.lookahead.acceptance import Array
from shoal.lookahead.costs import PairCosts


@dataclass(frozen=True)
class Plan:
    """A round with drafts.

    Attributes:
        rate: expected committed tokens per second, weighted as the plan was asked for.
        position_cost: tokens that could be committed elsewhere in the time that one verified position takes.
        step_cost: the same of one drafter step.
    """

    rate: float
    position_cost: float
    step_cost: float


def best_plan(survival: Array, weights: Array, costs: PairCosts) -> Plan | None:
    """The plan with the most expected tokens per second; None if plain decoding has more.

    Args:
        survival: [rows, positions], probability that a draft and all before it are accepted; 0 where none may be drafted.
        weights: [rows], what a committed token of the row counts.
    """
    rows, limit = survival.shape
    gains = (weights[:, None] * survival).ravel()
    order = np.argsort(-gains, kind="stable")
    steps = np.maximum.accumulate(order % limit) + 1
    drafts = np.arange(1, len(order) + 1)
    positions = rows + (drafts if costs.packed else rows * steps)
    verify, step = costs.verify.table(rows * (limit + 1)), costs.seconds_of_step(rows)
    rates = (rows + gains[order].cumsum()) / (verify[positions] + step * steps)
    best = int(rates.argmax())
    rate = costs.calibration * float(rates[best])
    if rate <= rows / verify[rows]:
        return None
    # The slope from plain decoding to the plan: between neighbouring sizes most of the difference is noise, and beyond the plan
    # nothing was measured.
    seconds_per_position = (verify[positions[best]] - verify[rows]) / (positions[best] - rows)
    return Plan(rate, rate * float(seconds_per_position), rate * step)


def remaining_weights(remaining: Array, survival: Array) -> Array:
    """[rows]: what a committed token of each row counts, 1 on average: once nothing waits for a slot, the run takes as long as its
    slowest row, so tokens of rows further from their end count more.

    Args:
        remaining: [rows], tokens that each row may still get; zeros if others wait for its slot, and all weights are 1.
    """
    if not remaining.any():
        return np.ones(len(remaining))
    rounds = remaining / (1 + survival.sum(axis=1))
    return np.asarray(rounds / rounds.mean())
