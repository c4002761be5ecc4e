"""Captured passes against ordinary ones on a GPU: `benchmarks/gpu/run.sh` runs this file with SHOAL_TEST_DEVICE=cuda.

Not collected by itself. Elsewhere the same static passes are launched one by one, to try the cases out; `test_static.py` has more
of them, for what can be shown without a device.

Tests of: models.passes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.api import Shoal
from shoal.models import loading
from shoal.models.passes import use_fused_layers
from shoal.models.runner import Runner
from shoal.testing import VOCABULARY, tiny_model
from shoal.types.samples import Result
from static_passes import ARCHITECTURES, Twins

DEVICE = torch.device(os.environ.get("SHOAL_TEST_DEVICE", "cpu"))
EXECUTOR = "graphed" if DEVICE.type == "cuda" else "eager"
ERROR = 1e-3
"""Logits reach 10; float32 sums in another order differ by 1e-6 of that, and libraries choose kernels by shape."""
FAMILY = ("llama", "qwen2", "qwen3")


def hf(architecture: str, seed: int = 0) -> Any:
    return tiny_model(architecture, seed=seed).to(DEVICE)


def runner(model: Any, executor: str | None, fused: bool = False) -> Runner:
    made = loading.wrap(model, "tiny")
    made.use_static_passes(executor)
    if fused:
        use_fused_layers(made)
        assert made.fused_layers is not None
    return made


class TwinsThere(Twins):
    """On the device; with fused layers if asked to."""

    def __init__(self, model: Any, fused: bool = False) -> None:
        self.made, self.plain = runner(model, EXECUTOR, fused), runner(model, None)
        self.forks = [self.made.fork(), self.plain.fork()]
        self.worst, self.generator = 0.0, torch.Generator().manual_seed(0)

    def feed(self, counts: Sequence[int], want_logits: bool = True) -> None:
        tokens = torch.randint(0, VOCABULARY, (len(counts), max(counts)), generator=self.generator).to(DEVICE)
        ours, theirs = (fork.feed(range(len(counts)), tokens, counts, want_logits=want_logits) for fork in self.forks)
        for row, count in enumerate(counts if want_logits else ()):
            self.worst = max(self.worst, float((ours[row, :count] - theirs[row, :count]).abs().max()))


def live(twins: TwinsThere) -> None:
    """Ragged rounds, rollbacks, a row that leaves, growth of the cache; nothing may have fallen back."""
    twins.life()
    passes = twins.made.static
    assert passes is not None
    assert passes.failure is None
    assert passes.ran.total() == 19
    assert twins.worst < ERROR


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_ordinary_passes(architecture: str) -> None:
    live(TwinsThere(hf(architecture)))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the kernels need CUDA")
@pytest.mark.parametrize("architecture", FAMILY)
def test_logits_of_fused_layers_are_those_of_ordinary_passes(architecture: str) -> None:
    live(TwinsThere(hf(architecture), fused=True))


def test_engines_of_one_model_do_not_disturb_each_other() -> None:
    """Two caches of one model, whose passes are built and run in turns."""
    one, other = TwinsThere(hf("llama")), TwinsThere(hf("llama"))
    other.made = one.made
    other.forks[0] = one.made.fork()
    for twins in (one, other):
        twins.reserve(3, 60)
        twins.feed([5, 2], want_logits=False)
    for counts in ([1, 1], [3, 2], [1, 1], [3, 1]):
        for twins in (one, other):
            twins.feed(counts)
    assert max(one.worst, other.worst) < ERROR
    assert one.made.static is not None
    assert one.made.static.failure is None


def pair(executor: str | None, fused: bool) -> Shoal:
    models = [hf("llama"), hf("llama", seed=1)]
    return Shoal(*(runner(copy.deepcopy(model), executor, fused) for model in models), max_batch=6)


@pytest.mark.parametrize(
    "fused", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA"))]
)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_p": 0.9},
        {"rule": "rejection"},
        {"lookahead": "off"},
    ],
    ids=str,
)
def test_tokens_are_those_of_ordinary_passes(options: dict[str, Any], fused: bool) -> None:
    """Whole runs, drafter's steps included, twice: the second finds what the first has built."""

    def decode(model: Shoal) -> Result:
        prompts = [[1, 2, 3, 4, 5], [7], [9, 9, 9, 3, 4, 5, 6, 2]]
        return model.generate(prompts, 2, **{"lookahead": 4, "max_new_tokens": 16, "seed": 3, **options})

    def ids(result: Result) -> list[tuple[int, ...]]:
        return [sample.token_ids for output in result for sample in output.samples]

    expected, made = ids(decode(pair(None, False))), pair(EXECUTOR, fused)
    for _ in range(2):
        assert ids(decode(made)) == expected
    for model in (made.target, made.draft_model):
        assert model is not None
        assert model.static is not None
        assert model.static.failure is None
        assert model.static.ran.total() > 0 or options.get("lookahead") == "off"
