"""`shoal bench` beside other programs: what it waits for, marks and shows of the time; and OpenVINO as a baseline.

Tests of: bench.machine, bench.report_views, cli.progress.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import beside_openvino
from bench_runs import POOL, measured, pair, printed, quick_ceilings
from engines.openvino_engine import OpenVinoSampling
from shoal.api import Shoal
from shoal.bench import decoding_methods, machine, report_views
from shoal.bench.decoding_methods import Job
from shoal.bench.job_runner import BenchmarkRunner
from shoal.bench.machine import QuietGate
from shoal.bench.report import Report
from shoal.bench.work import Ids, Work
from shoal.cli import progress
from shoal.cli import run as command_line

__all__ = ["pair", "quick_ceilings"]  # fixtures
TOKENS = 6
JOB = Job(
    batches=(3,), lookaheads=("off", "fixed:3"), baselines=("hf",), layouts=("same",), max_new_tokens=TOKENS, repeats=2
)
COMMAND = (
    "bench --shape tiny --prompt-tokens 12 --batch-sizes 2 --lookahead off,2 --baselines hf --max-new-tokens 6 --repeats 1"
).split()


class OtherProcess:
    """What is read when the processes are looked at: one more process, busy from look `first` on."""

    def __init__(self, first: int) -> None:
        self.first, self.looks = first, 0

    def __call__(self) -> machine.Processes:
        self.looks += 1
        return {7: machine.Process(1, "cc", 1.0, 1000.0 * max(0, self.looks - self.first))}


@pytest.fixture(scope="module")
def disturbed(pair: Shoal) -> Report:
    """Two looks for each of six runs: the second repeat is disturbed, but for its first method."""
    return measured(pair, JOB, QuietGate(0.0, read=OtherProcess(first=9)))


# ── a busy machine ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_disturbed_runs_are_marked_in_table_and_json(disturbed: Report) -> None:
    marked = {one.setting: [bool(run["busy"]) for run in one.runs] for one in disturbed.lines}
    # the second repeat runs in reverse order: hf, fixed:3, off; its second look at hf is the tenth
    assert marked == {"off": [False, True], "fixed:3": [False, True], "hf": [False, False]}
    shown = "\n".join(printed(disturbed))
    assert shown.count("1/2") == 2
    assert "disturbed, by another process that used more than 20% of a core: cc (up to" in shown
    again = Report.from_dict(json.loads(json.dumps(disturbed.to_dict())))
    assert [one.disturbed for one in again.lines] == [1, 1, 0]
    assert report_views.markdown(again).count("| 1/2 |") == 2


def test_nothing_is_marked_on_a_quiet_machine_or_where_nothing_is_known(pair: Shoal) -> None:
    report = measured(pair, JOB, QuietGate(0.0, read=lambda: {}))
    assert not [one for one in report.lines if one.disturbed]
    assert "disturbed, by" not in "\n".join(printed(report))
    assert all(run["busy"] == [] for one in report.lines for run in one.runs)
    unknown = measured(pair, JOB, QuietGate(0.0, read=lambda: None))
    assert all(run["busy"] is None for one in unknown.lines for run in one.runs)
    assert not [one for one in unknown.lines if one.disturbed]


def test_a_file_of_before_is_still_read(disturbed: Report) -> None:
    data = disturbed.to_dict()
    for line in data["lines"]:
        line["runs"] = [{name: value for name, value in run.items() if name != "busy"} for run in line["runs"]]
    assert not any(one.disturbed for one in Report.from_dict(data).lines)


def test_disturbed_points_are_hollow(disturbed: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    markers: list[tuple[str, str]] = []

    def keep(figure: object) -> None:
        axes = pyplot.gcf().axes
        markers.extend((ax.get_title(loc="left"), line.get_markerfacecolor()) for ax in axes for line in ax.get_lines())

    monkeypatch.setattr(pyplot, "close", keep)
    report_views.plot(disturbed, tmp_path / "busy.svg")
    assert sum(colour == "white" for _, colour in markers) == 4  # two settings in two plots
    assert any("hollow: disturbed by another process" in title for title, _ in markers)
    markers.clear()
    lines = [replace(one, runs=[run | {"busy": []} for run in one.runs]) for one in disturbed.lines]
    report_views.plot(replace(disturbed, lines=lines), tmp_path / "quiet.svg")
    assert not [1 for title, colour in markers if colour == "white" or "hollow" in title]


def test_the_command_waits_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "processes", OtherProcess(first=0))
    assert command_line([*COMMAND, "--wait", "0.6"]) == 0
    shown = capsys.readouterr()
    said = " ".join(shown.err.split())
    assert said.count("waiting for a quiet machine, at most 1 s: cc at") == 1
    assert said.count("what was measured beside it is marked as disturbed") == 1
    assert "disturbed, by another process" in shown.out


# ── the time that is left ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_time_that_is_left_follows_from_the_warm_up(pair: Shoal) -> None:
    left: list[float | None] = []
    runner = BenchmarkRunner(pair, JOB, POOL, step=lambda _: left.append(runner.seconds_left))
    runner.warm_up()
    assert set(left) == {None}
    left.clear()
    list(runner.measure())
    assert len(set(left)) == 3 * 2  # methods, repeats
    assert left == sorted(left, key=lambda seconds: -(seconds or 0.0))
    assert runner.seconds_left == 0


def test_the_bar_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    with progress.progress_bar() as bar:
        bar.expect(10)
        assert bar.seconds_left() is None
        for name in "ab":
            bar.step(name)
            now += 3.0
        assert bar.seconds_left() == 24.0  # 8 of 10 steps, 3 s each
        bar.left = lambda: 100.0
        assert bar.seconds_left() == 100.0
        bar.step("c")
        assert bar.progress.tasks[0].fields["left"] == "2 minutes left"


# ── OpenVINO ────────────────────────────────────────────────────────────────────────────────────────────────────────


class FakeEngine:
    """OpenVINO's rows, without OpenVINO."""

    made: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, export: str, dtype: str, threads: int) -> None:
        self.made.append((export, dtype, threads))

    def generate(self, prompts: Sequence[Ids], n: int, sampling: OpenVinoSampling) -> list[list[int]]:
        return [list(range(1, sampling.new_tokens + 1)) for _ in prompts for _ in range(n)]


def test_openvino_is_a_baseline_beside_the_others(
    pair: Shoal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beside_openvino.main([str(tmp_path)]) == beside_openvino.main([]) == 2  # no export
    monkeypatch.setattr(decoding_methods, "BASELINES", {**decoding_methods.BASELINES})
    monkeypatch.setattr(beside_openvino, "BASELINES", decoding_methods.BASELINES)
    (tmp_path / "openvino_model.xml").touch()
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    assert beside_openvino.main([str(tmp_path), *COMMAND[1:], "--baselines", "openvino", "--wait", "0"]) == 0
    assert "openvino (batch 2): openvino-genai is not installed: pip install '.[peers]'" in capsys.readouterr().out
    monkeypatch.setattr(beside_openvino, "OpenVinoEngine", FakeEngine)
    report = measured(pair, replace(JOB, baselines=("openvino",)), QuietGate(0.0, read=lambda: {}))
    (line,) = (one for one in report.lines if one.baseline)
    assert (line.setting, line.committed) == ("openvino", 3 * TOKENS)
    assert FakeEngine.made == [(str(tmp_path), "float32", torch.get_num_threads())]  # loaded once
    assert str(tmp_path) not in json.dumps(report.to_dict())  # results name no place
    run = decoding_methods.baseline_method(pair, "openvino").run(Work(((5, 6),), 2, 0.8, 6, seed=0, eos=(4,)))
    assert run.ids == ((1, 2, 3, 4),) * 2


def test_the_processor_is_named_by_maker_family_and_instructions(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    first = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
    first += "model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n"
    listed.write_text(f"{first}\n{first.replace('26', '25')}", encoding="utf-8")
    assert machine.processor_model(listed) == "AuthenticAMD, AMD EPYC, cpu family 26, model 2, avx2, avx512f"
    listed.write_text("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n", encoding="utf-8")
    assert machine.processor_model(listed) == "asimd"
    assert machine.processor_model(tmp_path / "none") == ""
    assert machine.machine(torch.device("cpu"))["model"] == machine.processor_model()
