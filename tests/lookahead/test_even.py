"""One draft length for all rows: the best of the plans, kept through rounds that were launched ahead.

Tests of: lookahead.controller, lookahead.auto, lookahead.acceptance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stopping
import virtual
from policies import KnownCosts, even_with_known_costs
from shoal.lookahead.acceptance import LIMIT, Acceptance, DraftOutcome
from shoal.lookahead.auto import FIRST_ROUNDS
from shoal.lookahead.controller import LENGTHS, SLOWEST, Auto, EvenAuto, Fixed, PairCosts, Uniform, best_even_plan, by_name
from shoal.types.rounds import Outcome
from virtual import PassCosts, Trace, _Text

chances = st.floats(0.02, 0.98)


def costs(step: float = 0.1, per_position: float = 0.004) -> PairCosts:
    made = PairCosts(packed=False)
    made.verify = KnownCosts({1: 1.0 + per_position, 1024: 1.0 + 1024 * per_position})
    made.start = made.draft = KnownCosts({1: step, 64: step})
    return made


def rows_of(count: int, trace: Trace | None = None) -> list[_Text]:
    trace = trace or Trace([0.8] * 200, [0.8] * 200, 200)
    return [_Text(trace, 200, False, np.random.default_rng(i)) for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(acceptance=st.lists(chances, min_size=1, max_size=6), step=st.floats(0.01, 0.6), waiting=st.booleans())
def test_no_other_length_ends_the_rows_earlier(acceptance: list[float], step: float, waiting: bool) -> None:
    """By the definition: tokens of all rows per second while others wait, else the rounds of the slowest rows, times their cost."""
    known, rows = costs(step), len(acceptance)
    survival = np.array(acceptance)[:, None] ** np.arange(1, LIMIT + 1)
    remaining = np.linspace(40, 160, rows)

    def speed(length: int) -> float:
        tokens = np.array([sum(own**i for i in range(length + 1)) for own in acceptance])
        seconds = 1.0 + 0.004 * rows * (1 + length) + length * step
        rounds = remaining / tokens
        return float(tokens.sum() if waiting else 1 / ((rounds**SLOWEST).mean()) ** (1 / SLOWEST)) / seconds

    plan = best_even_plan(survival, None if waiting else remaining, known)
    best = max(LENGTHS, key=speed)
    length = 0 if plan is None else plan.longest
    assert speed(length) == pytest.approx(speed(best), rel=1e-6)
    if plan is not None:
        tokens = sum(sum(own**i for i in range(length + 1)) for own in acceptance)
        assert plan.rate == pytest.approx(tokens / (1.0 + 0.004 * rows * (1 + length) + length * step), rel=1e-6)


def test_the_slowest_row_decides_where_nothing_waits() -> None:
    """Three rows would draft long, the fourth hardly: it ends last."""
    survival = np.array([0.97, 0.97, 0.97, 0.4])[:, None] ** np.arange(1, LIMIT + 1)
    alone = best_even_plan(survival, np.array([100.0] * 4), costs())
    together = best_even_plan(survival, None, costs())
    assert alone is not None
    assert together is not None
    assert alone.longest <= 3 < 8 <= together.longest


def test_a_plan_grows_by_doubling() -> None:
    """Beyond twice the largest pass so far, the cost is unknown."""
    known = PairCosts(packed=False)
    known.verify.observe(4, 1.0)
    known.start.observe(4, 0.01)
    survival = np.full((4, LIMIT), 0.99) ** np.arange(1, LIMIT + 1)
    plan = best_even_plan(survival, None, known)
    assert plan is not None
    assert plan.longest == 1
    known.verify.observe(8, 1.0)
    plan = best_even_plan(survival, None, known)
    assert plan is not None
    assert plan.longest == 3


def test_plans_are_corrected_by_what_comes_of_them() -> None:
    survival = np.array([[0.5]]) ** np.arange(1, LIMIT + 1)
    known = costs(step=0.3)
    assert best_even_plan(survival, None, known) is not None
    known.calibrations[1] = 0.5
    assert best_even_plan(survival, None, known) is None


def played(controller: EvenAuto, rows: list[Any], lengths: list[int], accepted: list[int]) -> None:
    seconds = 1.0 + (0.1 * max(lengths))
    controller.learn(Outcome(lengths, accepted, max(lengths), seconds, 0.1 * max(lengths), 0.0, None))


def test_a_round_that_was_launched_keeps_its_lengths_whatever_ended() -> None:
    """Most rows end, which would end a plan."""
    controller, rows = even_with_known_costs(), rows_of(4)
    lengths = controller.lengths(rows, 0)
    assert controller.steady
    assert lengths == [lengths[0]] * 4 > [1] * 4
    played(controller, rows, lengths, [1, 0, 2, 1])
    assert controller.repeat([rows[3], rows[1]]) == lengths[:2]
    played(controller, rows, lengths[:2], [1, 0])
    assert controller._record.rows == [row.serial for row in rows]
    spread = controller._record.outcomes[1]
    assert (list(spread.drafted), list(spread.accepted)) == ([0, lengths[0], 0, lengths[0]], [0, 0, 0, 1])
    assert controller.shorten is None


def test_lengths_are_steady_until_the_plan_is_old() -> None:
    controller, rows, steady = even_with_known_costs(), rows_of(3), 0
    lengths = controller.lengths(rows, 0)
    while controller.steady:
        played(controller, rows, lengths, [0, 1, 1])
        assert controller.repeat(rows) == lengths
        steady += 1
    assert steady == EvenAuto.rounds_of_a_plan - 1


def test_plain_rounds_that_are_launched_ahead_come_to_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were launched ahead count as well; else a drafter that did not pay once would never be asked again."""
    monkeypatch.setattr("shoal.lookahead.auto.trial_is_due", lambda *_: False)
    hopeless = costs(step=50.0)
    hopeless.rounds = len(FIRST_ROUNDS)
    controller, rows, ahead = EvenAuto(hopeless), rows_of(3), []
    for _ in range(5):
        lengths = controller.lengths(rows, 0)
        assert lengths == [0, 0, 0]
        ahead.append(0)
        while controller.steady and ahead[-1] < 100:
            played(controller, rows, lengths, [0, 0, 0])
            assert controller.repeat(rows) == lengths
            ahead[-1] += 1
        played(controller, rows, lengths, [0, 0, 0])
    assert ahead == [1, 3, 7, 15, 31]


def test_rows_are_known_by_their_outcomes_where_no_confidence_is_told() -> None:
    """A row that accepts everything and one that accepts nothing part; without outcomes they are alike."""
    known = Acceptance(LIMIT)
    known.learn((7, 8), [DraftOutcome([4, 4], [4, 0], [])] * 20)
    sure, unsure, other = known.by_position((7, 8, 9))[:, 0]
    assert unsure < other < sure
    assert sure - unsure > 0.3


def test_a_controller_of_the_protocol_says_its_lengths_again() -> None:
    rows = rows_of(3)
    rows[1].done = 197
    controller = Uniform(Fixed(4))
    assert controller.lengths(rows, 0) == [4, 2, 4]
    assert controller.repeat(rows[1:]) == [2, 4]


def test_the_name_auto_follows_the_rounds() -> None:
    assert type(by_name("auto", captured=True)) is EvenAuto
    assert type(by_name("auto")) is Auto
    assert isinstance(by_name("4", captured=True), Fixed)


def test_it_loses_little_against_the_best_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pass costs the same for any number of positions; and little against what stops by confidence."""
    monkeypatch.setattr(virtual, "NOISE", 0.0)
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(6):
        easy = rng.random(300) < 0.7
        acceptance = np.where(easy, 0.95, 0.3)
        texts.append(Trace(acceptance.tolist(), np.where(easy, 0.9, 0.5).tolist(), 300))
    found = next(iter(stopping.lines(stopping.flat(0.07), texts, [8], tokens=200, runs=4, stops=False)))
    assert found.speedups[stopping.EVEN] > 0.92 * found.speedups[found.best]
    assert found.speedups[stopping.EVEN] > 0.9 * found.speedups[stopping.WITH]
    facts = PassCosts({1: 0.01, 1024: 0.01}, {1: 0.0095, 64: 0.0095})
    off = next(iter(stopping.lines(facts, [Trace([0.1] * 200, [0.5] * 200, 200)], [4], tokens=150, runs=3, stops=False)))
    assert off.speedups[stopping.EVEN] > 0.97
