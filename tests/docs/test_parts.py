"""The parts of the slow tests, which CI runs by turns: each test is in one, always the same.

Tests of: tests/helpers/parts.py; scripts/lanes.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

import lanes
from parts import PARTS, SHARED, STALE, part_of

ROOT = Path(__file__).parents[2]
NAMES = [f"tests/room/test_{file}.py::test_case[{number}]" for file in "abc" for number in range(400)]


def test_a_part_is_decided_by_the_name_alone() -> None:
    """Figures of CRC-32, which is the same in every process and on every machine."""
    named = ["tests/a.py::test_b", "tests/a.py::test_c", "tests/models/test_recurrent.py::test_d[é-1]"]
    assert [part_of(name) for name in named] == [3, 6, 1]
    shared = [{part_of(f"tests/serve/{file}::test_{number}") for number in range(50)} for file in SHARED]
    assert [len(parts) for parts in shared] == [1, 1]


def test_parts_are_of_one_size() -> None:
    sizes = Counter(map(part_of, NAMES))
    assert sorted(sizes) == list(range(1, PARTS + 1))
    assert max(sizes.values()) < 1.25 * len(NAMES) / PARTS


def test_each_part_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [date.fromordinal(739_000 + day) for day in range(2 * PARTS)]
    monkeypatch.setattr(lanes, "date", type("Day", (), {"today": iter(days).__next__}))
    turns = [lanes.turn(PARTS) for _ in days]
    assert sorted(turns[:PARTS]) == list(range(PARTS))
    assert turns[PARTS:] == turns[:PARTS]


CASES = """
import pytest
def test_quick(): pass
@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_slow(number): pass
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mixed(number): pass
@pytest.mark.slow(but=["lamb", "ox-2"])
@pytest.mark.parametrize("case", ["lamb", "lamb-1", "lambs", "ox-1", "ox-2", pytest.param("ox-2-x", marks=pytest.mark.slow)])
def test_cases(case): pass
"""
QUICK = {"test_quick", "test_mixed[0]", "test_cases[lamb]", "test_cases[lamb-1]", "test_cases[ox-2]"}


RUNS = """
import json, sys, pytest
for options in json.loads(sys.argv[1]):
    pytest.main(["-v", "-p", "no:cacheprovider", *options, "."])
    print("next", flush=True)
"""


def sessions(folder: Path, *runs: Sequence[str]) -> list[tuple[set[str], str]]:
    """The tests that ran, and all that was said, in sessions with these options."""
    (folder / "test_case.py").write_text(CASES)
    (folder / "conftest.py").write_text("pytest_plugins = ['parts']\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: some\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in ("tests/helpers", "scripts"))}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plug-ins of others take longer than the session
    command = [sys.executable, "-c", RUNS, json.dumps(runs)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.split("next\n")[:-1]
    passed = r"^(?:\[gw0\].* PASSED )?(test_case\S+)(?: PASSED|\s*$)"
    return [(set(re.findall(passed, text, re.MULTILINE)), text) for text in told]


def test_the_parts_cover_all_tests_and_share_the_quick_ones(tmp_path: Path) -> None:
    parts = [["--slow-part", str(number)] for number in range(1, PARTS + 1)]
    (every, said), (not_slow, _), *others = sessions(tmp_path, [], ["-m", "not slow"], *parts)
    quick = {f"test_case.py::{name}" for name in QUICK}
    assert len(every) == 33
    assert "slow tests" not in said
    assert not_slow == quick
    slow = []
    for number, (names, said) in enumerate(others, 1):
        assert f"slow tests: part {number} of {PARTS}" in said
        assert quick < names
        slow += names - quick
        assert {part_of(name) for name in names - quick} == {number}
    assert sorted(slow) == sorted(every - quick)


def test_each_case_that_is_said_to_be_quick_is_there() -> None:
    """Of all tests that this session has collected."""
    assert not STALE


def test_the_part_of_the_day(tmp_path: Path) -> None:
    before = lanes.turn(PARTS)
    ((names, said),) = sessions(tmp_path, ["--slow-part", "turn", "-p", "xdist", "-n", "1"])
    turn = next(
        turn for turn in {before, lanes.turn(PARTS)} if f"slow tests: part {1 + turn} of {PARTS}" in said
    )  # midnight
    assert {part_of(name) for name in names if "slow" in name} == {1 + turn}
