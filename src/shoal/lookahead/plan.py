"""How many drafts of a batch are worth their cost: the plan of one round.

A plan takes draft positions of all rows in the order of their probability of being committed (the
greedy rule of DySpec's tree builder, Xiong et al. 2024, with the whole batch as one tree) and ends
where expected tokens per second are highest. A position of a tree costs the nodes that trees of its
depth have more than those of the depth before. The rate converts seconds into tokens, so the plan
says how many tokens a verified position and a drafter step must bring (Dinkelbach 1967, on ratios).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.lookahead.acceptance import Array
from shoal.lookahead.costs import PairCosts

TYPICAL = 4
"""Draft length at which the costs of one row and of all are compared."""
STEP_MARGIN = 1.3
"""A drafter step must bring so many times what the average plan brings in its time. Long drafts of
a few rows leave the others behind, which costs time in the end; by `benchmarks/virtual.py`."""
HORIZON = 128
"""Tokens of a row within which a plan must bring back what is computed for it beforehand."""


INVESTMENT_MARGIN = 2.0
"""How many times it must bring that back: the time is spent at once, and what is gained is an
estimate."""


@dataclass(frozen=True)
class Plan:
    """A round with drafts.

    Attributes:
        rate: expected committed tokens per second, weighted as the plan was asked for.
        position_cost: tokens that could be committed elsewhere in the time that one verified
            position takes, of trees one depth.
        step_cost: the same of one drafter step.
    """

    rate: float
    position_cost: float
    step_cost: float


def best_plan(survival: Array, weights: Array, costs: PairCosts) -> Plan | None:
    """The plan with the most expected tokens per second; None if plain decoding has more.

    Args:
        survival: [rows, positions], probability that a draft and all before it are accepted; 0
            where none may be drafted.
        weights: [rows], what a committed token of the row counts.
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
    # Of passes larger than any that was made nothing is known: a plan may grow by doubling.
    rates[positions > 2 * max(costs.verify.largest, rows)] = 0.0
    best = int(rates.argmax())
    rate = costs.calibration(rows) * float(rates[best])
    if rate <= rows / verify[rows]:
        return None
    # The slope from plain decoding to the plan: between neighbouring sizes most of the difference
    # is noise, and beyond the plan nothing was measured.
    drafted = drafts[best] if costs.packed else rows * steps[best]
    seconds_per_position = (verify[positions[best]] - verify[rows]) / drafted
    return Plan(rate, rate * float(seconds_per_position), STEP_MARGIN * rate * step)


def repays(plan: Plan, remaining: Array, preparing: float, costs: PairCosts) -> bool:
    """Whether the plan brings back, over the next tokens of the rows, the seconds that the drafter
    needs before it can begin.

    Args:
        remaining: [rows], tokens that each row may still get. Rows mostly end before.
    """
    plain = costs.verify.seconds(len(remaining)) / len(remaining)
    return (
        float(np.minimum(remaining, HORIZON).sum()) * (plain - 1 / plan.rate)
        >= INVESTMENT_MARGIN * preparing
    )


def remaining_weights(remaining: Array, survival: Array, costs: PairCosts) -> Array:
    """[rows]: what a committed token of each row counts, 1 on average, once nothing waits for a
    slot.

    A token saves its row a part of a round, the more the fewer tokens the row gets in one. What a
    round less of a row saves is what the row costs beside the others, as it ends sooner; for the
    row that ends last it is a whole round of a single row, which costs many times as much. Which
    row that will be is not known: the further from its end, the more likely.

    Args:
        remaining: [rows], tokens that each row may still get, at least 1.
        survival: see `best_plan`.
    """
    rows, speed = len(remaining), 1 + survival.sum(axis=1)
    rounds = remaining / speed
    last = np.exp(
        (rounds - rounds.max()) / np.sqrt(rounds.max())
    )  # counts of rounds differ by their square roots
    typical = 1 + math.ceil(costs.trees.by_depth[TYPICAL])
    alone, together = (
        costs.verify.seconds(typical * n) + costs.seconds_drafting(n, TYPICAL) for n in (1, rows)
    )
    beside = max((together - alone) / max(rows - 1, 1), 0.01 * alone)
    weights = (beside + alone * last / last.sum()) / speed
    return np.asarray(weights / weights.mean())
