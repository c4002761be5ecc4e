"""benchmarks/chaos.py finds what is lost and doubled: planted faults under each trouble, and the troubles themselves are met.

Tests of: benchmarks/chaos.py, chaos_batches.py, chaos_servers.py, chaos_planted.py and chaos_troubles.py.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import chaos
import chaos_batches
import chaos_planted
import chaos_servers
from chaos_troubles import Machine, Outcome, Trouble, differences, lines

STAND_IN = """
import json, os, sys, time
from pathlib import Path
from shoal.serve.batch_lines import read_lines
from shoal.serve.output_file import OutputFile
asked = list(read_lines(Path(sys.argv[1])))
try:
    with OutputFile(Path(sys.argv[2]), asked, {}) as output:
        for line in asked:
            if line.id in output.ids: continue
            n = json.loads(line.text)["n"]
            output.write({
                "id": line.id, "choices": [{"text": f"{line.id}, {i}"} for i in range(n)],
                "usage": {"choices": [{"ended_by": "length"}] * n},
            })
            for _ in range(150): time.monotonic()  # as rounds do
            time.sleep(0.15)
except Exception as error:
    print(error, file=sys.stderr)
    os._exit(2 if type(error).__name__ == "RequestError" else 1)
"""
"""Answers as `shoal batch` does, through its file, without a model."""
NEEDS_CC = pytest.mark.skipif(Trouble(slow=True).missing != "", reason="needs compiler")
HERE = {name: trouble for name, trouble in chaos_batches.TROUBLES.items() if trouble.victims == "process"}


def tried(name: str, folder: Path, planted: str = "") -> Outcome:
    """The stand-in under a trouble whose room fits its short lines."""
    trouble, asked, source = HERE[name], lines(6), folder / "requests.jsonl"
    if trouble.missing:
        pytest.skip(trouble.missing)
    room = trouble.room and 900
    trouble = Trouble(trouble.kill, trouble.victims, room, trouble.slow, trouble.clocks)
    source.write_text("".join(json.dumps(line) + "\n" for line in asked))
    expected = {line["id"]: [f"{line['id']}, {i}" for i in range(line["n"])] for line in asked}
    command = (sys.executable, "-c", STAND_IN)
    return chaos_batches.tried(trouble, source, folder / "run", expected, random.Random(0), planted, command)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_a_batch_without_a_fault_has_none(name: str, tmp_path: Path) -> None:
    seen = tried(name, tmp_path)
    assert seen.faults == []
    assert (seen.refused > 0) == (HERE[name].room is not None)
    assert seen.killed > 0 or HERE[name].kill < 1
    assert (seen.met > 0) == (HERE[name].slow or HERE[name].clocks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), list(zip(HERE, cycle(chaos_planted.BATCHES), strict=False)))
def test_a_planted_fault_of_a_batch_is_found(name: str, fault: str, tmp_path: Path) -> None:
    assert tried(name, tmp_path, chaos_planted.BATCHES[fault]).faults


ANSWER = {"id": 0, "choices": [{"text": "ab"}, {"text": "cd"}], "usage": {"choices": [{"ended_by": "length"}] * 2}}


def changed(text: str, end: str) -> dict[str, Any]:
    return {**ANSWER, "choices": [{"text": text}, {"text": "cd"}], "usage": {"choices": [{"ended_by": end}] * 2}}


@pytest.mark.parametrize(
    "found",
    [
        [], [ANSWER, ANSWER], [ANSWER, {**ANSWER, "id": 7}], [changed("a", "length")], [changed("b", "time")],
        [changed("abab", "time")], [{"id": 0, "error": {}}], [{**ANSWER, "choices": [{"text": "ab"}]}], [{**ANSWER, "usage": {}}],
    ],
)  # fmt: skip
def test_a_file_with_a_fault(found: Sequence[dict[str, Any]]) -> None:
    assert chaos_batches.compared(found, {0: ["ab", "cd"]})


def test_a_file_or_a_stream_without() -> None:
    assert chaos_batches.compared([ANSWER], {0: ["ab", "cd"]}) == []
    assert chaos_batches.compared([changed("a", "time")], {0: ["ab", "cd"]}) == []
    assert differences("x", ["", "cd"], ["not started", "eos"], ["ab", "cd"]) == []
    assert read(STREAM) == (True, [])
    for many in range(len(STREAM)):
        assert read(STREAM[:many]) == (False, [])


# ── a server's clients ──────────────────────────────────────────────────────────────────────────────────────────────


def chunk(index: int, text: str, reason: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": index, "text": text, "finish_reason": reason}]})


USAGE = "data: " + json.dumps({"choices": [], "usage": {"choices": [{"ended_by": "length"}] * 2}})
TEXTS = [chunk(0, "a"), chunk(1, "c"), ": keep-alive", chunk(0, "b", "length"), chunk(1, "d", "length")]
STREAM = [*TEXTS, USAGE, "data: [DONE]"]


def read(events: Sequence[str]) -> tuple[bool, list[str]]:
    found = chaos_servers.Found(["", ""])
    chaos_servers.streamed(events, found)
    return found.whole, found.faults("request", ["ab", "cd"])


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_an_event_that_is_lost_or_doubled(place: int, times: int) -> None:
    assert read([*STREAM[:place], *[STREAM[place]] * times, *STREAM[place + 1 :]])[1]


def test_ends_and_broken_streams() -> None:
    parts = [chunk(0, "ab"), chunk(1, "cd", "length"), USAGE, "data: [DONE]"]
    assert read(parts)[1]  # an end without text is lost
    assert read([chunk(0, "", "length"), *parts])[1] == []
    assert read([chunk(0, "", "length")] * 2 + parts)[1]
    assert read([chunk(0, "b")])[1]
    assert read([chunk(0, "a"), chunk(0, "a")])[1]


def test_a_request_that_the_log_has_twice() -> None:
    line = json.dumps({"path": chaos_servers.PATH, "request_id": "0-1"})
    other = json.dumps({"path": chaos_servers.PATH, "request_id": "0-2"})
    assert chaos_servers.logged(f"{line}\nserves\n{other}\n{line[:9]}", True) == []
    assert chaos_servers.logged(f"{line}\n{other}\n{line}\n", True) == ["the log has request 0-1 2 times"]
    assert chaos_servers.logged("", True)
    assert chaos_servers.logged("", False) == []


def test_counts_of_metrics() -> None:
    text = (
        f'shoal_requests_total{{path="{chaos_servers.PATH}",status="200"}} 3\n'
        'shoal_requests_total{path="/v1/models",status="200"} 9\nshoal_rows_total{reason="length"} 5\n'
        'shoal_rows_total{reason="eos"} 2\n'
    )
    assert chaos_servers.counts(f"# TYPE shoal_requests counter\n# TYPE shoal_rows counter\n{text}") == (3, 7)


# ── the troubles ────────────────────────────────────────────────────────────────────────────────────────────────────


def ran(trouble: Trouble, folder: Path, program: str, *arguments: str) -> tuple[Machine, str]:
    machine = Machine(trouble, folder)
    process = machine.start([sys.executable, "-c", program, *arguments], folder / "file", stdout=subprocess.PIPE)
    said, _ = process.communicate()
    assert process.returncode == 0
    return machine, said


def test_clocks_leap(tmp_path: Path) -> None:
    program = """
import time
read = (time.monotonic, time.perf_counter, lambda: time.monotonic_ns() / 1e9, lambda: time.perf_counter_ns() / 1e9)
for clock in read:
    seen = [clock() for _ in range(2000)]
    assert seen == sorted(seen)
    assert seen[-1] - seen[0] > 100
for clock in (time.time, lambda: time.time_ns() / 1e9):
    seen = [clock() for _ in range(200)]
    assert seen != sorted(seen)
    assert 3600 < max(seen) - min(seen) < 7300
"""
    machine, _ = ran(Trouble(clocks=True), tmp_path / "run", program)
    assert machine.met > 4
    assert machine.faults() == []
    calm, _ = ran(
        Trouble(), tmp_path / "calm", "import time; seen = [time.time() for _ in range(99)]; assert max(seen) < seen[0] + 60"
    )
    assert calm.met == 0


@NEEDS_CC
def test_a_slow_disk_is_that_of_the_folder_alone(tmp_path: Path) -> None:
    program = """
import os, sys
folder, beside = sys.argv[1:]
for place in (beside, folder):
    with open(f"{place}/file", "wb") as file:
        file.write(b"abc")
        file.flush()
        os.fsync(file.fileno())
    assert open(f"{place}/file", "rb", buffering=0).read(9) == b"abc"
    met = os.environ["CHAOS_MET"]
    print(os.path.getsize(met) if os.path.exists(met) else 0)
"""
    (tmp_path / "run-beside").mkdir()
    machine, said = ran(Trouble(slow=True), tmp_path / "run", program, str(tmp_path / "run"), str(tmp_path / "run-beside"))
    before, after = map(int, said.split())
    assert (before, after) == (0, 5), "two opens, a write, a sync, a read"
    assert machine.met == 5


def test_a_trouble_that_was_not_met_is_a_fault(tmp_path: Path) -> None:
    assert Machine(Trouble(clocks=True), tmp_path / "run").faults() == ["no clock leaped and no call was slow"]


def test_without_ray_a_trouble_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chaos_batches.TROUBLES["killed worker on Ray"].missing == "ray is not installed: pip install '.[ray]'"
    assert chaos_servers.TROUBLES["killed replica on Ray"].missing
    assert "skipped: ray" in str(list(chaos.shown({"x": Outcome(skipped="ray is not installed")}).columns[-1].cells))


def test_planted_programs_are_programs() -> None:
    """The names that they change are there."""
    from shoal.serve.output_file import OutputFile
    from shoal.serve.responses import ApiResponse

    for program in [*chaos_planted.BATCHES.values(), *chaos_planted.SERVERS.values()]:
        compile(program, "planted", "exec")
    assert {"write", "_count", "__exit__"} <= vars(OutputFile).keys()
    assert "_chunk" in vars(ApiResponse)
