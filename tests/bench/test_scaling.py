"""`python benchmarks/scaling.py`: what it times, what it predicts from, what it prints.

Tests of: benchmarks/scaling.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

import scaling
import shoal
from scaling import Point, Sweep, gains, grid, line, pass_sweeps, prepared_pass
from shoal.models.executor import PassBatch, PassOutput
from shoal.models.runner import Runner
from shoal.testing import save_pair

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def pair(places: tuple[Path, Path]) -> shoal.Shoal:
    return shoal.load(*places, dtype="float32", quantize="off")


class Clock:
    """Stands in for `timed`: every block takes as long as the test says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _device: torch.device) -> Clock:
        return self

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _measured(monkeypatch: pytest.MonkeyPatch, sweep: Sweep, cost: Any, repeats: int = 2) -> list[Point]:
    """The sweep as if every point took cost(size) seconds."""
    clock = Clock(0.0)
    make = sweep.make

    def priced(point: Point) -> Any:
        clock.seconds = cost(point.size)
        return make(point)

    monkeypatch.setattr(scaling, "timed", clock)
    Sweep(sweep.name, sweep.points, priced).measure(CPU, repeats)
    return sweep.points


@pytest.mark.parametrize("shared", [False, True])
def test_a_prepared_pass_is_the_pass_it_says(pair: shoal.Shoal, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    runner, plans = pair.target.fork(), []
    ordinary = Runner._ordinary

    def noted(own: Runner, batch: PassBatch) -> PassOutput:
        plans.append(batch.plan)
        return ordinary(own, batch)

    monkeypatch.setattr(Runner, "_ordinary", noted)
    for _ in range(2):  # preparing it again starts from the same place
        prepared_pass(runner, 3, 5, 40, shared)()
    for plan in plans:
        assert plan.starts == [40] * 3
        assert plan.counts == [5] * 3
        assert plan.offsets == [40 if shared else 0] * 3
        assert plan.kv == (5 if shared else 45)
    assert len(plans) == 2


def test_half_of_the_grid_predicts_the_other(pair: shoal.Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    points = _measured(monkeypatch, grid(pair.target, [1, 2, 4], [0, 1, 2]), lambda size: 0.01 * size)
    assert [point.shown for point in points] == [True, False] * 4 + [True]
    assert [point.size for point in points] == [1, 2, 3, 2, 4, 6, 4, 8, 12]
    assert all(len(point.seconds) == 2 for point in points)
    guessed = [point for point in points if not point.shown]
    assert [point.predicted for point in guessed] == pytest.approx([0.02, 0.02, 0.06, 0.08])
    assert [point.error for point in guessed] == pytest.approx([0.0] * 4)
    assert all(point.predicted is None and point.error is None for point in points if point.shown)


def test_a_law_that_the_model_does_not_know_shows_as_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = line("steps", "rows", [1, 2, 3], lambda value: lambda: None)
    points = _measured(monkeypatch, sweep, lambda size: {1: 1.0, 2: 3.0, 3: 3.0}[size])
    assert points[1].predicted == pytest.approx(2.0)
    assert points[1].error == pytest.approx(-1 / 3)


def test_sweeps_cover_what_was_asked(pair: shoal.Shoal) -> None:
    sweeps = list(pass_sweeps(pair, [1, 2], [0, 1], [16, 32], [1, 3]))
    assert [[tuple(point.at.items()) for point in sweep.points] for sweep in sweeps[:3]] == [
        [(("rows", b), ("k", k)) for b in (1, 2) for k in (0, 1)],
        [(("rows", 1),), (("rows", 2),)],
        [(("prompt", 16),), (("prompt", 32),)],
    ]
    assert [sweep.name.split(" tokens ")[1].split(",")[0] for sweep in sweeps[3:]] == ["copied", "shared"]


def test_gains_follow_from_counts(pair: shoal.Shoal) -> None:
    asked: list[int] = []
    generate = shoal.Shoal.generate

    def noted(own: shoal.Shoal, *arguments: Any, **options: Any) -> Any:
        result = generate(own, *arguments, **options)
        asked.append(options["lookahead"])
        assert result.stats.committed == scaling.BATCH * 12
        assert (result.stats.drafted > 0) == (options["lookahead"] > 0)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shoal.Shoal, "generate", noted)
        found = gains(pair, [0, 1, 2], acceptance=0.5, new_tokens=12, repeats=1)
    assert sorted(asked) == [0, 0, 1, 1, 2, 2]
    assert found[0].measured == 1.0
    assert [gain.predicted is not None for gain in found] == [False, True, False]
    assert all(gain.measured > 0 for gain in found)


def test_the_command_prints_writes_and_draws(places: tuple[Path, Path], tmp_path: Path) -> None:
    app = Typer()
    app.command()(scaling.main)
    target, draft = map(str, places)
    sizes = "--rows 1,2,3 --ks 0,1,2 --lengths 8,16,32 --ns 1,2,4 --new-tokens 8 --repeats 1".split()
    files = ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    done = CliRunner().invoke(app, ["--model", target, "--draft", draft, *sizes, *files])
    assert done.exit_code == 0, done.output
    assert done.output.count("predictions: median") == 5
    assert "speed-up over plain by draft length k" in done.output
    report = json.loads((tmp_path / "s.json").read_text())
    assert [len(sweep["points"]) for sweep in report["sweeps"]] == [9, 3, 3, 3, 3]
    assert [gain["k"] for gain in report["gains"]] == [0, 1, 2]
    assert (tmp_path / "s.png").stat().st_size > 10_000
