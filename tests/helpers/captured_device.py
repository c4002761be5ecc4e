"""Captured rounds on a pretended device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pretend import Pretend, moved
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models import loading
from shoal.models.compiled import EXECUTORS
from shoal.models.runner import Runner
from shoal.sampling.acceptance import RULES
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

MODELS = {"target": (0, 2), "drafter": (1, 1)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    pretend = Pretend()
    monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(pretend))
    return pretend


def runner(role: str, device: Pretend | None) -> Runner:
    seed, layers = MODELS[role]
    hf = tiny_model("llama", seed=seed, layers=layers)
    made = loading.wrap(hf if device is None else moved(hf), "tiny", "pad", checked=False)
    made.capture_rounds("eager" if device is None else "graphed")
    return made


def engine(k: int, rule: str, device: Pretend | None, samplings: Sequence[Sampling], new: int = 24) -> Engine:
    made = engine_of(
        runner("target", device), runner("drafter", device) if k else None, Fixed(k), rule=RULES[rule](), max_batch=8
    )
    for i, sampling in enumerate(samplings):
        made.submit(Request((1, 2, 3 + i), 1, sampling, Limits(max_new_tokens=new)))
    return made


def tokens(made: Engine) -> list[tuple[int, ...]]:
    """Runs an engine to its end; returns the tokens of its samples, in their order."""
    samples = [done.sample for commits in iter(made.step, []) for done in commits if done.sample is not None]
    return sorted(sample.token_ids for sample in samples)


def waits(counts: Counter[str]) -> int:
    """How often the host waits for the device."""
    return counts["download"] + counts["read"] + counts["size"]
