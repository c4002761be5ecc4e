"""The lanes: tests at reduced size in other surroundings.

Tests of: scripts/lanes.py; scripts/mutants/by_hand.toml.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

import lanes
from lanes import LANES, Failed, Lane
from shoal.native import build

ROOT = Path(__file__).parents[2]


def test_every_file_of_a_lane_is_there() -> None:
    files = {file for lane in LANES.values() for file in (*lane.tests.split(), *lane.quick.split())}
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "tests" / file).is_file()] == []
    rooms = {file.partition("/")[0] for file in lanes.ROOMS.split()}
    assert {each.name for each in (ROOT / "tests").iterdir() if each.is_dir()} - rooms <= {
        *("__pycache__", "data", "gpu", "helpers", "real")
    }


def test_the_oldest_releases_that_are_promised() -> None:
    assert f'requires-python = ">={lanes.PYTHONS[0]}"' in lanes.PROJECT
    for name, pin in lanes.OLDEST.items():
        assert f'"{name}>={pin.partition("==")[2].removesuffix(".0")},<' in lanes.PROJECT
    assert "triton==" in lanes.PINS  # the one of another torch
    assert LANES["oldest"].pins == {**lanes.OLDEST, "triton": ""}


def answer(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lanes.py", *words])
    return lanes.main()


def test_each_lane_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(lanes, "run_lane", lambda name, quick: chosen.append((name, quick)) or "passed")
    for day in range(len(LANES)):
        today = date.fromordinal(739_000 + day)
        monkeypatch.setattr(lanes, "date", type("Day", (), {"today": lambda today=today: today}))
        assert answer(monkeypatch, "turn") == 0
    assert sorted(chosen) == sorted((name, True) for name in LANES)


def test_a_lane_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"absent": Lane("9.9"), "broken": Lane(tests="docs/test_lanes.py")}
    monkeypatch.setattr(lanes, "LANES", made)
    monkeypatch.setattr(lanes.subprocess, "run", fails)
    assert answer(monkeypatch, "run", "absent") == 0
    assert "not run: no Python 9.9" in capsys.readouterr().out
    assert answer(monkeypatch, "run", "broken", "absent") == 1
    assert "lane broken: FAILED: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        answer(monkeypatch, "run", "unheard-of")


def test_a_lane_of_another_processor_is_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    began: list[list[str]] = []
    monkeypatch.setattr(lanes, "run", lambda command, **_: began.append(command))
    monkeypatch.setattr(build, "instructions", lambda: build.NEEDED["x86-64-v3"] | {"sse42"})
    assert answer(monkeypatch, "turn", "x86-64-v2", "x86-64-v3", "x86-64-v4", "no-compiler") == 0
    assert "x86-64-v4: not run: this processor has no avx512bw, avx512cd" in capsys.readouterr().out
    assert len(began) == 3


def fails(command: list[str], check: bool = False, **_: object) -> subprocess.CompletedProcess[str]:
    if check:
        raise subprocess.CalledProcessError(1, command)
    return subprocess.CompletedProcess(command, 1, "", "")


@pytest.mark.parametrize(("code", "torch"), [(lanes.NO_TORCH, False), (1, None)])
def test_an_install_that_fails_for_another_reason(
    code: int, torch: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **variables: str) -> None:
        if command[0] == "scripts/setup.sh":
            raise Failed("it says why") from subprocess.CalledProcessError(code, command)

    monkeypatch.setattr(lanes, "run", run)
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    if torch is None:
        with pytest.raises(Failed, match="it says why"):
            lanes.installed("oldest", LANES["oldest"], sys.executable)
        return
    assert lanes.installed("oldest", LANES["oldest"], sys.executable) is torch
    pins = (tmp_path / ".lanes/oldest.txt").read_text()
    assert set(lanes.OLDEST.values()) <= set(pins.splitlines())
    assert "transformers==5.2" not in pins


def test_mutants_made_by_hand_stand_once_in_their_files() -> None:
    """A change of a line takes its mutants along; else they prove nothing from then on."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    place = importlib.util.spec_from_file_location("mutants_run", ROOT / "scripts" / "mutants" / "run.py")
    assert place is not None
    assert place.loader is not None
    run = importlib.util.module_from_spec(place)
    place.loader.exec_module(run)
    mutants = tomllib.loads((ROOT / "scripts" / "mutants" / "by_hand.toml").read_text("utf-8"))["mutant"]
    texts = {one["file"]: (ROOT / one["file"]).read_text("utf-8") for one in mutants}
    found = [(one, run.pattern(one["old"]).subn(lambda _, one=one: one["new"], texts[one["file"]])) for one in mutants]
    assert [one["name"] for one, (_, changes) in found if changes != 1] == []
    assert [one["name"] for one, (text, _) in found if one["file"].endswith(".py") and not run.compiles(text)] == []
    for file, _, name in (test.partition("::") for one in mutants for test in one["tests"]):
        assert f"def {name}(" in (ROOT / file).read_text("utf-8") or not name
