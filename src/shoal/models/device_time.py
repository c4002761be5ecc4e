"""How long a device works: by events of its stream, as the host only launches and does not wait."""

from __future__ import annotations

import time
from typing import Any

import torch


def event_for(device: torch.device) -> Any:
    """An event that notes when the stream reaches it; None for a device whose work is done when a call returns."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" and torch.cuda.is_available() else None


class Moments:
    """Moments in the work of a device, noted again and again.

    Args:
        count: how many.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._events = [event_for(device) for _ in range(count)]
        self._times = [0.0] * count

    def note(self, place: int) -> None:
        """This is the moment: all work launched before it is done, none of what is launched after it."""
        if self._events[place] is not None:
            self._events[place].record()
        else:
            self._times[place] = time.perf_counter()

    def seconds(self, first: int, second: int) -> float:
        """From one moment to another; the device has passed both."""
        if self._events[first] is None:
            return self._times[second] - self._times[first]
        return float(self._events[first].elapsed_time(self._events[second])) / 1000
