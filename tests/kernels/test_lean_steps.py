"""A drafter's steps in one call are the same steps one by one: tokens, q, confidence, counts, and what is left in the cache.

Tests of: models.lean.steps, models.lean.whole, sampling.native_draws, models.passes, models.weights,
models.weights.matrix.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from by_pairs import by_pairs
from lean_passes import PROMPTS
from mutants import wrong_ones
from native_kernels import needs_compiler
from shoal import Shoal
from shoal.config import Sampling
from shoal.drafting import model
from shoal.engine import multi_step
from shoal.models import formats, weights
from shoal.models.lean import steps as lean_steps_module
from shoal.models.lean import whole
from shoal.models.lean.steps import Drawing, LeanSteps, lean_steps
from shoal.models.loading import wrap
from shoal.models.passes import use_lean_passes
from shoal.models.runner import Runner
from shoal.models.weights.matrix import PACKED
from shoal.sampling import native_draws
from shoal.testing import tiny_model, tiny_tokenizer
from wrong_kernels import wrong_kernels

pytestmark = needs_compiler
DTYPES = (torch.float32, torch.bfloat16)
VOCAB = 257


@pytest.fixture(autouse=True)
def _panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset(DTYPES)))


def packed(architecture: str, dtype: torch.dtype, disturbed: float = 0.0, **options: Any) -> Runner:
    """A runner whose passes are one call; `disturbed`: share of noise in its weights."""
    hf = tiny_model(architecture, max_position_embeddings=512, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in hf.parameters():
            weight += disturbed * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    hf = hf.to(dtype)
    weights.lay_out(hf, lambda keys: dict.fromkeys(keys, PACKED))
    runner = wrap(hf, architecture, checked=False)
    use_lean_passes(runner)
    assert runner.lean is not None
    assert runner.lean.whole is not None
    return runner


def pair(architecture: str, dtype: torch.dtype) -> tuple[Runner, Runner]:
    return packed(architecture, dtype), packed(architecture, dtype, 0.1)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were taken in one call, and how many of them failed."""
    counts: Counter[str] = Counter()
    inner = LeanSteps.__call__

    def counted(self: LeanSteps) -> Any:
        drawn = inner(self)
        counts["done" if drawn is not None else "failed"] += 1
        return drawn

    monkeypatch.setattr(LeanSteps, "__call__", counted)
    return counts


RUNS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "lookahead": 3},
    "seeded": {"seed": 3, "lookahead": 4},
    "rejection, bass": {"seed": 3, "lookahead": "bass", "rule": "rejection", "temperature": 0.7},
    "rejection, top-p": {"seed": 4, "lookahead": 3, "rule": "rejection", "top_p": 0.8, "top_k": 40},
    "heuristic": {"seed": 5, "lookahead": "heuristic", "min_p": 0.05},
}


@by_pairs({"dtype": DTYPES, "run": RUNS, "architecture": ["llama", "qwen2-sliding", "qwen3"]})
def test_engines_say_and_count_the_same(
    architecture: str, run: str, dtype: torch.dtype, steps: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, found = pair(architecture, dtype), []
    for _ in range(2):
        result = Shoal(*models, tiny_tokenizer(), max_batch=4).generate(PROMPTS, 2, max_new_tokens=14, **RUNS[run])
        stats = result.stats
        said = [(sample.token_ids, sample.logprobs, sample.accepted) for output in result for sample in output.samples]
        found.append((said, stats.rounds, stats.drafted, stats.accepted, stats.draft_passes, stats.target_passes))
        for module in (model, multi_step):
            monkeypatch.setattr(module, "lean_steps", lambda *arguments, **options: None)
    assert found[0] == found[1]
    assert steps["done"] == found[0][4] > 0
    assert found[0][3] > 0
    assert not steps["failed"]


# ── step by step ────────────────────────────────────────────────────────────────────────────────────────────────────────

SAMPLINGS = [Sampling(temperature=0.8), Sampling(temperature=0), Sampling(top_p=0.7), Sampling(top_k=9, temperature=1.5)]
STARTS, COUNTS = [7, 3, 0, 11], [2, 1, 3, 2]


def filled(runner: Runner) -> Runner:
    """Rows of unequal lengths in slots that are not in order."""
    fork = runner.fork()
    fork.memory.reserve(6, 40)
    for slot, length in zip((3, 1, 4, 0), STARTS, strict=True):
        if length:
            fork.feed([slot], torch.arange(5, 5 + length)[None], [length])
    return fork


def by_calls(runner: Runner, uniforms: Tensor, most: int = 4) -> tuple[list[Tensor | None], list[int]]:
    """Tokens, q, the highest probabilities and the cache's keys after steps in one call each."""
    fork = filled(runner)
    pending = torch.tensor([[9, 8, 8], [200, 200, 200], [1, 2, 3], [30, 31, 31]])
    drawing = Drawing(VOCAB, SAMPLINGS, uniforms, race=False, want_q=True, want_highest=True)
    step = lean_steps(fork, [3, 1, 4, 0], pending, COUNTS, most, drawing)
    assert step is not None
    drawn = [step() for _ in range(most)]
    if None in drawn:
        return [], []
    found = [torch.stack([getattr(each, name) for each in drawn]) for name in ("tokens", "q", "confidence")]
    return [*found, keys_of(fork)], list(fork.cache.lengths)


def one_by_one(runner: Runner, uniforms: Tensor, most: int = 4) -> tuple[list[Tensor | None], list[int]]:
    """The same by passes and draws apart."""
    fork, pending = filled(runner), torch.tensor([[9, 8, 8], [200, 200, 200], [1, 2, 3], [30, 31, 31]])
    found: list[list[Tensor]] = [[], [], []]
    block, counts = pending, COUNTS
    for j in range(most):
        logits = fork.feed([3, 1, 4, 0], block, counts)
        last = logits[torch.arange(4), torch.tensor(counts) - 1][:, None, :VOCAB]
        drawn = native_draws.draw(last, SAMPLINGS, uniforms[:, j : j + 1], want_p=True, want_highest=True)
        for kept, value in zip(found, (drawn.tokens, drawn.p, drawn.highest), strict=True):
            assert value is not None
            kept.append(value[:, 0])
        block, counts = drawn.tokens, [1] * 4
    return [*map(torch.stack, found), keys_of(fork)], list(fork.cache.lengths)


def keys_of(runner: Runner) -> Tensor:
    """What the cache has of all rows, in all layers."""
    stores = runner.cache.stores()
    return torch.cat([part[slot, : runner.cache.lengths[slot]].flatten() for keys, values, *_ in stores
                      for part in (keys, values) for slot in (3, 1, 4, 0)])  # fmt: skip


def distance(runner: Runner, seeds: Sequence[int] = (0, 1, 2)) -> float:
    """Largest difference of steps in one call to those one by one; 0 if they are the same."""
    worst = 0.0
    for seed in seeds:
        uniforms = torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        (mine, lengths), (theirs, other) = by_calls(runner, uniforms), one_by_one(runner, uniforms)
        if lengths != other or any(a is None or b is None or a.shape != b.shape for a, b in zip(mine, theirs, strict=True)):
            return float("inf")
        differences = [(a.double() - b.double()).abs().max().item() for a, b in zip(mine, theirs, strict=True)]  # type: ignore[union-attr]
        worst = max([worst, *(float("inf") if difference != difference else difference for difference in differences)])
    return worst


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding", "qwen3"])
def test_steps_have_the_bits_of_passes_and_draws_apart(architecture: str, dtype: torch.dtype) -> None:
    assert distance(packed(architecture, dtype)) == 0


# ── where there are none ────────────────────────────────────────────────────────────────────────────────────────────────


def asked(runner: Runner, most: int = 4, vocab_size: int = VOCAB) -> Any:
    uniforms = torch.rand(1, most + 1, 3, dtype=torch.float64)
    drawing = Drawing(vocab_size, SAMPLINGS[:1], uniforms, race=False, want_q=False, want_highest=False)
    return lean_steps(runner, [3], torch.tensor([[9]]), [1], most, drawing)


def test_they_are_refused_where_the_kernel_cannot() -> None:
    runner = filled(packed("llama", torch.float32))
    assert asked(runner) is not None
    assert asked(runner, vocab_size=runner.vocab_size + 1) is None, "q over ids that the drafter lacks"
    assert asked(runner, most=40 - STARTS[0]) is not None
    assert asked(runner, most=41 - STARTS[0]) is None, "more tokens than the slots hold"
    copied = copy.copy(runner)
    copied.lean = None
    assert asked(copied) is None


@pytest.mark.parametrize("controls", [{"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"typical_p": 0.9}])
def test_controls_that_the_kernel_does_not_have(controls: dict[str, Any], steps: Counter[str]) -> None:
    result = Shoal(*pair("llama", torch.float32), tiny_tokenizer(), max_batch=4).generate(
        PROMPTS, 2, max_new_tokens=8, seed=1, lookahead=3, **controls
    )
    assert result.stats.drafted > 0
    assert not steps


def test_a_drafter_without_a_distribution_is_asked_step_by_step(steps: Counter[str]) -> None:
    """A step that fails leaves nothing behind: rows go on as they do without one call per step."""
    found = []
    for _ in range(2):
        target, drafter = pair("llama", torch.float32)
        with torch.no_grad():
            drafter.hf.model.embed_tokens.weight[40] = torch.nan
        result = Shoal(target, drafter, tiny_tokenizer(), max_batch=4).generate(
            PROMPTS, 2, max_new_tokens=14, seed=3, lookahead=4
        )
        samples = [sample for output in result for sample in output.samples]
        found.append(([sample.token_ids for sample in samples], result.stats.drafted, result.stats.accepted))
        with patch.object(multi_step, "lean_steps", lambda *arguments, **options: None):
            result = Shoal(*pair("llama", torch.float32), tiny_tokenizer(), max_batch=4).generate(
                PROMPTS, 2, max_new_tokens=14, seed=3, lookahead="off"
            )
        assert [sample.token_ids for sample in samples] == [s.token_ids for output in result for s in output.samples]
    assert found[0] == found[1]
    assert steps["failed"] > 0
    assert found[0][1] > 0


# ── sabotage ────────────────────────────────────────────────────────────────────────────────────────────────────────────

MUTANTS = wrong_ones("steps")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_step_is_caught(name: str) -> None:
    made = wrong_kernels(MUTANTS[name])
    runner = packed("llama", torch.float32)
    with patch.object(whole, "library", lambda: made), patch.object(lean_steps_module, "library", lambda: made):
        try:
            assert distance(runner) > 1e-3
        except IndexError:  # a token that is none
            return


def test_rows_of_one_setting_share_it() -> None:
    assert len(native_draws.settings_of(SAMPLINGS)) == 4
    assert len(native_draws.settings_of([SAMPLINGS[0]] * 4)) == 1
