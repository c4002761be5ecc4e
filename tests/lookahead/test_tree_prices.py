"""`lookahead="auto"` prices draft trees by their nodes: trees are drafted where their columns pay, and left where they do not.

Tests of: lookahead.auto, lookahead.plan, lookahead.costs.
"""

from __future__ import annotations

import numpy as np
import pytest

from clocks import Clock, Priced, V, truth
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead import auto
from shoal.lookahead.acceptance import FADE, TreeSizes
from shoal.lookahead.controller import Auto
from shoal.lookahead.costs import PairCosts
from shoal.lookahead.plan import best_plan
from shoal.sampling.acceptance import Coupled
from shoal.testing.drafters import RandomTrees
from shoal.testing.scripted import runner
from shoal.types.requests import Request
from shoal.types.rounds import Outcome


def test_sizes_by_depth() -> None:
    sizes = TreeSizes(6)
    sizes.observe([1, 3, 0], None)
    assert sizes.by_depth.tolist() == [0, 1, 2, 3, 4, 5, 6]
    sizes.observe([2, 4, 0], [5, 8, 0])
    assert sizes.by_depth.tolist() == pytest.approx([0, 2.5, 5, 6.5, 8, 9, 10])
    sizes.observe([4], [4])
    earlier, last = 8 * FADE / (1 + FADE), 4 / (1 + FADE)
    assert sizes.by_depth.tolist()[4:] == pytest.approx([earlier + last + more for more in range(3)])
    for _ in range(400):  # what is a chain again costs what chains do
        sizes.observe([2, 4], None)
    assert sizes.by_depth.tolist() == pytest.approx([0, 1, 2, 3, 4, 5, 6], abs=0.01)


@pytest.mark.parametrize("packed", [True, False])
def test_plans_count_nodes(packed: bool) -> None:
    """What pays as a chain does not as a tree of six nodes a token, where columns cost half a token each."""
    survival = np.tile(0.8 ** np.arange(1.0, 17), (2, 1))
    found = {}
    for name, nodes in (("chains", None), ("trees", [24, 24])):
        costs = PairCosts(packed)
        for columns in range(1, 200):
            costs.verify.observe(columns, 1.0 + 0.1 * columns)
        costs.start.observe(2, 1e-6)
        costs.draft.observe(2, 1e-6)
        for _ in range(3):
            costs.trees.observe([4, 4], nodes)
        found[name] = best_plan(survival, np.ones(2), costs)
    chains, trees = found["chains"], found["trees"]
    assert chains is not None
    assert trees is None or trees.rate < chains.rate / 1.4
    assert chains.position_cost == pytest.approx(chains.rate * 0.1, rel=0.1)
    if trees is not None:
        assert trees.position_cost > 3 * trees.rate * 0.1


def drafted_share(nodes: int, tokens: int = 900) -> tuple[float, float]:
    """Trees one of whose paths is mostly right: drafted tokens per round of a row, and seconds against plain decoding."""
    seconds = []
    for made in (None, RandomTrees(V, guess=truth, max_nodes=nodes)):
        clock = Clock()
        engine = Engine(runner(Priced(clock)), made, Auto(PairCosts(packed=False)), max_batch=3, rule=Coupled(), clock=clock)
        for first in range(3):
            engine.submit(Request((first, 1), 1, Sampling(temperature=0.0), Limits(max_new_tokens=tokens)))
        while engine.step():
            pass
        seconds.append(clock.seconds)
    return engine.stats.drafted / engine.stats.row_rounds, seconds[1] / seconds[0]


def test_trees_that_do_not_pay_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns at 0.15 of a pass each: nine of them for half a token."""
    monkeypatch.setattr("clocks.COLUMN", 0.15)
    drafted, time = drafted_share(12)
    assert drafted < 0.6
    assert time < 1.02


@pytest.mark.slow
def test_trees_that_pay_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clocks.COLUMN", 0.002)
    drafted, time = drafted_share(12)
    assert drafted > 2
    assert time < 0.85


def test_costs_are_learned_at_the_columns_of_the_pass() -> None:
    controller = auto.Auto(PairCosts(packed=True))
    controller.lengths([], 0)
    controller._longest = [3, 3]
    controller.learn(Outcome([3, 1], [1, 0], 3, 2.0, 0.5, nodes=[7, 2]))
    assert controller.costs.verify.at(11) == 1.5
    assert controller.costs.verify.at(6) is None
