"""Controllers on a clock of their own: what a run takes by hand, and that good and bad controllers are told apart.

Tests of: lookahead.controller.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import virtual
from shoal.lookahead import auto
from shoal.lookahead.auto import Auto
from shoal.lookahead.controller import Controller, PairCosts, as_controller, by_name
from shoal.lookahead.plan import best_plan
from shoal.types.rounds import Outcome
from virtual import Comparison, PassCosts, Trace, _Text, lines, run

FACTS = PassCosts({1: 1.0, 1000: 1.0}, {1: 0.1, 1000: 0.1})
"""A pass takes a second, a drafter step a tenth."""


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "NOISE", 0.0)


def decode(name: str, trace: Trace, rows: int = 2, batch: int = 2, tokens: int = 30, facts: PassCosts = FACTS) -> float:
    rng = np.random.default_rng(0)
    texts = [_Text(trace, tokens, stops=True, rng=rng) for _ in range(rows)]
    rate = run(as_controller(by_name(name)), facts, texts, batch, rng)
    assert all(text.done == text.end for text in texts)
    return rate


@pytest.mark.usefixtures("no_noise")
def test_a_run_takes_what_its_passes_cost() -> None:
    sure, never = Trace([1.0] * 30, [1.0] * 30, 30), Trace([0.0] * 30, [0.5] * 30, 30)
    assert decode("off", sure) == pytest.approx(60 / 30, rel=1e-3)
    # both prompts, then five tokens a round, four steps; the last round's room leaves all its drafts
    assert decode("fixed:4", sure) == pytest.approx(60 / (0.1 + 6 * 1.4), rel=1e-2)
    # one token a round; the last four rounds have room for 3, 2, 1, 0 drafts
    assert decode("fixed:4", never) == pytest.approx(60 / (0.1 + 30 + 0.1 * (26 * 4 + 6)), rel=1e-2)
    # and a second with every proposal, beside its steps
    assert decode("fixed:4", sure, facts=replace(FACTS, start=1.0)) == pytest.approx(60 / (0.1 + 6 * 2.4), rel=1e-2)
    # two rows after two others
    assert decode("off", sure, rows=4) == pytest.approx(60 / 30, rel=1e-3)
    # a text that ends early
    assert decode("off", Trace([1.0] * 30, [1.0] * 30, 12)) == pytest.approx(24 / 12, rel=1e-3)


def test_auto_loses_little_and_a_fixed_length_much_with_a_shuffled_drafter() -> None:
    traces = [Trace([0.9] * 60, [0.9] * 60, 60)]
    steep = PassCosts({1: 1.0, 200: 20.0}, {1: 0.2, 200: 0.2})
    found = list(lines(steep, traces, [4], tokens=60, runs=3, stops=False))
    assert [(one.drafter, one.queue) for one in found] == [
        (drafter, queue) for drafter in ("the pair's", "shuffled") for queue in virtual.QUEUES
    ]
    shuffled = found[-1]
    assert shuffled.best == "off"
    assert shuffled.regret("auto") < 0.05 < 0.3 < shuffled.regret("bass")
    assert found[0].best != "off"
    assert found[0].regret("auto") < 0.15


@pytest.mark.usefixtures("no_noise")
def test_rows_that_drafts_pull_apart_cost_no_more_than_the_account_may_lose() -> None:
    """Each round gains, by its own rows; but plain decoding has no rounds of few rows: runs took 5 % longer."""
    facts = PassCosts({1: 0.7, 8: 1.0, 40: 2.44, 200: 9.64}, {1: 0.1, 8: 0.16, 400: 2.0}, 0.1)
    rng, costs, seconds = np.random.default_rng(2), PairCosts(packed=True), 0.0
    runs, rows, tokens = 30, 8, 128
    for _ in range(runs):
        texts = []
        for share in (0.75 + 0.1 * rng.standard_normal(rows)).clip(0, 0.98):
            accepted = np.where(rng.random(2 * tokens) < share, 0.97, 0.05)
            texts.append(_Text(Trace(accepted.tolist(), [share] * (2 * tokens), tokens), tokens, stops=False, rng=rng))
        seconds += rows * tokens / run(Auto(costs), facts, texts, rows, rng, clock=lambda: 0.0)
    assert 1.0 < seconds / (runs * tokens) < 1.012


def test_regret_is_against_the_best_fixed_setting() -> None:
    one = Comparison("", "", 8, {"off": 1.0, "fixed:2": 1.5, "auto": 1.2, "bass": 2.0})
    assert one.best == "fixed:2"
    assert one.regret("auto") == pytest.approx(0.2)
    assert one.regret("bass") == pytest.approx(1 - 2 / 1.5)


def test_facts_are_read_again_from_where_they_were_written(tmp_path: Path) -> None:
    import typer

    facts, out = tmp_path / "facts.json", tmp_path / "out.json"
    trace = {"acceptance": [0.8] * 20, "confidence": [0.8] * 20, "length": 20}
    facts.write_text(json.dumps({"prices": {"verify": {"1": 0.01, "9": 0.02}, "step": {"1": 0.001}}, "texts": [trace]}))
    app = typer.Typer()
    app.command()(virtual.main)
    options = ["--facts", str(facts), "--json", str(out), "--batch-sizes", "1,2", "--tokens", "20", "--runs", "1"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "1: 10.0, 9: 20.0" in done.output
    written = json.loads(out.read_text())
    assert written["prices"]["verify"] == {"1": 0.01, "9": 0.02}
    assert len(written["lines"]) == 2 * 2 * len(virtual.QUEUES)


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Of the passes below: one costs 2 % more for every position, a drafter step a share of that."""


def pair_of(acceptance: float, step: float, tokens: int, batch: int) -> tuple[PassCosts, list[Trace]]:
    """Costs, and texts of one pair whose drafter is right that often, give or take, and knows half of how often."""
    rng = np.random.default_rng(0)
    verify = {size: 0.004 * (1 + 0.02 * (size - 1)) for size in SIZES}
    facts = PassCosts(verify, {size: step * seconds for size, seconds in verify.items()})
    texts = []
    for _ in range(batch):
        known, unknown = rng.uniform(-0.15, 0.15, size=(2, tokens))
        texts.append(
            Trace((acceptance + known + unknown).clip(0, 1).tolist(), (acceptance + known).clip(0.02, 0.98).tolist(), tokens)
        )
    return facts, texts


@pytest.fixture
def free_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock does not count what controllers compute: this machine may be busy."""
    monkeypatch.setattr(virtual, "thread_time", lambda: 0.0)


@pytest.mark.usefixtures("no_noise", "free_thinking")
@pytest.mark.parametrize("batch", [1, 4, 8, 16, 32])
@pytest.mark.parametrize(("step", "acceptance"), [(0.15, 0.02), (0.3, 0.02), (0.6, 0.02), (0.6, 0.6), (1.0, 0.8)])
def test_auto_is_never_slower_than_plain_decoding(batch: int, step: float, acceptance: float) -> None:
    """With a useless drafter, a dear one, and one with nothing to gain: over all runs of a pair but the first, its prompts, trials
    and mistakes cost less than a hundredth."""
    facts, known = pair_of(acceptance, step, 128, batch)
    pair_costs, spent = PairCosts(packed=True), {"off": 0.0, "auto": 0.0}
    for i in range(9):
        for name in spent:
            rng = np.random.default_rng(i)
            texts = [_Text(trace, 128, stops=False, rng=rng) for trace in known]
            rate = run(as_controller(by_name(name, pair_costs)), facts, texts, batch, rng)
            spent[name] += 1 / rate if i else 0.0
    assert spent["off"] / spent["auto"] > 0.985 if acceptance > 0.5 else spent["off"] / spent["auto"] >= 0.99


@pytest.mark.slow(but=["1"])
@pytest.mark.usefixtures("free_thinking")
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_auto_loses_little_against_the_best_fixed_length(batch: int) -> None:
    """On average over six times that it gets to know the pair: what it learns by chance may cost a hundredth for long."""
    facts, known = pair_of(0.85, 0.12, 160, 64)
    rates = {
        name: np.mean(
            [np.log(virtual._rates(name, facts, known, batch, 2 * batch, 160, 4, False, seed)) for seed in range(6)]
        )
        for name in ("off", "fixed:1", "fixed:2", "fixed:4", "fixed:6", "fixed:9", "auto")
    }
    best = max(rate for name, rate in rates.items() if name != "auto")
    assert best - rates["auto"] < 0.03
    assert batch > 16 or best - rates["off"] > 0.1


class Counting(Auto):
    """Counts the drafts by the number of rows that are left: {rows: [rounds, drafts]}."""

    def __init__(self) -> None:
        super().__init__(PairCosts(packed=True))
        self.by_rows: dict[int, list[int]] = {}

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        found = self.by_rows.setdefault(len(outcome.drafted), [0, 0])
        found[0] += 1
        found[1] += sum(outcome.drafted)

    def drafts(self, fewest: int, most: int) -> float:
        """A row's drafts in a round, where so many rows are left."""
        some = {rows: found for rows, found in self.by_rows.items() if fewest <= rows <= most}
        return sum(drafts for _, drafts in some.values()) / sum(rows * rounds for rows, (rounds, _) in some.items())


ROLLOUTS = [24 + 6 * i for i in range(24)] + [200 + 60 * i for i in range(8)]
"""Lengths of the 32 samples of a step of reinforcement learning: most are short, a few are long."""


def rollouts(controller: Controller, slope: float) -> float:
    """The seconds of the last of several steps, of passes that cost so much more for every position."""
    verify = {size: 0.004 * (1 + slope * (size - 1)) for size in SIZES}
    facts = PassCosts(verify, dict.fromkeys(SIZES, 0.0008))
    for step in range(4):
        rng = np.random.default_rng(step)
        texts = [_Text(Trace([0.7] * 640, [0.7] * 640, length), 640, stops=True, rng=rng) for length in ROLLOUTS]
        rate = run(controller, facts, texts, len(texts), rng)
    return sum(ROLLOUTS) / rate


def of_a_full_batch(survival: Any, weights: Any, costs: PairCosts) -> Any:
    """Sabotage: the plan of 32 rows, however many are left."""
    rows = np.arange(len(ROLLOUTS)) % len(survival)
    return best_plan(survival[rows], weights[rows], costs)


@pytest.mark.usefixtures("no_noise", "free_thinking")
def test_the_fewer_rows_are_left_the_more_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long tail of rollouts: a draft of one of few rows costs a pass little. Where positions cost nothing, and where plans
    do not know how many rows are left, all draft alike."""
    found, free, blind = Counting(), Counting(), Counting()
    seconds, plain = rollouts(found, 0.02), rollouts(as_controller(by_name("off")), 0.02)
    rollouts(free, 0.0)
    monkeypatch.setattr(auto, "best_plan", of_a_full_batch)
    seconds_blind = rollouts(blind, 0.02)
    ours, alike, without = (
        [one.drafts(*rows) for rows in ((17, 32), (5, 16), (2, 4), (1, 1))] for one in (found, free, blind)
    )
    assert ours == sorted(ours)
    assert ours[-1] > 2 * ours[0]
    assert alike[-1] < 1.4 * alike[0]
    assert without[-1] < without[0]
    assert seconds < 0.93 * seconds_blind < 0.86 * plain
