"""The working time of a device, measured by events of its stream: the host does not wait.

The passes of a model are timed so, and counted by the executors that computed them.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Any

import torch

from shoal.models.available import explained

MOST = 256
"""The number of stretches that are stored before they are added up, more than a round has."""


def event_for(device: torch.device) -> Any:
    """Returns an event that notes when the stream reaches it.

    Returns None for a device whose work is done when a call returns.
    """
    return (
        torch.cuda.Event(enable_timing=True)
        if device.type == "cuda" and torch.cuda.is_available()
        else None
    )


def _stream(device: torch.device) -> Any:
    """Returns the stream that works for a device; None for a device without streams.

    Without a stream, an event is recorded on the stream of the current device.
    """
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Moments:
    """A list of moments in the work of a device, which can be noted again and again.

    Args:
        count: the number of moments.
    """

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
            self._events[place].record(_stream(self._device))
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
        self._used, self._seconds = 0, 0.0

    def begin(self) -> None:
        """Begins a stretch. An earlier stretch that did not end is dropped."""
        if self._used == len(self._all):
            self._all.append(Moments(self._device, 2))
        self._all[self._used].note(0)

    def end(self) -> None:
        """Ends the stretch that began last."""
        last = self._all[self._used]
        last.note(1)
        self._used += 1
        if not last.by_events or self._used == MOST:
            self._add()

    def take(self) -> float:
        """Returns the seconds of all stretches since the last call.

        Waits for the end of the last one.
        """
        self._add()
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _add(self) -> None:
        used, self._used = self._all[: self._used], 0
        if used:
            used[-1].wait(1)
            self._seconds += sum(moments.seconds(0, 1) for moments in used)


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
        """Returns the context of one pass, which is timed and counted if it succeeds.

        Args:
            name: the name of the model, for a lack of memory.
        """
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
        taken = self.passes, self._elsewhere + self._spans.take()
        self.passes, self._elsewhere = 0, 0.0
        return taken

    def take_executors(self) -> Counter[str]:
        """Returns the passes since the last call by executor, those of prompts included."""
        taken, self.executors = self.executors, Counter()
        return taken


class _TimedPass(explained):
    """A context of one pass, which is timed and counted if it succeeds."""

    def __init__(self, counts: RunnerCounts, name: str) -> None:
        super().__init__(name)
        self._counts = counts
        counts._spans.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._counts._spans.end()
            self._counts.passes += 1
