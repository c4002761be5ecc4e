"""Draft lengths by measured costs: what it learns, what it plans, where it stops, and that the law stays.

Tests of: lookahead.plan, lookahead.safeguards, lookahead.acceptance.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from by_pairs import by_pairs
from enumeration import chain_rule, chi_square
from laws import ALPHA, P, Q, joint
from policies import KnownCosts, auto
from shoal.engine.engine import Engine
from shoal.lookahead import safeguards
from shoal.lookahead.acceptance import Acceptance, DraftOutcome, Record
from shoal.lookahead.controller import Auto, Controller, Heuristic, PairCosts, by_name
from shoal.lookahead.costs import CostCurve, DraftCostCurve, RunCostCurve, rounded
from shoal.lookahead.plan import Unfed, best_plan
from shoal.lookahead.safeguards import FIRST, LONGEST, MOST, SHARE, Backoff, Credit, PlainRounds, WholeRun
from shoal.testing.drafters import engine_of, runners_of
from shoal.testing.scripted import table_model
from shoal.types.requests import Limits, Request, Row, Sampling
from shoal.types.rounds import Outcome

# ── costs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_curve_interpolates_and_is_kind_beyond_what_it_saw() -> None:
    curve = CostCurve()
    curve.observe(4, 2.0)
    curve.observe(8, 3.0)
    table = curve.table(12)
    assert table[[4, 6, 8]].tolist() == pytest.approx([2.0, 2.5, 3.0])
    assert table[2] == pytest.approx(1.0)  # below: in proportion
    assert table[12] == pytest.approx(3.0)  # above: no dearer


def test_a_smaller_pass_is_never_dearer() -> None:
    curve = CostCurve()
    curve.observe(4, 9.0)  # disturbed
    curve.observe(8, 3.0)
    assert curve.table(8)[4] == pytest.approx(3.0)


def test_one_disturbed_pass_counts_little() -> None:
    curve = CostCurve()
    for seconds in (50.0, 1.0, 1.0, 1.0):  # the very first pass is slow
        curve.observe(4, seconds)
    curve.observe(4, 100.0)
    assert curve.table(4)[4] == pytest.approx(1.0)
    curve.observe(4, 100.0)
    assert 1.0 < curve.table(4)[4] < 1.25


def test_a_size_seen_thrice_costs_what_one_seen_often_does() -> None:
    """The fastest of a few would be less: plain rounds, of which few are made where drafts pay, would seem faster than they are."""
    rng = np.random.default_rng(0)
    noise = np.exp(rng.exponential(0.1, size=(400, 300)))
    often, thrice = [], []
    for one in noise:
        curve = CostCurve()
        for seconds in one:
            curve.observe(8, seconds)
        for seconds in one[:3]:
            curve.observe(4, seconds)
        often.append(curve.at(8))
        thrice.append(curve.at(4))
    assert np.mean(thrice) == pytest.approx(np.mean(often), rel=0.04)
    assert np.mean(noise[:, :3].min(axis=1)) < 0.95 * np.mean(often)


def test_first_passes_amid_other_work_are_believed_within_bounds() -> None:
    """Twenty times its time, and seen thrice: it may still cost half more than smaller passes say, not more."""
    curve = CostCurve()
    for size, seconds in ((16, 12.0), (32, 14.0), *[(51, 400.0)] * 3, (304, 60.0)):
        curve.observe(size, seconds)
    assert curve.seconds(51) == pytest.approx(1.5 * 51 * 14.0 / 32)
    assert curve.seconds(304) == 60.0
    assert np.all(np.diff(curve.table(400)) >= 0)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    curve = CostCurve()
    curve.observe(16, 50.0)
    for _ in range(500):
        curve.observe(4, 1.0)
    assert curve.table(16)[16] == pytest.approx(1.0)


def test_what_was_seen_before_many_plain_rounds_counts_no_more_once_it_is_seen_again() -> None:
    """A drafter's passes are not seen while none are made: one disturbed measurement must not rule them out for good."""
    old, recent = CostCurve(), CostCurve()
    for curve, rounds in ((old, 1000), (recent, 100)):
        curve.observe(4, 50.0)
        curve.observe(4, 50.0)
        for _ in range(rounds):
            curve.age()
        assert curve.seconds(4) == 50.0  # until it is seen again
        curve.observe(4, 1.0)
    assert old.seconds(4) == 1.0
    assert recent.seconds(4) == 50.0


@given(st.dictionaries(st.integers(1, 40), st.floats(0.1, 9.0), max_size=6), st.integers(0, 60))
def test_one_size_costs_what_the_table_says(points: dict[int, float], size: int) -> None:
    curve = CostCurve()
    for known, seconds in points.items():
        curve.observe(known, seconds)
    assert curve.seconds(size) == pytest.approx(curve.table(60)[size])


# ── acceptance ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_acceptance_is_learned_by_position_row_and_confidence() -> None:
    """Row 1's drafts are worse; the confident ones are accepted, the others are not, and only decided positions count."""
    rng = np.random.default_rng(0)
    acceptance, rows = Acceptance(4), ("good", "bad")
    for _ in range(300):
        confidence = rng.choice([0.35, 0.99], size=(4, 2))
        passes = rng.random((4, 2)) < np.where(confidence > 0.5, 0.95, 0.3) * np.array([1.0, 0.6])
        accepted = passes.cumprod(axis=0).sum(axis=0)
        acceptance.learn(rows, [DraftOutcome([4, 4], accepted.tolist(), list(confidence))])
    by_position = acceptance.by_position(rows)
    assert by_position.shape == (2, 4)
    assert (by_position[0] > by_position[1]).all()
    assert 0.4 < by_position.mean() < 0.65
    sure, unsure = (acceptance.by_confidence(rows)[:, bisect_left(Acceptance.EDGES, c)] for c in (0.99, 0.35))
    assert (sure - unsure > 0.3).all()
    assert sure[0] > sure[1]


def test_positions_that_were_looked_at_and_left_count_with_their_estimate() -> None:
    """Otherwise only the confident places would be counted, and every text would seem easy."""
    acceptance = Acceptance(4)
    for _ in range(200):
        acceptance.learn(("row",), [DraftOutcome([1], [1], [np.array([0.99]), np.array([0.05])])])
    by_position = acceptance.by_position(("row",))[0]
    assert by_position[0] > 0.9
    assert by_position[1] < 0.5


def test_rounds_learned_together_teach_what_they_teach_one_by_one() -> None:
    """Also with drafts of unequal lengths, and rounds whose confidences are unknown."""
    rng, rows = np.random.default_rng(1), ("a", "b", "c")
    rounds = []
    for i in range(40):
        drafted = rng.integers(0, 5, size=3)
        drafted[i % 3] = 4
        looked = [] if i % 10 == 9 else [rng.random(3) for _ in range(4 + i % 2)]
        rounds.append(DraftOutcome(drafted.tolist(), rng.integers(0, drafted + 1).tolist(), looked))
    together, singly = Acceptance(6), Acceptance(6)
    for i in range(0, 40, 8):
        together.learn(rows, rounds[i : i + 8])
    for one in rounds:
        singly.learn(rows, [one])
    for name in ("_hits", "_trials"):
        ours, theirs = (getattr(known._confidences, name) for known in (together, singly))
        assert ours == pytest.approx(theirs)
    assert together._positions._trials == pytest.approx(singly._positions._trials)
    assert together.by_position(rows) == pytest.approx(singly.by_position(rows), abs=0.06)


def test_many_outcomes_do_not_throw_a_rows_estimate_beyond_them() -> None:
    """Eight rounds of 16 drafts that were all accepted, or not: the row's own acceptance stays within what was seen."""
    for hit in (0, 16):
        acceptance = Acceptance(16)
        middling = [DraftOutcome([16], [hit], [np.array([0.9])] * 16) for _ in range(8)]
        acceptance.learn(("row",), middling)
        assert abs(acceptance._offsets(("row",))[0]) < 4.0


def test_an_unknown_pair_is_given_a_chance() -> None:
    assert Acceptance(4).by_position(("row",))[0].tolist() == pytest.approx([0.7] * 4)


# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────


SERIALS = itertools.count()


def row(remaining: int = 100) -> Any:
    """As much of a row as a controller sees."""
    serial = next(SERIALS)
    return SimpleNamespace(
        remaining=remaining, max_draft_length=remaining - 1, serial=serial, group=serial, prompt_length=5, tokens=[0] * 5
    )


def best_uniform(verify: CostCurve, draft: float, acceptance: float, rows: int) -> int:
    """The best common draft length by the textbook formula."""

    def rate(k: int) -> float:
        tokens = rows * sum(acceptance**i for i in range(k + 1))
        return tokens / (float(verify.table(rows * (k + 1))[rows * (k + 1)]) + k * draft)

    return max(range(17), key=rate)


FLAT = {1: 1.0, 600: 1.01}
STEEP = {1: 1.0, 600: 600.0}


@by_pairs({"acceptance": [0.3, 0.6, 0.9], "draft": [0.02, 0.1, 0.5], "verify": [FLAT, STEEP, {8: 1.0, 16: 2.0, 600: 20.0}]})
def test_plain_decoding_exactly_where_no_draft_length_pays(
    verify: dict[int, float], draft: float, acceptance: float
) -> None:
    controller = auto(verify, draft, acceptance)
    lengths = controller.lengths([row() for _ in range(8)], 0)
    expected = best_uniform(controller.costs.verify, draft, acceptance, 8)
    assert (max(lengths) > 0) == (expected > 0)


def test_without_costs_every_kind_of_round_is_tried_twice() -> None:
    controller, seen = Auto(PairCosts(packed=True)), []
    for _ in range(6):
        seen.append(controller.lengths([row(), row(3), row()], 0))
        controller.learn(Outcome(seen[-1], [0, 0, 0], max(seen[-1]), 1.0, 0.1))
    assert seen == [[0, 0, 0], [2, 2, 0], [2, 2, 0], [0, 0, 0], [2, 2, 0], [2, 2, 0]]


def test_plans_are_corrected_by_what_comes_of_them() -> None:
    """Rounds that bring half of what was promised, whatever the reason, end in plain decoding."""
    controller, rows = auto({1: 1.0, 600: 1.2}, 0.3, 0.5), [row() for _ in range(8)]
    assert max(controller.lengths(rows, 0)) > 0
    for _ in range(60):
        lengths = controller.lengths(rows, 0)
        if max(lengths) == 1:
            break
        if not max(lengths):  # what drafts are compared with
            controller.learn(Outcome([0] * 8, [0] * 8, 0, 1.0, 0.0))
            continue
        controller.shorten(0, [0.99] * 8)
        controller.learn(Outcome([1] * 8, [1] * 8, 1, 40.0, 0.3))
    assert controller.costs.calibration(8) < 0.8
    assert (
        controller.costs.calibration(1) == 1.0
    )  # the last row of a batch brings less than promised, and says nothing of all
    assert controller._plan is None


def test_plans_are_corrected_by_the_time_that_they_take() -> None:
    found = []
    for planning in (0.0, 0.6):
        controller, rows = auto({1: 1.0, 600: 1.2}, 0.3, 0.5), [row() for _ in range(8)]
        for _ in range(30):
            drafts = int(max(controller.lengths(rows, 0)) > 0)
            controller.shorten(0, [0.99] * 8)
            seconds = 1.0 + 0.3 * drafts
            own = [drafts] * 8
            controller.learn(Outcome(own, own, drafts, seconds, 0.3 * drafts, seconds_planning=planning * drafts))
        found.append(controller.costs.calibration(8))
    assert found[1] < 0.9 * found[0]


def test_a_first_slow_step_does_not_end_speculation() -> None:
    """The first pass of a process may take many times as long as any after it."""
    controller, rows = Auto(PairCosts(packed=True)), [row() for _ in range(8)]
    for i in range(20):
        lengths = controller.lengths(rows, 0)
        slow = 50.0 if i < 2 else 1.0
        steps = max(lengths)
        controller.learn(Outcome(lengths, lengths, steps, slow * (1.0 + 0.1 * steps), slow * 0.1 * steps))
    assert max(controller.lengths(rows, 0)) > 4


def lengths_of_rounds(rows: int, first: float, acceptance: float = 0.8) -> list[int]:
    """The longest draft of each of 200 rounds; the first pass over each number of positions takes `first` times its seconds."""
    controller, held = Auto(PairCosts(packed=True)), [row(10_000) for _ in range(rows)]
    luck, seen, found = np.random.default_rng(0), set[int](), []
    for _ in range(200):
        ends, steps = controller.lengths(held, 0), 0
        while steps < max(ends):
            ends = controller.shorten(steps, [acceptance] * rows)
            steps += steps < max(ends)
        drafted = [min(end, steps) for end in ends]
        accepted = [int(np.append(luck.random(d) > acceptance, True).argmax()) for d in drafted]
        size = rows + sum(drafted)
        seconds = (1 + 0.02 * size) * (1.0 if rounded(size) in seen else first)
        seen.add(rounded(size))
        controller.learn(Outcome(drafted, accepted, steps, seconds + 0.05 * steps, 0.05 * steps))
        found.append(max(drafted))
    return found


@pytest.mark.parametrize("rows", [1, 8])
def test_slow_first_passes_of_every_size_delay_the_right_length_by_a_few_rounds(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, disturbed = (np.array(lengths_of_rounds(rows, first)[10:]) for first in (1.0, 10.0))
    assert np.median(quiet) > 2
    assert abs(np.median(disturbed) - np.median(quiet)) <= 3
    assert (disturbed == 0).sum() <= (quiet == 0).sum() + 6
    monkeypatch.setattr(CostCurve, "DOUBTED", 1)  # sabotage: a first pass is believed
    assert (np.array(lengths_of_rounds(rows, 10.0)[10:]) == 0).sum() > 150


def test_plain_rounds_in_one_go_are_not_priced_as_drafts_of_as_many_positions() -> None:
    """A pass over eight positions, four rows and a draft of each, costs twice a plain round of eight rows among eight in one go."""
    costs = PairCosts(packed=True)
    controller, eight, four = Auto(costs), [row(10_000) for _ in range(8)], [row(10_000) for _ in range(4)]
    for _ in range(20):
        controller.lengths(eight, 0)
        controller.learn(Outcome([0] * 8, [0] * 8, 0, 1.0, 0.0, rounds=8))
        controller.lengths(four, 0)
        controller.learn(Outcome([1] * 4, [1] * 4, 1, 2.0, 0.1))
    assert (costs.seconds_plain(8), costs.verify.seconds(8)) == (pytest.approx(1.0), pytest.approx(1.9))
    survival = np.full((8, 16), 0.1).cumprod(axis=1)  # eight rows and a draft each cost 1.9 at least, and bring 0.9 more
    assert best_plan(survival, np.ones(8), costs) is None
    costs.runs = CostCurve()  # sabotage: a plain round costs a pass over its positions
    assert best_plan(survival, np.ones(8), costs) is not None


def test_a_plain_round_among_several_costs_no_more_than_one_by_itself() -> None:
    """Else drafts go on for as long as plain rounds are believed to be as slow as they were for a moment: those that are made
    between drafts to check it come one by one."""
    controller = Auto(PairCosts(packed=True))
    for seconds in (1.0, 3.0):  # the machine is quiet, then busy
        for _ in range(10):
            controller.learn(Outcome([0] * 8, [0] * 8, 0, seconds, 0.0, rounds=8))
    assert controller.costs.seconds_plain(8) == pytest.approx(3.0)
    controller.learn(Outcome([0] * 8, [0] * 8, 0, 1.2, 0.0))
    assert controller.costs.runs.seconds(8) == pytest.approx(3.0)
    assert controller.costs.seconds_plain(8) == pytest.approx(1.2)


def test_plain_rounds_that_are_slow_for_a_moment_begin_no_drafts() -> None:
    """The median of nine counts; of each other pass a mean does."""
    runs, mean = RunCostCurve(), CostCurve()
    for seconds in [1.0] * 12 + [1.9] * 4:
        runs.observe(8, seconds)
        mean.observe(8, seconds)
    assert (runs.seconds(8), mean.seconds(8)) == (1.0, pytest.approx(1.53, abs=0.01))
    runs.observe(8, 1.9)
    assert runs.seconds(8) == 1.9  # they are slow for good


def plans_made(costs: PairCosts, runs: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of plans that runs of 128 plain rounds of eight rows make."""
    made = 0

    def counted(*args: Any) -> None:
        nonlocal made
        made += 1

    monkeypatch.setattr("shoal.lookahead.auto.best_plan", counted)
    for _ in range(runs):
        controller, rows, left = Auto(costs), [row() for _ in range(8)], 128
        while left:
            assert not any(controller.lengths(rows, 0))
            rounds = min(left, controller.plain_rounds, 8)
            assert rounds == min(left, 8)  # no round comes by itself because a plan is due
            controller.learn(Outcome([0] * 8, [0] * 8, 0, 1.0, 0.0, rounds=rounds))
            left -= rounds
    return made


def test_a_run_goes_on_with_the_wait_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are new change no estimate, so what did not pay at the end of a run does not pay at the beginning of the next."""
    costs = auto({8: 1.0, 16: 2.0, 600: 60.0}, 0.2, 0.02).costs
    monkeypatch.setattr("shoal.lookahead.auto.trial_is_due", lambda *_: False)
    assert plans_made(costs, 1, monkeypatch) in range(4, 8)  # after 1, 3, 7, ... rounds, each at the end of a run
    assert plans_made(costs, 10, monkeypatch) <= 1 + 10 * 128 // LONGEST
    made = 0
    for _ in range(10):  # sabotage: each run begins to wait anew
        costs.backoff = Backoff()
        made += plans_made(costs, 1, monkeypatch)
    assert made >= 50


def first_planned_round(slow: int, rows: int) -> int:
    """The first round with a plan, if the first `slow` rounds with drafts take twenty times their seconds, drafter and target."""
    controller, held, trials = Auto(PairCosts(packed=True)), [row(10_000) for _ in range(rows)], 0
    for number in range(6_000):
        lengths = controller.lengths(held, 0)
        if max(lengths) > 2:
            return number
        trials += (drafts := max(lengths) > 0)
        factor = 20.0 if drafts and trials <= slow else 1.0
        starting, step = (0.4 * factor, 0.1 * factor * (max(lengths) - 1)) if drafts else (0.0, 0.0)
        verifying = (1.0 + 0.02 * sum(lengths)) * factor
        controller.learn(
            Outcome(lengths, lengths, max(lengths), verifying + starting + step, starting + step, seconds_between=step)
        )
    return 6_000


@pytest.mark.parametrize("rows", [1, 8])
def test_a_few_slow_trials_put_off_drafts_by_few_rounds(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are borne by the others; after four, the next trial comes as soon as a cheap one would, and its seconds are believed."""
    assert first_planned_round(2, rows) == first_planned_round(0, rows)
    assert first_planned_round(4, rows) <= 1_000
    with monkeypatch.context() as sabotage:  # the slow trials' price is believed
        sabotage.setattr("shoal.lookahead.plan.DOUBTED_PRICE", 1e9)
        assert first_planned_round(4, rows) > 1_500
    with monkeypatch.context() as sabotage:  # two trials decide
        sabotage.setattr("shoal.lookahead.auto.FIRST_ROUNDS", (False, True, False, True))
        assert first_planned_round(2, rows) > 400
    monkeypatch.setattr(DraftCostCurve, "_believed", staticmethod(CostCurve._believed))  # the median counts
    assert first_planned_round(4, rows) > 1_500


def test_a_cost_beyond_that_of_smaller_sizes_is_believed_at_the_third_time() -> None:
    """And one within it at once, as where passes cost their positions."""
    curve, costs = CostCurve(), []
    curve.observe(4, 1.0)
    for _ in range(3):
        costs.append(curve.observe(8, 9.0))
    assert costs == [1.0, 1.0, 9.0]
    assert curve.observe(16, 4.5) == 4.5


def test_a_row_near_its_end_gets_no_more_than_it_may_commit() -> None:
    controller = auto(FLAT, 0.01, 0.9)
    assert controller.lengths([row(1), row(3), row(100)], 1) == [0, 2, 16]


def test_unsure_rows_stop_and_sure_rows_go_on() -> None:
    controller = auto({1: 1.0, 600: 40.0}, 0.02, 0.8)
    assert max(controller.lengths([row(), row()], 0)) > 0
    assert controller.shorten(0, [0.999, 0.02]) == [16, 0]
    assert controller.shorten(1, [0.999, 0.999]) == [16, 0]  # a row that stopped stays so
    assert controller.shorten(0, [0.999, 0.999]) == [16, 16]  # drafting began anew, as after a step that gave up
    assert len(controller._confidence) == 1


def test_drafting_ends_when_nothing_left_is_worth_a_step() -> None:
    controller = auto(FLAT, 0.4, 0.8)
    assert max(controller.lengths([row()], 0)) > 0
    steps = 0
    while controller.shorten(steps, [0.75]) > [steps]:
        steps += 1
    assert 1 <= steps < 8


def test_the_step_before_the_last_worthwhile_one_is_the_last() -> None:
    """What a step costs is known before it is made: its drafts are kept, and no further pass is spent on finding out."""
    controller = auto(FLAT, 0.4, 0.8)
    controller.lengths([row()], 0)
    ends = [controller.shorten(position, [0.75])[0] for position in range(3)]
    (last,) = {end for end in ends if end < 16}
    assert ends.index(last) == last - 1  # said while position last - 1 is drawn, not one pass later


def test_rows_further_from_their_end_draft_more_unless_others_wait() -> None:
    """The run is as long as its slowest row, but for a batch that will be filled up the sum of all is what counts."""
    last, filled = ([], [])
    for waiting, kept in ((0, last), (5, filled)):
        controller = auto({1: 1.0, 600: 40.0}, 0.02, 0.8)
        controller.lengths([row(20), row(200)], waiting)
        ends = [16, 16]
        for position in range(16):
            if max(ends) > position:
                ends = controller.shorten(position, [0.9, 0.9])
        kept.extend(ends)
    assert last[0] < last[1]
    assert filled[0] == filled[1] > last[0]


def test_plans_rest_while_they_find_nothing() -> None:
    controller, rows = auto(STEEP, 0.5, 0.3), [row() for _ in range(8)]
    plan, planned = controller._best, []
    controller._best = lambda rows, **kinds: planned.append(len(rows)) or plan(rows, **kinds)  # type: ignore[method-assign,func-returns-value]
    for _ in range(100):
        assert max(controller.lengths(rows, 0)) == 0
    assert len(planned) < 12
    made = len(planned)
    for i in range(16):
        controller.lengths(rows[i % 3 :], 0)  # 8, 7 or 6 rows, as on a server
    assert len(planned) <= made + 1
    controller.lengths(rows[:4], 0)
    assert planned[-1] == 4  # another batch is another question


def test_a_plan_goes_on_when_few_of_its_rows_end() -> None:
    """In any order of those that are left, as the last row moves to a free slot; another row, or a queue, is another question."""
    controller, rows = auto({1: 1.0, 600: 40.0}, 0.01, 0.8), [row() for _ in range(16)]
    plan, planned = controller._best, []
    controller._best = lambda rows, **kinds: planned.append(len(rows)) or plan(rows, **kinds)  # type: ignore[method-assign,func-returns-value]
    assert controller.lengths(rows, 0) == [16] * 16
    left = [rows[0], rows[14], *rows[2:14]]
    for batch in (rows[:15], left):
        assert controller.lengths(batch, 0) == [16] * len(batch)
        assert controller.shorten(0, [0.99] * 5 + [0.02] + [0.99] * (len(batch) - 6)).index(0) == 5
    assert planned == [16]
    controller.lengths(left[:13], 0)  # more than an eighth of them
    controller.lengths(left[:13], 1)
    controller.lengths([*left[:12], row()], 1)
    assert planned == [16, 13, 13, 13]


def test_a_row_keeps_its_weight_and_its_acceptance_when_others_end() -> None:
    """Row 9 moves to slot 1; what was believed of it goes with it."""
    controller, rows = auto({1: 1.0, 600: 40.0}, 0.02, 0.8), [row() for _ in range(10)]
    controller.costs.acceptance._rows = {each.serial: 3.0 * (i == 9) for i, each in enumerate(rows)}
    controller.lengths(rows, 1)
    sure = [0.2] * 10
    assert [i for i, end in enumerate(controller.shorten(0, sure)) if end] == [9]
    controller.lengths([rows[0], rows[9], *rows[2:9]], 1)
    assert [i for i, end in enumerate(controller.shorten(0, sure[:9])) if end] == [1]


def test_rounds_of_the_rows_that_are_left_teach_what_they_teach_alone() -> None:
    """Acceptance and offsets; what tokens per second they bring is no word on a plan for more rows."""
    rows, rng = [3, 5, 8, 9], np.random.default_rng(2)
    record, singly = Record(rows), Acceptance(6)
    for left in ([3, 5, 8, 9], [3, 9, 8], [9, 3]):
        if left != rows:
            record.narrow(left)
        drafted = rng.integers(1, 5, size=len(left))
        looked = [rng.random(len(left)).tolist() for _ in range(5)]
        tried = DraftOutcome(drafted.tolist(), rng.integers(0, drafted + 1).tolist(), looked)
        record.add(tried, 1.0, 7.0)
        singly.learn(left, [tried])
    assert (record.full, record.seconds, record.tokens) == (1, 1.0, 7.0)
    together = Acceptance(6)
    together.learn(record.rows, record.outcomes)
    for name in ("_hits", "_trials"):
        assert getattr(together._confidences, name) == pytest.approx(getattr(singly._confidences, name))
    assert together._positions._trials == pytest.approx(singly._positions._trials)
    (one, two), (first, second) = tried.drafted, tried.confidence[4]
    assert record.outcomes[-1].drafted == [two, 0, 0, one]
    assert record.outcomes[-1].confidence[4] == pytest.approx([second, np.nan, np.nan, first], nan_ok=True)


@pytest.mark.parametrize("rows", [8, 48])
@pytest.mark.parametrize("checked", [True, False])
def test_a_plain_round_believed_to_be_slow_is_made_again(rows: int, checked: bool) -> None:
    """The only plain round of so many rows met other work, and drafts seem to pay, which cost three plain rounds and bring two:
    without plain rounds in between that would last."""
    controller, batch = Auto(PairCosts(packed=True)), [row(10_000) for _ in range(rows)]
    costs, drafted = controller.costs, 0
    costs.rounds = 100
    costs.verify.observe(rows, 20.0)  # 20 times what it takes
    for i in range(400):
        if not checked:
            costs.plain_rounds = PlainRounds()
        if i % 3 == 0:  # rows join and leave
            batch = [*batch[1:], row(10_000)]
        longest = min(max(controller.lengths(batch, 1)), 1)
        if not longest:
            controller.learn(Outcome([0] * rows, [0] * rows, 0, 1.0, 0.0))
            continue
        controller.shorten(0, [0.9] * rows)
        controller.learn(Outcome([1] * rows, [1] * rows, 1, 3.0, 0.5))
        drafted += 1
    assert (safeguards.FIRST_WAIT < drafted < 3 * safeguards.FIRST_WAIT) if checked else drafted > 300


def test_plain_rounds_get_rarer_by_size() -> None:
    known = PlainRounds()
    waited = []
    for _ in range(5):
        rounds = 0
        while not known.due(8):
            known.drafted(15)  # of the same size
            rounds += 1
        assert known.plain(8)
        waited.append(rounds)
    assert waited == [16, 64, 256, 1024, 1024]
    assert not known.plain(8)
    for _ in range(safeguards.FIRST_WAIT):
        known.drafted(16)
    assert known.due(31)
    assert not known.due(32)


def test_a_padded_pass_is_priced_as_such() -> None:
    """One row near its end cannot make the others' padding cheaper: costs are those of rows times the longest draft."""
    packed, padded = (auto({1: 1.0, 600: 100.0}, 0.001, 0.9, kind) for kind in (True, False))
    rows = [row(), *[row(1) for _ in range(15)]]
    assert max(packed.lengths(rows, 1)) > 0
    assert max(padded.lengths(rows, 1)) == 0


def test_a_hopeless_drafter_is_given_up_and_asked_again_for_little() -> None:
    """Mostly early in a run, when there is little to catch up with; what waits for it outlives the run."""
    controller, rows = auto({8: 1.0, 16: 2.0, 600: 60.0}, 0.2, 0.02), [row() for _ in range(8)]
    trials, spent, extra = 0, 0.0, 0.0
    for i in range(5000):
        if i % 500 == 0:
            controller = Auto(controller.costs)
        lengths = controller.lengths(rows, 0)
        trial = max(lengths) > 0
        trials += trial
        assert sum(lengths) == 2 * trial
        spent, extra = spent + 1.0, extra + (0.2 + 0.25 if trial else 0.0)  # a step, and two positions more
        controller.learn(Outcome(lengths, [0] * 8, int(trial), 1.0 + 0.45 * trial, 0.2 * trial))
    assert trials >= 3
    assert extra / spent < 0.01


def rounds_with(between: bool) -> Auto:
    """After 40 rounds with a drafter whose proposals take half a plain round before their first step, and 1 % of one for a step."""
    controller, rows = Auto(PairCosts(packed=True)), [row() for _ in range(8)]
    for _ in range(40):
        lengths = controller.lengths(rows, 0)
        steps, ends = 0, lengths
        while steps < max(ends):
            ends = controller.shorten(steps, [0.99] * 8)
            steps += 1
        lengths = [min(length, end) for length, end in zip(lengths, ends, strict=True)]
        drafting = 0.5 + 0.01 * steps if steps else 0.0
        verifying = 1.0 + 0.02 * sum(lengths)
        known = 0.01 * (steps - 1) if between else None
        controller.learn(Outcome(lengths, lengths, steps, verifying + drafting, drafting, seconds_between=known))
    return controller


def test_what_a_proposal_takes_before_its_first_step_is_no_part_of_a_step() -> None:
    """Otherwise every step seems to take its share of it, drafts stay short, and a short draft seems as dear as before."""
    learned, mixed = rounds_with(between=True).costs, rounds_with(between=False).costs
    assert learned.seconds_starting(8) == pytest.approx(0.51)
    assert learned.seconds_step(8) == pytest.approx(0.01)
    assert learned.seconds_drafting(8, 5) == pytest.approx(0.55)
    assert mixed.seconds_step(8) > 0.03  # all that can be known without the times of the steps


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


def with_known_costs(packed: bool = False) -> Auto:
    """For a target whose pass costs little more for many positions, and a drafter that is not free."""
    pair_costs = PairCosts(packed)
    pair_costs.verify, pair_costs.draft = KnownCosts({1: 1.0, 1000: 1.5}), KnownCosts({1: 0.02, 250: 0.02})
    pair_costs.start = pair_costs.draft
    return Auto(pair_costs)


def run(controller: Controller, samples: int = 5_000, **sampling: Any) -> tuple[Engine, list[Row]]:
    engine = engine_of(table_model(P), table_model(Q), controller, max_batch=250)
    rows = engine.submit(Request((0, 0), samples, Sampling(**{"seed": 5, **sampling}), Limits(max_new_tokens=4)))
    while engine.step():
        pass
    return engine, rows


@pytest.mark.slow
def test_the_law_stays_whatever_confidence_decides() -> None:
    engine, rows = run(with_known_costs(), samples=2000)
    assert chi_square(joint(rows, 4), chain_rule(P, 4)) > ALPHA
    stats = engine.stats
    assert 0 < stats.accepted < stats.drafted
    assert len({row.drafted for row in rows}) > 2  # rows really had draft lengths of their own
    assert stats.row_rounds < 4 * len(rows)


class Spy(Controller):
    """Lets what was thrown away decide: after a rejected first draft, whether the next round drafts at all follows from the
    confidence after the second, which that draft's own uniforms have shaped."""

    limit = 3

    def __init__(self, adaptive: bool) -> None:
        self.adaptive = adaptive
        self._next: dict[int, int] = {}

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        self._rows, self._seen = rows, []
        return [min(self._next.get(id(row), 3), row.remaining - 1) for row in rows]

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        self._seen.append(confidence)
        return [self.limit] * len(confidence)

    def learn(self, outcome: Outcome) -> None:
        self._next = {}
        for b, row in enumerate(self._rows):
            if outcome.drafted[b] == 3 and outcome.accepted[b] == 0:
                self._next[id(row)] = 0 if self._seen[2][b] > 0.6 else 3


@pytest.mark.slow
def test_noise_is_new_in_every_round_of_an_adaptive_controller() -> None:
    """And has to be: with the numbers of the round before, the same controller bends the law."""
    assert chi_square(joint(run(Spy(adaptive=True))[1], 4), chain_rule(P, 4)) > ALPHA
    assert chi_square(joint(run(Spy(adaptive=False))[1], 4), chain_rule(P, 4)) < ALPHA


def test_knowledge_outlives_an_engine() -> None:
    controller = Auto(PairCosts(packed=False))
    run(controller, samples=50)
    assert controller.costs.rounds > 0
    again = by_name("auto", controller.costs)
    assert isinstance(again, Auto)
    assert again.costs is controller.costs


def test_the_engine_times_the_steps_of_a_draft_apart_from_its_start() -> None:
    """A clock that ticks whenever it is read: the first step's time is the start's, all others lie between."""
    ticks = itertools.count()
    controller = Steps()
    engine = engine_of(table_model(P), table_model(Q), controller, max_batch=4, clock=lambda: float(next(ticks)))
    engine.submit(Request((0, 0), 4, Sampling(seed=5), Limits(max_new_tokens=9)))
    while engine.step():
        pass
    assert controller.seen[0].steps == 3
    assert [outcome.seconds_between for outcome in controller.seen[:2]] == [2.0, 2.0]
    assert all(outcome.seconds_drafting > 2.0 for outcome in controller.seen[:2])


def test_the_time_of_planning_is_no_cost_of_drafts() -> None:
    """Planning is slow in the first rounds and rare later: drafts would seem dear that are not."""
    now, seen = [0.0], {}
    for slow in (0.0, 5.0):
        controller = Steps()
        engine = engine_of(table_model(P), table_model(Q), controller, max_batch=4, clock=lambda: now[0])
        lengths, propose = controller.lengths, engine.drafter.propose  # type: ignore[union-attr]

        def planned(rows: Sequence[Row], waiting: int, lengths: Any = lengths, slow: float = slow) -> list[int]:
            now[0] += slow
            return lengths(rows, waiting)

        def proposed(inputs: Any, propose: Any = propose) -> Any:
            now[0] += 1.0
            return propose(inputs)

        controller.lengths, engine.drafter.propose = planned, proposed  # type: ignore[method-assign, union-attr]
        engine.submit(Request((0, 0), 4, Sampling(seed=5), Limits(max_new_tokens=9)))
        while engine.step():
            pass
        seen[slow] = [(each.seconds_planning, round(each.seconds_drafting), round(each.seconds)) for each in controller.seen]
    assert (0.0, 1, 1) in seen[0.0]
    assert seen[5.0] == [(5.0, *others) for _, *others in seen[0.0]]


class Steps(Controller):
    """Three drafts a round; keeps what it is told."""

    limit, adaptive = 3, True

    def __init__(self) -> None:
        self.seen: list[Outcome] = []

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        return [min(3, row.max_draft_length) for row in rows]

    def shorten(self, position: int, confidence: Sequence[float]) -> list[int]:
        return [3] * len(confidence)

    def learn(self, outcome: Outcome) -> None:
        self.seen.append(outcome)


def test_no_drafter_work_where_it_does_not_pay() -> None:
    pair_costs = PairCosts(packed=False)
    pair_costs.verify, pair_costs.draft = KnownCosts({1: 1.0, 1000: 1000.0}), KnownCosts({1: 5.0, 250: 5.0})
    pair_costs.start = pair_costs.draft
    pair_costs.rounds = 100
    engine, _ = run(Auto(pair_costs), samples=200)
    assert (engine.stats.draft_passes, engine.stats.drafted) == (0, 0)
    assert engine.stats.acceptance_length == 1.0


def test_a_drafter_known_to_be_hopeless_is_not_even_given_the_prompts() -> None:
    controller = auto({1: 1.0, 600: 60.0}, 0.2, 0.01)
    assert not controller.may_speculate
    engine, _ = run(controller, samples=20)
    assert runners_of(engine) == [engine.target]
    controller.costs.credit.seconds = 1e9
    assert controller.may_speculate
    assert auto(FLAT, 0.2, 0.5).may_speculate


def test_the_heuristic_grows_by_two_and_shrinks_by_one() -> None:
    heuristic = Heuristic()
    seen = [heuristic.next_length()]
    for drafted, accepted in (([5, 5], [5, 5]), ([7, 7], [7, 0]), ([9, 9, 9], [9, 0, 0]), ([8], [0]), ([0], [0])):
        heuristic.update(drafted, accepted)
        seen.append(heuristic.next_length())
    assert seen == [5, 7, 9, 8, 7, 7]
    for _ in range(30):
        heuristic.update([1], [0])
    assert heuristic.next_length() == 1
    for _ in range(30):
        heuristic.update([1], [1])
    assert heuristic.next_length() == heuristic.limit == 20


def test_what_is_learned_of_a_row_goes_with_it() -> None:
    """Python gives the place of a row that has gone to the next one: a row is known by its serial number."""
    controller = auto(FLAT, 0.2, 0.9)
    known = controller.costs.acceptance
    places: set[int] = set()
    for i in range(20):
        living = Row(Request((1,)), 0, 0, 0, [1], frozenset(), 1000)
        again = id(living) in places
        places.add(id(living))
        controller.lengths([living], 0)
        assert known._offsets(controller._rows).tolist() == [0.0]
        controller.shorten(0, [0.5])
        controller.learn(Outcome([1], [i % 2], 1, 1.0, 0.1))
        controller._learn_acceptance()
        controller.costs.credit.seconds, controller.costs.plain_rounds = 9.0, PlainRounds()
        assert known._offsets(controller._rows).tolist() != [0.0]
        del living
    assert again, "no place was used twice: this test shows nothing"


# ── never slower ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_credit_nothing_is_drafted_whatever_a_plan_promises() -> None:
    controller, rows = auto(FLAT, 0.01, 0.9), [row() for _ in range(8)]
    assert max(controller.lengths(rows, 0)) == 16
    controller.costs.credit.seconds = -1e-9
    assert all(max(controller.lengths(rows, 0)) == 0 for _ in range(50))


def test_a_round_is_charged_what_it_took_beyond_plain_rounds_of_its_tokens() -> None:
    controller, rows = auto({8: 1.0, 16: 1.2, 600: 60.0}, 0.3, 0.5), [row() for _ in range(8)]
    credit = controller.costs.credit
    credit.plain(1.0)
    assert credit.seconds == pytest.approx(FIRST + SHARE)
    controller.costs.acceptance._positions._hits[:] = 0.0  # no plan, and credit for a trial of two rows
    credit.seconds = before = MOST - 1
    assert sorted(controller.lengths(rows, 0)) == [0] * 6 + [1] * 2
    controller.learn(Outcome([1, 1] + [0] * 6, [0] * 8, 1, 1.5, 0.3, 0.7))
    spent = 1.05 + 0.3 + 0.7
    assert credit.seconds == pytest.approx(before + SHARE * spent - (spent - 1.0))
    before = credit.seconds
    controller.learn(Outcome([1] * 8, [1] * 8, 1, 1.5, 0.3))
    assert credit.seconds == pytest.approx(min(before + SHARE * 1.5 + 2 * 1.0 - 1.5 - 0.7, MOST), abs=0.71)


def test_what_was_invested_in_prompts_is_paid_by_gains_or_taken_from_the_account() -> None:
    credit = Credit()
    credit.plain(1.0)
    opened = credit.seconds
    credit.invested = 5.0
    credit.drafted(1.0, 1.0, 2.0)
    assert (credit.invested, credit.allows_plans) == (3.0, True)
    assert credit.seconds == pytest.approx(opened + SHARE)
    credit.drafted(1.0, 1.0, -0.5)  # a round that lost is no return
    assert credit.invested == 3.0
    credit.plain(1.0)
    assert credit.invested == 0.0
    assert credit.seconds == pytest.approx(opened + 3 * SHARE - 0.5 - 3.0)
    for _ in range(100):
        credit.drafted(1.0, 1.0, 5.0)
    assert credit.seconds == MOST


def test_an_account_is_of_one_run() -> None:
    """Invested seconds, the first credit, each of several plain rounds, and the bound by the longest of them."""
    credit = Credit()
    credit.follow([1, 2], float)
    credit.plain(1.0, rounds=3)
    assert credit.run.seconds == 3.0
    assert credit.seconds == pytest.approx(FIRST + 3 * SHARE)
    credit.run.add(rounds_of([0, 0], rounds=3))
    credit.invest(2.0)
    assert (credit.run.seconds, credit.invested) == (5.0, 2.0)
    credit.follow([3], float)  # 3 rounds of two rows, of 2 s each by these prices: a second less than were spent
    assert credit.invested == 0
    assert credit.seconds == pytest.approx(min(FIRST + 3 * SHARE - 2, FIRST + 1 + 5 * SHARE))
    for seconds in (4.0, 1.0):  # the longest round of the run counts
        credit.drafted(seconds, 1.0, 999.0)
        assert credit.seconds == 4 * MOST
    credit.run.whole = False
    credit.follow([4], float)
    credit.drafted(1.0, 1.0, 0.0)
    assert credit.seconds == MOST


def test_what_may_be_invested_and_tried() -> None:
    credit = Credit()
    credit.plain(1.0)
    credit.seconds = 2.0
    for invested, allowed in ((MOST + 1, True), (MOST + 2, True), (MOST + 2.1, False)):
        credit.invested = invested
        assert credit.allows_plans is allowed
    for seconds, cost, allowed in ((FIRST, 0.1, False), (FIRST + 1, 1.0, True), (MOST, 99.0, True), (MOST - 1, 99.0, False)):
        credit.seconds = seconds
        assert credit.allows_trial(cost, 1.0) is allowed


def test_a_wait_is_as_many_rounds_as_it_says() -> None:
    backoff = Backoff()
    for length in (1, 3, 7):
        backoff.extend(8)
        assert backoff.left == length
        assert [backoff.waits(8) for _ in range(length + 1)] == [True] * length + [False]


def useless(rounds: int, waits: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Auto, list[Any], list[int]]:
    """A controller that knows drafts to be useless, its three rows, and the sizes of the passes that it learns from now on.

    Its plain rounds come eight in one go, of a second each.
    """
    controller, rows = Auto(PairCosts(packed=True)), [row(10_000) for _ in range(3)]
    while controller.costs.rounds < rounds or controller.costs.credit.waiting:
        drafts = max(controller.lengths(rows, 0))
        some = (
            Outcome([drafts] * 3, [0] * 3, drafts, 2.0, 1.0) if drafts else Outcome([0] * 3, [0] * 3, 0, 1.0, 0.0, rounds=8)
        )
        controller.learn(some)
    learned: list[int] = []
    observe = CostCurve.observe
    monkeypatch.setattr(
        CostCurve, "observe", lambda self, size, seconds: (learned.append(size), observe(self, size, seconds))[1]
    )
    controller.costs.backoff._rows, controller.costs.backoff._left = 3, waits
    return controller, rows, learned


def test_of_plain_runs_alike_one_of_four_is_learned_and_the_account_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run costs the same, so the account is what it would be if each were learned; so is what it knows of the whole run."""
    controller, rows, learned = useless(300, 80, monkeypatch)
    credit, run = controller.costs.credit, controller.costs.credit.run
    run.whole, spent, rounds, held = False, run.seconds, run._rounds, credit.seconds
    for turn in range(1, 7):
        assert controller.lengths(rows, 0) == [0, 0, 0]
        controller.learn(Outcome([0] * 3, [0] * 3, 0, 1.0, 0.0, rounds=8))
        assert (controller.costs.backoff.left, run._rounds - rounds) == (80 - 8 * turn, 8 * turn)
    assert learned == [3]
    assert (run.seconds - spent, credit.seconds - held) == (pytest.approx(32), pytest.approx(SHARE * 32))
    controller.lengths([row(10_000) for _ in range(2)], 0)  # another run: the last two are told before it is judged
    assert (run.seconds - spent, credit.seconds - held) == (pytest.approx(48), pytest.approx(SHARE * 48))


def test_plain_runs_of_other_rows_or_by_themselves_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, rows, learned = useless(300, 10_000, monkeypatch)
    single = Outcome([0] * 3, [0] * 3, 0, 1.0, 0.0)
    for _ in range(3):
        controller.lengths(rows, 0)
        controller.learn(single)
    assert learned == [3] * 3
    controller.lengths(rows[:2], 0)
    controller.learn(Outcome([0] * 2, [0] * 2, 0, 1.0, 0.0, rounds=8))
    assert learned == [3] * 3 + [2]
    controller.costs.backoff._rows, controller.costs.backoff._left = 2, 10_000
    for _ in range(3):  # too few of two rows were seen for their median to be trusted
        controller.lengths(rows[:2], 0)
        controller.learn(Outcome([0] * 2, [0] * 2, 0, 1.0, 0.0, rounds=8))
    assert learned == [3] * 3 + [2] * 4


def test_credit_bounds_what_is_lost_whatever_drafts_cost() -> None:
    """Against the worst of plans: one that promises gains for ever, and rounds that cost twice what they should."""
    credit, lost, rounds = Credit(), 0.0, 20_000
    for _ in range(rounds):
        if credit.allows_plans:
            credit.drafted(1.0, 2.0, -1.0)
            lost += 1
        else:
            credit.plain(1.0)
    assert FIRST < lost <= FIRST + 2 + SHARE * (rounds + lost)


def rounds_of(accepted: list[int], rounds: int = 1, **more: Any) -> Outcome:
    """One round with drafts, or several plain ones."""
    return Outcome([4 * (rounds == 1)] * len(accepted), accepted, 4 * (rounds == 1), 1.0, 0.1, rounds=rounds, **more)


def run_of_three(**more: Any) -> WholeRun:
    """Rows of 18, 9 and 7 tokens: a round of all, ten plain ones of two, two rounds of one."""
    run = WholeRun([5, 6, 7])
    run.add(rounds_of([2, 3, 6]))  # 3, 4 and 7 tokens
    assert run.follows([5, 6])
    run.add(rounds_of([0, 0], rounds=5))
    assert run.follows([5])
    run.add(rounds_of([4]))
    run.add(rounds_of([4], **more))
    return run


def test_a_run_is_compared_with_plain_rounds_of_the_rows_that_would_be_left() -> None:
    prices = {1: 1.0, 2: 1.5, 3: 1.75}
    run = run_of_three()
    assert run.whole
    assert run.seconds_plain(prices.__getitem__) == 7 * 1.75 + 2 * 1.5 + 9 * 1.0
    assert not run.follows([8])


def credit_after(run: WholeRun, seconds: float, credit: float = 3.0) -> float:
    """The account of `credit` after a run by which it seemed to gain ten seconds."""
    account = Credit()
    account.run, account._before, account.seconds, run.seconds = run, credit, credit + 10, seconds
    account.follow([100], lambda rows: 1.0)
    assert (account.run.rows, account.run.whole, account._before) == ([100], True, account.seconds)
    return account.seconds


def test_a_run_that_loses_though_all_its_rounds_gain_is_taken_from_the_account() -> None:
    """18 plain rounds of a second would do."""
    assert credit_after(run_of_three(), 20.0) == pytest.approx(3 - 2 + SHARE * 20)
    assert credit_after(run_of_three(), 14.0) == pytest.approx(3 + 4 + SHARE * 14)
    assert credit_after(run_of_three(), 5.0) == 13  # the account is never more than its rounds say


@pytest.mark.parametrize("kind", ["a row joins", "forced", "riding", "learning"])
def test_runs_that_plain_decoding_has_no_like_of_are_not_compared(kind: str) -> None:
    more: dict[str, Any] = {"forced": [1]} if kind == "forced" else {"riding": 5} if kind == "riding" else {}
    run = run_of_three(**more)
    if kind == "learning":
        run.add(rounds_of([0], rounds=2), learning=True)  # plain rounds are paid
        assert run.whole
        run.add(rounds_of([4]), learning=True)
    elif kind == "a row joins":
        assert run.follows([5, 9])
    assert not run.whole
    assert credit_after(run, 20.0) == 13


def test_the_controller_tells_the_account_of_its_rows() -> None:
    controller, rows = auto(FLAT, 0.01, 0.9), [row() for _ in range(3)]
    credit = controller.costs.credit
    for left in (3, 2):
        lengths = controller.lengths(rows[:left], 0)
        controller.learn(Outcome(lengths, [1] * left, 16, 1.0, 0.2))
    assert credit.run.rows == [one.serial for one in rows[:2]]
    assert credit.run.seconds_plain(float) == 2 * 3.0 + 2 * 2.0  # a row of two tokens, and two of four
    assert credit.run.whole
    assert credit.run.seconds == pytest.approx(2.0, rel=0.2)
    controller.repeat(rows[1:2])
    assert credit.run.rows == [rows[1].serial]
    controller.lengths([row()], 1)
    assert credit.run.seconds == 0
    assert not credit.run.whole  # rows wait, which will join


def test_the_drafters_prompts_are_part_of_a_trials_price() -> None:
    """What rows that were never drafted for would need, and rows that were decoded without drafts since; a group's prompt once."""
    unfed = Unfed()
    rows = [row() for _ in range(3)]
    rows[1].group = rows[0].group
    for one, new in zip(rows, (0, 2, 4), strict=True):
        one.tokens = [0] * (5 + new)
    assert unfed.tokens(rows) == 5 + 2 + 9
    assert unfed.feed(rows[:2]) == 5 + 2
    assert unfed.feed(rows[:2]) == 0  # drafting goes on
    rows[0].tokens = [0] * 9
    assert unfed.tokens(rows) == 9
    unfed.leave(rows)
    rows[0].tokens = [0] * 12
    assert unfed.tokens(rows) == 3 + 0 + 9
    assert unfed.cheapest(rows, 2) == rows[1::-1]
    unfed.change(rows[2:])
    assert unfed.tokens(rows) == 12 + 2 + 9  # those that left are not remembered


@pytest.mark.parametrize("remaining", [100, 10_000])
def test_a_plan_must_bring_back_the_prompts_it_needs(remaining: int) -> None:
    """Within the tokens that a row is likely to get, however many it may get."""
    cheap, dear = (auto(FLAT, 0.3, 0.5) for _ in range(2))
    for controller, seconds in ((cheap, 0.1), (dear, 50.0)):
        controller.costs.preparing.observe(40, seconds)
        lengths = controller.lengths([row(remaining) for _ in range(8)], 0)
        assert (max(lengths) > 1) == (controller is cheap)


def test_prompts_beyond_the_longest_seen_cost_in_proportion() -> None:
    """A pass of a target costs as much as the largest one seen, so that larger ones are tried; a prompt takes many passes."""
    costs = PairCosts(packed=True)
    costs.preparing.observe(40, 2.0)
    assert [costs.seconds_preparing(tokens) for tokens in (20, 40, 400)] == pytest.approx([1.0, 2.0, 20.0], rel=0.1)
    assert costs.preparing.seconds(400) == costs.preparing.seconds(40)


def test_plans_grow_by_doubling_what_was_seen() -> None:
    """Nothing is known of passes beyond: the first plans of a pair must not be its dearest rounds."""
    survival = np.full((8, 16), 0.9).cumprod(axis=1)
    gains = np.sort(survival.ravel())[::-1]
    for largest, drafts in ((16, 24), (32, 56), (600, 128)):
        plan = best_plan(survival, np.ones(8), auto({1: 1.0, largest: 1.0}, 1e-9, 0.9).costs)
        assert plan is not None
        assert plan.rate == pytest.approx(8 + gains[:drafts].sum(), rel=1e-3)


# ── thinking ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Calls:
    """Counts calls of functions, C functions included."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, arg: object) -> None:
        self.count += event in ("call", "c_call")


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_thinking_takes_few_calls_a_round(rows: int) -> None:
    """Plans and estimates are made once in several rounds, and a step decides by a lookup per row."""
    controller = auto({1: 1.0, 600: 1.5}, 0.02, 0.9)
    batch, sure = [row(10_000) for _ in range(rows)], [0.97] * rows
    rounds, steps = 64, 0

    def decide() -> int:
        lengths = controller.lengths(batch, 0)
        position = 0
        while position < max(lengths):
            lengths = controller.shorten(position, sure)
            position += 1
        drafted = [min(length, position) for length in lengths]
        controller.learn(Outcome(drafted, drafted, position, 2.0, 0.1))
        return position

    decide()
    with Calls() as calls:
        for _ in range(rounds):
            steps += decide()
    assert steps > 4 * rounds
    assert calls.count / rounds < 60 + 6 * rows + (12 + 2 * rows) * steps / rounds


@pytest.mark.parametrize(("forced", "riding"), [([4, 4], 0), (None, 8), ([2, 2], 4)])
def test_forced_tokens_and_prompts_that_ride_are_no_drafts_of_the_drafter(forced: list[int] | None, riding: int) -> None:
    """Their columns are part of the pass, and its time is that of a larger one."""
    learned = []
    for more, ride in ((None, 0), (forced, riding)):
        controller, rows = Auto(PairCosts(packed=True)), [row() for _ in range(2)]
        for _ in range(30):
            lengths = controller.lengths(rows, 0)
            own, steps = [min(length, 2) for length in lengths], int(max(lengths) > 0)
            size = 2 + sum(own)
            controller.costs.verify.observe(size, 0.1 * size)
            seconds = 0.1 * (size + sum(more or []) + ride)
            controller.learn(Outcome(own, own, steps, seconds, 0.0, forced=more, riding=ride))
        learned.append(controller.costs)
    plain, beside = learned
    assert beside.verify.seconds(2) == pytest.approx(plain.verify.seconds(2), rel=0.02)
    assert beside.verify.seconds(10) == pytest.approx(1.0, rel=0.02)
    assert beside.credit.seconds == pytest.approx(plain.credit.seconds)
