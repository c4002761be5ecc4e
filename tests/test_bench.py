"""The benchmark measures what it says: identity first, equal work for every way, memory against the prediction."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.bench import __main__ as bench
from shoal.bench import stages
from shoal.bench.memory import peak_tensor_bytes


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    app = typer.Typer()
    app.command()(bench.main)
    options = "--dtype float32 -n 2 --max-new-tokens 8 --prompts 1 --repeats 1 --lookahead 3 --json".split()
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])["runs"][0]
    return report


def test_every_way_does_the_same_work(report: dict[str, Any]) -> None:
    plain, ours, theirs = (report["ways"][name] for name in (bench.PLAIN, bench.OURS, bench.HF))
    assert plain["target_passes"] == theirs["target_passes"] == 8
    assert plain["drafted"] == 0 < ours["drafted"]
    assert ours["target_passes"] < 8
    for way in (plain, ours, theirs):
        assert round(way["tokens_per_second"] * way["seconds"]) == 2 * 8


def test_identity_and_memory_are_reported(report: dict[str, Any]) -> None:
    assert report["greedy_identical_rows"] == report["control_identical_rows"] == report["greedy_rows"] == 2
    memory = report["memory"]
    assert memory["weights"] + memory["caches_predicted"] < memory["peak"] * 1.01
    assert memory["peak_over_predicted"] < 1.25


@pytest.mark.skipif(sys.platform != "linux", reason="the profiler reports memory on Linux")
def test_peak_counts_what_is_alive_at_once() -> None:
    import torch

    def work() -> None:
        first = torch.zeros(1_000_000)
        del first
        torch.zeros(2_000_000)

    assert 8_000_000 <= peak_tensor_bytes(work) < 9_000_000


def test_stages_counts_every_watched_function(capsys: pytest.CaptureFixture[str]) -> None:
    stages.main(n=2, max_new_tokens=8, lookahead="3", repeats=1)
    shown = capsys.readouterr().out
    for name in (*stages.WATCHED, "whole round"):
        assert name in shown
