"""DISCO's stopping by ablation: the two rules differ by the drafter's confidence alone, and a gain is seen where there is one.

Tests of: lookahead.plan; lookahead.auto.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import stopping
import virtual
from shoal.lookahead.plan import RoundPlan, Stopping
from stopping import WITH, WITHOUT, ByPosition, Line, lines
from virtual import PassCosts, Trace

FACTS = PassCosts({1: 1.0, 100: 3.0}, {1: 0.15, 100: 0.15})
EASY, HARD = 0.97, 0.1


def of_stretches(told: bool) -> Trace:
    """Eight easy tokens, then four hard ones; the drafter knows which are which, or is as sure of all."""
    chances = ([EASY] * 8 + [HARD] * 4) * 20
    return Trace(chances, chances if told else [0.7] * len(chances), len(chances))


def gain(monkeypatch: pytest.MonkeyPatch, told: bool) -> float:
    monkeypatch.setattr(virtual, "NOISE", 0.0)
    found = next(iter(lines(FACTS, [of_stretches(told)], [2], tokens=200, runs=4, stops=False)))
    return found.speedups[WITH] / found.speedups[WITHOUT] - 1


def test_confidence_pays_where_it_tells_easy_tokens_from_hard_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gain(monkeypatch, told=True) > 0.2
    assert abs(gain(monkeypatch, told=False)) < 0.08


def test_the_ablated_rule_is_the_same_for_any_confidence() -> None:
    plan = RoundPlan(rate=1.0, position_cost=0.3, step_cost=0.1)
    by_confidence = [[0.05 * place for place in range(stopping.BINS)]] * 2
    by_position = [[0.9, 0.6, 0.5, 0.4], [0.2, 0.2, 0.2, 0.2]]

    def ends(kind: type[Stopping], sure: float) -> list[int]:
        rule = kind(plan, [1.0, 1.0], by_confidence, by_position)
        rule.begin([3, 3])
        return [rule.shorten(position, [sure, sure]) for position in range(3)][-1]

    # 0.9, 0.54 and 0.27 of the first row, of which the last is worth less than 0.3; 0.2 of the second
    assert ends(ByPosition, 0.01) == ends(ByPosition, 0.999) == [2, 0]
    assert ends(Stopping, 0.01) == [0, 0]


def test_drafting_ends_where_the_next_token_of_the_rows_left_is_worth_less_than_a_step() -> None:
    """It is worth 0.9 * 0.5 less the 0.4 of its place; one of the row that has ended was worth five times as much."""
    plan = RoundPlan(rate=1.0, position_cost=0.4, step_cost=0.1)
    rule = Stopping(plan, [5.0, 1.0], [[0.9] * stopping.BINS] * 2, [[0.5] * 4] * 2)
    rule.keep([1])
    rule.begin([3])
    assert rule.shorten(0, [0.5]) == [1]


def test_all_settings_have_the_same_luck_and_figures_repeat() -> None:
    def found() -> list[Line]:
        return list(lines(stopping.flat(0.1), [of_stretches(True)], [1], tokens=60, runs=2, stops=False))

    assert found() == found()


def test_a_file_has_both_rules_run_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "traces", lambda pair, tokens: [of_stretches(True)])
    monkeypatch.setattr(stopping.shoal, "load", lambda: None)
    app, out = typer.Typer(), tmp_path / "out.json"
    app.command()(stopping.main)
    done = CliRunner().invoke(app, ["--batch-sizes", "1", "--tokens", "40", "--runs", "3", "--json", str(out)])
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert written["prices from"] == stopping.COSTS.name
    assert [(line["queue"], line["batch"]) for line in written["lines"]] == [("none", 1), ("three batches", 1)]
    assert all(len(line["runs"][name]) == 3 for line in written["lines"] for name in (WITH, WITHOUT))
