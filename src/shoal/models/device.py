"""The device of a model: its free memory, the errors that mean a lack of it, and its working time.

By default keys and values may take a part of the free memory. Exceptions that mean a lack of memory
become one error.

The working time is measured by events of the device's stream, so the host does not wait. The passes
of a model are timed so, and counted by the executors that computed them.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shoal.errors import OutOfMemory

KV_SHARE = 0.5
"""The part of the free memory that the caches may take.

The rest is for the passes, the logits and distributions of a batch, and the copy of a layer while
its cache grows.
"""


def kv_budget(device: torch.device) -> int | None:
    """Returns the number of bytes for the keys and values of all models on a device.

    The caller asks once the weights are on the device. Processes that torchrun started on one
    machine share its main memory. Returns None if the system does not report its free memory.
    """
    free = free_bytes(device)
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    return None if free is None else int(KV_SHARE * free / sharing)


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a device.

    Memory that PyTorch holds and does not use counts as free. Returns None if the system does not
    report its free memory.
    """
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return _of_machine(Path("/"))


def _of_machine(root: Path) -> int | None:
    """Returns the free main memory in bytes; None if the system does not report it.

    The result is the least of the memory that the kernel counts as available and the memory that
    the limits of the process's control groups leave.
    """
    sizes = [free for free in (_available(root), *_left_by_groups(root)) if free is not None]
    return max(min(sizes), 0) if sizes else None


def _available(root: Path) -> int | None:
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        return available * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: all memory
    except (AttributeError, ValueError, OSError):
        return None


def _left_by_groups(root: Path) -> Iterator[int | None]:
    """Yields the bytes that each control group of the process leaves, in versions 2 and 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, top = ("memory.max", "memory.current", "inactive_file"), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):  # a container may see its own group as the top
            yield _left(top / group, *names)


def _left(group: Path, limit: str, usage: str, file_cache: str) -> int | None:
    """Returns the bytes that a group leaves; None if it has no limit or cannot be read."""
    most, now = _text(group / limit).strip(), _text(group / usage).strip()
    if not (most.isdecimal() and now.isdecimal()):
        return None
    return int(most) - int(now) + _fields(group / "memory.stat").get(file_cache, 0)


def _fields(path: Path) -> dict[str, int]:
    """Reads the lines of a file that consist of a name and a number."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


SIGNS = (
    "out of memory",  # CUDA's allocator, "CUDA error: out of memory", drivers, ROCm
    "can't allocate memory",  # PyTorch on a CPU
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER
    # a new handle fails for want of memory, though the status then says "not initialized"
    "cublascreate",
)
"""The texts in the messages of such errors; libraries raise them as plain RuntimeErrors."""
ADVICE = "lower max_batch, n, max_new_tokens or use dtype='bfloat16'"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that there was no memory, on any device."""
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


class explained:
    """A context in which out of memory becomes an `OutOfMemory` with advice.

    Every other error passes unchanged. The traceback of the cause is dropped: its frames hold the
    tensors that took the memory.
    """

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (MemoryError, RuntimeError, OSError)) and is_out_of_memory(error):
            raise OutOfMemory(
                f"{self._who}: out of memory ({error}); {ADVICE}"
            ) from error.with_traceback(None)


MOST = 256
"""The number of stretches that are stored before they are added up, more than a round has."""


def event_for(device: torch.device) -> Any:
    """Returns an event that notes when the stream reaches it.

    Returns None for a device whose work is done when a call returns.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.Event(enable_timing=True)
    return None


class Moments:
    """A list of `count` moments in a device's work, which can be noted again and again."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._events = [event_for(device) for _ in range(count)]
        self._times = [0.0] * count

    @property
    def by_events(self) -> bool:
        return self._events[0] is not None

    def note(self, place: int) -> None:
        """Notes a moment: all work launched before it is done, no work launched after it is."""
        if self._events[place] is not None:
            on_cuda = self._device.type == "cuda"
            self._events[place].record(torch.cuda.current_stream(self._device) if on_cuda else None)
        else:
            self._times[place] = time.perf_counter()

    def seconds(self, first: int, second: int) -> float:
        """Returns the seconds from one moment to another; the device has passed both."""
        if self._events[first] is None:
            return self._times[second] - self._times[first]
        return float(self._events[first].elapsed_time(self._events[second])) / 1000

    def wait(self, place: int) -> None:
        """Waits until the device has passed a moment."""
        if self._events[place] is not None:
            self._events[place].synchronize()


class Spans:
    """The stretches of a device's work, whose times `take` adds up without an earlier wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._all: list[Moments] = []  # used again and again
        self._next, self._seconds = 0, 0.0

    def begin(self) -> None:
        """Begins a stretch. An earlier stretch that did not end is dropped."""
        if self._next == len(self._all):
            self._all.append(Moments(self._device, 2))
        self._all[self._next].note(0)

    def end(self) -> None:
        """Ends the stretch that began last."""
        last = self._all[self._next]
        last.note(1)
        self._next += 1
        if not last.by_events or self._next == MOST:
            self._add()

    def take(self) -> float:
        """Waits for the end of the last stretch; returns the seconds of all since the last call."""
        self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self) -> None:
        spans, self._next = self._all[: self._next], 0
        if spans:
            spans[-1].wait(1)
            self._seconds += sum(moments.seconds(0, 1) for moments in spans)


class RunnerCounts:
    """The passes of a runner, and the time in them.

    Attributes:
        passes: the number of passes since the last call of `take`.
        executors: the number of passes by executor since the last call of `take_executors`.
    """

    def __init__(self, device: torch.device) -> None:
        self.passes = 0
        self.executors: Counter[str] = Counter()
        self._elsewhere = 0.0
        self._spans = Spans(device)

    def timed(self, name: str) -> _TimedPass:
        """Returns the context of a pass, timed and counted on success; `name` is for errors."""
        return _TimedPass(self, name)

    def add(self, passes: int, seconds: float, executor: str) -> None:
        """Adds passes that were computed elsewhere, by an executor of that name."""
        self.passes += passes
        self._elsewhere += seconds
        self.executors[executor] += passes

    def take(self) -> tuple[int, float]:
        """Returns the passes, and the seconds in them on the device, since the last call.

        Waits for the last of the passes.
        """
        counts = self.passes, self._elsewhere + self._spans.take()
        self.passes, self._elsewhere = 0, 0.0
        return counts

    def take_executors(self) -> Counter[str]:
        """Returns the number of passes since the last call by executor, passes over prompts
        included.
        """
        counts, self.executors = self.executors, Counter()
        return counts


class _TimedPass(explained):
    """A context of one pass, which is timed and counted if it succeeds."""

    def __init__(self, counts: RunnerCounts, name: str) -> None:
        super().__init__(name)
        self._counts = counts
        counts._spans.begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._counts._spans.end()
            self._counts.passes += 1
