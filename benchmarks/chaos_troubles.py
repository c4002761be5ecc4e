"""What a process of `benchmarks/chaos.py` meets: kills, disks, clocks; and what was seen of it."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import shoal

Json = dict[str, Any]
Texts = dict[int, list[str]]
PLACED = ("--dtype", "float32", "--quantize", "off")  # decided here, not by measurement: all runs must be the same
PROMPTS = ("def is_even(n):\n", "def add(a, b):\n", "class Stack:\n", "import math\n\n\ndef area(radius):\n")
MOST_RUNS = 200
PATIENCE = 600.0  # seconds that something may take until it is a hang
TIMEOUT = "3600"  # seconds of a request, by the clock that leaps
ENDED_BY_TIME = ("time", "not started")
CLOCKS = """
import os, random, time
draw, ahead = random.Random(), 0.0
def leaped():
    global ahead
    if draw.random() < 0.01:
        ahead += draw.uniform(0, 600)
        try:
            with open(os.environ["CHAOS_MET"], "ab") as met: met.write(b".")
        except OSError: pass
    return ahead
def steady(right, unit): return lambda: right() + type(right())(leaped() * unit)
def wall(right, unit): return lambda: right() + type(right())(draw.uniform(-3600, 3600) * unit)
for name, made in {"time": wall, "monotonic": steady, "perf_counter": steady}.items():
    setattr(time, name, made(getattr(time, name), 1))
    setattr(time, f"{name}_ns", made(getattr(time, f"{name}_ns"), 10**9))
"""
"""A program that every Python of a run begins with: the wall clock is anywhere within two hours at every call, the steady ones leap
forward, as they do for a process that was paused."""


@dataclass(frozen=True)
class Trouble:
    """What a run meets.

    Attributes:
        kill: the chance that a run gets SIGKILL. victims: what is killed: the process, or workers of it on Ray.
        room: bytes by which its files may grow; None = no limit. slow: of opens, reads, writes and syncs. clocks: they leap.
    """

    kill: float = 0.0
    victims: Literal["process", "ray"] = "process"
    room: int | None = None
    slow: bool = False
    clocks: bool = False

    @property
    def missing(self) -> str:
        """What this machine lacks for it; "" = nothing."""
        if self.victims == "ray" and importlib.util.find_spec("ray") is None:
            return "ray is not installed: pip install '.[ray]'"
        if self.slow and shutil.which("cc") is None:
            return "no C compiler (cc), which benchmarks/slow_disk.c needs"
        return ""


@dataclass
class Outcome:
    """Of a trouble.

    Attributes:
        runs: processes started; killed, refused: processes that were killed at work, and that ended by an error.
        met: leaps of clocks and slow calls. cut: answers that ended by their time, and say so. again: requests asked again.
        faults: what must not be. skipped: why it was not tried.
    """

    runs: int = 0
    killed: int = 0
    refused: int = 0
    met: int = 0
    cut: int = 0
    again: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    skipped: str = ""


class Machine:
    """Where the processes of a trouble run.

    Args:
        folder: of the files that they write. planted: a program that every Python begins with, see `chaos_planted`.
    """

    def __init__(self, trouble: Trouble, folder: Path, planted: str = "") -> None:
        self._trouble, self.folder = trouble, folder.resolve()
        self.folder.mkdir(parents=True)
        beside = self.folder.with_name(f"{self.folder.name}-patches")
        beside.mkdir()
        self._met = beside / "met"
        source = Path(shoal.__file__).parents[1]
        self.environment = {
            **os.environ, "PYTHONDONTWRITEBYTECODE": "1",  # on a full disk Python keeps half of a compiled module
            "CHAOS_FOLDER": f"{self.folder}/", "CHAOS_MET": str(self._met), "RAY_ADDRESS": "local",
            "PYTHONPATH": os.pathsep.join(map(str, (beside, source, os.environ.get("PYTHONPATH", "")))),
        }  # fmt: skip
        patches = (CLOCKS if trouble.clocks else "") + planted
        if patches:
            (beside / "sitecustomize.py").write_text(patches, encoding="utf-8")
        if trouble.slow:
            self.environment["LD_PRELOAD"] = str(slow_disk(beside))

    @property
    def met(self) -> int:
        return self._met.stat().st_size if self._met.exists() else 0

    def start(self, arguments: Sequence[str], file: Path, **options: Any) -> subprocess.Popen[str]:
        """Starts a process. file: the one that may grow by the trouble's room, and each other no further than it."""
        limit: Callable[[], None] | None = None
        if self._trouble.room is not None:
            most = (file.stat().st_size if file.exists() else 0) + self._trouble.room

            def limit() -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes then fail, as on a full disk
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        return subprocess.Popen(arguments, env=self.environment, preexec_fn=limit, encoding="utf-8", **options)

    def faults(self) -> list[str]:
        """That a trouble was not met proves nothing."""
        silent = (self._trouble.slow or self._trouble.clocks) and not self.met
        return ["no clock leaped and no call was slow"] if silent else []


def slow_disk(folder: Path) -> Path:
    """The library that is preloaded."""
    library = folder / "slow_disk.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(Path(__file__).with_name("slow_disk.c")), "-ldl"]
    subprocess.run(command, check=True)
    return library


def lines(count: int) -> list[Json]:
    """Greedy and seeded requests."""
    chosen: list[Json] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
    return [
        {"id": i, "prompt": f"# {i}\n{PROMPTS[i % len(PROMPTS)]}", "n": 1 + i % 3, "max_tokens": 24, **chosen[i % 2]}
        for i in range(count)
    ]


def texts(answer: Json) -> list[str]:
    """Of an answer; what else it is, if it has none."""
    return [choice["text"] for choice in answer.get("choices", ())] or [str(answer)]


def ends(answer: Json) -> list[str]:
    """What ended each text."""
    return [choice["ended_by"] for choice in (answer.get("usage") or {}).get("choices", ())]


def differences(what: str, found: Sequence[str], ended: Sequence[str], expected: Sequence[str]) -> list[str]:
    """What is wrong with the texts of an answer: whole ones must be the expected, and those that ended by their time begin them."""
    if len(found) != len(expected) or len(ended) != len(expected):
        return [f"{what}: {len(found)} texts and {len(ended)} ends, not {len(expected)}: {list(found)!r}"]
    return [
        f"{what}: {text!r} ended by {end}, and {right!r} was expected"
        for text, end, right in zip(found, ended, expected, strict=True)
        if not (right.startswith(text) if end in ENDED_BY_TIME else text == right)
    ]


def is_cut(ended: Sequence[str]) -> bool:
    """Whether an answer says that its time ended it."""
    return any(end in ENDED_BY_TIME for end in ended)


def working(process: int, title: str) -> list[Any]:
    """The processes on Ray under another one, by the title that Ray gives them."""
    import psutil
    import ray  # noqa: F401 - brings psutil along

    found = []
    for child in psutil.Process(process).children(recursive=True):
        try:
            if "".join(child.cmdline()[:1]).startswith(title):
                found.append(child)
        except psutil.Error:  # it has ended
            continue
    return found
