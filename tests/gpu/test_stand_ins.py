"""What stands in for CUDA graphs and for a GPU finds what they would do wrongly: Python that a replay does not run, memory of
others, copies that are not over yet.

Tests of: models.compiled, models.compiled.transfer, models.compiled.captured_round.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from captured_device import device, engine, tokens
from pretend import DEVICE, InCapture, Pretend
from recorder import Recorder
from shoal.config import Sampling
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.transfer import Arrival, Download, Upload

__all__ = ["device"]  # fixtures

CPU = torch.device("cpu")

# ── graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_a_replay_runs_what_was_recorded_and_no_python() -> None:
    numbers, factor, calls = torch.zeros(3), 2.0, []
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def run() -> tuple[Tensor, Tensor]:
        calls.append(factor)
        numbers[1:] += 1
        twice = numbers.view(3, 1) * factor
        return twice.squeeze(1) + weight, twice

    replay = Recorder(CPU)(run)
    warm_ups = len(calls)
    numbers.zero_()
    factor, weight.data = 5.0, torch.full((3,), 100.0)
    total, twice = replay()
    assert total.tolist() == [1, 3, 3]  # the old factor, and the old weight
    assert twice.tolist() == [[0], [2], [2]]
    assert replay()[0] is total
    assert total.tolist() == [1, 5, 5]
    assert numbers.tolist() == [0, 2, 2]
    assert len(calls) == warm_ups


@torch.inference_mode()
def test_a_capture_computes_nothing_and_reads_nothing() -> None:
    numbers, seen = torch.ones(3), []

    def run() -> Tensor:
        seen.append(numbers * 2)
        return seen[-1]

    replay = Recorder(CPU)(run)
    assert seen[-1].isnan().all()
    assert replay().tolist() == [2, 2, 2]
    with pytest.raises(InCapture, match="read by aten"):
        Recorder(CPU)(lambda: numbers * float(numbers.sum()))


@pytest.mark.parametrize("lets_go", [False, True])
@torch.inference_mode()
def test_memory_that_a_function_lets_go_of_is_that_of_the_next(lets_go: bool) -> None:
    pool, numbers, between = Recorder(CPU), torch.ones(3), list[Tensor]()

    def first() -> Tensor:
        between.append(numbers + 1)
        return between[-1] * 2

    one = pool(first)
    other = pool(lambda: between[-1] * 10)
    if lets_go:
        between.clear()
    assert one().tolist() == [4, 4, 4]
    assert bool(other().isnan().all()) is lets_go


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_copies_and_replays_happen_when_the_host_waits(device: Pretend) -> None:
    with device:
        upload, download = Upload({"numbers": 2}, DEVICE), Download()
        twice = Recorder.on(device)(DEVICE)(lambda: upload["numbers"].view(1, 2) * 2)
        for value in (3, 4):
            upload.on_host("numbers")[:] = [value, 1]
            upload.send()
            assert download(twice()).tolist() == [[2 * value, 2]]
        upload.send()
        upload.on_host("numbers")[:] = [50, 60]  # too early
        assert download(twice()).tolist() == [[100, 120]]
        device.later(lambda: None)
        assert not (twice() == 0).cpu().any()  # another operation


SAMPLINGS = [Sampling(0.8, seed=i) for i in range(3)]


def rewritten(self: CapturedRound, name: str) -> Any:
    """The next round's numbers are filled in before those of this round have arrived."""
    found = run(self, name)
    if name == "verify":
        self.functions.inputs._host.zero_()
    return found


def early(self: Arrival) -> Any:
    """The host reads results that it did not wait for."""
    return self._numbers.numpy()


run = CapturedRound._run
EARLY = {
    "uploads": (CapturedRound, "_run", rewritten),
    "downloads": (Arrival, "wait", early),
    "nothing": (Pretend, "x", None),
}


@pytest.mark.slow(but=["uploads-True"])
@pytest.mark.parametrize(("fault", "late"), [*((fault, True) for fault in EARLY), ("uploads", False), ("downloads", False)])
def test_rounds_that_do_not_wait_for_their_copies_are_noticed(
    fault: str, late: bool, device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that copies at once shows none of them."""
    k = 4
    if not late:
        monkeypatch.setattr(Pretend, "later", lambda self, work: work())
    expected = tokens(engine(k, "rejection", None, SAMPLINGS, new=12))
    owner, name, wrong = EARLY[fault]
    monkeypatch.setattr(owner, name, wrong, raising=False)
    with device, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = tokens(engine(k, "rejection", device, SAMPLINGS, new=12))
    right = found == expected and not any("no more captured rounds" in str(one.message) for one in seen)
    assert right is (fault == "nothing" or not late)
