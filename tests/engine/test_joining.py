"""The clock of `benchmarks/joining.py`: what a step costs by hand, and that a long prompt's chunks are seen in the rows' waits.

Tests of: engine.scheduler, engine.prefill.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import joining
from joining import WHOLE, Clients, measured
from shoal.engine import scheduler


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LONG", 200)
    monkeypatch.setattr(joining, "SHORT", 10)
    monkeypatch.setattr(scheduler, "CHUNK", 16)


def test_a_chunk_that_rides_saves_a_pass() -> None:
    """At a second a pass: a row waits two where a chunk has one of its own, among them the last chunks of prompts."""
    own, fused = (Clients(16, lambda positions: 1.0, way).play(16, 24) for way in (False, True))
    assert own.tokens == fused.tokens == 16 * 24
    assert (own.seconds, fused.seconds) == (own.passes, fused.passes)
    assert own.joint > 10
    assert (own.fused, fused.fused > 5) == (0, True)
    assert own.passes - fused.passes >= fused.fused - 1
    assert set(own.waits) == set(fused.waits) == {1.0, 2.0}
    assert own.waits.count(2.0) > 2 * fused.waits.count(2.0)


def test_the_longest_wait_is_that_of_a_chunk() -> None:
    price = float  # a second per position
    runs = {chunk: Clients(chunk, price, False).play(16, 24) for chunk in (WHOLE, 64, 16)}
    most = 8 * (joining.DRAFTS + 1)  # of a round
    for chunk, run in runs.items():
        assert min(chunk, 199) < max(run.waits) <= min(chunk, 199 + 8 * 10) + most
    assert len({run.tokens for run in runs.values()}) == 1
    assert runs[WHOLE].joint < runs[64].joint < runs[16].joint


def test_lines_and_a_file(tmp_path: Path) -> None:
    assert [(one["chunk"], one["fused"]) for one in measured(joining.of_a_device, [8], 9, 6)] == [(8, False), (8, True)]
    app, out = typer.Typer(), tmp_path / "out.json"
    app.command()(joining.main)
    options = ["--chunks", "whole,16", "--requests", "17", "--tokens", "6", "--json", str(out)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    lines = json.loads(out.read_text())["lines"]
    assert [one["chunk"] for one in lines] == [WHOLE, WHOLE, 16, 16]
    assert lines[0]["wait max"] > lines[2]["wait max"]
