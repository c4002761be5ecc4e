"""Times of models are those of their device: a GPU goes on while the host has long returned.

Tests of: models.device, drafting.captured, models.compiled, models.compiled.transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from captured_device import engine
from pretend import Pretend
from recorder import Recorder
from shoal.config import Sampling
from shoal.drafting.captured import CapturedRounds
from shoal.models.compiled import EXECUTORS, transfer
from shoal.models.device import MOST, Moments, RunnerCounts, Spans

CPU = torch.device("cpu")
SAMPLINGS = [Sampling(seed=i) for i in range(3)]


class Event:
    """Of a device that takes a millisecond for each operation, and does nothing but work."""

    def __init__(self, device: Pretend) -> None:
        self._device, self.at, self.waited = device, 0, False

    def record(self, stream: Any = None) -> None:
        self.stream = stream
        self._device.after(self._note)

    def _note(self) -> None:
        self.at = self._device.counts["launch"] + self._device.counts["captured"]

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    pretend = Pretend()
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(pretend))
    monkeypatch.setattr("shoal.models.device.event_for", lambda _: Event(pretend))
    return pretend


def round_of(device: Pretend, made: Any) -> tuple[int, int, float]:
    """Operations of a round in which nothing was built, captured ones, and the seconds of both models."""
    while True:
        before, stats, building = device.counts.copy(), made.stats - type(made.stats)(), made.target.seconds_building
        made.step()
        if made.stats.rounds > 8 and made.target.seconds_building == building:
            counts, spent = device.counts - before, made.stats - stats
            return counts["launch"], counts["captured"], spent.seconds_target + spent.seconds_draft


@pytest.mark.slow(but=["4-True"])
@pytest.mark.parametrize("by_stages", [False, True])
@pytest.mark.parametrize("k", [0, 4])
def test_models_take_the_time_of_their_functions_or_passes(
    k: int, by_stages: bool, device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All operations of a captured round are in them, but those that fill the inputs of the next one."""
    monkeypatch.setattr(CapturedRounds, "decide" if by_stages else "_launch_next", lambda *_, **__: None)
    with device:
        made = engine(k, "rejection", device, SAMPLINGS, new=64)
        launched, captured, seconds = round_of(device, made)
    if by_stages:
        assert captured == 0 < seconds < launched / 1000
    else:
        assert launched == 0
        assert seconds == pytest.approx(captured / 1000)


def test_the_clock_of_the_host_would_say_something_else(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("shoal.models.device.event_for", lambda _: None)
    with device:
        _, captured, seconds = round_of(device, engine(4, "rejection", device, SAMPLINGS, new=64))
    assert seconds != pytest.approx(captured / 1000)


def test_prompts_are_waited_for_before_a_round_begins(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of them would count as bookkeeping of the round."""
    take: Callable[[RunnerCounts], Any] = RunnerCounts.take
    waited: list[bool] = []

    def taking(self: RunnerCounts) -> Any:
        ends = [moments._events[1] for moments in self._spans._all[: self._spans._next][-1:]]
        taken = take(self)
        waited.extend(end.waited for end in ends)
        return taken

    monkeypatch.setattr(RunnerCounts, "take", taking)
    with device:
        engine(0, "rejection", device, SAMPLINGS, new=8).step()
    assert waited
    assert all(waited)


def test_stretches_are_added_up_and_a_broken_one_is_forgotten(device: Pretend) -> None:
    spans = Spans(CPU)
    for operations in (3, 4):
        spans.begin()
        device.counts["launch"] += 50  # and something fails
        spans.begin()
        device.counts["launch"] += operations
        spans.end()
        device.counts["launch"] += 10
    assert spans.take() == pytest.approx(0.007)
    assert spans.take() == 0.0
    for _ in range(3 * MOST + 1):
        spans.begin()
        device.counts["launch"] += 1
        spans.end()
    assert len(spans._all) == MOST
    assert spans.take() == pytest.approx((3 * MOST + 1) / 1000)


def test_a_model_is_timed_on_the_stream_of_its_own_device(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another one, whose stream is idle."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    spans = Spans(torch.device("cuda:1"))
    spans.begin()
    spans.end()
    assert [event.stream for event in spans._all[0]._events] == ["the stream of cuda:1"] * 2


def test_copies_are_waited_for_on_the_stream_of_their_own_device(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of another device's stream is over at once: results would be read before they are there."""
    made: list[Event] = []

    def event_for(_: torch.device) -> Event:
        made.append(Event(device))
        return made[-1]

    monkeypatch.setattr(transfer, "event_for", event_for)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    upload = transfer.Upload({"numbers": 2}, CPU)
    monkeypatch.setattr(upload, "_device", SimpleNamespace(copy_=lambda *_, **__: None, device=torch.device("cuda:1")))
    upload.send()
    transfer.Arrival(torch.zeros(1), torch.device("cuda:1")).wait()
    assert [(event.stream, event.waited) for event in made] == [
        ("the stream of cuda:1", False),
        ("the stream of cuda:1", True),
    ]
    upload.reuse()
    assert made[0].waited


def test_without_events_it_is_the_clock_of_the_host() -> None:
    moments = Moments(CPU, 2)
    moments.note(0)
    moments.note(1)
    assert 0 <= moments.seconds(0, 1) < 1
    assert not moments.by_events
