"""Figures from samples: by hand, by enumeration, and what the intervals and the test promise."""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np
import pytest

from shoal.evaluation.summary import Results, SampleTable, permutation_test, summarize

INF = np.inf


def table(finished_at: Any, score: Any, mean_logprob: Any = None) -> SampleTable:
    moments, scores = np.array(finished_at, float), np.array(score, float)
    ranks = np.zeros_like(moments) if mean_logprob is None else np.array(mean_logprob, float)
    zeros = np.zeros_like(moments)
    return SampleTable(moments, ranks, scores, zeros + 5, zeros, np.where(np.isfinite(moments), moments, 0).max(axis=1))


def test_ranks_without_a_log_probability_come_last_and_ties_go_to_the_first_row() -> None:
    assert table([[1, 1]], [[0, 1]], [[-INF, -9]]).first(INF)[0] == 1
    assert table([[1, 1]], [[1, 0]], [[-1, -1]]).first(INF)[0] == 1
    assert table([[INF, 1]], [[0, 1]], [[-1, -INF]]).first(INF)[0] == 1  # the only finished one
    assert table([[INF, INF]], [[1, 1]]).first(INF)[0] == 0  # nothing finished: the problem fails


def outcomes(dice: np.random.Generator, chances: Any, n: int = 8) -> SampleTable:
    passed = dice.random((len(chances), n)) < chances[:, None]
    return table(np.ones(passed.shape), passed)


def test_the_permutation_test_cries_wolf_as_often_as_it_says_and_finds_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.evaluation.summary.SHUFFLES", 500)
    dice = np.random.default_rng(1)
    chances = dice.random(40)
    p_values = [permutation_test(outcomes(dice, chances), outcomes(dice, chances), 1, seed) for seed in range(100)]
    assert mean(p <= 0.05 for p in p_values) <= 0.12  # 5 are expected; 13 or more come once in a thousand seeds
    assert mean(p <= 0.5 for p in p_values) == pytest.approx(0.5, abs=0.16)
    assert permutation_test(outcomes(dice, np.clip(chances + 0.2, 0, 1)), outcomes(dice, chances), 1) < 0.01


# ── summaries ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sample(moment: float, finished: bool = True, tokens: int = 5) -> dict[str, Any]:
    return {"token_ids": [1] * tokens, "mean_logprob": -1.0, "finished": finished, "finished_at": moment}


def test_nothing_finished_is_a_summary_too() -> None:
    attempts = {"a": {"error": None, "attempts": {"plain": {"seconds": 1.0, "samples": [sample(1.0, False)]}}}}
    summary = summarize(
        Results(["a"], ("plain",), 1, ("passed",), attempts, {"a": {"grades": {"plain": [None]}}}), [1.0, INF]
    )
    assert [line["passed_all"]["mean"] for line in summary["lines"]] == [0, 0]
    assert summary["curves"]["budgets"] == []
    assert summary["against"] == []
