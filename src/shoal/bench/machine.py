"""The machine of a measurement: hardware, versions, the commit, and the other programs on it.

Results kept in benchmarks/results must name a commit, so that they can be measured again.

Measurements wait for a quiet machine, and those on a busy one are marked. Processor time is read
from /proc, or by `psutil` where there is no /proc and that package is installed; elsewhere nothing
is known. This process and its children do not count.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shoal
from shoal.errors import RequestError

if TYPE_CHECKING:
    import torch

KEPT = ("benchmarks", "results")
NO_GIT = "not from a git repository"
PACKAGE = Path(__file__).parents[1]


def commit(package: Path = PACKAGE) -> str:
    """Returns 12 digits of the commit that the package runs from, or `NO_GIT`.

    "-dirty" is added if a tracked file differs from it, or if src or benchmarks have untracked
    files that git does not ignore: they may change the results. Files in benchmarks/results do not
    count: the results of one run must not spoil the next one's.
    """
    try:
        _git(
            package, "ls-files", "--error-unmatch", "__init__.py"
        )  # not just some repository around it
        top = Path(_git(package, "rev-parse", "--show-toplevel"))
        results = ":(top,exclude)" + "/".join(KEPT)
        tracked = "status --porcelain --untracked-files=no -- :(top)".split()
        others = "ls-files --others --exclude-standard -- :(top)src :(top)benchmarks".split()
        changed, unknown = _git(top, *tracked, results), _git(top, *others, results)
        return _git(top, "rev-parse", "--short=12", "HEAD") + (
            "-dirty" if changed or unknown else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return NO_GIT


def _git(place: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=place, check=True, capture_output=True, encoding="utf-8"
    ).stdout.strip()


def require_place(*places: Path | None, made_at: str | None = None) -> None:
    """Checks the files or directories that results shall go to, before the work starts.

    Args:
        places: the files or directories; None is none.
        made_at: the commit of results that are there already; None for this package's commit now.

    Raises:
        RequestError: a place is in benchmarks/results, and the results name no commit.
    """
    for place in filter(None, places):
        if _is_kept(place):
            named = commit() if made_at is None else made_at
            if not re.fullmatch("[0-9a-f]{12,}", named):
                raise RequestError(
                    f"results in {'/'.join(KEPT)} must name the commit they were made at, and this "
                    f"is {named}: commit the changes first, or write elsewhere"
                )


def _is_kept(place: Path) -> bool:
    parts = place.resolve().parts
    return KEPT in pairwise(parts)


def machine(device: torch.device) -> dict[str, Any]:
    """Returns the machine for JSON; nothing in it names a host or a user."""
    import torch
    import transformers

    processor = platform.processor() or platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "processor": processor,
        "model": processor_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "shoal": shoal.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


WIDE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd")
"""The instruction sets that decide how fast products are."""


def processor_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the maker, family and model of the first processor, and its wide instruction sets.

    Makers call processors of several generations by one name: the family tells them apart. Empty
    where the system has no such file.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (told.get("flags") or told.get("Features") or "").split()
    parts = [told.get("vendor_id"), told.get("model name")]
    parts += [f"{key} {told[key]}" for key in ("cpu family", "model") if key in told]
    return ", ".join([*filter(None, parts), *(flag for flag in WIDE if flag in flags)])


LIMIT = 0.2  # cores; a process that uses more disturbs a measurement
LEAST_SECONDS = 0.05  # of processor time: the clock ticks every 10 ms
WINDOW = 0.5  # seconds that a machine must be quiet for
TIMEOUT = 30.0  # seconds of waiting in all


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        started: when; with its id it names one process.
        seconds: processor time so far.
        reaped: processor time of the ended children that it has waited for.
    """

    parent: int
    name: str
    started: float
    seconds: float
    reaped: float = 0.0

    @property
    def total(self) -> float:
        return self.seconds + self.reaped


Processes = Mapping[int, Process]
"""The processes by id."""


def processes(proc: Path = Path("/proc")) -> Processes | None:
    """Returns all processes that can be seen; None if neither /proc nor `psutil` is there."""
    if (proc / "self" / "stat").exists():
        return dict(_from_proc(proc))
    try:
        import psutil
    except ImportError:
        return None
    return dict(_from_psutil(psutil))


def _from_proc(proc: Path) -> Iterator[tuple[int, Process]]:
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            text = (proc / entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        head, _, rest = text.rpartition(")")  # a name may hold blanks and brackets
        fields = rest.split()  # the first is the third of proc(5)
        user, system, waited_user, waited_system = (int(value) / ticks for value in fields[11:15])
        name = head.partition("(")[2]
        yield (
            int(entry),
            Process(
                int(fields[1]),
                name,
                int(fields[19]) / ticks,
                user + system,
                waited_user + waited_system,
            ),
        )


def _from_psutil(psutil: Any) -> Iterator[tuple[int, Process]]:
    for process in psutil.process_iter(["pid", "ppid", "name", "create_time", "cpu_times"]):
        known = process.info
        spent = known["cpu_times"]
        if spent is None:  # not ours to read
            continue
        reaped = getattr(spent, "children_user", 0.0) + getattr(spent, "children_system", 0.0)
        own = spent.user + spent.system
        yield (
            known["pid"],
            Process(
                known["ppid"] or 0, known["name"] or "", known["create_time"] or 0.0, own, reaped
            ),
        )


@dataclass(frozen=True)
class BusyProcess:
    """A process that is not ours and used more than `LIMIT` cores; its `name` has no arguments."""

    name: str
    cores: float

    def __str__(self) -> str:
        return f"{self.name} at {self.cores:.0%} of a core"


def busy_processes(
    before: Processes, after: Processes, seconds: float, own: int
) -> tuple[BusyProcess, ...]:
    """Returns the other processes that were busy between two moments, the busiest first.

    A process that ended in between is counted by the time that its parent waited for.

    Args:
        seconds: the seconds between the moments.
        own: the process that does not count, nor its descendants.
    """
    family, busy = _descendants(own, {**before, **after}), []
    ended = {pid: one for pid, one in before.items() if not _same(one, after.get(pid))}
    for pid, process in after.items():
        if pid in family:
            continue
        earlier = before.get(pid)
        if earlier is None or earlier.started != process.started:
            earlier = Process(process.parent, process.name, process.started, 0.0)
        waited_for = _descendants(pid, ended) - {pid}
        reaped = process.reaped - earlier.reaped - sum(ended[one].total for one in waited_for)
        spent = process.seconds - earlier.seconds + max(0.0, reaped)
        if spent >= LEAST_SECONDS and spent > LIMIT * seconds:
            busy.append(BusyProcess(process.name, spent / seconds))
    return tuple(sorted(busy, key=lambda one: -one.cores))


def _same(earlier: Process, later: Process | None) -> bool:
    return later is not None and later.started == earlier.started


def _descendants(root: int, known: Processes) -> set[int]:
    family, grown = {root}, True
    while grown:
        more = {pid for pid, process in known.items() if process.parent in family} - family
        grown = bool(more)
        family |= more
    return family


@dataclass
class Watch:
    """The finding of `QuietGate.watch`.

    Attributes:
        busy: the busy processes; None until the block has ended, and if processes cannot be
            seen.
    """

    busy: tuple[BusyProcess, ...] | None = None


@dataclass
class QuietGate:
    """A gate before each measurement, and a watch beside it.

    Args:
        timeout: the seconds to wait for a quiet machine in all; once used up, nothing waits any
            more.
        say: reports waiting.
        read: replaced in tests; None: `processes`.
        clock: replaced in tests.
        sleep: replaced in tests.
        own: the process that does not count, nor its descendants.

    Attributes:
        quiet: the machine was quiet at the last look; None: there was no look.
    """

    timeout: float = TIMEOUT
    say: Callable[[str], None] = lambda _: None
    read: Callable[[], Processes | None] | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    own: int = field(default_factory=os.getpid)
    quiet: bool | None = field(default=None, init=False)

    def wait(self) -> None:
        """Waits until the machine was quiet for `WINDOW` seconds, or no time is left to wait.

        A measurement that was watched and not disturbed is a quiet window: nothing waits after it.
        """
        waited = False
        while not self.quiet and self.timeout > 0:
            with self.watch() as window:
                started = self.clock()
                self.sleep(WINDOW)
            if window.busy is None:
                self.say(
                    "other processes cannot be seen here: nothing tells whether they disturb "
                    "the measurement"
                )
                self.timeout = 0.0
            elif window.busy:
                if not waited:
                    self.say(
                        f"waiting for a quiet machine, at most {self.timeout:.0f} s: "
                        f"{_listed(window.busy)}"
                    )
                waited = True
                self.timeout -= self.clock() - started
                if self.timeout <= 0:
                    self.say(
                        f"not quiet: {_listed(window.busy)}; what was measured beside it is "
                        f"marked as disturbed"
                    )

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Looks at the processes before and after a block, outside of its own time."""
        read, seen = self.read or processes, Watch()
        before, started = read(), self.clock()
        yield seen
        seconds = self.clock() - started
        after = read()
        if before is not None and after is not None:
            seen.busy = busy_processes(before, after, seconds, self.own)
            self.quiet = not seen.busy


def _listed(busy: tuple[BusyProcess, ...]) -> str:
    return ", ".join(map(str, busy[:3]))
