"""Stages of a run: processes with a time limit each, one after the other. What one leaves behind, the next ones do not touch.

Neighbours whose times say nothing run together.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

GRACE = 10.0
"""Seconds that a stage at its limit has to deliver what it has measured, before it is killed."""
PASSED, STOPPED = "passed", "stopped after"


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        name: short, unique. what: for the reader. limit: seconds.
        command: of the process; "{results}" stands for the folder in which it may leave JSON files.
        quick: part of the quick run. proves: figures are worth nothing unless it passed.
        together: it measures nothing, so that it may run beside its neighbours of this kind.
        needs: packages that it cannot do without. variables: of its environment.
    """

    name: str
    what: str
    limit: float
    command: tuple[str, ...]
    quick: bool = False
    proves: bool = False
    together: bool = False
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class Cases(NamedTuple):
    """Tests of a stage. chosen: those that should have run."""

    passed: int
    failed: int
    chosen: int


@dataclass(frozen=True)
class Outcome:
    """What became of a stage.

    Attributes:
        result: `PASSED`, or what went wrong. seconds: it took. reports: the JSON files that it left. output: all it printed.
    """

    stage: Stage
    result: str
    seconds: float
    reports: Sequence[dict[str, Any]]
    output: str

    @property
    def passed(self) -> bool:
        return self.result == PASSED

    @property
    def stopped(self) -> bool:
        """Whether its time was over, and nothing else is known to be wrong."""
        return self.result.startswith(STOPPED)

    @property
    def cases(self) -> Cases:
        """The counts that pytest printed, alone or with workers; zeros where it printed none."""

        def count(pattern: str) -> int:
            return sum(map(int, re.findall(pattern, self.output, re.MULTILINE)))

        chosen = r"^collected \d+ items? .*?(\d+) selected|^collected (\d+) items?$|^\d+ workers? \[(\d+) items?\]"
        numbers = [int("".join(found)) for found in re.findall(chosen, self.output, re.MULTILINE)]
        return Cases(count(r"\b(\d+) passed\b"), count(r"\b(\d+) (?:failed|errors?)\b"), max(numbers, default=0))


def run(
    stages: Sequence[Stage],
    folder: Path,
    missing: Sequence[str] = (),
    *,
    seconds: float = float("inf"),
    grace: float = GRACE,
) -> Iterator[Outcome]:
    """Runs the stages in order, whatever becomes of them.

    Args:
        folder: for the files of the stages. missing: packages that are not there.
        seconds: for all of them; a stage gets what its own limit and the others have left. grace: see `GRACE`.
    """
    end = time.monotonic() + seconds
    for group in _groups(stages):
        limits = [min(stage.limit, end - time.monotonic() - grace) for stage in group]
        with ThreadPoolExecutor(len(group)) as pool:
            jobs = [pool.submit(_outcome, *job, folder, missing, grace) for job in zip(group, limits, strict=True)]
            yield from (job.result() for job in jobs)


def _groups(stages: Sequence[Stage]) -> list[list[Stage]]:
    """The stages in order, those that run together in one list."""
    groups: list[list[Stage]] = []
    for stage in stages:
        if groups and stage.together and groups[-1][-1].together:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _outcome(stage: Stage, limit: float, folder: Path, missing: Sequence[str], grace: float) -> Outcome:
    lacking = [name for name in stage.needs if name in missing]
    if lacking:
        return Outcome(stage, f"not run: needs {', '.join(lacking)}", 0.0, [], "")
    if limit <= 0:
        return Outcome(stage, "not run: no time left", 0.0, [], "")
    place = folder / stage.name
    place.mkdir(parents=True)
    print(f"\n── {stage.name}: {stage.what} (at most {limit:.0f} s)", flush=True)
    return _run(stage, limit, place, grace)


def _run(stage: Stage, limit: float, place: Path, grace: float) -> Outcome:
    command = [part.replace("{results}", str(place)) for part in stage.command]
    started, stopped = time.monotonic(), False
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **stage.variables}, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stopped = True
        finally:
            _end(process, grace)
        output.seek(0)
        text = output.read().decode(errors="replace")
    result = f"{STOPPED} {limit:.0f} s" if stopped else PASSED
    if not stopped and process.returncode:
        result = f"failed, exit code {process.returncode}"
    seconds = time.monotonic() - started
    return Outcome(stage, result, seconds, _reports(place), text)


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupts the process, which may deliver what it has, then kills it and all that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            print("   it does not stop by itself", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in this group
    process.wait()


def _reports(place: Path) -> list[dict[str, Any]]:
    """The JSON files; one that was being written when the stage was killed is left out."""
    found = []
    for file in sorted(place.glob("*.json")):
        try:
            found.append(json.loads(file.read_text(encoding="utf-8")))
        except ValueError:
            print(f"   {file.name} is not whole", file=sys.stderr)
    return found
