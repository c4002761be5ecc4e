"""Results survive a kill at any byte, and are never mixed with those of other settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import RequestError
from shoal.evaluation.journal import Journal, open_directory

ENTRIES = [{"task_id": f"é/{i}", "text": "line\nbreak \u2028"} for i in range(3)]


def test_entries_are_there_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    for entry in ENTRIES:
        journal.append(entry)
    again = Journal(tmp_path / "a.jsonl")
    assert list(again.entries.values()) == list(journal.entries.values()) == ENTRIES


def test_a_line_torn_at_any_byte_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for entry in ENTRIES:
        Journal(file).append(entry)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size] + b"\0" * (size % 3))  # as a crash may leave it
        journal = Journal(file)
        kept = whole[:size].count(b"\n")
        assert list(journal.entries.values()) == ENTRIES[:kept]
        for entry in ENTRIES[kept:]:
            journal.append(entry)
        assert file.read_bytes() == whole


def test_what_is_new_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, waited, real = tmp_path.stat().st_ino, [], os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        stat = os.fstat(descriptor)
        waited.append("folder" if stat.st_ino == folder else stat.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    open_directory(tmp_path, {"n": 1})
    assert waited == [(tmp_path / "settings.json").stat().st_size, "folder"]
    journal = Journal(tmp_path / "a.jsonl")
    assert waited[2:] == [0, "folder"]
    for entry in ENTRIES:
        journal.append(entry)
        assert waited[-1] == (tmp_path / "a.jsonl").stat().st_size


def test_settings_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            open_directory(tmp_path, {"n": 1})
    open_directory(tmp_path, {"n": 2})
    assert json.loads((tmp_path / "settings.json").read_text()) == {"n": 2}


KILLED = """
import os, sys
from pathlib import Path
from shoal.evaluation.journal import Journal
while sys.stdin.readline():
    if not os.fork():
        journal = Journal(Path(sys.argv[1]))
        for i in range(len(journal.entries), 1_000_000):
            journal.append({"task_id": str(i), "text": "x" * 5000})
            print(i, os.getpid(), flush=True)
    print("ended by", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""For each line that it reads, a copy of one process writes until it is killed."""


@pytest.mark.slow
def test_what_was_reported_done_survives_kill_9(tmp_path: Path) -> None:
    file, reported = tmp_path / "a.jsonl", 0
    command = [sys.executable, "-c", KILLED, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for _ in range(3):
            print(file=running.stdin, flush=True)
            for _ in range(5):
                number, process = map(int, running.stdout.readline().split())
                reported = number + 1
            os.kill(process, signal.SIGKILL)
            ends = [line for line in iter(running.stdout.readline, f"ended by {-signal.SIGKILL}\n") if not line[0].isdigit()]
            assert ends == []
            names = list(Journal(file).entries)
            assert names == [str(i) for i in range(len(names))]
            assert len(names) >= reported
        running.stdin.close()
    assert reported >= 15


@pytest.mark.parametrize(
    ("line", "said"), [("{oops}", "2 is not JSON"), ("[1]", '2 must be an object with a text "task_id"')]
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"task_id": "a"}}\n{line}\n{{"task_id": "b"}}\n')
    with pytest.raises(RequestError, match=said):
        Journal(file)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    file, settings = tmp_path / "settings.json", {"n": 8, "methods": ("plain",), "seed": None}
    open_directory(tmp_path, settings)
    open_directory(tmp_path, settings)
    for other, said in (({"n": 4}, "n = 8, asked for is 4"), ({"top_p": 0.9}, "top_p = None, asked for is 0.9")):
        with pytest.raises(RequestError, match=said):
            open_directory(tmp_path, {**settings, **other})
    with pytest.raises(RequestError, match=r"methods = \['plain'\], asked for is None"):
        open_directory(tmp_path, {"n": 8})
    assert json.loads(file.read_text()) == {"n": 8, "methods": ["plain"], "seed": None}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(RequestError, match=r"folder\.jsonl"):
        Journal(tmp_path / "folder.jsonl")
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(RequestError, match="not JSON"):
        open_directory(tmp_path, {})
