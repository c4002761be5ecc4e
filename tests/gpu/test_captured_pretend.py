"""The engine on a device that pretends to be a GPU: same tokens, and what a round asks of the host.

Tests of: models.compiled.draft_functions, drafting.captured, models.compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from captured_device import MODELS, device, engine, tokens, waits
from pretend import DEVICE, InCapture, Mixed, Pretend, moved
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.drafting.captured import CapturedRounds
from shoal.errors import UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models import loading, selfcheck
from shoal.models.compiled import EXECUTORS, draft_functions, obstacle
from shoal.models.compiled.captured_round import CapturedRound
from shoal.testing import tiny_model
from shoal.testing.architectures import ARCHITECTURES
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request

__all__ = ["device"]  # fixtures

K = 4


SETTINGS: dict[str, list[Sampling]] = {
    "greedy": [Sampling(temperature=0.0)] * 3,
    "sampled": [Sampling(temperature=0.8, seed=i) for i in range(3)],
    "several": [Sampling(temperature=t, seed=2) for t in (0.0, 0.7, 1.2)],
    "top_p": [Sampling(top_p=0.9, top_k=20, seed=i) for i in range(3)],
    "penalty": [Sampling(repetition_penalty=1.2, seed=i) for i in range(3)],
}


@pytest.mark.slow(but=["0-rejection-several", "4-coupled-top_p"])
@pytest.mark.parametrize(
    ("k", "rule", "settings"),
    [
        *((K, "rejection", settings) for settings in SETTINGS if settings != "sampled"),  # of which "several" has rows
        (0, "rejection", "several"),
        (K, "coupled", "top_p"),
    ],
)
def test_tokens_on_the_device_are_those_of_the_cpu(k: int, rule: str, settings: str, device: Pretend) -> None:
    samplings = SETTINGS[settings]
    expected = tokens(engine(k, rule, None, samplings, new=12))
    with device:
        made = engine(k, rule, device, samplings, new=12)
        assert tokens(made) == expected
    for model in runners_of(made):
        assert model.captures is not None
        assert model.captures.failures == []
        assert model.captures.ran or settings == "penalty"


# ── what a round asks of the host ───────────────────────────────────────────────────────────────────────────────────


def of_a_round(k: int, rule: str, device: Pretend, samplings: Sequence[Sampling]) -> Counter[str]:
    """What was counted in a round in which nothing was built."""
    with device:
        made = engine(k, rule, device, samplings, new=64)
        for _ in range(6):
            made.step()
        before = device.counts.copy()
        device.where.clear()
        made.step()
    return device.counts - before


def captured_in(k: int, rule: str, device: Pretend, settings: str) -> int:
    """The operations of a captured round, which is one upload, three launches and one download."""
    counts = of_a_round(k, rule, device, SETTINGS[settings])
    captured = counts.pop("captured")
    # The inputs of the next round, its drafts and its target's pass.
    assert counts == {"upload": 1, "replay": 3 if k else 2, "download": 1}, device.where
    return captured


@pytest.mark.slow(but=["coupled-several"])
@pytest.mark.parametrize(("rule", "settings"), [("coupled", "several"), ("rejection", "top_p")])
def test_what_crosses_in_a_captured_round(rule: str, settings: str, device: Pretend) -> None:
    assert captured_in(K, rule, device, settings) > 0


LAUNCHES: dict[tuple[int, str, str], tuple[int, int]] = {
    (0, "rejection", "sampled"): (36, 76), (0, "rejection", "greedy"): (36, 66), (K, "rejection", "sampled"): (38, 353),
    (K, "coupled", "sampled"): (38, 364), (K, "rejection", "greedy"): (38, 257),
}  # fmt: skip
"""Operations on the device in a captured round: of each layer of the target by its own modules in float32 (fused layers have fewer:
tests/gpu/layer_models_cases.py; blocks of several columns have masks of two), and of everything but
layers, of target and drafter, the inputs of the next round included."""


@pytest.mark.slow(but=["(0, 'rejection', 'sampled')"])
@pytest.mark.parametrize(("case", "budget"), LAUNCHES.items(), ids=str)
def test_launches_of_a_captured_round(
    case: tuple[int, str, str], budget: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    k, rule, settings = case

    def launches(target: int, drafter: int) -> int:
        pretend = Pretend()
        monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(pretend))
        monkeypatch.setitem(MODELS, "target", (0, target))
        monkeypatch.setitem(MODELS, "drafter", (1, drafter))
        return captured_in(k, rule, pretend, settings)

    least = launches(1, 1)
    layer, draft_layer = launches(2, 1) - least, launches(1, 2) - least if k else 0
    assert layer <= budget[0]
    assert draft_layer <= k * 36 + 2
    assert least - layer - draft_layer <= budget[1]


STAGES: dict[tuple[int, str, str], tuple[int, int]] = {
    (0, "rejection", "sampled"): (7, 5), (K, "rejection", "sampled"): (35, 14), (K, "coupled", "sampled"): (35, 14),
    (K, "rejection", "penalty"): (53, 18),
}  # fmt: skip
"""By draft length, rule and settings: the most copies from the host to the device, and how often the host waits at most."""


@pytest.mark.slow(but=["(0, 'rejection', 'sampled')"])
@pytest.mark.parametrize(("case", "budget"), STAGES.items(), ids=str)
def test_what_crosses_in_a_round_by_stages(
    case: tuple[int, str, str], budget: tuple[int, int], device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedRounds, "decide", lambda *_, **__: None)
    k, rule, settings = case
    counts = of_a_round(k, rule, device, SETTINGS[settings])
    assert counts["upload"] <= budget[0], device.where
    assert waits(counts) <= budget[1], device.where


# ── the device itself ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_device_refuses_what_cuda_refuses(device: Pretend) -> None:
    with device, torch.inference_mode():
        there = torch.arange(6, device=DEVICE).view(2, 3)
        with pytest.raises(Mixed):
            there + torch.ones(2, 3)
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        with device.capture(), pytest.raises(InCapture, match="read"):
            there.sum().item()
        with device.capture(), pytest.raises(InCapture, match="upload"):
            there[[1, 0]]
        with device.capture(), pytest.raises(InCapture, match="upload"):
            torch.tensor([1], device=DEVICE)
        with device.capture(), pytest.raises(InCapture, match="size"):
            there[there > 2]


def test_the_device_counts_what_crosses(device: Pretend) -> None:
    with device, torch.inference_mode():
        there = torch.tensor([[1, 2], [3, 4]], device=DEVICE)
        there[:, 1] = 5
        there += 1
        assert there.tolist() == [[2, 6], [4, 6]]
        assert (there.is_cuda, there.device, there[0].cpu().is_cuda) == (True, DEVICE, False)
        assert int(there.sum()) == 18
    assert device.counts == {"upload": 1, "download": 2, "read": 1, "launch": 4}


def test_a_host_read_in_a_captured_step_is_found(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the step works on a CPU, and its capture fails on the device."""
    of_target = draft_functions._of_target

    def reading(logits: torch.Tensor, style: Any) -> Any:
        return of_target(logits if bool(logits.sum() < 1e9) else -logits, style)

    monkeypatch.setattr(draft_functions, "_of_target", reading)
    with device, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = engine(K, "rejection", device, SETTINGS["sampled"])
        tokens(made)
    target = runners_of(made)[0].captures
    assert target is not None
    assert "read by aten.is_nonzero" in target.failures[0]
    assert [str(one.message) for one in seen if "read by aten.is_nonzero" in str(one.message)]


def test_a_device_that_is_lost_ends_the_run_with_its_own_error(device: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays with the device is no reason to go on by stages: each call would fail, with a message that misleads."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def launch(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(CapturedRound, "launch", launch)
    for lost in (False, True):
        device.lost = lost
        with device, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            made = engine(0, "rejection", device, SETTINGS["sampled"])
            if lost:
                with pytest.raises(RuntimeError, match="an illegal memory access"):
                    tokens(made)
            else:
                tokens(made)
        assert bool(seen) is not lost


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("part", ["_sharing", "_decode"])
def test_a_device_that_is_lost_in_the_checks_of_a_load_is_no_fault_of_the_model(
    part: str, lost: bool, device: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that fails alone is done without, or refused; what comes after a lost device fails whatever it is."""

    def fails(*_: Any) -> Any:
        device.lost = lost
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(selfcheck, part, fails)
    with device:
        made = loading.wrap(moved(tiny_model("llama")), "tiny", "pad", checked=False)
        if lost:
            with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"):
                selfcheck.self_check(made)
        elif part == "_decode":
            with pytest.raises(UnsupportedModel, match="is not supported: its modules"):
                selfcheck.self_check(made)
        else:
            selfcheck.self_check(made)
            assert not made.shares


@pytest.mark.slow(but=["llama"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounds_of_every_architecture_stay_on_the_device(architecture: str, device: Pretend) -> None:
    """Those of experts in float32 are captured nowhere, and are known by their config."""
    hf = tiny_model(architecture)
    with device:
        by_mask = not type(hf)._can_set_attn_implementation()
        made = loading.wrap(moved(hf), "tiny", "auto" if by_mask else "pad", checked=False)
        made.capture_rounds("graphed")
        if by_mask or hasattr(hf.config, "num_experts_per_tok"):
            assert made.captures is None
            assert by_mask or "experts" in str(obstacle(made.hf))
            return
        plain = engine_of(made, None, Fixed(0), max_batch=4)
        for i in range(2):
            plain.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=5)))
        assert len(tokens(plain)) == 2
    assert made.captures is not None
    assert made.captures.failures == []
    ahead = plain._stages.captured.launched_ahead  # each by a replay that fills its inputs
    assert device.counts["replay"] == plain.stats.rounds + ahead["used"] > 2
    assert ahead == {"used": plain.stats.rounds - 2}  # the first is compared with its stages; the last may end rows


@pytest.mark.slow
@pytest.mark.limit(900)
def test_the_cases_for_a_gpu_run_on_the_device() -> None:
    """All that `captured_cases.py` has for a GPU, by the settings of a run there, so that no case fails there for what can be known
    here."""
    scripts = Path(__file__).parents[2] / "benchmarks" / "gpu"
    options = ["-q", "-c", str(scripts / "pytest.ini"), "--rootdir", str(scripts.parents[1]), "-p", "no:cacheprovider"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name("captured_cases.py"))],
        env={**os.environ, "SHOAL_TEST_DEVICE": "pretend"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert "8 passed" in found.stdout
