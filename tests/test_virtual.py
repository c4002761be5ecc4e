"""Controllers on a clock of their own: what a run takes by hand, and that good and bad controllers are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import virtual
from shoal.lookahead.controller import as_controller, by_name
from virtual import Comparison, PassCosts, Trace, _Text, lines, run

FACTS = PassCosts({1: 1.0, 1000: 1.0}, {1: 0.1, 1000: 0.1})
"""A pass takes a second, a drafter step a tenth."""


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "NOISE", 0.0)


def decode(name: str, trace: Trace, rows: int = 2, batch: int = 2, tokens: int = 30) -> float:
    rng = np.random.default_rng(0)
    texts = [_Text(trace, tokens, stops=True, rng=rng) for _ in range(rows)]
    rate = run(as_controller(by_name(name)), FACTS, texts, batch, rng)
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
